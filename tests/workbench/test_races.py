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
