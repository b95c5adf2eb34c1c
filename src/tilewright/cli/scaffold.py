"""`tilewright new`: begin a kernel from an op family that works."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.screen import arguments, console
from tilewright.workbench.scaffold import scaffold_op


def scaffold(
    name: Annotated[str, typer.Argument(help="The op's name, in snake_case: a folder, a module and a function.")],
    root: Annotated[Path, typer.Option(help="The checkout to write into.")] = Path("."),
) -> None:
    """Make a new op family that works, with its tests passing from the start.

    It has a reference, a plain JAX version, TPU kernels for the value and the gradients, block sizes, named shapes, tests
    and a page of documentation, for a small op: `silu(x) * w`. Comments say where your own math goes. Of the files that
    are there already one is changed, by one line: `src/tilewright/__init__.py`, which makes the op public.
    """
    with arguments():
        *made, changed = scaffold_op(name, root)
    out = console()
    for path in made:
        out.print(f"made     {path}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"changed  {changed} (one line)", markup=False, highlight=False, soft_wrap=True)
    out.print(f"\nIt works as it stands; see for yourself, then put your own math in, {made[2]} first:", soft_wrap=True)
    for command in (f"pytest tests/ops/{name}", f"tilewright check {name}", f"tilewright bench {name}"):
        out.print(f"  uv run {command}", markup=False, highlight=False, soft_wrap=True)
