"""Runs a peer in a process of its own: what is passed to it, and what it returns. The other side is child.py."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.case import Case
from tilewright.core.quantized import QuantizedArray
from tilewright.workbench.bench import Metrics
from tilewright.workbench.peers.registry import Adapter, Failed, Refused
from tilewright.workbench.trace import Event

_CHILD = Path(__file__).resolve().parent / "child.py"
# fla's autotuning of one shape took up to two minutes on an H200.
_LIMIT_SECONDS = 900.0
_LONGEST_TEXT = 700


@dataclass(frozen=True)
class Answer:
    """The results and measurements of a peer."""

    samples_s: tuple[float, ...]
    metrics: Metrics
    results: Mapping[str, np.ndarray]
    versions: Mapping[str, str]
    device: str
    kernels: tuple[Event, ...]
    """What ran on the device in so many calls of it, with warm caches; nothing where its tensor library has no profiler."""
    traced_calls: int


def leave_room() -> None:
    """Makes JAX allocate GPU memory as needed, not three quarters of it at once. Call it before JAX looks for devices."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def ask(
    adapter: Adapter,
    tensors: Path,
    case: Case,
    arrays: Mapping[str, jax.Array | QuantizedArray],
    cotangents: tuple[jax.Array, ...] | None,
    seconds: float,
    python: str | None = None,
    limit_s: float = _LIMIT_SECONDS,
) -> Answer:
    """Times one adapter on a case that it takes. Raises `Failed` with its error, or the end of its log if it crashed."""
    with tempfile.TemporaryDirectory(prefix="tilewright-peer-") as name:
        folder = Path(name)
        dtypes: dict[str, str] = {}
        quantized: dict[str, dict[str, str]] = {}

        def write(what: str, array: jax.Array | QuantizedArray) -> str:
            if isinstance(array, QuantizedArray):
                quantized[what] = {"dtype": array.dtype, "layout": array.layout}
                write(f"{what} stored", array.stored)
                write(f"{what} scales", array.scales)
                return what
            np.save(folder / f"{what}.npy", _bits(array))
            dtypes[what] = array.dtype.name
            return what

        job = {
            "adapter": adapter.load().__file__,
            "tensors": str(tensors),
            "op": case.op,
            "options": dict(case.options),
            "arrays": [write(each, array) for each, array in arrays.items()],
            "outputs": case.outputs,
            "differentiable": case.differentiable,
            "cotangents": None
            if cotangents is None
            else [write(f"cotangent {each}", array) for each, array in zip(case.outputs, cotangents, strict=True)],
            "seconds": seconds,
            "dtypes": dtypes,
            "quantized": quantized,
        }
        answer = answered(folder, job, python, limit_s)
        results = {
            each: _from_bits(np.load(folder / f"result {each}.npy"), dtype) for each, dtype in answer["results"].items()
        }
    return Answer(
        tuple(answer["samples_s"]),
        answer["metrics"],
        results,
        answer["versions"],
        answer["device"],
        tuple(Event(name, start, seconds, seconds) for name, start, seconds in answer["kernels"]),
        answer["traced_calls"],
    )


def answered(folder: Path, job: Any, python: str | None = None, limit_s: float = _LIMIT_SECONDS) -> dict[str, Any]:
    """Runs child.py on a job in a folder, and returns its answer. Raises `Refused` or `Failed` with its error."""
    (folder / "job.json").write_text(json.dumps(job))
    try:
        done = subprocess.run(
            [python or sys.executable, str(_CHILD), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"it had no answer after {limit_s:.0f} s, and was ended") from error
    written = folder / "answer.json"
    if not written.exists():
        raise Failed(f"its process ended with code {done.returncode}: {_short(done.stdout)}")
    answer = json.loads(written.read_text())
    if "error" in answer:
        raise (Refused if answer["refused"] else Failed)(_short(answer["error"]))
    return answer


def _bits(array: jax.Array) -> np.ndarray:
    """The array, or its bits where numpy files do not support its dtype."""
    host = np.asarray(array)
    if array.dtype.name.startswith("float8"):
        return host.view(np.uint8)
    return host.view(np.uint16) if array.dtype == jnp.bfloat16 else host


def _from_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.view(jnp.bfloat16) if dtype == "bfloat16" else array


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TEXT else f"... {text[-_LONGEST_TEXT:]}"
