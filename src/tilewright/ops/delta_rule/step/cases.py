"""The named shapes of the delta rule's steps: the same for all three."""

from typing import Any

from tilewright.core.case import Case, Input, Work
from tilewright.ops.delta_rule.cases import token_inputs

OPS = ("delta_rule_step", "gated_delta_rule_step", "kda_step")
_FLOAT32_BYTES = 4


def _case(
    op: str,
    name: str,
    b: int,
    h: int,
    k: int,
    v: int,
    *,
    hv: int | None = None,
    gate: float = 0.1,
    small: bool = False,
    **options: Any,
) -> Case:
    """FLOPs are 6 K V per head, and three times that with gradients."""
    hv = hv or h
    inputs, elements, gates = token_inputs(op, (b,), h, k, v, hv, gate)
    states = b * hv * k * v
    flops = 6.0 * states

    def work(itemsize: int) -> Work:
        return Work(flops, float(itemsize * (elements + b * hv * v) + _FLOAT32_BYTES * (2 * states + gates)))

    def work_grad(itemsize: int) -> Work:
        # Backward reads all inputs once more and the cotangents of both results, and writes the gradients.
        backward = itemsize * (2 * elements + b * hv * v) + _FLOAT32_BYTES * (3 * states + 2 * gates)
        return Work(3 * flops, work(itemsize).bytes + backward)

    return Case(
        op=op,
        name=name,
        inputs={"state": Input((b, hv, k, v), dtype="float32"), **inputs},
        outputs=("o", "state"),
        work=work,
        work_grad=work_grad,
        options=options,
        small=small,
    )


def _cases(op: str) -> tuple[Case, ...]:
    return (
        _case(op, "narrow", 1, 1, 16, 16, small=True),
        _case(op, "grouped", 2, 2, 32, 96, hv=4, small=True, normalize_qk=True),
        _case(op, "odd", 1, 2, 37, 50, small=True),
        _case(op, "strong_gate", 1, 1, 64, 32, gate=30.0, small=True),
        _case(op, "batch_1", 1, 16, 128, 128, hv=32),
        _case(op, "batch_16", 16, 16, 128, 128, hv=32),
        _case(op, "batch_64", 64, 16, 128, 128, hv=32),
    )


CASES: tuple[Case, ...] = tuple(case for op in OPS for case in _cases(op))
