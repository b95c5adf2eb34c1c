"""A process that compiles, checks and times configs for `tilewright tune`: if one crashes or hangs, only this ends.

    python -m tilewright.workbench.tuning.worker

reads one JSON object per line from its input, and writes one per line as the answer: {"ok": true, ...}, or {"ok": false,
"kind": ..., "error": ...}. Before the answer there may be {"waits": true}, and {"waits": false} when it has the device.
pool.py is the other side.

    open           the op, case, dtype and implementation that everything after is about, and the lock of the device
    expect         computes the expected results, and writes them to a folder: of large arrays, signed sums of runs
    prepare        compiles a config to be timed, runs it, and compares its results with those of the folder
    differentiate  compiles the forward and the backward with a config, runs both, and compares the gradients as well
    sample         times what was prepared last

Programs are compiled at any time, and run when nothing is timed. Whoever asks for `sample` holds the lock.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from tilewright.core.case import Case
from tilewright.core.config import Config
from tilewright.core.dispatch import Op, Unsupported
from tilewright.core.numerics import Discrepancy, discrepancy, judge_beside, signed_sums
from tilewright.core.target import interpret
from tilewright.core.tuned import read_config
from tilewright.workbench.bench import Mode, Program
from tilewright.workbench.check import CaseCheck, call, cotangents_like, needs_interpreter
from tilewright.workbench.device_time import NoDeviceTime, device_time
from tilewright.workbench.figures import one_line
from tilewright.workbench.peers.agreement import TOLERANCE, Wanted, relative_error
from tilewright.workbench.sampling import calls_per_sample, sample
from tilewright.workbench.tuning.pool import on_device

Device = Callable[[], contextlib.AbstractContextManager[None]]
"""Contexts for what runs on the device."""
Clock = Literal["wall", "device"]
"""What a time is of: calls as the host sees them, or what runs on the device (device_time.py)."""
BOTH: Mode = "forward+backward"
ORACLE = "the oracle"
_EXPECTED = "expected.json"
_WARM_SECONDS = 0.05  # Calls that take longer are not repeated to warm up, and are timed once per turn.
_SAMPLES_PER_TURN = 3
_sums = jax.jit(signed_sums)
_TINY = 1e-300  # The bound of a quantity that is 0 everywhere.
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.


def config_of(op: Op, implementation: str, fields: Mapping[str, Any]) -> Config:
    """The config of an implementation that JSON fields describe."""
    kinds = {kind.__name__: kind for one in op.architectures(implementation) for kind in one.configs}
    if fields.get("config") not in kinds:
        raise ValueError(f"{fields.get('config')!r} is not a config of {op.name} {implementation}")
    return read_config(fields, kinds[fields["config"]])


class Reference(CaseCheck):
    """A check whose reference is compiled before the device is asked for, so that the device is not kept waiting."""

    def __init__(self, op: Op, case: Case, dtype: str, arrays: Mapping[str, Any], device: Device):
        self.op, self.case, self.dtype, self._compared = op, case, dtype, _sums
        jitted: Any = self._program(call(op, case, "reference"))

        def run(arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> dict[str, Any]:
            compiled = jitted.lower(arrays, cotangents).compile()
            with device():
                return jax.block_until_ready(compiled(arrays, cotangents))

        self._reference = run
        self._set_arrays(arrays, seed=0)


class Session:
    """What one worker is about: one implementation of an op on one case."""

    op: Op
    case: Case
    dtype: str
    implementation: str
    outputs: tuple[Any, ...]
    arrays: Mapping[str, Any]
    cotangents: tuple[Any, ...]

    def __init__(self, told: Callable[[bool], None]) -> None:
        """`told` is called when it begins to wait for the device, and when that ends."""
        self._timed: Program | None = None
        self._lock: str | None = None
        self._told = told
        self._calls, self._seconds = 0, 0.0

    def open(
        self, op: list[Any], case: str, dtype: str, implementation: str, lock: str | None = None
    ) -> dict[str, Any]:
        name, family, implementations = op
        self._timed, self._lock = None, lock
        self.op = Op(name, family, tuple(implementations))
        self.case, self.dtype, self.implementation = self.op.case(case), dtype, implementation
        self.outputs = jax.eval_shape(call(self.op, self.case, "reference"), **self.case.structs(dtype))
        self.arrays, self.cotangents = {}, ()  # Those of another case are not kept beside these.
        with self._device():
            self.arrays, self.cotangents = self.case.draw(dtype), cotangents_like(self.outputs, seed=0)
            jax.block_until_ready((self.arrays, self.cotangents))
        return {}

    def expect(self, folder: str, exact: bool) -> dict[str, Any]:
        """`exact`: the oracle, by the 2x rule. Otherwise what fits into memory, as for comparisons with other libraries."""
        if exact:
            held = Reference(self.op, self.case, self.dtype, self.arrays, self._device)
            wanted, against = held.oracle, ORACLE
            baselines = {name: dataclasses.asdict(discrepancy(held.plain[name], want)) for name, want in wanted.items()}
        else:
            with self._device():
                whole, against = Wanted(self.op, self.case, self.dtype, BOTH).expected(self.case)
            wanted, baselines = {name: np.asarray(_sums(want)) for name, want in whole.items()}, {}
        names = list(wanted)
        for place, name in enumerate(names):
            np.save(Path(folder) / f"{place}.npy", wanted[name])
        (Path(folder) / _EXPECTED).write_text(json.dumps({"names": names, "against": against, "baselines": baselines}))
        return {"against": against}

    def prepare(self, configs: list[dict[str, Any]], mode: Mode, folder: str) -> dict[str, Any]:
        """Compiles the program of `mode`, compares its results, and keeps it to be timed."""
        self._calls, self._timed = 0, None
        program = self._program(configs, mode)
        checks = self._judged(program, Path(folder))
        self._timed = program
        digest = hashlib.sha256(program.lowered.as_text().encode()).hexdigest()
        return {"checks": checks, "program": digest, **program.metrics}

    def differentiate(self, configs: list[dict[str, Any]], folder: str) -> dict[str, Any]:
        """Compiles both passes and compares their results. What is timed stays as it is."""
        return {"checks": self._judged(self._program(configs, BOTH), Path(folder))}

    def _program(self, configs: list[dict[str, Any]], mode: Mode) -> Program:
        built = tuple(config_of(self.op, self.implementation, each) for each in configs)
        function = call(self.op, self.case, self.implementation, built)
        cotangents = self.outputs if mode == BOTH else ()
        with self._interpreted():
            return Program.of(function, self.case, self.case.structs(self.dtype), cotangents, self.dtype, mode)

    def _device(self) -> contextlib.AbstractContextManager[None]:
        return on_device(self._lock, told=self._told)

    def _interpreted(self) -> contextlib.AbstractContextManager[Any]:
        return interpret() if needs_interpreter(self.implementation) else contextlib.nullcontext()

    def _run(self, program: Program) -> Any:
        return program.run(dict(self.arrays), self.cotangents if program.mode == BOTH else ())

    def _judged(self, program: Program, folder: Path) -> list[dict[str, Any]]:
        """Runs a program, and compares every output, and every gradient where it has any."""
        with self._interpreted(), self._device():
            results = {name: np.asarray(_sums(got)) for name, got in self._run(program).items()}
        expected = json.loads((folder / _EXPECTED).read_text())
        checks = []
        for name, got in results.items():
            want = np.load(folder / f"{expected['names'].index(name)}.npy")
            if expected["baselines"]:
                baseline = expected["baselines"][name]
                verdict = judge_beside(got, Discrepancy(**baseline | {"worst": tuple(baseline["worst"])}), want)
                shares = (
                    verdict.error.max_abs / max(verdict.max_abs_bound, _TINY),
                    verdict.error.relative / verdict.relative_bound,
                )
                checks.append({"quantity": name, "share": max(shares), "ok": verdict.ok, "text": str(verdict)})
            else:
                error, bound = relative_error(got, want), TOLERANCE[self.dtype]
                ok, text = error <= bound, f"relative error {error:.3g} (bound {bound:.3g})"
                checks.append({"quantity": name, "share": error / bound, "ok": ok, "text": text})
        return checks

    def sample(self, clock: Clock) -> dict[str, Any]:
        """One turn: a few samples, after a call to warm up, or one where calls take long.

        By the device's clock it is one sample, the median of the calls of a trace, with cold caches where the device has
        any; or `no_device_time`, the reason.
        """
        program = self._timed
        assert program is not None

        def run() -> Any:
            return self._run(program)

        if not self._calls:
            self._calls, self._seconds = calls_per_sample(run, jax.block_until_ready)
        if clock == "device":
            try:
                found = device_time(run, self._seconds, warm=False)
                taken = [statistics.median(found.cold_s or found.warm_s)]
            except NoDeviceTime as error:
                return {"no_device_time": str(error)}
        else:
            quick = self._seconds < _WARM_SECONDS
            if quick:
                jax.block_until_ready(run())
            count = _SAMPLES_PER_TURN if quick else 1
            taken = [sample(run, jax.block_until_ready, self._calls) for _ in range(count)]
        return {"samples": taken, "median": statistics.median(taken)}


def failure(error: BaseException) -> dict[str, Any]:
    """The answer of a request that raised."""
    text = one_line(error)
    lacking = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    kind = "out of memory" if lacking else "refused" if isinstance(error, Unsupported) else "failed"
    # A kernel that fails on a GPU leaves a context in which every other one fails, too.
    return {"ok": False, "kind": kind, "error": text, "restart": isinstance(error, jax.errors.JaxRuntimeError)}


def _end_with_parent(parent: int) -> None:
    """Has the kernel end this process when its parent ends, also while it hangs in foreign code."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(4)


def main() -> None:
    _end_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.

    def say(told: Mapping[str, Any]) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    session = Session(lambda waits: say({"waits": waits}))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            told = {"ok": True, **getattr(session, request.pop("do"))(**request)}
        except Exception as error:
            told = failure(error)
        say(told)


if __name__ == "__main__":
    main()
