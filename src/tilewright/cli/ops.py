"""`tilewright ops`: every op, which of its implementations run here, which one is chosen, and why not the others."""

from rich.markup import escape

from tilewright.cli.screen import console, new_table
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, explain, registered
from tilewright.core.target import default_device


def ops() -> None:
    """List the ops, which of their implementations run on this machine, which one is chosen, and why not the others.

    For those that run it shows what runs forward and backward, with the block sizes. All of it is for the op's first case
    in bfloat16; use `tilewright.explain(op, ...)` for a call of your own.
    """
    device = default_device()
    title = f"Ops on {device.device_kind} (chip {Chip.of(device).name})"
    table = new_table(title, ("op", "implementation", "here", "why"))
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
        explanation = explain(op.name, **arrays, **case.options, implementation=name)
        if explanation.refusal is not None:
            why = escape(explanation.refusal.split("cannot run this call: ", 1)[-1])
            rows.append((label, name, "[yellow]no[/]", why))
            continue
        (decision,) = explanation.decisions
        is_chosen = name == chosen
        why = "the first in order of preference that can run" if is_chosen else f"{chosen} comes before it"
        passes = escape(f"forward: {decision.forward}\nbackward: {decision.backward}")
        rows.append((label, name, "[bold green]chosen[/]" if is_chosen else "[green]runs[/]", f"{why}\n{passes}"))
    return rows
