"""Every test is run by something: each one that is collected is selected by a pytest command of .ci/run."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.conftest import COLLECTED

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def commands() -> list[tuple[Expression, list[str]]]:
    """The pytest commands of .ci/run, the README's among them: each one's marker expression and paths."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    if any(line.startswith("step ") and line.endswith('readme "pytest"') for line in lines):
        lines += [line for line in (ROOT / "README.md").read_text().splitlines() if "uv run pytest" in line]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True) if re.search(r"uv run .*\bpytest\b", line) else []
        if "pytest" in words:
            given = shlex.split(OPTIONS["addopts"]) + words[words.index("pytest") + 1 :]
            expression = [given[i + 1] for i, word in enumerate(given) if word == "-m"][-1]
            paths = [word for word in given if word.startswith("tests")]
            found.append((Expression.compile(expression), paths or OPTIONS["testpaths"]))
    return found


def selects(command: tuple[Expression, list[str]], nodeid: str, marks: frozenset[str]) -> bool:
    expression, paths = command
    in_paths = any(nodeid == path or nodeid.startswith((f"{path}/", f"{path}::")) for path in paths)
    return in_paths and expression.evaluate(lambda name, /, **_: name in marks)


def test_the_commands_are_found() -> None:
    assert len(commands()) == 4  # The README's, the slow tier, the runners and Slurm.


def test_every_test_that_was_collected_is_run_by_ci(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash[COLLECTED]
    assert collected
    run_by_none = [
        nodeid for nodeid, marks in collected.items() if not any(selects(c, nodeid, marks) for c in commands())
    ]
    assert not run_by_none


@pytest.mark.parametrize("marker", [line.split(":")[0] for line in OPTIONS["markers"]])
def test_every_tier_is_run_by_ci(marker: str) -> None:
    """A test of any kind, wherever it is."""
    for marks in (frozenset({marker}), frozenset({marker, "slow"}) - {"slurm"}):
        assert any(selects(command, "tests/runners/test_slurm.py::test", marks) for command in commands())


def test_a_test_that_nothing_runs_would_be_seen() -> None:
    assert not any(selects(command, "tests/core/test_x.py::test", frozenset({"slurm"})) for command in commands())
