"""Runs a peer in a process of its own: `python child.py FOLDER` reads job.json there, and writes answer.json.

It is run by its path, in the interpreter that the peer is installed in, and imports nothing of tilewright or JAX: only the
adapter, its tensor library, and the sampling of the bench. An error of the peer is also an answer: its text, and whether it
refuses the case (`NotImplementedError`) or failed.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SAMPLING = Path(__file__).resolve().parent.parent / "sampling.py"


def load_module(path: str | Path) -> ModuleType:
    """Loads a module by its path, under a unique name."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"_tilewright_peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """The versions of the installed packages."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run(folder: Path) -> dict[str, Any]:
    """Runs the job of job.json. Writes the results to files in the same folder, and returns everything else."""
    job = json.loads((folder / "job.json").read_text())
    if "workload" in job:  # A whole model: model_bench.py.
        return load_module(job["adapter"]).run(job, load_module(SAMPLING).samples, versions)
    adapter, tensors = load_module(job["adapter"]), load_module(job["tensors"])
    tensors.check()
    op, options = job["op"], job["options"]
    layouts = getattr(adapter, "LAYOUTS", {}).get(op, {})

    def read(name: str) -> Any:
        if name in job["quantized"]:
            return tensors.quantized(read(f"{name} stored"), read(f"{name} scales"), **job["quantized"][name])
        return tensors.load(np.load(folder / f"{name}.npy"), job["dtypes"][name])

    arrays = {name: read(name) for name in job["arrays"]}
    for name, (there, _) in layouts.items():
        if name in arrays:
            arrays[name] = there(arrays[name])
    cotangents = None if job["cotangents"] is None else [read(name) for name in job["cotangents"]]
    step = tensors.step(lambda arrays: adapter.OPS[op](**arrays, **options), arrays, job["differentiable"], cotangents)
    tensors.wait(None)

    began = time.perf_counter()
    outputs, gradients = step()
    tensors.wait(outputs)
    metrics: dict[str, Any] = {"first_step_s": time.perf_counter() - began}
    named = dict(zip(job["outputs"], outputs, strict=True))
    for name, gradient in zip(job["differentiable"] if cotangents is not None else (), gradients, strict=True):
        back = layouts[name][1] if name in layouts else None
        named[f"d {name}"] = gradient if back is None else back(gradient)
    dtypes = {}
    for name, value in named.items():
        array, dtypes[name] = tensors.store(value)
        np.save(folder / f"result {name}.npy", array)
    del outputs, gradients, named
    metrics |= tensors.memory(step, [*arrays.values(), *(cotangents or ())])
    sampling = load_module(SAMPLING)
    taken = sampling.samples(step, tensors.wait, job["seconds"])
    calls = sampling.calls_to_trace(sorted(taken)[len(taken) // 2])
    kernels: list[tuple[str, float, float]] = []
    try:
        kernels = tensors.kernels(step, calls)
    except Exception as error:  # Its times are kept without those on the device.
        metrics["no_device_time"] = f"{type(error).__name__}: {error}"
    return {
        "samples_s": taken,
        "kernels": kernels,
        "traced_calls": calls,
        "metrics": metrics,
        "results": dtypes,
        "versions": versions(adapter.DISTRIBUTIONS) | tensors.toolchain(),
        "device": tensors.device(),
    }


def main() -> None:
    # Python puts the folder of this file first on the path; nothing that a peer imports is in it.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    folder = Path(sys.argv[1])
    try:
        answer = run(folder)
    except Exception as error:
        traceback.print_exc()
        refused = isinstance(error, NotImplementedError)
        answer = {"error": f"{type(error).__name__}: {error}", "refused": refused}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
