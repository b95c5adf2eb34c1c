"""The Hopper kernels of flash_attention, beyond the contract: shapes, masks, what is refused, configs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.attention.drawing import draw
from tests.ops.contract import able_to_run
from tilewright import flash_attention, masks
from tilewright.configs import AttentionSm90Backward, AttentionSm90Forward
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.cases import _case
from tilewright.ops.attention.pallas_gpu import sm90_bwd, sm90_fwd
from tilewright.ops.attention.pallas_gpu.tiles import assign_tiles
from tilewright.workbench.check import CaseCheck

# Consumers that take turns: three, and two.
TURNS = AttentionSm90Forward(128, 2, consumers=3, overlap=False)
CONFIGS = {"d64_gqa8": TURNS, "long": AttentionSm90Forward(128, 2, overlap=False)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        _case("d64_gqa8", 1, 150, 150, (8, 1), 64, mask=masks.SlidingWindow(9, 4)),
        _case("mla", 1, 130, 150, (2, 2), 192, 128, mask=masks.BlockSparse(np.eye(3, 3, dtype=bool), (50, 50))),
        _case("d256_prefix", 1, 50, 50, (4, 1), 256, mask=masks.Causal() | masks.Prefix(9), soft_cap=9.0),
        _case("not_a_prefix", 1, 140, 300, (2, 1), 128, mask=~masks.Prefix(130) & masks.Causal(200)),
        # A block of queries, and a block of keys, that have no work.
        _case(
            "empty",
            1,
            256,
            256,
            (1, 1),
            32,
            mask=masks.BlockSparse(np.array([[False, True], [False, False]]), (128, 128)),
        ),
        # Four blocks of keys add to dq, and each pipeline uses its stages more than once.
        _case("long", 2, 400, 400, (2, 1), 128, causal=True, segments=3),
    ],
    ids=lambda case: case.name,
)
def test_the_gpu_kernels_meet_the_oracle_on_more_shapes(case) -> None:
    held = CaseCheck(find_op("flash_attention"), case, "bfloat16")
    with able_to_run("pallas_gpu"):
        results = held.check("pallas_gpu", config=CONFIGS.get(case.name))
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


@pytest.mark.parametrize(
    ("visits", "heads", "together", "blocks"),
    [((1, 2, 3, 4, 5), 7, 3, 6), ((4,) * 8, 4, 4, 16), ((3, 1), 2, 2, 9), (tuple(range(1, 33)), 128, 32, 132)],
)
def test_every_tile_is_assigned_once_and_the_work_is_even(
    visits: tuple[int, ...], heads: int, together: int, blocks: int
) -> None:
    tiles, counts = assign_tiles(visits, heads, together, blocks)
    lists = [row[:count] for row, count in zip(tiles, counts, strict=True)]
    assert sorted(np.concatenate(lists)) == list(range(heads * len(visits)))
    work = [sum(visits[tile % len(visits)] + 1 for tile in each) for each in lists]
    assert max(work) - min(work) <= max(visits) + 1
    # The first tiles are the longest ones of the first heads.
    assert {tile // len(visits) for tile in tiles[: min(together, blocks), 0]} <= set(range(together))
    assert visits[tiles[0, 0] % len(visits)] == max(visits)


def test_the_forward_leaves_four_thread_blocks_to_a_head() -> None:
    assert [sm90_fwd._heads_together(heads, 132) for heads in (1, 16, 32, 37, 64, 128)] == [1, 16, 32, 19, 32, 32]


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((4, 4096, 16, 64), TURNS),
        ((1, 300, 16, 64), AttentionSm90Forward(128, 2)),
        ((4, 4096, 32, 128), AttentionSm90Forward(128, 2)),
        ((1, 4096, 16, 256), AttentionSm90Forward(64, 2)),
    ],
)
def test_narrow_heads_take_three_consumers_where_there_are_tiles_for_all_multiprocessors(shape, config) -> None:
    def check(q):
        absent = dict.fromkeys(("bias", "sinks", "q_segments", "kv_segments", "keep", "mask", "soft_cap"))
        call = AttentionCall(q=q, k=q, v=q, scale=1.0, q_offset=0, **absent)
        assert sm90_fwd._choose(Chip.named("h200"), call) == config

    jax.eval_shape(check, jax.ShapeDtypeStruct(shape, "bfloat16"))


def test_the_backward_takes_as_few_heads_together_as_keep_a_gpu_busy() -> None:
    assert sm90_bwd._heads_together(16, 256, 132) == 2
    assert sm90_bwd._heads_together(16, 64, 132) == 8
    assert sm90_bwd._heads_together(7, 64, 132) == 7
    assert sm90_bwd._heads_together(16, 4, 132) == 16
    assert sm90_bwd._heads_together(1, 4096, 132) == 1


@pytest.mark.slow
def test_the_order_of_heads_does_not_change_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads side by side, and one after the other: the sums of dq have no order, so the bits are the same."""
    q, k, v = draw(t=140, s=140, h=2, kv=2, d=32, dtype="bfloat16")

    def gradients(together: int) -> list[jax.Array]:
        monkeypatch.setattr(sm90_bwd, "_heads_together", lambda *_: together)
        with able_to_run("pallas_gpu"):
            out, pull = jax.vjp(lambda *a: flash_attention(*a, causal=True, implementation="pallas_gpu"), q, k, v)
            return [out, *pull(jnp.ones_like(out))]

    side_by_side = gradients(2)
    assert all(float(jnp.max(jnp.abs(x))) > 0 for x in side_by_side)
    for got, expected in zip(gradients(1), side_by_side, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-9])
def test_the_gpu_kernel_masks_whatever_the_scale(scale: float) -> None:
    """Masks are applied before the scale, which must not bring what is masked back."""
    q, k, v = draw(t=12, s=12, d=64, dtype="bfloat16")
    run = {"mask": masks.Causal(-5), "scale": scale, "return_logsumexp": True}
    with able_to_run("pallas_gpu"):
        out, logsumexp = jax.jit(lambda *a: flash_attention(*a, **run, implementation="pallas_gpu"))(q, k, v)
    expected, expected_logsumexp = flash_attention(q, k, v, **run, implementation="reference")
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.02)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, atol=1e-5)


@pytest.mark.slow
def test_the_gpu_kernels_lower_without_a_gpu() -> None:
    """Forward and backward are one kernel each, for wide heads as well."""

    def kernels(d: int) -> int:
        struct = jax.ShapeDtypeStruct((1, 300, 4, d), "bfloat16")

        def loss(q, k, v):
            return jnp.sum(flash_attention(q, k, v, causal=True).astype(jnp.float32))

        with tilewright.target("h200"):
            traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(struct, struct, struct)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return text.count("stablehlo.custom_call @mosaic_gpu")

    assert kernels(80) == 2
    assert kernels(192) == 2


def test_wide_heads_with_sinks_have_no_backward_kernel_for_gpus() -> None:
    """The kernel runs forward and refuses to be differentiated; without a name, xla then takes both directions."""
    struct, sinks = jax.ShapeDtypeStruct((1, 300, 4, 256), "bfloat16"), jax.ShapeDtypeStruct((4,), "float32")

    def loss(implementation):
        def total(q, sinks):
            out = flash_attention(q, q, q, causal=True, sinks=sinks, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32))

        return total

    message = (
        r"cannot differentiate this call: heads wider than 128 .* with sinks .*; use implementation='xla', or None"
    )
    with tilewright.target("h200"):
        with pytest.raises(tilewright.Unsupported, match=message):
            jax.eval_shape(jax.grad(loss("pallas_gpu")), struct, sinks)
        text = jax.jit(loss("pallas_gpu")).trace(struct, sinks).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
        (forward,) = tilewright.explain(loss(None), struct, sinks).decisions
        assert forward.implementation == "pallas_gpu"
        assert "cannot run: heads wider than 128" in str(forward.backward)
        (both,) = tilewright.explain(jax.grad(loss(None)), struct, sinks).decisions
        assert both.implementation == "xla"
        assert "with sinks" in both.rejected["pallas_gpu"]


@pytest.mark.slow
def test_wide_heads_with_sinks_run_forward() -> None:
    q, k, v = draw(t=50, s=50, h=4, kv=1, d=256, dtype="bfloat16")
    run = {"mask": masks.Causal() | masks.Prefix(9), "soft_cap": 9.0, "sinks": jnp.linspace(-1.0, 1.0, 4)}
    run |= {"return_logsumexp": True}
    with able_to_run("pallas_gpu"):
        out, logsumexp = jax.jit(lambda *a: flash_attention(*a, **run, implementation="pallas_gpu"))(q, k, v)
    expected, expected_logsumexp = flash_attention(q, k, v, **run, implementation="reference")
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.02)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "sinks", "buffers"), [(128, False, 4), (128, True, 2), (64, False, 2)])
def test_the_backward_has_as_many_buffers_as_fit(d: int, sinks: bool, buffers: int) -> None:
    """Mosaic refuses to lower a kernel that needs more shared memory than there is."""
    q, k = (jax.ShapeDtypeStruct((1, 300, heads, d), "bfloat16") for heads in (8, 1))
    sunk = jax.ShapeDtypeStruct((8,), "float32") if sinks else None

    def loss(q, k, v, sinks):
        return jnp.sum(flash_attention(q, k, v, causal=True, sinks=sinks).astype(jnp.float32))

    with tilewright.target("h200"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, sunk)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu") == 2
    with tilewright.target("h200"):
        told = tilewright.explain(lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks), q, k, k, sunk)
    assert told.decisions[0].backward.config == AttentionSm90Backward(stages=2, buffers=buffers)


@pytest.mark.parametrize(
    ("chip", "change", "message"),
    [
        (
            "a100",
            {},
            r"for Hopper GPUs \(compute capability 9.0: H100, H200\), and the chip is a100, with .* 8.0; use",
        ),
        ("h200", {"dtype": "float32"}, r"q is float32, and it multiplies bfloat16 only .*implementation='xla'"),
        ("h200", {"bias": (40, 40)}, r"bias is not among what it takes; .*implementation='xla'"),
        ("h200", {"mask": masks.PerHead((masks.Causal(),) * 4)}, r"differs from head to head; use one mask"),
        ("h200", {"d": 300}, r"D=300 and Dv=300 must be 256 at most .*implementation='xla'"),
        (
            "h200",
            {"config": AttentionSm90Forward(256, 4)},
            r"its forward kernel needs about \d+ KiB of shared memory for .* D=16 .* use a smaller block_k or stages",
        ),
        (
            "h200",
            {"kv": 1, "h": 128, "sinks": (128,)},
            r"cannot differentiate .*its backward kernel needs .* H=128 KV=1 .* sinks=True with .*implementation='xla'",
        ),
        (
            "h200",
            {"d": 256, "config": AttentionSm90Backward(stages=3, buffers=2)},
            r"its backward kernel for heads wider than 128 .* is written for 2 stages and buffers, and config has stages=3",
        ),
    ],
)
def test_what_the_gpu_kernel_does_not_take_is_refused_with_the_way_out(chip: str, change: dict, message: str) -> None:
    change = dict(change)
    heads, d, dtype = change.pop("h", 4), change.pop("d", 16), change.pop("dtype", "bfloat16")
    q, k = (jax.ShapeDtypeStruct((1, 40, number, d), dtype) for number in (heads, change.pop("kv", heads)))
    arrays = {name: jax.ShapeDtypeStruct(change.pop(name), "float32") for name in ("bias", "sinks") if name in change}

    def gradient(implementation):
        def total(q, k, arrays):
            out = flash_attention(q, k, k, **arrays, **change, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(total)

    with tilewright.target(chip):
        with pytest.raises(tilewright.Unsupported, match=message):
            jax.eval_shape(gradient("pallas_gpu"), q, k, arrays)
        if "config" not in change:
            assert tilewright.explain(gradient(None), q, k, arrays).decisions[0].implementation == "xla"


def test_a_gpu_config_that_breaks_a_rule_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"block_k=96 must be a multiple of 64, 256 at most .*; use 128$"):
        AttentionSm90Forward(96, 2)
    with pytest.raises(ValueError, match=r"stages=1 must be 2 or more \(a copy .*\); use 2"):
        AttentionSm90Forward(128, 1)
    with pytest.raises(ValueError, match=r"stages=1 must be 2 or more \(a copy .*\); use 2"):
        AttentionSm90Backward(1, 2)
    with pytest.raises(ValueError, match=r"buffers=1 must be 2 or more; use 2"):
        AttentionSm90Backward(2, 1)
    with pytest.raises(ValueError, match=r"consumer_registers=100 must be a positive multiple of 8 .*; use 96"):
        AttentionSm90Backward(2, 2, consumer_registers=100)
    with pytest.raises(ValueError, match=r"consumers=4 must be 2 or 3 \(registers .*\); use 2"):
        AttentionSm90Forward(128, 2, consumers=4)
    with pytest.raises(ValueError, match=r"consumer_registers=248 and producer_registers=24 exceed .*use 240 and 24"):
        AttentionSm90Backward(2, 2, consumer_registers=248)


@pytest.mark.parametrize("d", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dv", [64, 128, 256])
def test_the_gpu_heuristic_fits(d: int, dv: int) -> None:
    q, k, v = (jax.ShapeDtypeStruct((1, 300, 2, width), "bfloat16") for width in (d, d, dv))
    with tilewright.target("h200"):
        told = tilewright.explain(flash_attention, q, k, v, implementation="pallas_gpu")
    if (d, dv) == (192, 256):
        # Its output needs room next to its queries, and by about 100 bytes there is none.
        assert told.refusal is not None
        assert "implementation='xla'" in told.refusal
    else:
        assert told.refusal is None
        assert told.decisions[0].backward.refusal is None
