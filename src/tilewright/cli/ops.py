"""`tilewright ops`: every op, which of its implementations run here, which one is chosen, and why not the others."""

from typing import Any

from rich.markup import escape

from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import console, new_table
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, explain, registered
from tilewright.core.target import default_device


@prints_json
def ops() -> None:
    """List the ops, which of their implementations run on this machine, which one is chosen, and why not the others.

    For those that run it shows what runs forward and backward, with the block sizes. All of it is for the op's first case
    in bfloat16; use `tilewright.explain(op, ...)` for a call of your own.
    """
    device, chip = default_device(), Chip.of(default_device()).name
    rows = {name: _rows(op) for name, op in registered().items()}
    tell(device=device.device_kind, chip=chip, ops=rows)
    table = new_table(f"Ops on {device.device_kind} (chip {chip})", ("op", "implementation", "here", "why"))
    for name, implementations in rows.items():
        for position, row in enumerate(implementations):
            here = "[bold green]chosen[/]" if row["chosen"] else "[green]runs[/]" if row["runs"] else "[yellow]no[/]"
            passes = f"\nforward: {row['forward']}\nbackward: {row['backward']}" if row["runs"] else ""
            table.add_row("" if position else name, row["implementation"], here, escape(f"{row['why']}{passes}"))
        table.add_section()
    console().print(table)


def _rows(op: Op) -> list[dict[str, Any]]:
    case = op.cases[0]
    arrays = case.structs("bfloat16")
    chosen = explain(op.name, **arrays, **case.options).decisions[0].implementation
    rows = []
    for name in op.implementations:
        explanation = explain(op.name, **arrays, **case.options, implementation=name)
        if explanation.refusal is not None:
            why = explanation.refusal.split("cannot run this call: ", 1)[-1]
            rows.append({"implementation": name, "runs": False, "chosen": False, "why": why})
            continue
        (decision,) = explanation.decisions
        is_chosen = name == chosen
        why = "the first in order of preference that can run" if is_chosen else f"{chosen} comes before it"
        passes = {"forward": str(decision.forward), "backward": str(decision.backward)}
        rows.append({"implementation": name, "runs": True, "chosen": is_chosen, "why": why, **passes})
    return rows
