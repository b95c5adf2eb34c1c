"""Imports: the contracts of pyproject.toml hold, and the library needs only jax, jaxtyping and numpy."""

import graphlib
import logging
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
# Hides every package that `pip install tilewright` does not install.
ONLY_THE_LIBRARY = """
import sys

INSTALLED = {"jax", "jaxlib", "jaxtyping", "numpy", "ml_dtypes", "opt_einsum", "scipy", "wadler_lindig", "tilewright"}


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in INSTALLED or top in sys.stdlib_module_names or top.startswith("_sysconfigdata"):
            return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


def library(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has only the library's own dependencies."""
    code = ONLY_THE_LIBRARY + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")


def test_import_contracts() -> None:
    """Layers point one way and there are no import cycles, imports inside functions included."""
    try:
        assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0
    finally:
        # It configures logging, which turns off every logger that is there: other tests read the package's.
        for name in [*logging.root.manager.loggerDict]:
            logging.getLogger(name).disabled = False


def test_no_import_cycles() -> None:
    """Between any modules, imports inside functions included. The contracts leave out a package's own `__init__`."""
    graph = grimp.build_graph("tilewright", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_the_library_depends_on_jax_jaxtyping_and_numpy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name.partition(">")[0] for name in project["dependencies"]] == ["jax", "jaxtyping", "numpy"]
    assert set(project["optional-dependencies"]) == {"bench", "models", "wandb", "tpu", "gpu", "aot", "sky", "ray"}


@pytest.mark.slow
def test_ops_and_layers_run_without_extras() -> None:
    done = library("""
        import jax
        import jax.numpy as jnp

        import tilewright
        from tilewright.layers import Attention, KimiDeltaAttention

        x, w = jnp.ones((2, 8, 32)), jnp.ones(32)
        y, (dx, dw) = jax.value_and_grad(lambda x, w: tilewright.rms_norm(x, w).sum(), (0, 1))(x, w)
        assert dx.shape == x.shape and dw.shape == w.shape
        assert "rms_norm: xla" in str(tilewright.explain("rms_norm", x, w))
        for layer in (
            KimiDeltaAttention(d_model=32, num_heads=2, head_dim=16),
            Attention(d_model=32, num_heads=2, num_kv_heads=1, head_dim=16),
        ):
            y = jax.jit(lambda x: layer.apply(layer.init(jax.random.key(0)), x)[0])(x)
            assert y.shape == x.shape and bool(jnp.isfinite(y).all())
        print("ran")
    """)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_the_command_line_without_its_extra_says_how_to_install_it() -> None:
    done = library("""
        sys.argv = ["tilewright", "ops"]
        from tilewright.cli.entry import main
        main()
    """)
    assert done.returncode == 2
    assert done.stderr == "tilewright's command line needs typer, rich and packaging: pip install 'tilewright[bench]'\n"
    assert done.stdout == ""


def test_the_command_is_the_entry_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"tilewright": "tilewright_command:main"}
