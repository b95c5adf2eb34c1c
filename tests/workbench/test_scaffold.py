"""`tilewright new`: what it writes works as it is, two files get imports, and an error names the remedy."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import ran
from tilewright.workbench.scaffold import MAX_NAME, scaffold_op

ROOT = Path(__file__).resolve().parents[2]
NAME = "my_op"
PUBLIC, CONFIGS = "src/tilewright/__init__.py", "src/tilewright/configs.py"
CLI = ("-c", "from tilewright.cli.main import main; main()")


def copy_of_the_checkout(to: Path) -> Path:
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    """Python in `checkout`, with the package of that checkout and not the installed one."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """What each of them printed; every one must end well, and none outlives the test."""
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def lint(checkout: Path, *paths: str) -> None:
    formatted = start(checkout, "-m", "ruff", "format", "--check", "--no-cache", *paths)
    finish(formatted, start(checkout, "-m", "ruff", "check", "--no-cache", *paths))


def files(checkout: Path) -> dict[str, str]:
    return {
        str(path.relative_to(checkout)): path.read_text(errors="replace")
        for path in checkout.rglob("*")
        if path.is_file()
    }


needs_ruff = pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], dict[str, str], str]:
    """A checkout with an op made by the CLI; its files before and after, and what the CLI said."""
    checkout = copy_of_the_checkout(tmp_path_factory.mktemp("checkout"))
    before = files(checkout)
    done = ran("new", NAME, cwd=checkout)
    assert done.code == 0, done
    return checkout, before, files(checkout), done.stdout


def test_imports_are_added_to_two_files_and_the_rest_is_new(made) -> None:
    _, before, after, said = made
    changed = [path for path in before if after.get(path) != before[path]]
    assert sorted(changed) == sorted([PUBLIC, CONFIGS])
    configs = [f"MyOpTpu{direction} as MyOpTpu{direction}" for direction in ("Backward", "Forward")]
    added = {
        PUBLIC: [f"from tilewright.ops.{NAME}.api import {NAME} as {NAME}"],
        CONFIGS: [f"from tilewright.ops.{NAME}.config import {config}" for config in configs],
    }
    for path, imports in added.items():
        lines = after[path].splitlines()
        for line in imports:
            lines.remove(line)
        assert lines == before[path].splitlines()

    package = [f"src/tilewright/ops/{NAME}/{stem}.py" for stem in ("__init__", "api", "call", "cases", "config")]
    package += [f"src/tilewright/ops/{NAME}/{stem}.py" for stem in ("pallas_tpu", "reference", "xla")]
    tests = [f"tests/ops/{NAME}/__init__.py", f"tests/ops/{NAME}/test_{NAME}.py"]
    assert sorted(set(after) - set(before)) == sorted([*package, *tests, f"docs/ops/{NAME}.md"])
    for path in (*package, *tests, PUBLIC, CONFIGS):
        assert path in said
    for command in (f"pytest tests/ops/{NAME}", f"tilewright check {NAME}", f"tilewright bench {NAME}"):
        assert f"uv run {command}" in said


@pytest.mark.slow
def test_what_is_made_passes_its_tests_the_check_and_the_type_checker(made) -> None:
    """All at once, since each takes a while."""
    checkout, *_ = made
    running = [
        start(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/ops/{NAME}"),
        start(checkout, *CLI, "check", NAME),
    ]
    if importlib.util.find_spec("pyright"):
        running.append(start(checkout, "-m", "pyright", "--pythonpath", sys.executable, f"src/tilewright/ops/{NAME}"))
    tests, check, *types = finish(*running)
    passed = re.search(r"(\d+) passed", tests)
    assert passed, tests
    assert int(passed[1]) > 50
    within = re.search(r"(\d+) of (\d+) within bounds", check)
    assert within, check
    assert within[1] == within[2] != "0"
    for output in types:
        assert "0 errors, 0 warnings" in output


@pytest.mark.slow
def test_its_tests_follow_the_signature(made, tmp_path: Path) -> None:
    """An array and an option that are added to api.py, call.py and cases.py reach the tests without a change to them."""
    checkout = shutil.copytree(made[0], tmp_path / "changed")
    weights = '    w: Float[Array, " D"]'
    order = '"order": Input((d,), lambda key, shape: jnp.arange(*shape), dtype="int32", differentiable=False)'
    changes = {
        "api.py": {
            "import Array, Float": "import Array, Float, Int",
            f"{weights},\n    *,\n": f"{weights},\n    order: Int[Array, ' D'],\n    *,\n    gain: float,\n",
            "x=x, w=w)": "x=x, w=w, order=order, gain=gain)",
        },
        "call.py": {
            "import Array, Float": "import Array, Float, Int",
            "import Call, array, ": "import Call, array, option, ",
            f"{weights} = array()\n": f"{weights} = array()\n    order: Int[Array, ' D'] = array(differentiable=False)\n"
            "    gain: float = option()\n",
        },
        "cases.py": {
            "import math\n": "import math\n\nimport jax.numpy as jnp\n",
            '"w": Input((d,))}': f'"w": Input((d,)), {order}}}',
            '        outputs=("y",),\n': '        outputs=("y",),\n        options={"gain": 2.0},\n',
        },
    }
    for file, those in changes.items():
        path = checkout / "src/tilewright/ops" / NAME / file
        text = path.read_text()
        for old, new in those.items():
            assert text.count(old) == 1, (file, old)
            text = text.replace(old, new)
        path.write_text(text)
    finish(start(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/ops/{NAME}"))


@pytest.mark.slow
def test_the_ops_verb_lists_it(made) -> None:
    checkout, *_ = made
    (listed,) = finish(start(checkout, *CLI, "ops"))
    assert re.search(rf"\b{NAME}\b.*pallas_tpu", listed)


@needs_ruff
def test_what_is_made_is_formatted_and_linted(made) -> None:
    checkout, *_ = made
    lint(checkout, f"src/tilewright/ops/{NAME}", f"tests/ops/{NAME}", PUBLIC, CONFIGS)


@needs_ruff
def test_names_of_any_length_and_place_in_the_alphabet_are_formatted_and_linted(tmp_path: Path) -> None:
    checkout = copy_of_the_checkout(tmp_path)
    names = ("q", "aa", "op10", "op2", "op_2b", "linear", "linear_cross_entropy2", "z" * MAX_NAME)
    for name in names:
        scaffold_op(name, checkout)
    lint(
        checkout,
        *(f"{folder}/{name}" for folder in ("src/tilewright/ops", "tests/ops") for name in names),
        PUBLIC,
        CONFIGS,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Op", r"name='My-Op' must be in snake_case \(a-z, 0-9 and single _ .*\); use 'my_op'"),
        ("RmsNorm", r"name='RmsNorm' must be in snake_case .*; use 'rms_norm'"),
        ("2d_conv", r"name='2d_conv' must be in snake_case .* a letter first\); use 'op_2d_conv'"),
        ("", r"name='' must be in snake_case .*; use 'op'"),
        ("../escape", r"name='../escape' must be in snake_case .*; use 'escape'"),
        ("lambda", r"name='lambda' must not be a Python keyword, .*; use 'lambda_op'"),
        ("jax", r"name='jax' must not be a name that the generated files use for something else; use 'jax_op'"),
        ("x", r"name='x' must not be a name that the generated files use .*; use 'x_op'"),
        (
            "a" * (MAX_NAME + 1),
            rf"has {MAX_NAME + 1} characters and must have at most {MAX_NAME}, .*; use a shorter one",
        ),
    ],
)
def test_a_bad_name_is_refused_with_a_better_one(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        scaffold_op(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "norm",
            r"name='norm' must be free, and src/tilewright/ops/norm exists; use another name, or remove that first",
        ),
        ("tested", r"name='tested' must be free, and tests/ops/tested exists; use another name"),
        ("written", r"name='written' must be free, and docs/ops/written.md exists; use another name"),
        ("core", r"name='core' must be free, and src/tilewright/core exists; use another name"),
        ("explain", r"name='explain' must be free, and tilewright.explain exists; use another name"),
    ],
)
def test_a_name_that_is_taken_is_refused_and_nothing_is_written(name: str, message: str, tmp_path: Path) -> None:
    for folder in ("src/tilewright/ops/norm", "src/tilewright/core", "tests/ops/tested", "docs/ops"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/ops/written.md").touch()
    (tmp_path / PUBLIC).write_text("from tilewright.core.dispatch import explain as explain\n")
    (tmp_path / CONFIGS).touch()
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match=message):
        scaffold_op(name, tmp_path)
    assert files(tmp_path) == before


def test_outside_a_checkout_the_error_says_where_to_go(tmp_path: Path) -> None:
    """Through the CLI: one line on stderr and exit code 2."""
    done = ran("new", NAME, cwd=tmp_path)
    assert done.code == 2
    assert f"root='{tmp_path}' must be a checkout of tilewright, and it has no src/tilewright/ops" in done.stderr
    assert "run it from the top of a checkout, or pass --root" in done.stderr
    assert not list(tmp_path.iterdir())
