"""The recipes are true: their Python and their examples run, and the command line takes their commands.

tests/docs/blocks.py says what of a page is run, and test_commands.py runs its commands. A block with a file's name as its
title belongs to that file: the recipe of a kernel is followed in a copy of the checkout, command by command and block by
block. Training runs for fewer steps, with fewer layers, than on its page.
"""

import ast
import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.cli.test_cli import ran
from tests.cli.test_generate import checkpoint_with_tokenizer
from tests.docs.blocks import ROOT, blocks_of, commands_of, python_of
from tests.workbench.test_scaffold import CLI, copy_of_the_checkout, finish, lint, start

RECIPES = ROOT / "docs" / "recipes"
PAGES = sorted(path for path in RECIPES.glob("*.md") if path.name != "index.md")
OWN = ("shard_over_a_mesh.md", "train_a_hybrid.md")
"""Pages with tests of their own below."""


def test_the_contents_name_every_recipe() -> None:
    named = re.findall(r"^\| \[.*?\]\((\w+\.md)\)", (RECIPES / "index.md").read_text(), re.M)
    assert sorted(named) == [path.name for path in PAGES]
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"recipes/{name}" in navigation for name in named)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [path for path in PAGES if path.name not in OWN and python_of(path)], ids=lambda path: path.name
)
def test_the_python_of_a_recipe_runs(page: Path, tmp_path: Path) -> None:
    checkpoint_with_tokenizer(tmp_path / "Qwen3-0.6B")
    follow(page, tmp_path)


def follow(page: Path, folder: Path) -> None:
    """Runs a page's Python in a folder."""
    scope: dict[str, Any] = {"__name__": page.stem}
    with contextlib.chdir(folder):
        for line, code in python_of(page):
            exec(compile("\n" * line + code, str(page), "exec"), scope)  # Its lines are those of the page.


@pytest.mark.slow
def test_the_recipe_for_meshes_runs_on_eight_devices(tmp_path: Path) -> None:
    """As its command says: a process of its own, since the tests' process has four devices."""
    page = RECIPES / "shard_over_a_mesh.md"
    assert "JAX_NUM_CPU_DEVICES=8 python shard.py" in page.read_text()
    (tmp_path / "shard.py").write_text("".join(code for _, code in python_of(page)))
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "shard.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ".embedding (256, 64) P('tensor', 'fsdp')" in done.stdout


@pytest.mark.slow
def test_the_recipe_for_a_hybrid_goes_from_text_to_text(tmp_path: Path) -> None:
    page = RECIPES / "train_a_hybrid.md"
    (file,) = re.findall(r'(?ms)^```toml title="hybrid.toml"\n(.*?)^```$', page.read_text())
    assert file.count("steps = 200") == 1
    shorter = file.replace("steps = 200", "steps = 2").replace("num_hidden_layers = 4", "num_hidden_layers = 1")
    (tmp_path / "hybrid.toml").write_text(shorter)
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text())
    done = ran("train", "hybrid.toml", cwd=tmp_path)
    assert done.code == 0, done
    assert (tmp_path / "runs/hybrid/loss.png").exists()
    follow(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "needs"), [("plain_jax", "jax"), ("flax_nnx", "flax"), ("equinox_model", "equinox")])
def test_an_example_learns(name: str, needs: str) -> None:
    """On a mesh of the tests' four devices. optax promotes dtypes, so the tests' strictness is off."""
    pytest.importorskip(needs, reason=f"pip install {needs} optax")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        losses = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]()
    assert losses[-1] < losses[0] - 1


def names_of(node: ast.stmt) -> set[str]:
    """What a statement defines; the docstring of a module counts as a definition."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {"__doc__"} if isinstance(node, ast.Expr) else set()


def put(path: Path, code: str) -> None:
    """Does with a block what the recipe says: definitions replace those of the same name, and imports go to the others."""
    if not path.exists():
        path.write_text(code)
        return
    for node in ast.parse(code).body:
        text = path.read_text()
        lines, body = text.splitlines(keepends=True), ast.parse(text).body
        segment = ast.get_source_segment(code, node)
        same = [each for each in body if names_of(each) & names_of(node)]
        if same:
            first, last = same[0].lineno - 1, same[0].end_lineno
        elif isinstance(node, ast.ImportFrom):
            first = last = max(each.end_lineno or 0 for each in body if isinstance(each, ast.ImportFrom))
        else:  # A new function stands before the first one.
            first = last = next(each.lineno - 1 for each in body if isinstance(each, ast.FunctionDef))
            segment = f"{segment}\n\n"
        lines[first:last] = [f"{segment}\n"]
        path.write_text("".join(lines))


@pytest.mark.slow
def test_the_recipe_for_a_kernel_makes_one_that_is_right(tmp_path: Path) -> None:
    """Its commands and blocks in order, in a copy of the checkout: its own package is the one that is checked."""
    page = RECIPES / "add_a_kernel.md"
    checkout = copy_of_the_checkout(tmp_path)
    commands, printed = commands_of(page), ""
    for block in blocks_of(page):
        if block.title is not None:
            put(checkout / block.title, block.code)
        for command in commands if block.kind == "sh" else ():
            if command.block == block and command.needs is None:
                printed += did(command.bare, checkout)
    package, tests = "src/tilewright/ops/bias_gelu", "tests/ops/bias_gelu"
    left = [
        path.name for path in (checkout / package).glob("*.py") if re.search(r"silu|sigmoid|weight", path.read_text())
    ]
    assert left == []  # Of the op that it began with.
    lint(checkout, package, tests)
    assert "18 of 18 within bounds" in printed
    assert "No data race found" in printed


def did(command: str, checkout: Path) -> str:
    """Runs a command of a recipe in a checkout, and returns what it printed."""
    words = shlex.split(command)
    if words[:2] == ["tilewright", "new"]:
        done = ran(*words[1:], cwd=checkout)
        assert done.code == 0, done
        return done.stdout
    if words[0] == "tilewright":
        return finish(start(checkout, *CLI, *words[1:]))[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.check_output(command, shell=True, cwd=checkout, text=True, env=os.environ | {"PATH": path})
