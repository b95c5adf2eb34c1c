"""Every block of README, CONTRIBUTING and docs/ runs as it is written, or says what it needs (tests/docs/blocks.py).

The commands of a page run in order, in a folder that looks like a clone, in which `Qwen3-0.6B` is a tiny checkpoint.
Those of the command line run in this process; the rest are handed to bash. Commands that another test or step of CI
runs are named in `ELSEWHERE`. A new block is run by this file, or fails it.
"""

import dataclasses
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import Done, ran
from tests.cli.test_generate import checkpoint_with_tokenizer
from tests.docs.blocks import DOCS, KINDS, PAGES, ROOT, Command, blocks_of, commands_of
from tilewright.models.train_config import TrainConfig

GUIDE, RECIPES = DOCS / "guide", DOCS / "recipes"
FOLLOWED = ("add_a_kernel.md",)
"""Recipes whose files and commands tests/docs/test_recipes.py follows, one after the other."""
WRITTEN = ("add_a_kernel.md", "train_a_hybrid.md")
"""Recipes whose blocks with a title become files in tests/docs/test_recipes.py."""
ELSEWHERE = {
    "pip install uv && uv run python delta_attention_comparison/benchmark_script.py": ".ci/run",
    "uv run python delta_attention_comparison/benchmark_script.py": ".ci/run",
    "pip install uv && uv run pytest -n 2": ".ci/run",
    "uv run pytest -n 2": ".ci/run",
    "uv run pytest -n 2 -m slow": ".ci/run",
    "uv run ruff format . && uv run ruff check . && uv run pyright && uv run lint-imports": ".ci/run",
    "uv run --extra sky --extra ray pytest tests/runners": ".ci/run",
    "uv run --group docs mkdocs build --strict": ".ci/run",
    "JAX_NUM_CPU_DEVICES=8 python shard.py": "tests/docs/test_recipes.py",
    "JAX_NUM_CPU_DEVICES=4 python examples/plain_jax.py": "tests/docs/test_recipes.py",
    "JAX_NUM_CPU_DEVICES=4 python examples/flax_nnx.py": "tests/docs/test_recipes.py",
    "JAX_NUM_CPU_DEVICES=4 python examples/equinox_model.py": "tests/docs/test_recipes.py",
}
"""Commands of the pages, and the file of CI that runs what they run."""
MAY_FAIL = re.compile(r" --baseline |^tilewright (?:compile --doctor|doctor)")
"""Commands whose exit code is 1 for what they found: something slower, something that is not installed."""
ANSWERS = {"tilewright generate Qwen3-0.6B --interactive": "w5\n\n"}
"""What is typed."""
_READ_ONLY = re.compile(r"^tilewright (?:ops|doctor|plan|compile --doctor|tuned(?: --missing \w+)?$)")
_DONE: dict[str, Done] = {}


def runnable(page: Path) -> list[Command]:
    """The commands of a page that are run here."""
    if page.name in FOLLOWED:
        return []
    return [each for each in commands_of(page) if each.needs is None and each.text not in ELSEWHERE]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a clone has, with records, tables of tuned configs, and a small checkpoint with a tokenizer."""
    folder = tmp_path / "clone"
    for name in ("src", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(Path(__file__).parent / "tables", folder / "tables")  # What a search of minutes would write.
    (folder / "results").mkdir()
    shutil.copy(DOCS / "measurements" / "2026-11-15-h200-delta_rule.jsonl", folder / "results" / "bench.jsonl")
    checkpoint_with_tokenizer(folder / "Qwen3-0.6B")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def run(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command as it is written."""
    text, _, file = command.bare.partition(" > ")
    if text.startswith("tilewright "):
        done = _DONE.get(text)
        if done is None:
            monkeypatch.setattr("sys.stdin", io.StringIO(ANSWERS.get(text, "")))
            done = ran(*shlex.split(text)[1:], cwd=folder)
        if _READ_ONLY.match(text):
            _DONE[text] = done  # Several pages have it.
        if file:
            (folder / file).write_text(done.stdout)
        code, told = done.code, done
    else:
        words = ["bash", "-euo", "pipefail", "-c", command.bare]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        told = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        code = told.returncode
    assert code in ((0, 1) if MAY_FAIL.search(text) else (0,)), (command.where, told)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = runnable(page)
    if any(each.text.startswith("git ") for each in commands):
        made = "git init -q && git config user.name Test && git config user.email test@example.org"
        subprocess.run(made, shell=True, cwd=clone, check=True)
    for command in commands:
        run(command, clone, monkeypatch)


def test_every_block_has_a_kind_that_something_runs_or_reads() -> None:
    for page in PAGES:
        assert "~~~" not in page.read_text(), f"{page.name}: begin blocks with three backquotes"
        for block in blocks_of(page):
            assert block.kind in (*KINDS, "given"), f"{block.where}: a block of kind {block.kind!r}; use one of {KINDS}"
            assert block.title is None or page.name in WRITTEN, f"{block.where}: no test writes {block.title}"
            recorded = page.parent.name == "measurements"  # Pages with the commands of their day, as text.
            assert not (recorded and block.kind != "text"), f"{block.where}: write it as text"
            runs = page.parent in (DOCS, DOCS / "ops", GUIDE, RECIPES) or page == ROOT / "README.md"
            assert block.kind != "python" or block.needs or runs, f"{block.where}: no test runs the Python of this page"


def test_what_a_block_needs_is_said_on_the_page_and_not_in_a_comment() -> None:
    for page in PAGES:
        assert "<!-- not run" not in page.read_text(), f"{page.name}: write a sentence that begins with Needs"


def test_commands_that_other_parts_of_ci_run_are_still_there() -> None:
    written = {each.text for page in PAGES for each in commands_of(page)}
    assert not ELSEWHERE.keys() - written
    steps = (ROOT / ".ci" / "run").read_text()
    for word in (
        "ruff format",
        "ruff check",
        "pyright",
        "lint-imports",
        "mkdocs build --strict",
        "pytest -n 2 -m slow",
    ):
        assert word in steps


def test_a_mark_is_read_where_a_reader_sees_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It needs little.\n\n```sh\na  # one\nb --x '# no'  # two, needs a GPU\n# a remark\n```\n\n"
        "One row. Needs torch:\n\n```python\n1\n```\n\n```python\n# Needs libtpu.\n2\n```\n"
        "\n- item\n\n  ```sh\n  c\n  ```\n"
    )
    assert [(each.text, each.needs) for each in commands_of(page)] == [
        ("a", None),
        ("b --x '# no'", "needs a GPU"),
        ("c", None),
    ]
    assert [each.needs for each in blocks_of(page) if each.kind == "python"] == ["Needs torch:", "Needs libtpu."]


def toml_blocks() -> list[Any]:
    found = [block for page in PAGES for block in blocks_of(page) if block.kind == "toml" and block.title is None]
    return [pytest.param(block, id=block.page.name) for block in found]


@pytest.mark.parametrize("block", toml_blocks())
@pytest.mark.parametrize("without", [("path", "pretrained", "tokens"), ("config", "text", "separator", "tokenizer")])
def test_toml_is_read_by_the_training_verb(block: Any, without: tuple[str, ...], tmp_path: Path) -> None:
    """Each table as it is written, with one of two keys where only one may be given; tables that it lacks are added."""
    (tmp_path / "Qwen3-0.6B").symlink_to(ROOT / "tests" / "golden" / "models" / "qwen3")
    for name in ("a.txt", "b.txt", "ids.npy"):
        (tmp_path / name).write_text("some text")
    values: dict[str, Any] = {
        "model": {"path": "Qwen3-0.6B"},
        "data": {"seq_len": 8, "text": ["a.txt"]},
        "train": {"steps": 1, "batch_size": 1},
    }
    for table, given in tomllib.loads(block.code).items():
        kept = {key: value for key, value in given.items() if key not in without}
        values[table] = kept if table in ("model", "data") else values.get(table, {}) | kept
    TrainConfig.of(values, tmp_path / "run.toml")


def test_the_page_of_training_has_every_key() -> None:
    (block,) = (block for block in blocks_of(DOCS / "train.md") if block.kind == "toml")
    written = tomllib.loads(block.code)
    for field in dataclasses.fields(TrainConfig):
        kind = next(
            each for each in (field.type, *getattr(field.type, "__args__", ())) if dataclasses.is_dataclass(each)
        )
        assert {each.name for each in dataclasses.fields(kind)} == set(written[field.name]), field.name
