"""README, CONTRIBUTING and docs/ are true: their Python runs as written, and the command line takes their commands.

A page's Python blocks run in order, in one namespace, in an empty folder in which `Qwen3-0.6B` is a tiny checkpoint. A
comment `<!-- with: CODE -->` has what a page takes for granted, such as its inputs; the block below a comment
`<!-- not run: WHY -->` is not run. Pages of ops are traced and not compiled, which takes a tenth of the time: that a call
is taken is seen here, and its values in the tests of the op. Chapters of the guide are tests of their own.
"""

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.main import get_command

from tests.cli.test_cli import ran
from tilewright.cli.main import app
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.workbench.model_bench import PRESETS

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "ops").glob("*.md"))
COMMANDED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "docs" / "guide").glob("*.md"))]
"""Recipes have a test of their own; pages of measurements have the commands of their day."""
RUN = ("tilewright tuned", "tilewright compile --doctor")
"""Commands that are run, too, since they are quick; other tests run the rest of the verbs."""
PARTS = re.compile(
    r"(?ms)^<!-- with: (?P<given>.*?) ?-->$|(?P<skip>^<!-- not run: [^\n]+ -->\n+)?^```python\n(?P<code>.*?)^```$"
)
COMMAND = get_command(app)
README_COLUMN = 48  # Where the README's list of verbs says what they do.


def python_of(text: str) -> list[tuple[int, str]]:
    """What is run of a page: each part with the line that it begins at."""
    found = []
    for part in PARTS.finditer(text):
        if part["given"] is not None:
            found.append((text.count("\n", 0, part.start("given")), part["given"]))
        elif part["skip"] is None:
            found.append((text.count("\n", 0, part.start("code")), part["code"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [path for path in PAGES if python_of(path.read_text())], ids=lambda path: path.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B").symlink_to(ROOT / "tests" / "golden" / "models" / "qwen3")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scope: dict[str, Any] = {"__name__": page.stem}

    def run() -> None:
        for line, code in python_of(page.read_text()):
            exec(compile("\n" * line + code, str(page), "exec"), scope)  # Its lines are those of the page.

    with contextlib.chdir(tmp_path):
        jax.eval_shape(run) if page.parent.name == "ops" else run()


def commands_of(page: Path) -> list[str]:
    """The `tilewright` commands of a page: lines of blocks that are no Python, and code in the text."""
    text = page.read_text()
    found = []
    for block in re.findall(r"(?ms)^ *```(?:sh|bash)?\n(.*?)^ *```$", text):
        for line in block.splitlines():
            command = line[:README_COLUMN] if page.name == "README.md" else line
            command = re.sub(r"^(?:uv run (?:--\S+ \w+ )*|[A-Z_]+=\S+ )+", "", command.split(" #")[0].strip())
            command = command.split(" > ")[0]
            found += [command] if command.startswith("tilewright ") else []
    inline = re.findall(r"`(tilewright [^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```$", "", text))
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


@pytest.mark.parametrize("page", [path for path in COMMANDED if commands_of(path)], ids=lambda path: path.name)
def test_the_command_line_takes_the_commands_of_a_page(page: Path) -> None:
    for command in commands_of(page):
        if re.fullmatch(r"tilewright [a-z]+(?: [a-z]+)?", command) and page.name != "README.md":
            continue  # A verb that is named, and no command.
        verb, given = parsed(command)
        op, case, chip = (given.get(name) for name in ("op", "case", "chip"))
        if op is not None and op != "my_op" and not op.isupper():
            names = {each.name for each in find_op(op).cases} | {"all", "CASE"}
            assert set((case or "all").split(",")) <= names, command
        for name in (chip or "").split(","):
            assert not name or Chip.named(name), command
        if verb.endswith("bench model"):
            assert given["preset"] in PRESETS, command
        if command in RUN:
            assert ran(*shlex.split(command)[1:]).code in (0, 1), command
