"""`tilewright new`: starts a new op from a family that works."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.screen import arguments, console
from tilewright.workbench.scaffold import scaffold_op


def scaffold(
    name: Annotated[str, typer.Argument(help="The op's name, in snake_case: a folder, a module and a function.")],
    root: Annotated[Path, typer.Option(help="The checkout to write into.")] = Path("."),
) -> None:
    """Write a new op family that works and whose tests pass.

    It has a call, a reference, a plain JAX version, TPU kernels for the forward and the backward pass, their configs, named
    shapes, tests and a page of documentation, for a small op: `silu(x) * w`. Comments say where your own math goes. Two
    existing files are changed: a line in `src/tilewright/__init__.py` makes the op public, and two lines in
    `src/tilewright/configs.py` its configs.
    """
    with arguments():
        made, changed = scaffold_op(name, root)
    out = console()
    for path in made:
        out.print(f"made     {path}", markup=False, highlight=False, soft_wrap=True)
    for path, lines in changed.items():
        added = "1 line" if lines == 1 else f"{lines} lines"
        out.print(f"changed  {path} ({added} added)", markup=False, highlight=False, soft_wrap=True)
    first = next(path for path in made if path.stem == "call")
    out.print(f"\nIt works as it is. Try it, then put your own math in, beginning with {first}:", soft_wrap=True)
    for command in (f"pytest tests/ops/{name}", f"tilewright check {name}", f"tilewright bench {name}"):
        out.print(f"  uv run {command}", markup=False, highlight=False, soft_wrap=True)
