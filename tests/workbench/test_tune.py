"""Tuning: what is searched in which order, what counts as a gain, and that nothing that was measured is lost."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.cli.test_cli import ran
from tests.workbench.planted.api import OP
from tests.workbench.planted.xla import TwiceXlaForward
from tilewright.cli.main import app
from tilewright.cli.tune import _interrupted, _line, _show
from tilewright.core import dispatch, numerics, tuned
from tilewright.core.chip import Chip
from tilewright.core.config import Config, search_over
from tilewright.core.target import target as target_chip
from tilewright.core.tuned import Entry
from tilewright.workbench.check import CaseCheck
from tilewright.workbench.tuning import crew, results, session
from tilewright.workbench.tuning.crew import Crew, Pool
from tilewright.workbench.tuning.estimate import Estimates
from tilewright.workbench.tuning.measure import Bench, Confirmed, is_gain, is_slow
from tilewright.workbench.tuning.search import Budget, Outcome, Search
from tilewright.workbench.tuning.source import code
from tilewright.workbench.tuning.space import Space, dominates
from tilewright.workbench.tuning.target import Target, targets


class Tiles(Config):
    """Fast at a=32, b=4, c=512, and slower the further away."""

    choices = search_over(a=(4, 8, 16, 32, 64), b=(1, 2, 4, 8), c=(64, 128, 256, 512, 1024))
    memory_fields = ("a", "c")

    a: int = 4
    b: int = 1
    c: int = 64

    def __post_init__(self) -> None:
        if self.a * self.b > 256:
            raise ValueError("too large")


class Trial:
    """Costs of configs without running any. `confirmed`: the ratios of the last comparison with the heuristic."""

    side_by_side = 2
    settled = False

    def __init__(self, cost: Callable[[Any], float | str], confirmed: float = 0.5) -> None:
        self.cost, self.best, self.seen = cost, float("inf"), list[Config]()
        self.confirmed = confirmed

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
        for config in configs:
            self.seen.append(config)
            cost = self.cost(config)
            if isinstance(cost, str):
                yield Outcome(config, cost, "planted")
                continue
            better = cost < self.best
            self.best = min(self.best, cost)
            yield Outcome(config, "timed", better=better, samples_s=(cost, cost))

    def confirm(self, chosen: Config, beside: Config) -> Confirmed:
        theirs = (1.0, 1.0, 1.0)
        ours = tuple(self.confirmed for _ in theirs)
        return Confirmed(ours, theirs, is_gain([self.confirmed] * 3), Outcome(chosen, "prepared"))


def distance(config: Tiles) -> float:
    return 1.0 + sum(abs(x - y) for x, y in ((config.a, 32), (4 * config.b, 16), (config.c / 16, 32)))


def searched(cost: Callable[[Any], float | str], **fields: Any) -> tuple[Search, Trial]:
    trial = Trial(cost)
    search = Search(Space(Tiles(), lambda config: None), trial, Budget(60), **fields)
    list(search.run([]))
    return search, trial


def test_a_large_space_is_searched_locally_and_the_best_is_found() -> None:
    search, trial = searched(distance)
    assert (search.best, search.complete) == (Tiles(32, 4, 512), True)
    assert len(trial.seen) == len(set(trial.seen)) < 60  # Of 96 that are valid.


def test_two_fields_that_must_change_together_are_found_by_the_last_sweep() -> None:
    def cost(config: Tiles) -> float:
        return 0.5 if (config.a, config.b) == (8, 2) else 1.0 + abs(config.a - 4) + abs(config.b - 1)

    assert searched(cost)[0].best == Tiles(8, 2, 64)


def test_the_neighbours_are_searched_until_none_is_faster() -> None:
    search, trial = searched(distance, reach="neighbours")
    assert trial.seen[:4] == [Tiles(), Tiles(8), Tiles(b=2), Tiles(c=128)]
    assert (search.best, search.complete) == (Tiles(32, 4, 512), True)  # From step to step.
    search, trial = searched(lambda config: 1.0 + abs(config.a - 4), reach="neighbours")
    assert (search.best, search.complete, len(trial.seen)) == (Tiles(), True, 4)


def test_a_search_that_has_tried_all_ends_with_its_budget() -> None:
    class Slow(Trial):
        def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
            yield from super().evaluate(configs)
            budget._end = 0.0

    budget, trial = Budget(60), Slow(lambda config: 1.0)
    trial.side_by_side = 4
    search = Search(Space(Tiles(), lambda config: None), trial, budget, reach="neighbours")
    list(search.run([]))
    assert (len(trial.seen), search.complete) == (4, True)


def test_a_small_space_is_tried_as_a_whole_nearest_first() -> None:
    trial = Trial(lambda config: float(config.block == 1))
    search = Search(Space(TwiceXlaForward(), lambda config: None), trial, Budget(60))
    list(search.run([]))
    assert len(trial.seen) == 14
    assert trial.seen[0] == TwiceXlaForward()
    assert search.best is not None
    assert getattr(search.best, "block", None) == 8


@pytest.mark.parametrize("status", ["crashed", "hung", "out of memory"])
def test_what_is_deadly_prunes_what_needs_as_much_memory(status: str) -> None:
    def cost(config: Tiles) -> float | str:
        return status if config.a >= 16 else distance(config)

    search, trial = searched(cost)
    died = [config for config in trial.seen if isinstance(cost(config), str)]
    for number, config in enumerate(died):
        assert not any(dominates(config, earlier) for earlier in died[: max(0, number - 1)])  # Two run side by side.
    assert search.best is not None
    assert getattr(search.best, "a", 99) < 16


def test_dominance() -> None:
    assert dominates(Tiles(8, 2, 128), Tiles(4, 2, 128))
    assert not dominates(Tiles(8, 4, 128), Tiles(4, 2, 128))
    assert not dominates(Tiles(4, 2, 64), Tiles(4, 2, 128))
    assert not dominates(TwiceXlaForward(), Tiles())


def test_what_the_memory_model_refuses_is_never_tried() -> None:
    trial = Trial(distance)
    search = Search(Space(Tiles(), lambda config: "no" if config.c > 128 else None), trial, Budget(60))
    list(search.run([]))
    assert {config.c for config in trial.seen if isinstance(config, Tiles)} == {64, 128}


def test_a_spent_budget_ends_the_search_after_the_first_config() -> None:
    trial = Trial(distance)
    search = Search(Space(Tiles(), lambda config: None), trial, Budget(0))
    list(search.run([Tiles(8)]))
    assert (trial.seen, search.best, search.complete) == ([Tiles()], Tiles(), False)


def test_a_spent_budget_leaves_time_for_what_others_are_compared_with() -> None:
    """A search that starts from what a table has is compared with the heuristic's config, also when it is over at once."""
    trial = Trial(distance)
    search = Search(Space(Tiles(8), lambda config: None), trial, Budget(0), always=(Tiles(),))
    list(search.run([Tiles(), Tiles(16)]))
    assert (trial.seen, search.best, search.complete) == ([Tiles(8), Tiles()], Tiles(8), False)


def test_a_gain_inside_the_noise_is_none() -> None:
    noise = random.Random(0)
    assert not is_gain([1 + noise.gauss(0, 0.05) for _ in range(9)])
    assert not is_gain([0.995] * 9)
    assert is_gain([0.9 + noise.gauss(0, 0.02) for _ in range(9)])
    assert not is_gain([0.5])
    assert is_slow([1.4, 1.5])
    assert is_slow([1.0, 1.1, 1.08, 1.2])
    assert not is_slow([1.4, 1.0, 1.02])
    assert is_slow([2.1])
    assert is_slow([1.06], early=1)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's tables, and the planted op among the ops."""
    monkeypatch.setenv("TILEWRIGHT_TUNED", str(tmp_path / "tables"))
    monkeypatch.setitem(dispatch._registry, "twice", OP)
    tuned.forget()
    yield tmp_path / "tables"
    tuned.forget()


@pytest.fixture
def target(tables: Path) -> Target:
    (found,) = targets(OP, OP.case("small"), "float32", "xla")
    assert found.mode == "forward+backward"  # The backward follows the forward.
    return found


def tuned_with(target: Target, trial: Trial, path: Path) -> session.Tuned:
    done = session.tune(target, trial, budget_s=60, records=path, say=lambda outcome: None)
    if done.record is not None:
        results.put(tuned.user_tables(), "cpu", "twice", [results.entry_of(done.record)])
    return done


def cost_of(config: TwiceXlaForward) -> float | str:
    return 8.0 / config.block if config.fault == "none" else config.fault


def decided() -> Any:
    (decision,) = dispatch.explain(OP.function, OP.case("small").structs("float32")["x"]).decisions
    return decision


def test_a_gain_is_put_into_the_table_and_dispatch_takes_it(target: Target, tables: Path, tmp_path: Path) -> None:
    assert decided().forward.config_source == "heuristic"
    done = tuned_with(target, Trial(cost_of), tmp_path / "tune.jsonl")
    assert (done.chosen, done.gain) == (TwiceXlaForward(8), 2.0)
    assert (decided().forward.config, decided().forward.config_source) == (TwiceXlaForward(8), "tuned")
    (entry,) = tuned.read_table(tables, "cpu", "twice")
    assert (entry.kind, entry.heuristic_s, entry.provenance["source"]) == ("measured", 1.0, target.source)
    assert entry.search == {"reach": "all", "tried": 11, "of": 12, "complete": True}
    assert set(entry.provenance) == {"chip", "device_kind", "versions", "source", "commit", "date"}
    table = results.write_csv(tmp_path / "tune.jsonl").read_text().splitlines()
    assert len(table) == 1 + len(results.read(tmp_path / "tune.jsonl"))
    assert "block=8 fault=none" in "\n".join(table)
    assert ",times_the_best," in table[0]


def test_a_gain_inside_the_noise_changes_nothing(target: Target, tables: Path, tmp_path: Path) -> None:
    done = tuned_with(target, Trial(cost_of, confirmed=0.995), tmp_path / "tune.jsonl")
    assert (done.chosen, done.note) == (TwiceXlaForward(1), "the gain over the heuristic is inside the noise")
    assert decided().forward.config == TwiceXlaForward(1)


def test_a_search_that_did_not_end_and_found_nothing_makes_no_entry(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say = list[Outcome]().append
    done = session.tune(target, Trial(cost_of), budget_s=0, records=tmp_path / "tune.jsonl", say=say)
    assert (done.chosen, done.record, done.complete) == (TwiceXlaForward(1), None, False)
    assert "the search did not end: no entry" in done.note
    begun = _interrupted(target, ["timed", "timed", "slow"])
    _show("twice", [done, begun])
    told = capsys.readouterr().out
    assert told.count("no entry: the search was not ended") == 2
    assert "1.00x" not in told
    assert "2 timed, 1 slow" in told
    assert "the budget ended before the search did; a longer one goes on from here." in told
    assert "interrupted; the same command goes on from here." in told
    assert "0 of 2 searches ended by themselves." in told


def test_a_search_that_is_interrupted_is_in_the_summary(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Trial):
        def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
            yield from super().evaluate(configs[:1])
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def trials(*given: Any, **named: Any) -> Iterator[Any]:
        yield lambda one: Interrupted(cost_of)

    monkeypatch.setattr("tilewright.cli.tune._trials", trials)
    words = ["twice", "--case", "small", "--dtype", "float32", "--records", str(tmp_path / "tune.jsonl")]
    done = CliRunner().invoke(app, ["tune", *words])
    assert done.exit_code == 130, done.output
    assert "no entry: the search was not ended" in " ".join(done.output.split())
    assert "0 of 1 searches ended by themselves." in done.output


def test_a_named_case_that_has_nothing_to_tune_is_refused_behind_a_spent_budget(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Trial):
        def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
            time.sleep(0.2)
            yield from super().evaluate(configs)

    @contextlib.contextmanager
    def trials(*given: Any, **named: Any) -> Iterator[Any]:
        yield lambda one: Slow(cost_of)

    monkeypatch.setattr("tilewright.cli.tune._trials", trials)
    words = ["twice,rms_norm", "--case", "small,odd", "--dtype", "float32", "--budget", "0.1s", "--quiet"]
    done = CliRunner().invoke(app, ["tune", *words, "--records", str(tmp_path / "tune.jsonl")])
    assert done.exit_code == 2, done.output
    told = " ".join(done.output.split())
    assert "rms_norm has nothing to tune here" in told
    assert "The budget ended before" not in told
    assert "searches ended by themselves." in told  # The summary, which --quiet leaves.
    assert "ms, " not in told  # And no line of a config.


def test_a_line_says_what_its_ratio_is_of() -> None:
    def line(**fields: Any) -> str:
        return _line(Outcome(TwiceXlaForward(), "timed", samples_s=(1e-3,), **fields))

    assert line(better=True).startswith("first  ")
    assert line(better=True, ratio=0.5).endswith("1.00 ms, 0.50 times the best one in the same turns")
    assert line(ratio=3.5334).endswith("1.00 ms, 3.53 times the best one in the same turns")
    assert line(ratio=2.0, metrics={"estimate_s": 1e-3}).endswith("1.00 ms (estimate), 2.00 times the best one")


def test_times_of_two_clocks_are_not_compared(target: Target) -> None:
    def record(seconds: float, **metrics: Any) -> Any:
        outcome = Outcome(TwiceXlaForward(), "timed", samples_s=(seconds,), metrics=metrics)
        return results.record_of(target, outcome)

    wall, faster, device = record(2e-4, clock="wall"), record(1e-4, clock="wall"), record(1e-5, clock="device")
    assert results.best_of([wall, faster, device]) == [faster, device]
    assert results.entry_of(device).clock == "device"


def test_a_second_run_goes_on_where_the_first_was(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    first = Trial(cost_of)
    for outcome in first.evaluate([TwiceXlaForward(1, "crash"), TwiceXlaForward(8), TwiceXlaForward(1, "wrong")]):
        results.append(path, results.record_of(target, outcome))
    again = Trial(cost_of)
    done = tuned_with(target, again, path)
    assert TwiceXlaForward(1, "crash") not in again.seen
    assert TwiceXlaForward(1, "wrong") not in again.seen
    assert again.seen[:2] == [TwiceXlaForward(1), TwiceXlaForward(8)]  # The best of before is timed again.
    assert done.chosen == TwiceXlaForward(8)
    third = Trial(cost_of)
    kept = tuned_with(target, third, path)
    assert (kept.note, kept.heuristic_s, kept.gain) == ("the table has this config already", 1.0, 2.0)
    assert set(third.seen) == {TwiceXlaForward(1), TwiceXlaForward(8)}
    spent = Trial(cost_of)
    session.tune(target, spent, budget_s=0, records=path, say=lambda outcome: None)
    assert spent.seen == [TwiceXlaForward(8), TwiceXlaForward(1)]  # What the table has, and the heuristic's beside it.


def test_a_measurement_replaces_an_estimate_also_where_the_heuristic_is_best(target: Target, tmp_path: Path) -> None:
    estimate = planted_entry(64, config=TwiceXlaForward(8, "refused"), kind="estimated")
    results.put(tuned.user_tables(), "cpu", "twice", [estimate])
    done = tuned_with(target, Trial(lambda config: float(config.block)), tmp_path / "tune.jsonl")
    assert done.chosen == TwiceXlaForward(1)
    (entry,) = tuned.read_table(tuned.user_tables(), "cpu", "twice")
    assert (entry.kind, entry.config["block"]) == ("measured", 1)


def test_what_the_kernel_as_it_is_now_was_measured_with_is_not_missing(target: Target, tables: Path) -> None:
    assert not target.is_measured
    results.put(tables, "cpu", "twice", [planted_entry(64)])  # Of the kernel as it was.
    assert not target.is_measured
    now = {"chip": "cpu", "date": "2026-01-02T00:00:00+00:00", "source": target.source}
    results.put(tables, "cpu", "twice", [planted_entry(64, provenance=now)])
    assert target.is_measured


def planted_entry(n: int, *, config: Config | None = None, **fields: Any) -> Entry:
    given = {
        "implementation": "xla",
        "direction": "forward",
        "bucket": {"dtype": "float32", "N": n, "D": 64},
        "config": (config or TwiceXlaForward(8)).to_json(),
        "kind": "measured",
        "mode": "forward",
        "seconds": 1e-3,
        "samples_s": (1e-3,) * 20,
        "provenance": {"chip": "cpu", "date": "2026-01-01T00:00:00+00:00", "source": "old"},
    }
    return Entry(**given | fields)


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a copy of this process, and returns its id. It does nothing but write files."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_two_tuners_on_one_table_lose_no_entry(tmp_path: Path) -> None:
    def put(first: int) -> None:
        for n in range(first, first + 12):
            results.put(tmp_path, "cpu", "twice", [planted_entry(n)])

    children = [in_child(lambda first=first: put(first)) for first in (0, 1000)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    found = {entry.bucket["N"] for entry in tuned.read_table(tmp_path, "cpu", "twice")}
    assert found == {*range(12), *range(1000, 1012)}


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_sigkill_at_any_moment_tears_nothing_and_loses_nothing(target: Target, tmp_path: Path) -> None:
    """A process that records and puts entries is killed twenty times; what it had reported as done is there."""
    path, said = tmp_path / "tune.jsonl", tmp_path / "said"
    said.write_text("0")
    line = results.record_of(target, Outcome(TwiceXlaForward(), "timed", "x" * 9000, samples_s=(1e-3,) * 50))

    def work() -> None:
        for n in range(int(said.read_text()) + 1, 10**6):
            results.append(path, dataclasses.replace(line, metrics={**line.metrics, "number": n}))
            results.put(tmp_path, "cpu", "twice", [planted_entry(n % 50, case=str(n))])
            (tmp_path / "next").write_text(str(n))
            (tmp_path / "next").replace(said)

    moments = random.Random(0)
    for _ in range(20):
        child = in_child(work)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = int(said.read_text())
        numbers = [record.metrics["number"] for record in results.read(path)]
        assert set(range(1, done + 1)) <= set(numbers)
        table = tmp_path / "cpu" / "twice.json"
        _, _, entries, wrong = tuned.parse_table(table.read_text()) if table.exists() else ("", "", [], [])
        assert not wrong
        there = {int(entry.case) for entry in entries}
        # The entry after those that it reported may be there, too, in the place of the one of its bucket.
        missing = set(range(max(1, done - 49), done + 1)) - there
        assert not missing or (missing == {done + 1 - 50} and done + 1 in there)
    assert done >= 5


def test_the_torn_end_of_a_record_is_removed(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    record = results.record_of(target, Outcome(TwiceXlaForward(), "timed", samples_s=(1e-3,)))
    results.append(path, record)
    with path.open("a") as file:
        file.write(record.to_json()[:100])
    results.append(path, record)
    assert len(results.read(path)) == 2


def test_a_damaged_table_is_one_line_on_the_command_line(tables: Path) -> None:
    path = tuned.table_path(tables, "cpu", "twice")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    done = ran("tuned", "twice")
    line = f"warning: the tuned table {path} is ignored: it is not JSON, or was cut off"
    assert done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == 1  # Without Python's file and source line.


def test_the_csv_of_a_tuner_that_was_killed_is_level_before_the_next_one_tunes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tune.jsonl"
    for block in (1, 8):
        outcome = Outcome(TwiceXlaForward(block), "timed", samples_s=(1e-3,))
        results.append(path, results.record_of(target, outcome))
    path.with_suffix(".csv").write_text("op\n")
    monkeypatch.setattr("tilewright.cli.tune.leave_room", lambda: sys.exit("killed again"))
    words = ["tune", "twice", "--quiet", "--records", str(path)]
    assert "killed again" in CliRunner().invoke(app, words).output
    assert len(path.with_suffix(".csv").read_text().splitlines()) == 3
    path.write_text(path.read_text() + '{"op": 3}\n')
    assert f"{path}: line 3 is not a record" in str(CliRunner().invoke(app, words).exception)


def test_a_damaged_table_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tuned.table_path(tmp_path, "cpu", "twice")
    results.put(tmp_path, "cpu", "twice", [planted_entry(1)])
    path.write_text(path.read_text()[:100])
    results.put(tmp_path, "cpu", "twice", [])  # Nothing is written: the table stays as it is.
    assert not path.with_name("twice.json.damaged").exists()
    with pytest.warns(
        RuntimeWarning, match=r"was damaged \(it is not JSON, or was cut off.*a copy is now .*damaged, and a new"
    ):
        results.put(tmp_path, "cpu", "twice", [planted_entry(2)])
    assert [entry.bucket["N"] for entry in tuned.read_table(tmp_path, "cpu", "twice")] == [2]
    assert len(path.with_name("twice.json.damaged").read_text()) == 100
    results.put(tmp_path, "cpu", "twice", [planted_entry(3)])
    by_hand = path.read_text().replace('"N": 2', '"N": 4')
    path.write_text(by_hand)
    with pytest.warns(RuntimeWarning, match=r"a copy is now .*\.damaged-2, and its 1 whole entries were kept"):
        results.put(tmp_path, "cpu", "twice", [planted_entry(5)])
    assert [entry.bucket["N"] for entry in tuned.read_table(tmp_path, "cpu", "twice")] == [3, 5]
    assert path.with_name("twice.json.damaged-2").read_text() == by_hand
    assert len(path.with_name("twice.json.damaged").read_text()) == 100


def test_tuned_shows_what_is_there_and_what_is_stale_and_merges(target: Target, tables: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    empty = run(app, ["tuned", "twice"])
    assert "No tuned config of twice in" in empty.output
    other = tmp_path / "other"
    fresh = {"chip": "cpu", "date": "2026-01-02T00:00:00+00:00", "source": target.source, "versions": {"jax": "0"}}
    results.put(other, "cpu", "twice", [planted_entry(64), planted_entry(128, provenance=fresh, heuristic_s=3e-3)])
    results.put(tables, "cpu", "twice", [planted_entry(64, kind="estimated"), planted_entry(32, seconds=2e-3)])
    merged = run(app, ["tuned", "--merge", str(other / "cpu" / "twice.json")])
    assert (merged.exit_code, "twice on cpu: 2 taken, in " in merged.output) == (0, True), merged.output
    again = run(app, ["tuned", "--merge", str(other)])
    assert "twice on cpu: 0 taken, 2 there already" in again.output
    shown = " ".join(run(app, ["tuned", "twice"]).output.split())
    assert "3 measured, 0 estimated" in shown
    assert "stale" in shown
    assert "3.00x" in shown
    assert "current, jax 0" in shown
    assert "3 measured" in run(app, ["tuned", "twice", "--chip", "cpu"]).output
    assert "No tuned config of twice for h200 in" in run(app, ["tuned", "twice", "--chip", "h200"]).output
    torn = tmp_path / "torn.json"
    torn.write_text((other / "cpu" / "twice.json").read_text()[:50])
    refused = run(app, ["tuned", "--merge", str(torn)])
    assert refused.exit_code != 0
    assert "is not a table that can be read: it is not JSON, or was cut off" in str(refused.exception)


def test_a_merge_that_takes_nothing_says_why_and_fails_where_no_entry_can_be_used(tables: Path, tmp_path: Path) -> None:
    def merge(folder: str, *entries: Entry) -> tuple[int, str]:
        results.put(tmp_path / folder, "cpu", "twice", entries)
        done = CliRunner().invoke(app, ["tuned", "--merge", str(tmp_path / folder)])
        return done.exit_code, " ".join(done.output.split())

    code, told = merge("other", dataclasses.replace(planted_entry(64), config={"config": "Other"}))
    assert (code, "Nothing was taken from" in told) == (1, True), told
    assert "twice on cpu: 0 taken left out:" in told  # Without the path of a table that is not there.
    assert not tables.exists()
    assert "none of its entries can be used here (1 left out)" in told
    now = {"chip": "cpu", "date": "2026-01-02T00:00:00+00:00"}
    results.put(tables, "cpu", "twice", [planted_entry(n, provenance=now) for n in (64, 128)])
    old, estimated, same = planted_entry(64), planted_entry(128, kind="estimated"), planted_entry(256)
    code, told = merge("known", old, estimated, same)
    assert (code, "1 taken, 1 estimated where a measurement is there, 1 older than what is there" in told) == (0, True)
    code, told = merge("known")
    why = "1 estimated where a measurement is there, 1 there already, 1 older than what is there."
    assert (code, told.endswith(f"known: {why}")) == (0, True), told
    (tmp_path / "empty" / "cpu").mkdir(parents=True)
    (tmp_path / "empty" / "cpu" / "twice.json").write_text(tuned.table_text("twice", "cpu", []))
    code, told = merge("empty")
    assert (code, told.endswith("it has no entry.")) == (0, True), told


def test_a_table_that_cannot_be_read_does_not_keep_others_from_being_merged(tables: Path, tmp_path: Path) -> None:
    results.put(tmp_path / "there", "cpu", "twice", [planted_entry(64)])
    (tmp_path / "there" / "cpu" / "aaa.json").write_text('{"schema": 1, "op"')
    merged = CliRunner().invoke(app, ["tuned", "--merge", str(tmp_path / "there")])
    assert "1 taken" in merged.output
    assert "aaa.json is not a table that can be read" in str(merged.exception)


def test_tuned_lists_the_cases_that_have_no_entry() -> None:
    missing = " ".join(CliRunner().invoke(app, ["tuned", "linear_cross_entropy", "--missing", "h100"]).output.split())
    assert "linear_cross_entropy │ qwen3 │ pallas_gpu forward │ the heuristic's" in missing
    assert "do not." in missing


@pytest.mark.slow
def test_every_config_declares_what_is_searched() -> None:
    for op in dispatch.registered().values():
        for name in op.implementations:
            for kind in (kind for one in op.architectures(name) for kind in one.configs):
                fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
                assert kind.choices, kind
                assert {*kind.choices, *kind.memory_fields} <= fields, kind
                assert all(len(values) > 1 for values in kind.choices.values()), kind


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["matmul", "--budget", "soon"], "--budget soon is not a time; write 90s, 10m or 2h"),
        (["matmul", "--chip", "v6e"], "--chip is a chip to estimate for; pass --estimate too"),
        (["apply_rope", "--estimate"], "apply_rope has no TPU kernel to estimate"),
        (["matmul", "--estimate", "--implementation", "xla"], "--estimate is for pallas_tpu, not xla"),
        (["matmul", "--case", "huge"], "--case huge is not known"),
        (["matmul", "--tables", __file__], ".py is a file; name a folder of tables, with a folder per chip"),
        (["matmul", "--implementation", "xla,pallas_gpu"], "--implementation xla,pallas_gpu is not known; use one of"),
    ],
)
def test_a_wrong_argument_is_told(words: list[str], told: str) -> None:
    refused = CliRunner().invoke(app, ["tune", *words])
    assert told in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["rms_norm"],
            "where it runs (--on), or estimate it for a TPU (--estimate); xla declares no block sizes to search",
        ),
        (["rms_norm", "--case", "odd"], "xla declares no block sizes to search"),
        (["matmul", "--implementation", "pallas_gpu"], "device than this cpu; tune it where it runs (--on)"),
    ],
)
def test_what_cannot_be_tuned_here_is_refused(words: list[str], told: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["tune", *words, "--records", str(tmp_path / "tune.jsonl")])
    assert refused.exit_code == 2
    assert told in " ".join(refused.output.split())
    assert "implementation=" not in refused.output  # An option that the verb does not have in these words.


def hangs(config: Config) -> bool:
    return getattr(config, "fault", "") == "hang"


@pytest.mark.slow
def test_sums_of_the_reference_are_of_its_rounded_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one program with the sums, XLA leaves out the rounding of a gradient, and every kernel seems wrong."""
    monkeypatch.setattr(numerics, "SUMMED_ABOVE", 16)
    op = dispatch.find_op("grouped_matmul")
    case, sums = next(case for case in op.cases if case.small), jax.jit(numerics.signed_sums)
    held, whole = CaseCheck(op, case, "bfloat16", compared=sums), CaseCheck(op, case, "bfloat16")
    for name, result in whole.plain.items():
        assert held.plain[name].size <= 16
        np.testing.assert_array_equal(held.plain[name], sums(jnp.asarray(result)))


@pytest.mark.slow
def test_what_is_wrong_or_dies_never_wins(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong values, wrong gradients, a crash, a hang and a memory hog: each costs one line, and the right one wins.

    A config whose program was timed already is not timed.
    """
    monkeypatch.setattr(crew, "memory_share", lambda workers: 3 * 2**30 // 2)
    path = tmp_path / "tune.jsonl"
    about = (target.op, target.case, target.dtype, target.implementation)
    with Pool(1) as pool, Crew(pool, *about, limit_s=120, oracle_s=120) as workers:
        assert workers.expected_from == "the oracle"
        bench = Bench(target, workers, limit_s=120)
        space = Space(TwiceXlaForward(), lambda config: target.refusal(config) or ("later" if hangs(config) else None))
        search = Search(space, bench, Budget(300))
        said: list[Outcome] = []
        for outcome in search.run([]):
            said.append(outcome)
            results.append(path, results.record_of(target, outcome))
        bench._patience_s = 5.0
        said += bench.evaluate([TwiceXlaForward(1, "hang")])
        bench._patience_s = 120.0
        (same,) = bench.evaluate([TwiceXlaForward(8, "unused")])
        confirmed = bench.confirm(TwiceXlaForward(8), TwiceXlaForward(1))
    assert (same.status, same.better, same.samples_s) == ("same", False, ())
    assert same.reason == f"the program is that of {TwiceXlaForward(8)}"
    statuses = {(outcome.config.fault, outcome.config.block): outcome.status for outcome in said}  # type: ignore[attr-defined]
    assert statuses == {
        ("none", 1): "timed",
        ("none", 8): "timed",
        ("wrong", 1): "wrong",
        ("wrong", 8): "wrong",
        ("wrong gradient", 1): "wrong",
        ("wrong gradient", 8): "wrong",
        ("crash", 1): "crashed",
        ("hang", 1): "hung",
        ("out of memory", 1): "out of memory",
    }  # Those that dominate one which died, and what is refused, are not tried.
    assert search.best == TwiceXlaForward(8)
    assert confirmed.gain
    assert len(results.read(path)) == len(said) - 1 == 8
    reasons = {outcome.status: outcome.reason for outcome in said}
    assert "exit code 3" in reasons["crashed"]
    assert reasons["wrong"].startswith("d x: max")
    assert json.loads(results.read(path)[0].to_json())["kind"] == "tune"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compile for a TPU says."""

    floor_us: float | None
    ok: bool = True
    cause: str = ""
    seconds: float = 1.0
    temp_bytes: int | None = 0
    kernels: tuple[Any, ...] = ()


def test_estimates_rank_configs_and_never_stand_for_measurements(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forward, _) = targets(
        dispatch.find_op("rms_norm"), case_of("rms_norm"), "bfloat16", "pallas_tpu", Chip.named("v6e")
    )

    def compile_each(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Compiled]]:
        for place, given in enumerate(configs):
            block, tile = given["forward"].block_n, given["forward"].tile_n
            floor = 1000.0 * (1000.0 / block + tile)
            no = Compiled(None, ok=False, cause="scoped vmem limit exceeded") if block > 256 else None
            yield place, no or Compiled(None if tile == 32 else floor)

    trial = Estimates(forward, compile_each, jobs=2)
    monkeypatch.setattr(
        trial, "_checked", lambda config: {"error": 0.5, "error_against": "the oracle, in the interpreter"}
    )
    said: list[Outcome] = []
    done = session.tune(forward, trial, budget_s=60, records=tmp_path / "tune.jsonl", say=said.append)
    assert done.chosen is not None
    assert (done.chosen.to_json()["block_n"], done.chosen.to_json()["tile_n"]) == (256, 16)
    assert {outcome.status for outcome in said} == {"estimated", "out of memory", "failed"}
    assert done.record is not None
    entry = results.entry_of(done.record)
    assert (done.record.kind, entry.kind, entry.samples_s, entry.provenance["chip"]) == (
        "estimate",
        "estimated",
        (),
        "v6e",
    )
    assert entry.seconds == pytest.approx((1000 / 256 + 16) * 1e-3)
    results.put(tables, "v6e", "rms_norm", [entry])
    case = case_of("rms_norm")
    with target_chip("v6e"):
        told = str(dispatch.explain("rms_norm", **case.structs("bfloat16"), **case.options))
    assert "(tuned: estimated on v6e" in told


def test_an_estimate_that_no_small_case_can_check_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forward, _) = targets(
        dispatch.find_op("rms_norm"), case_of("rms_norm"), "bfloat16", "pallas_tpu", Chip.named("v6e")
    )

    def compile_each(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Compiled]]:
        for place, given in enumerate(configs):
            yield place, Compiled(2000.0 if given["forward"] == forward.heuristic else 1000.0)

    monkeypatch.setattr(Target, "refusal", lambda self, config: "too many rows" if self.case.small else None)
    trial = Estimates(forward, compile_each, jobs=2)
    done = session.tune(forward, trial, budget_s=60, records=tmp_path / "tune.jsonl", say=lambda _: None)
    assert (done.chosen, done.heuristic_s) == (forward.heuristic, 2e-3)
    assert "could not be checked: no small case of rms_norm takes it" in done.note


def test_a_config_at_the_floor_of_its_bytes_ends_the_search(tmp_path: Path) -> None:
    case, chip = case_of("rms_norm"), Chip.named("v6e")
    (forward, _) = targets(dispatch.find_op("rms_norm"), case, "bfloat16", "pallas_tpu", chip)
    assert chip.bytes_per_s is not None
    floor_us = case.work(2).bytes / chip.bytes_per_s * 1e6
    compiled: list[Any] = []

    def compile_each(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Compiled]]:
        for place, given in enumerate(configs):
            compiled.append(given)
            yield place, Compiled((2.0 if len(compiled) == 1 else 1.005) * floor_us)

    trial = Estimates(forward, compile_each, jobs=1)
    trial._checked = lambda config: {}  # type: ignore[method-assign]
    done = session.tune(forward, trial, budget_s=60, records=tmp_path / "tune.jsonl", say=lambda _: None)
    assert (len(compiled), done.complete) == (2, True)


def case_of(op: str) -> Any:
    return dispatch.find_op(op).case("train_8k")


def test_what_a_docstring_says_does_not_make_an_entry_stale() -> None:
    """A measurement is told in its kernel's docstring, and is of that kernel still."""
    kernel = "def f(x):\n    return x + 1  # One.\n"
    told = '"""12 us."""\n\n\ndef f(x):\n  """Adds 1."""\n\n  return x + 1\n'
    assert code(told) == code(kernel)
    others = ("x + 2", '"x + 1"', 'x + "1"', "(x) + 1")
    assert len({code(kernel), *(code(kernel.replace("x + 1", other)) for other in others)}) == 5
    assert code("if x:\n    y()\n    z()\n") != code("if x:\n    y()\nz()\n")
