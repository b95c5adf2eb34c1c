"""`check --races` finds a planted race and a read of memory that nobody wrote, and passes a sound kernel."""

import pytest
from typer.testing import CliRunner

from tests.workbench.faulty.api import OP
from tilewright.cli.main import app
from tilewright.core import dispatch
from tilewright.core.target import RaceDetected
from tilewright.workbench.check import CaseCheck, check_implementation


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch._registry, "double", OP)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_a_planted_race_is_found_and_a_sound_kernel_is_not_blamed(implementation: str) -> None:
    race = CaseCheck(OP, OP.case("race"), "float32")
    with pytest.raises(RaceDetected, match=rf"{implementation}.py|accesses above"):
        check_implementation(race, implementation, races=True)
    # The interpreters start afresh after a race.
    sound = CaseCheck(OP, OP.case("sound"), "float32")
    results = check_implementation(sound, implementation, races=True)
    assert all(result.verdict.ok for result in results)


def test_a_read_of_uninitialised_scratch_is_found() -> None:
    """0 times uninitialised memory is 0 on most days; in the interpreter it is NaN."""
    held = CaseCheck(OP, OP.case("scratch"), "float32")
    (value, gradient) = check_implementation(held, "pallas_tpu", races=True)
    assert not value.verdict.ok
    assert value.verdict.error.not_finite == 128 * 128
    assert gradient.verdict.ok


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("sum", r"both write \[\d+:\d+, 0:128\] of an output"),
        ("carried", "one reads what another one has left in memory"),
    ],
)
def test_parallel_steps_that_depend_on_each_other_are_a_race(case: str, what: str) -> None:
    held = CaseCheck(OP, OP.case(case), "float32")
    told = rf'two steps of a grid axis that is marked "parallel" depend on each other: {what}; mark the axis'
    with pytest.raises(RaceDetected, match=rf"{told}|accesses above"):
        check_implementation(held, "pallas_tpu", races=True)


def test_an_accumulation_over_an_arbitrary_axis_is_none() -> None:
    results = check_implementation(CaseCheck(OP, OP.case("sum_in_order"), "float32"), "pallas_tpu", races=True)
    assert all(result.verdict.ok for result in results)


def test_the_verb_never_says_that_there_is_no_race_where_values_are_wrong() -> None:
    args = ["check", "double", "--races", "--implementation", "pallas_tpu", "--dtype", "float32", "--case"]
    summed, unwritten = (CliRunner().invoke(app, [*args, case]) for case in ("sum", "scratch"))
    assert (summed.exit_code, unwritten.exit_code) == (1, 1)
    assert "No data race found" not in summed.output + unwritten.output
    assert "race: pallas_tpu sum float32: " in " ".join(summed.output.split())
    assert "The values are wrong, by another cause than a data race" in unwritten.output


def test_the_verb_exits_with_1_on_a_race_and_0_without() -> None:
    runner = CliRunner()
    args = ["check", "double", "--races", "--implementation", "pallas_tpu", "--dtype", "float32", "--case"]
    found = runner.invoke(app, [*args, "race"])
    assert found.exit_code == 1
    assert "race: pallas_tpu race float32: " in found.output
    sound = runner.invoke(app, [*args, "sound"])
    assert sound.exit_code == 0, sound.output
    assert "No data race found." in sound.output
    assert "In the interpreter, with race detection: pallas_tpu." in sound.output
