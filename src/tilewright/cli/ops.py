"""`tilewright ops`: every op, its implementations, which run here, which would be taken, and why not the others."""

from rich.markup import escape
from rich.table import Table

from tilewright.cli.screen import console
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, explain, registered
from tilewright.core.target import default_device


def ops() -> None:
    """List the ops, their implementations, which of them run on this machine, which is chosen, and why not the others.

    The choice shown is for the op's first case in bfloat16; ask `tilewright.explain(op, ...)` about a call of your own.
    """
    device = default_device()
    table = Table(title=f"Ops on {device.device_kind} (chip {Chip.of(device).name})", title_justify="left")
    for column in ("op", "implementation", "here", "why"):
        table.add_column(column, overflow="fold")
    for op in registered().values():
        for row in _rows(op):
            table.add_row(*row)
        table.add_section()
    console().print(table)


def _rows(op: Op) -> list[tuple[str, str, str, str]]:
    case = op.cases[0]
    arrays = case.structs("bfloat16")
    chosen = explain(op.name, **arrays, **case.options).decisions[0].implementation
    rows = []
    for position, name in enumerate(op.implementations):
        label = op.name if position == 0 else ""
        refusal = explain(op.name, **arrays, **case.options, implementation=name).refusal
        if name == chosen:
            rows.append((label, name, "[bold green]chosen[/]", "the first in order of preference that can run"))
        elif refusal is None:
            rows.append((label, name, "[green]runs[/]", f"{chosen} comes before it"))
        else:
            rows.append((label, name, "[yellow]no[/]", escape(refusal.split("cannot run this call: ", 1)[-1])))
    return rows
