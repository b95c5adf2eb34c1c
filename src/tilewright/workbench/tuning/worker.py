"""A process that compiles, checks and times configs for `tilewright tune`: if one crashes or hangs, only this ends.

    python -m tilewright.workbench.tuning.worker

reads one JSON object per line from its input, and writes one per line as the answer: {"ok": true, ...}, or {"ok": false,
"kind": ..., "error": ...}. pool.py is the other side.

    open      the op, case, dtype and implementation that everything after is about
    expect    computes the expected results, and writes them to a folder: of large arrays, signed sums of runs
    prepare   compiles a config, runs it, and compares its results with those of the folder
    sample    times what was prepared last
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from tilewright.workbench.figures import one_line
from tilewright.workbench.peers.agreement import TOLERANCE, Wanted, relative_error
from tilewright.workbench.sampling import calls_per_sample, sample

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


class Session:
    """What one worker is about: one implementation of an op on one case."""

    op: Op
    case: Case
    dtype: str
    implementation: str
    arrays: Mapping[str, Any]
    cotangents: tuple[Any, ...]

    def __init__(self) -> None:
        self._run: Callable[[], Any] | None = None
        self._calls, self._seconds = 0, 0.0

    def open(self, op: list[Any], case: str, dtype: str, implementation: str) -> dict[str, Any]:
        name, family, implementations = op
        self.op = Op(name, family, tuple(implementations))
        self.case, self.dtype, self.implementation = self.op.case(case), dtype, implementation
        self.arrays = self.case.draw(dtype)
        shapes = jax.eval_shape(call(self.op, self.case, "reference"), **self.case.structs(dtype))
        self.cotangents = cotangents_like(shapes, seed=0)
        return {}

    def expect(self, folder: str, exact: bool) -> dict[str, Any]:
        """`exact`: the oracle, by the 2x rule. Otherwise what fits into memory, as for comparisons with other libraries."""
        if exact:
            held = CaseCheck(self.op, self.case, self.dtype, arrays=self.arrays, compared=_sums)
            wanted, against = held.oracle, ORACLE
            baselines = {name: dataclasses.asdict(discrepancy(held.plain[name], want)) for name, want in wanted.items()}
        else:
            whole, against = Wanted(self.op, self.case, self.dtype, BOTH).expected(self.case)
            wanted, baselines = {name: np.asarray(_sums(want)) for name, want in whole.items()}, {}
        names = list(wanted)
        for place, name in enumerate(names):
            np.save(Path(folder) / f"{place}.npy", wanted[name])
        (Path(folder) / _EXPECTED).write_text(json.dumps({"names": names, "against": against, "baselines": baselines}))
        return {"against": against}

    def prepare(self, configs: list[dict[str, Any]], mode: Mode, folder: str) -> dict[str, Any]:
        """Compiles; compares every output and gradient; and keeps the program of `mode` to be timed."""
        self._run, self._calls = None, 0
        built = tuple(config_of(self.op, self.implementation, each) for each in configs)
        function = call(self.op, self.case, self.implementation, built)
        here = interpret() if needs_interpreter(self.implementation) else contextlib.nullcontext()
        with here:
            programs = {BOTH: self._program(function, BOTH)}
            if mode != BOTH:
                programs[mode] = self._program(function, mode)
            timed = programs[mode]
            told: list[dict[str, Any]] = []
            for program in programs.values():
                results = jax.block_until_ready(program.run(dict(self.arrays), program_cotangents(self, program)))
                told += self._judged(results, Path(folder))
                del results
        self._run = lambda: timed.run(dict(self.arrays), program_cotangents(self, timed))
        return {"checks": told, **timed.metrics}

    def _program(self, function: Callable[..., tuple[Any, ...]], mode: Mode) -> Program:
        cotangents = self.cotangents if mode == BOTH else ()
        return Program.of(function, self.case, self.arrays, cotangents, self.dtype, mode)

    def _judged(self, results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
        expected = json.loads((folder / _EXPECTED).read_text())
        checks = []
        for name, got in results.items():
            got, want = np.asarray(_sums(got)), np.load(folder / f"{expected['names'].index(name)}.npy")
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

    def sample(self) -> dict[str, Any]:
        """One turn: a few samples, after a call to warm up, or one where calls take long."""
        assert self._run is not None
        if not self._calls:
            self._calls, self._seconds = calls_per_sample(self._run, jax.block_until_ready)
        quick = self._seconds < _WARM_SECONDS
        if quick:
            jax.block_until_ready(self._run())
        count = _SAMPLES_PER_TURN if quick else 1
        taken = [sample(self._run, jax.block_until_ready, self._calls) for _ in range(count)]
        return {"samples": taken, "median": statistics.median(taken)}


def program_cotangents(session: Session, program: Program) -> tuple[Any, ...]:
    return session.cotangents if program.mode == BOTH else ()


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
    session = Session()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            told = {"ok": True, **getattr(session, request.pop("do"))(**request)}
        except Exception as error:
            told = failure(error)
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
