"""The table of docs/composition.md: what each op's contract declares, and its tests check (tests/ops/composition.py)."""

import importlib
from pathlib import Path

import pytest

from tests.ops.contract import OpContract
from tilewright.core.dispatch import KERNEL_PLATFORM, registered

PAGE = Path(__file__).parents[1] / "docs" / "composition.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def contracts() -> dict[str, type[OpContract]]:
    """The contract of each op, by name."""
    found = {}
    for path in sorted((Path(__file__).parent / "ops").glob("*/test_*.py")):
        for value in vars(importlib.import_module(f"tests.ops.{path.parent.name}.{path.stem}")).values():
            if isinstance(value, type) and issubclass(value, OpContract) and hasattr(value, "op_name"):
                found[value.op_name] = value
    return found


def table() -> str:
    columns = ("op", "kernels", "cut in `shard_map`", "cut under Auto and Explicit axes", "never cut along")
    columns = (*columns, "forward mode, second order")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    every = contracts()
    for name, op in registered().items():
        contract = every[name]
        manual = [cut for cut in contract.cuts if cut not in contract.only_compiler]
        cells = (
            f"`{name}`",
            ", ".join(one for one in op.implementations if one in KERNEL_PLATFORM) or "none",
            ", ".join(manual),
            ", ".join(contract.cuts),
            contract.whole_letter,
            ", ".join(("reference", *contract.plainly_differentiable)),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def test_every_op_has_a_contract() -> None:
    assert set(contracts()) == set(registered())


def test_the_page_has_the_table(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    if request.config.getoption("--write-docs"):
        PAGE.write_text(before + BEGIN + table() + END + after)
        return
    assert old == table(), "run `pytest tests/test_composition.py --write-docs`"
