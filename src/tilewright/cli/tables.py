"""`tilewright tables`: writes the tables of the documentation from the records of measurements."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.screen import arguments, console
from tilewright.workbench.tables import written


def tables(
    pages: Annotated[
        list[Path] | None, typer.Argument(help="Markdown pages; defaults to README.md and every page in docs.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a table differs from its records.")
    ] = False,
) -> None:
    """Write the tables of Markdown pages from the records that they name.

    A table that is made from records stands between two comments, `<!-- table ... -->` and `<!-- end of table -->`; the
    first one has the file of the records, which of them are rows, and the columns. docs/measurements has the records and
    docs/ops/linear_cross_entropy.md an example.
    """
    with arguments():
        chosen = pages or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
        new = {page: written(page) for page in chosen}
    stale = [page for page, text in new.items() if text != page.read_text()]
    for page in stale:
        if not check:
            page.write_text(new[page])
        console().print(f"{'stale' if check else 'written'}: {page}", markup=False, highlight=False, soft_wrap=True)
    if check and stale:
        console().print("Run `tilewright tables` to write them from their records.", markup=False)
        raise typer.Exit(1)
    if not stale:
        console().print(f"Every table of {len(new)} pages is up to date with its records.")
