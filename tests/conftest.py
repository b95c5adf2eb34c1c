"""Strict shapes and dtypes for every test, four CPU devices to shard over, and what was collected in all tiers."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import tests.interpreter

# Tests run small programs once or twice, and most of their time is XLA's compiler: its code need not be fast. Tests that
# keep the optimisations on turn them on per function (`OPTIMISED` in tests/ops/contract.py).
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

# Not what `tilewright tune` has found for whoever runs the tests.
os.environ["TILEWRIGHT_TUNED"] = "/nonexistent/tilewright/tuned"

tests.interpreter.install()
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SOURCE = Path(__file__).resolve().parent.parent / "src"
MOST_MAPS = 20_000
COLLECTED = pytest.StashKey[dict[str, frozenset[str]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write the tables of the docs that tests check")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps every test and its markers, before `-m` deselects some: tests/test_tiers.py asks whether CI runs each.

    Tests of the contract that an op leaves to another, or that have no implementation to run with, are no tests.
    """
    items[:] = [item for item in items if "NOTSET" not in item.name]
    config.stash[COLLECTED] = {item.nodeid: frozenset(mark.name for mark in item.iter_markers()) for item in items}


def _checked_modules() -> list[str]:
    """Every module but the apis: those check their own arguments, and their errors are tested by text."""
    modules = []
    for path in sorted((SOURCE / "tilewright").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] not in ("api", "__init__") and "templates" not in parts:
            modules.append(".".join(parts))
    return modules


if importlib.util.find_spec("beartype"):
    import tests.typechecker

    tests.typechecker.install(_checked_modules())


def pytest_runtest_teardown() -> None:
    """Frees compiled programs: those of thousands of tests have more memory maps (65,530) than Linux gives a process."""
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def cpu_devices() -> list[jax.Device]:
    return jax.devices("cpu")


@pytest.fixture
def without_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without the package's tuned tables, so that heuristics choose every config."""
    from tilewright.core import tuned

    monkeypatch.setattr(tuned, "PACKAGE_TABLES", tmp_path)
    tuned.forget()
    yield
    monkeypatch.undo()
    tuned.forget()
