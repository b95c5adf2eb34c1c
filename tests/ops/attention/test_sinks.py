"""Sinks of flash_attention: their gradient is one number per head, a sum over all queries, which shows every
rounding.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.contract import able_to_run
from tilewright import masks
from tilewright.configs import (
    AttentionTpuBackward,
    AttentionTpuForward,
    AttentionXlaBackward,
    AttentionXlaForward,
)
from tilewright.core.dispatch import find_op
from tilewright.ops.attention.cases import _case
from tilewright.workbench.check import CaseCheck

CASES = [
    _case("d256_prefix", 1, 50, 50, (4, 1), 256, sinks=True, mask=masks.Causal() | masks.Prefix(9), soft_cap=9.0),
    _case("many_rows", 1, 400, 400, (2, 1), 128, sinks=True, causal=True),
    _case("one_head", 1, 150, 150, (1, 1), 64, sinks=True),
    _case("window", 2, 200, 200, (8, 2), 64, sinks=True, causal=True, window=(40, 0)),
    _case("tiny", 1, 5, 7, (2, 1), 8, sinks=True),
]


def assert_sinks_meet_the_oracle(implementation: str, case, dtype: str, seed: int, config=None) -> None:
    held = CaseCheck(find_op("flash_attention"), case, dtype, seed=seed)
    with able_to_run(implementation):
        (verdict,) = [one.verdict for one in held.check(implementation, config) if one.quantity == "d sinks"]
    assert verdict.ok, f"{case.name}, seed {seed}: {verdict}"
    # A bound of its own, tighter than twice the error of the plain version: the sums are float32.
    assert verdict.error.relative < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name == "one_head" else [pytest.mark.slow]) for case in CASES],
)
def test_their_gradient_in_plain_jax(case) -> None:
    assert_sinks_meet_the_oracle("xla", case, "bfloat16", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype}")
        for case in CASES
        for dtype in {"window": ("float32", "bfloat16"), "tiny": (), "one_head": ()}.get(case.name, ("bfloat16",))
    ],
)
def test_their_gradient_in_the_tpu_kernel(case, dtype: str) -> None:
    """Blocks and chunks of 128: the sums are over several."""
    assert_sinks_meet_the_oracle(
        "pallas_tpu", case, dtype, 0, (AttentionTpuForward(*[128] * 4), AttentionTpuBackward(*[128] * 5))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("many_rows", "window")], ids=lambda case: case.name
)
def test_their_gradient_in_the_gpu_kernel(case) -> None:
    """Heads of 256 are refused: test_wide_heads_with_sinks_have_no_backward_kernel_for_gpus."""
    assert_sinks_meet_the_oracle("pallas_gpu", case, "bfloat16", 0)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    t=st.integers(1, 120),
    s=st.integers(1, 120),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    d=st.sampled_from([16, 80]),
    mask=st.sampled_from([None, masks.Causal(), masks.SlidingWindow(20, 5), masks.Causal(-9) | masks.Prefix(2)]),
    soft_cap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 1000),
)
def test_their_gradient_in_any_draw(t, s, heads, d, mask, soft_cap, seed) -> None:
    case = _case("drawn", 2, t, s, heads, d, sinks=True, mask=mask, soft_cap=soft_cap)
    assert_sinks_meet_the_oracle(
        "xla", case, "bfloat16", seed, (AttentionXlaForward(24, 40), AttentionXlaBackward(24, 40))
    )
