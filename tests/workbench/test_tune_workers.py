"""Tuning with workers: who takes which, which clock counts, and what is checked before a faster config counts."""

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.cli.tune import _Asked
from tilewright.core.chip import Chip
from tilewright.core.config import Config
from tilewright.core.dispatch import find_op
from tilewright.workbench.check import CaseCheck
from tilewright.workbench.tuning import measure, worker
from tilewright.workbench.tuning.crew import Crew, Pool
from tilewright.workbench.tuning.measure import Bench
from tilewright.workbench.tuning.pool import Stopped, Worker, WorkerFailed, on_device
from tilewright.workbench.tuning.target import Target, targets

Seconds = Callable[[Mapping[str, Any], str], float]


class Planted(Worker):
    """A worker without a process: `seconds` has the time of a config by a clock, and NaN where the profiler fails."""

    def __init__(self, seconds: Seconds, wrong: Sequence[str] = (), **rest: Any):
        super().__init__(None, 0, **rest)
        self.seconds, self.wrong, self.asked = seconds, wrong, list[str]()
        self.config: Mapping[str, Any] = {}

    def ask(self, do: str, **request: Any) -> None:
        self.asked.append(do)
        self.config = request["configs"][0]

    def answer(self) -> dict[str, Any]:
        return {"compile_s": 1.0, **self.checks("y")}

    def checks(self, quantity: str) -> dict[str, Any]:
        return {"checks": [{"quantity": quantity, "share": 0.5, "ok": quantity not in self.wrong, "text": "planted"}]}

    def call(self, do: str, *, limit_s: float, **request: Any) -> dict[str, Any]:
        self.asked.append(f"{do} {request['clock']}" if do == "sample" else do)
        if do == "differentiate":
            return self.checks("d x")
        taken = self.seconds(self.config, request["clock"])
        return {"no_device_time": "no CUPTI"} if taken != taken else {"samples": [taken], "median": taken}


class PlantedPool(Pool):
    def __init__(self, seconds: Seconds, wrong: Sequence[str] = (), **rest: Any):
        super().__init__(4, overlap=True, **rest)
        self._planted = seconds, wrong

    def new(self, about: Any, memory_bytes: int) -> Worker:
        self._all.append(Planted(*self._planted, stop=self._stop))
        return self._all[-1]


def tried(
    monkeypatch: pytest.MonkeyPatch, seconds: Seconds, wrong: Sequence[str] = ()
) -> tuple[list[measure.Outcome], list[str], Bench]:
    """The outcomes of the heuristic's config and two more of a kernel on an H200, and all that workers were asked."""
    monkeypatch.setattr(measure, "answered", lambda workers, limit_s: {each: each.answer() for each in workers})
    target = forward_target()
    pool = PlantedPool(seconds, wrong)
    about = (target.op, target.case, target.dtype, target.implementation)
    crew = Crew(pool, *about, limit_s=9, oracle_s=9)
    crew.folder, crew.expected_from = "", worker.ORACLE
    bench = Bench(target, crew, limit_s=9)
    outcomes = list(bench.evaluate(configs_of(target)))
    return outcomes, [each for one in pool._all for each in getattr(one, "asked", [])], bench


def forward_target() -> Target:
    op = find_op("gated_rms_norm")
    return targets(op, op.case("train_8k"), "bfloat16", "pallas_gpu", Chip.named("h200"))[0]


def configs_of(target: Target) -> list[Config]:
    (first, *others), space = [target.heuristic], target.space()
    assert first.to_json()["block_n"] == 16
    return [first, *others, *(space.changed(first, block_n=size) or first for size in (8, 32))]


def by_block(**times: Mapping[int, float]) -> Seconds:
    return lambda config, clock: times[clock][config["block_n"]]


def test_small_kernels_are_judged_by_the_time_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's clock, which the launch bounds, the last one looks faster, and the first one slow, on a busy host."""
    seconds = by_block(wall={16: 5e-3, 8: 90e-6, 32: 60e-6}, device={16: 20e-6, 8: 10e-6, 32: 40e-6})
    outcomes, asked, bench = tried(monkeypatch, seconds)
    assert [(one.metrics["clock"], one.better) for one in outcomes] == [
        ("device", True),
        ("device", True),
        ("device", False),
    ]
    assert "sample wall" not in asked
    assert len(outcomes[2].samples_s) == 1  # Clearly slower in the first turn.
    confirmed = bench.confirm(outcomes[1].config, outcomes[0].config)
    assert (confirmed.gain, confirmed.heuristic_samples_s, confirmed.samples_s) == (True, (20e-6,) * 5, (10e-6,) * 5)


@pytest.mark.parametrize(("order", "status"), [((32, 16, 8), "same"), ((32, 8, 16), "slow")])
def test_a_heuristic_of_a_program_that_was_timed_is_compared_with(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], status: str
) -> None:
    """As where a table has the same config, written otherwise: nothing would be compared with the heuristic's."""
    seconds = by_block(wall={16: 4e-3, 8: 3e-3, 32: 4e-3}, device={16: 4e-3, 32: 4e-3})
    _, _, bench = tried(monkeypatch, seconds)
    bench = Bench(bench.target, bench._crew, limit_s=9)
    program = lambda self: {**Planted.checks(self, "y"), "program": str(self.config["block_n"] == 8)}  # noqa: E731
    monkeypatch.setattr(Planted, "answer", program)
    space = bench.target.space()
    configs = [space.changed(bench.target.heuristic, block_n=size) or bench.target.heuristic for size in order]
    outcomes = {outcome.config: outcome.status for outcome in bench.evaluate(configs)}
    assert [outcomes[config] for config in configs] == ["timed", *(status if n == 16 else "timed" for n in order[1:])]
    confirmed = bench.confirm(configs[order.index(8)], bench.target.heuristic)
    assert confirmed.gain
    assert set(confirmed.heuristic_samples_s) == {4e-3}


def test_long_kernels_are_judged_by_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, asked, _ = tried(monkeypatch, by_block(wall={16: 4e-3, 8: 3e-3, 32: 9e-3}, device={16: 4e-3}))
    assert {one.metrics["clock"] for one in outcomes} == {"wall"}
    assert asked.count("sample device") == 1
    assert [(one.status, len(one.samples_s)) for one in outcomes] == [("timed", 9), ("timed", 9), ("slow", 1)]


def test_without_a_profiler_the_wall_time_counts_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, _, _ = tried(monkeypatch, lambda config, clock: 9e-5 if clock == "wall" else float("nan"))
    assert {(one.metrics["clock"], one.metrics["no_device_time"]) for one in outcomes} == {("wall", "no CUPTI")}


def test_a_config_without_device_time_is_not_timed_by_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = by_block(wall={16: 9e-5}, device={16: 2e-5, 8: float("nan"), 32: 2e-5})
    outcomes, _, _ = tried(monkeypatch, seconds)
    assert [one.status for one in outcomes] == ["timed", "failed", "timed"]
    assert outcomes[1].reason == "while it was timed: no CUPTI"


def test_a_faster_forward_counts_when_its_gradients_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = by_block(wall={16: 4e-3, 8: 3e-3, 32: 4e-3}, device={16: 4e-3, 32: 4e-3})
    outcomes, asked, _ = tried(monkeypatch, seconds)
    assert (asked.count("differentiate"), outcomes[1].better) == (
        1,
        True,
    )  # Of the one that is faster, and of no other.
    outcomes, _, bench = tried(monkeypatch, seconds, wrong=["d x"])
    assert (outcomes[1].status, outcomes[1].better, outcomes[1].reason) == ("wrong", False, "d x: planted")
    assert bench._best == outcomes[0].config


def test_workers_are_shared_and_go_from_case_to_case() -> None:
    pool = PlantedPool(by_block())
    one, two = {"case": "one"}, {"case": "two"}
    first = pool.take(one, 9, wait=True)
    assert (len(first), pool.take(two, 1, wait=False)) == (4, [])
    pool.set_aside(first[0])  # It keeps the best config so far; another one may be prepared.
    (extra,) = pool.take(two, 9, wait=False)
    assert extra not in first
    taken: list[Worker] = []
    waits = threading.Thread(target=lambda: taken.extend(pool.take(two, 2, wait=True)))
    waits.start()
    pool.give_back(first[1])
    waits.join(5)
    assert (taken, first[1].about) == ([first[1]], two)
    pool.give_back(first[0])
    pool.give_back(first[2])
    assert pool.take(one, 9, wait=False) == [first[0]]  # Of those that are free, one that has the case open.


def test_an_interrupt_ends_those_who_wait() -> None:
    pool, ended = PlantedPool(by_block()), list[type]()
    pool.take({}, 4, wait=True)

    def wait() -> None:
        try:
            pool.take({}, 1, wait=True)
        except Stopped as error:
            ended.append(type(error))

    waits = threading.Thread(target=wait)
    waits.start()
    pool.stop()
    waits.join(5)
    assert ended == [Stopped]


def test_what_failed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are left behind by an error would be missed by the other cases."""
    target, pool = forward_target(), PlantedPool(by_block(wall={16: 4e-3}))
    crew = Crew(pool, target.op, target.case, target.dtype, target.implementation, limit_s=9, oracle_s=9)
    crew.folder, crew.expected_from = "", worker.ORACLE
    monkeypatch.setattr(
        measure, "answered", lambda workers, limit_s: {each: WorkerFailed("hung", "") for each in workers}
    )
    trying = Bench(target, crew, limit_s=9).evaluate(configs_of(target))
    assert next(trying).status == "hung"
    trying.close()  # type: ignore[attr-defined]
    assert (pool._preparing, len(pool._free)) == (0, 3)


def test_the_first_case_of_each_op_comes_before_the_second_of_any() -> None:
    ops = find_op("short_conv"), find_op("linear_cross_entropy")
    asked = _Asked(ops, (), "bfloat16", None, ("forward",), 60.0, ())
    first = [one.name for one in asked.work(large=True)][:3]
    assert first == ["short_conv train_8k", "linear_cross_entropy gpt2", "short_conv train_8k_packed"]
    named = _Asked(ops, ("llama3", "kimi_linear"), "bfloat16", None, ("forward",), 60.0, ())
    assert [one.name for one in named.work(large=True)] == ["linear_cross_entropy llama3", "short_conv kimi_linear"]


@pytest.mark.slow
def test_a_reference_that_is_compiled_first_gives_the_same_results(tmp_path: Path) -> None:
    op = find_op("grouped_matmul")
    case = next(case for case in op.cases if case.small)
    arrays = case.draw("bfloat16")
    ahead = worker.Reference(op, case, "bfloat16", arrays, lambda: on_device(str(tmp_path / "lock")))
    held = CaseCheck(op, case, "bfloat16", arrays=arrays, compared=worker._sums)
    for name in held.oracle:
        assert ahead.oracle[name].dtype == held.oracle[name].dtype
        np.testing.assert_array_equal(ahead.oracle[name], held.oracle[name])
        np.testing.assert_array_equal(ahead.plain[name], held.plain[name])


def test_waiting_for_another_tuner_is_no_hang(tmp_path: Path) -> None:
    """What waits for the device tells it, and its limit begins when it has the device."""
    one, said, lock = Worker({}, 2**60), list[bool](), str(tmp_path / "lock")
    read, write = os.pipe()
    one._process = types.SimpleNamespace(stdout=os.fdopen(read, "rb"), pid=0)  # type: ignore[assignment]

    def check() -> None:
        with on_device(lock, told=said.append):
            pass

    with on_device(lock, alone=True):
        waits = threading.Thread(target=check)
        waits.start()
        waits.join(0.05)
        assert said == [True]
    waits.join(5)
    assert said == [True, False]
    os.write(write, b'{"waits": true}\n')
    assert (one.read(), one.overdue(-1.0)) == (None, None)
    os.write(write, b'{"waits": false}\n')
    assert (one.read(), one._waits, one.overdue(60.0)) == (None, False, None)
    os.close(write)


def test_what_is_timed_is_alone_on_the_device(tmp_path: Path) -> None:
    lock, seen = str(tmp_path / "lock"), list[str]()

    def check() -> None:
        with on_device(lock):
            seen.append("checked")

    with on_device(lock), on_device(lock):  # Checks do not wait for each other.
        pass
    with on_device(lock, alone=True):
        waits = threading.Thread(target=check)
        waits.start()
        waits.join(0.05)
        seen.append("timed")
    waits.join(5)
    assert seen == ["timed", "checked"]


HOLDS = """
import fcntl, sys, time
with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("timing", flush=True)
    time.sleep(60)
"""


def test_two_tuners_on_one_machine_take_turns() -> None:
    with Pool(1) as one, Pool(1) as other:
        assert one.lock == other.lock


def test_a_tuner_that_is_killed_leaves_the_device_free(tmp_path: Path) -> None:
    lock, seen = str(tmp_path / "lock"), list[str]()

    def time() -> None:
        with on_device(lock, alone=True):
            seen.append("timed")

    with subprocess.Popen([sys.executable, "-S", "-c", HOLDS, lock], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "timing\n"
        waits = threading.Thread(target=time)
        waits.start()
        waits.join(0.05)
        assert seen == []
        other.kill()
    waits.join(5)
    assert seen == ["timed"]
