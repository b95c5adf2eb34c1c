"""A sharded training step as libtpu compiled it for slices of TPUs: its collectives beside those that were estimated.

The programs are records (record.py): a compile takes a quarter of an hour where libtpu is emulated.
"""

from pathlib import Path

import pytest

from tests.plan.slices import SLICES, STEP
from tilewright.core.chip import Chip
from tilewright.plan.compiled import read_collectives

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "topology"), SLICES)
def test_collectives_are_those_that_the_rules_call_for(chip: str, topology: str) -> None:
    program = (PROGRAMS / f"{chip}-{topology}.hlo").read_text()
    compiled = {(each.kind, each.axes): each for each in read_collectives(program, STEP.sizes)}
    estimated = {(each.kind, each.axes): each.bytes for each in STEP.work(Chip.named(chip)).collectives}
    sent = {which: each.bytes for which, each in compiled.items()}
    fsdp, tensor, both = ("fsdp",), ("tensor",), ("fsdp", "tensor")
    assert set(sent) == set(estimated) - {("all-gather", tensor)}  # 16 bytes, with which the compiler does without.
    # The layers run once, so some weights that the forward pass has gathered are there for the backward pass.
    assert 0.85 * estimated["all-gather", fsdp] <= sent["all-gather", fsdp] <= estimated["all-gather", fsdp]
    assert sent["all-reduce", tensor] == pytest.approx(estimated["all-reduce", tensor], rel=0.01)
    assert sent["all-reduce", both] == estimated["all-reduce", both]
    # Gradients that libtpu does not scatter are summed on all devices, which sends twice as much.
    summed = sent["all-reduce", fsdp] - estimated["all-reduce", fsdp]
    assert sent["reduce-scatter", fsdp] + summed / 2 == estimated["reduce-scatter", fsdp]
    # This libtpu leaves all of them synchronous, on both slices: see docs/parallel.md.
    assert sum(each.asynchronous for each in compiled.values()) == program.count("-start(") == 0
