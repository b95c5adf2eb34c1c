"""README, CONTRIBUTING and docs/ are true: their Python runs as written, and the command line takes their commands.

A page's Python blocks run in order, in one namespace, in an empty folder in which `Qwen3-0.6B` is a tiny checkpoint;
tests/docs/blocks.py says which ones are left out. Pages of ops are traced and not compiled, which takes a tenth of the
time: that a call is taken is seen here, and its values in the tests of the op. Chapters of the guide and recipes have
tests of their own, and test_commands.py runs the commands.
"""

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.main import get_command

from tests.docs.blocks import DOCS, ROOT, commands_of, python_of
from tests.docs.blocks import PAGES as ALL_PAGES
from tilewright.cli.main import app
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.workbench.model_bench import PRESETS

PAGES = sorted(DOCS.glob("*.md")) + sorted((DOCS / "ops").glob("*.md"))
COMMANDED = [page for page in ALL_PAGES if page.parent.name != "measurements"]
"""Pages of measurements have the commands of their day."""
COMMAND = get_command(app)


@pytest.mark.slow
@pytest.mark.parametrize("page", [path for path in PAGES if python_of(path)], ids=lambda path: path.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B").symlink_to(ROOT / "tests" / "golden" / "models" / "qwen3")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scope: dict[str, Any] = {"__name__": page.stem}

    def run() -> None:
        for line, code in python_of(page):
            exec(compile("\n" * line + code, str(page), "exec"), scope)  # Its lines are those of the page.

    with contextlib.chdir(tmp_path):
        jax.eval_shape(run) if page.parent.name == "ops" else run()


def verbs_of(page: Path) -> list[str]:
    """The `tilewright` commands of a page: those of its blocks, run or not, and code in the text."""
    written = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", each.bare).split(" > ")[0] for each in commands_of(page)]
    found = [command for command in written if command.startswith("tilewright ")]
    inline = re.findall(r"`(tilewright [^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text()))
    return found + [command for command in inline if not re.search(r"\.\.\.|\|", command)]


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The verb of a command and its options, as the command line reads them. What it does not take is an error."""
    verb, words = COMMAND, shlex.split(command)[1:]
    if words[0].startswith("--"):  # Such as --install-completion, which is done when it is read.
        assert any(words[0] in option.opts for option in verb.params)
        return "tilewright", {}
    context = verb.make_context("tilewright", list(words))
    while hasattr(verb, "commands"):
        rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        name, verb, rest = verb.resolve_command(context, rest)  # type: ignore[attr-defined]
        context = verb.make_context(name, rest, parent=context)
    return str(context.command_path), context.params


@pytest.mark.parametrize("page", [path for path in COMMANDED if verbs_of(path)], ids=lambda path: path.stem)
def test_the_command_line_takes_the_commands_of_a_page(page: Path) -> None:
    for command in verbs_of(page):
        if re.fullmatch(r"tilewright [a-z]+(?: [a-z]+)?", command) and page.name != "README.md":
            continue  # A verb that is named, and no command.
        verb, given = parsed(command)
        op, case, chip = (given.get(name) for name in ("op", "case", "chip"))
        if op is not None and op not in ("my_op", "bias_gelu") and not op.isupper():
            names = {each.name for one in op.split(",") for each in find_op(one).cases} | {"all", "CASE"}
            assert set((case or "all").split(",")) <= names, command
        for name in (chip or "").split(","):
            assert not name or Chip.named(name), command
        if verb.endswith("bench model"):
            assert given["preset"] in PRESETS, command
