"""Times a peer on one case, and makes a record of it like ours."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tilewright.core.case import Case
from tilewright.core.target import default_device
from tilewright.workbench.bench import (
    Measured,
    Program,
    Timing,
    achieved,
    bench_record,
    device_fields,
    judged,
    with_device,
)
from tilewright.workbench.device_time import NoDeviceTime, of_events
from tilewright.workbench.figures import one_line
from tilewright.workbench.peers.agreement import Wanted
from tilewright.workbench.peers.beside import ask
from tilewright.workbench.peers.child import versions
from tilewright.workbench.peers.registry import Adapter, Failed, Peer, Refused
from tilewright.workbench.records import Provenance, Record


def bench_peer(peer: Peer, adapter: Adapter, wanted: Wanted, timing: Timing, python: str | None = None) -> Record:
    """Runs, times and judges one adapter of a peer. Raises `Refused` where it does not take this case, and `Failed`."""
    theirs = adapter.settle(wanted.case)
    if peer.tensors is not None:
        measured, found = _beside(adapter, peer.tensors, theirs, wanted, timing, python)
    else:
        measured, found = _inside(adapter, theirs, wanted, timing)
    metrics = dict(measured.metrics) | {"peer": True}
    metrics |= judged(lambda results: wanted.judge(results, theirs).metrics(), measured.results)
    if lacks := [name for name in wanted.case.outputs if name not in theirs.outputs]:
        metrics["lacks"] = ", ".join(lacks)
    if instead := adapter.instead(wanted.case.op):
        metrics["instead"] = ", ".join(f"{name}={value!r}" for name, value in instead.items())
    here = Provenance.here(default_device())
    where = dataclasses.replace(here, versions={**here.versions, **found})
    names = (wanted.op, wanted.case, adapter.name, wanted.dtype, wanted.mode)
    fields = device_fields(measured.device)
    return bench_record(*names, provenance=where, samples_s=measured.samples_s, metrics=metrics, **fields)


_Outcome = tuple[Measured, Mapping[str, str]]
"""With the versions of the peer's packages."""


def _beside(
    adapter: Adapter, tensors: Path, theirs: Case, wanted: Wanted, timing: Timing, python: str | None
) -> _Outcome:
    cotangents = wanted.cotangents(theirs)
    answer = ask(adapter, tensors, theirs, wanted.arrays, cotangents, timing.seconds, python)
    metrics = dict(answer.metrics) | achieved(wanted.case, answer.samples_s, wanted.dtype, wanted.mode)
    measured = Measured(answer.samples_s, metrics | {"peer_device": answer.device}, answer.results)
    try:
        measured = with_device(measured, of_events(answer.kernels, answer.traced_calls))
    except NoDeviceTime as error:
        measured = dataclasses.replace(measured, metrics={"no_device_time": str(error)} | measured.metrics)
    return measured, answer.versions


def _inside(adapter: Adapter, theirs: Case, wanted: Wanted, timing: Timing) -> _Outcome:
    if (reason := adapter.unavailable()) is not None:
        raise Refused(reason)
    call = adapter.ops[theirs.op]
    layouts = adapter.layouts(theirs.op)

    def function(**arrays: Any) -> tuple[Any, ...]:
        return call(**arrays, **theirs.options)

    try:
        arrays = {name: layouts[name][0](array) if name in layouts else array for name, array in wanted.arrays.items()}
        cotangents = wanted.cotangents(theirs) or ()
        if cotangents:
            outputs = jax.eval_shape(function, **arrays)
            cotangents = tuple(each.astype(out.dtype) for each, out in zip(cotangents, outputs, strict=True))
        program = Program.of(function, theirs, arrays, cotangents, wanted.dtype, wanted.mode, adapter.compiler_options)
        measured = program.time(arrays, cotangents, timing)
    except Exception as error:  # Whatever a peer raises is its answer.
        raise (Refused if isinstance(error, NotImplementedError) else Failed)(one_line(error)) from error
    results = {name: _restored(name, value, layouts) for name, value in measured.results.items()}
    return dataclasses.replace(measured, results=results), versions(adapter.load().DISTRIBUTIONS)


def _restored(name: str, value: Any, layouts: Mapping[str, tuple[Any, Callable[[Any], Any] | None]]) -> np.ndarray:
    there_and_back = layouts.get(name.removeprefix("d ")) if name.startswith("d ") else None
    back = None if there_and_back is None else there_and_back[1]
    return np.asarray(value if back is None else back(value))
