"""flash_attention: the contract, and what is its own: masks, groups, segments, bias, sinks, memory, errors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tests.ops.attention.drawing import draw, gradients
from tests.ops.contract import OpContract, able_to_run, implementations
from tilewright import flash_attention, masks
from tilewright.configs import (
    AttentionTpuBackward,
    AttentionTpuForward,
    AttentionXlaBackward,
    AttentionXlaForward,
)
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.core.implementation import Launch
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.cases import _case
from tilewright.ops.attention.pallas_tpu import IMPLEMENTATION
from tilewright.workbench.bench import Timing, bench_case
from tilewright.workbench.check import CaseCheck

IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")
every_implementation = implementations(*IMPLEMENTATIONS)
TINY_BLOCKS = {
    # 256 keys are two tiles of a block in the forward, and two blocks and two chunks in the backward.
    "pallas_tpu": (AttentionTpuForward(128, 256, 128, 128), AttentionTpuBackward(128, 128, 128, 128, 128)),
    "xla": (AttentionXlaForward(24, 40), AttentionXlaBackward(24, 40)),
}


class TestContract(OpContract):
    op_name = "flash_attention"
    call_type = AttentionCall
    not_taken = frozenset({("pallas_gpu", "bias_sinks_cap")})  # It takes no bias.
    property_case = _case("properties", 2, 150, 150, (2, 1), 32, segments=4, causal=True, sinks=True)
    tokens = ("q", "k", "v", "segment_ids", "out", "logsumexp")
    segments = "segment_ids"

    def extreme(self, arrays: dict) -> dict:
        """Logits of about 10,000."""
        return arrays | {name: arrays[name] * 100 for name in ("q", "k")}

    def chained(self, run: Callable, arrays: dict) -> tuple:
        """The queries in two parts, the second with its offset; its keys in two parts, joined by their logsumexps."""
        t = arrays["q"].shape[1] // 2
        (q, *past), (q_later, *later) = (
            [arrays[name][:, part] for name in ("q", "k", "v", "segment_ids")] for part in (slice(0, t), slice(t, None))
        )

        def attend(q: Any, q_ids: Any, keys: list, *, sinks: Any = None, q_offset: int = 0) -> tuple:
            k, v, ids = keys
            return run({"q": q, "k": k, "v": v, "segment_ids": (q_ids, ids), "sinks": sinks}, q_offset=q_offset)

        out, logsumexp = attend(q, past[2], past, sinks=arrays["sinks"])
        parts = [
            attend(q_later, later[2], past, sinks=arrays["sinks"], q_offset=t),
            attend(q_later, later[2], later),
        ]
        joined = jnp.logaddexp(parts[0][1], parts[1][1])
        out_later = sum(jnp.exp(part_lse - joined)[..., None] * part.astype(joined.dtype) for part, part_lse in parts)
        return (
            jnp.concatenate([out, out_later.astype(out.dtype)], axis=1),
            jnp.concatenate([logsumexp, joined], axis=1),
        )


def assert_alike(got, expected, tolerance=2e-5):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"causal": True}, {"is_causal": True}),
        ({"window": (7, 3)}, {"local_window_size": (7, 3)}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"bias": "bias"}, {"bias": "bias"}),
        ({"mask": "mask"}, {"mask": "mask"}),
    ],
)
def test_agrees_with_jax_nn(ours: dict, theirs: dict) -> None:
    """An oracle that is not ours."""
    q, k, v = draw(b=2, t=40, s=40)
    arrays = {
        "bias": jax.random.normal(jax.random.key(5), (2, 1, 40, 40)),
        "mask": jax.random.bernoulli(jax.random.key(6), 0.7, (1, 4, 40, 40)),
    }
    ours = {name: arrays.get(value, value) if isinstance(value, str) else value for name, value in ours.items()}
    theirs = {name: arrays.get(value, value) if isinstance(value, str) else value for name, value in theirs.items()}
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(q, k, v, **theirs)
    for implementation in ("xla", "reference"):
        got = flash_attention(q, k, v, **ours, implementation=implementation)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@implementations("pallas_tpu", "xla")
@pytest.mark.parametrize(
    "case",
    [
        # Widths of heads, groups and masks that the named cases do not have.
        _case("d64_gqa8", 1, 33, 33, (8, 1), 64, mask=masks.SlidingWindow(9, 4)),
        _case("d192_mla", 1, 130, 150, (2, 2), 192, 128, mask=masks.BlockSparse(np.eye(3, 3, dtype=bool), (50, 50))),
        _case("d256_prefix", 1, 50, 50, (4, 1), 256, sinks=True, mask=masks.Causal() | masks.Prefix(9), soft_cap=9.0),
        _case("key_bias", 2, 30, 140, (2, 2), 64, bias=(2, 2, 1)),
        # Full blocks and empty ones and none between, with a block of queries that has no work.
        _case(
            "empty_rows",
            1,
            256,
            256,
            (1, 1),
            32,
            mask=masks.BlockSparse(np.array([[False, True], [False, False]]), (128, 128)),
        ),
    ],
    ids=lambda case: case.name,
)
def test_more_shapes_meet_the_oracle(implementation: str, case) -> None:
    held = CaseCheck(find_op("flash_attention"), case, "float32")
    with able_to_run(implementation):
        results = held.check(implementation, config=TINY_BLOCKS[implementation] if case.name == "empty_rows" else None)
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_block_in_passes_meets_the_oracle(dtype: str) -> None:
    """Two passes per block and two blocks of keys, with all that logits depend on; beside partial blocks for the end."""
    case = _case("passes", 1, 200, 1100, (2, 1), 32, 48, bias=(1, 2, 200), sinks=True, soft_cap=9.0, logit_scale=4.0)
    config = (AttentionTpuForward(256, 512, 128, 128, 2), TINY_BLOCKS["pallas_tpu"][1])
    with able_to_run("pallas_tpu"):
        results = CaseCheck(find_op("flash_attention"), case, dtype).check("pallas_tpu", config=config)
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


drawn_masks = st.sampled_from(
    [
        None,
        masks.Causal(),
        masks.Causal(-3) | masks.Prefix(11),
        masks.SlidingWindow(20, 5) & ~masks.Prefix(4),
        masks.MaskFn(lambda q, k: (q + k) % 3 != 1),
        masks.Dilated(4) & masks.Causal(),
    ]
)


@pytest.mark.parametrize(
    ("implementation", "examples"),
    [pytest.param("pallas_tpu", 3, marks=pytest.mark.slow), pytest.param("xla", 3, marks=pytest.mark.slow)],
)
def test_any_mask_and_shape_in_many_small_blocks(implementation: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        t=st.integers(1, 150),
        s=st.integers(1, 300),
        group=st.sampled_from([1, 3]),
        mask=drawn_masks,
        q_offset=st.integers(0, 30),
    )
    def check(t: int, s: int, group: int, mask, q_offset: int) -> None:
        case = _case("drawn", 1, t, s, (group, 1), 16, mask=mask, q_offset=q_offset)
        held = CaseCheck(find_op("flash_attention"), case, "float32", seed=t)
        with able_to_run(implementation):
            results = held.check(implementation, config=TINY_BLOCKS[implementation])
        for result in results:
            assert result.verdict.ok, f"T={t} S={s} {mask} {result.quantity}: {result.verdict}"

    check()


@every_implementation
def test_a_query_without_keys_gives_zeros(implementation: str) -> None:
    """Queries 0 to 4 stand before every key that they could attend to."""
    q, k, v = draw(t=12, s=12)
    run = {"mask": masks.Causal(-5), "return_logsumexp": True, "implementation": implementation}
    with able_to_run(implementation):
        out, logsumexp, dq, dk, dv = gradients(lambda *a: flash_attention(*a, **run), q, k, v)
    assert not np.any(out[:, :5])
    assert np.all(logsumexp[:, :5] == -np.inf)
    assert not np.any(dq[:, :5])
    assert np.all(np.isfinite(logsumexp[:, 5:]))
    for gradient in (dq, dk, dv):
        assert np.all(np.isfinite(gradient))


@every_implementation
def test_a_sink_alone_takes_all_the_weight(implementation: str) -> None:
    q, k, v = draw(t=3, s=3)
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    with able_to_run(implementation):
        out, logsumexp = flash_attention(
            q, k, v, mask=masks.Prefix(0), sinks=sinks, return_logsumexp=True, implementation=implementation
        )
    assert not np.any(out)
    np.testing.assert_allclose(logsumexp, np.broadcast_to(sinks, logsumexp.shape), rtol=1e-6)


@pytest.mark.slow
@every_implementation
def test_a_mask_array_may_change_under_jit(implementation: str) -> None:
    """Whole blocks empty, full and mixed, different from head to head, with one compiled program."""
    q, k, v = draw(b=2, t=140, s=260, h=2, kv=1)
    config = TINY_BLOCKS.get(implementation)
    seen = []

    @jax.jit
    def run(mask):
        seen.append(mask)
        return flash_attention(
            q,
            k,
            v,
            mask=mask,
            causal=True,
            q_offset=120,
            return_logsumexp=True,
            implementation=implementation,
            config=config,
        )

    first = jax.random.bernoulli(jax.random.key(1), 0.5, (2, 2, 140, 260))
    second = jnp.zeros((2, 2, 140, 260), bool).at[:, 1, :, 130:].set(True).at[0, 0, :128, :128].set(True)
    for mask in (first, second):
        with able_to_run(implementation):
            got = run(mask)
        expected = flash_attention(
            q, k, v, mask=mask, causal=True, q_offset=120, return_logsumexp=True, implementation="reference"
        )
        assert_alike(got, expected)
    assert len(seen) == 1


@pytest.mark.slow
@implementations("pallas_tpu", "xla")
def test_heads_with_masks_of_their_own(implementation: str) -> None:
    q, k, v = draw(t=140, s=140, h=4, kv=2)
    mask = masks.PerHead(
        (masks.Causal(), masks.SlidingWindow(5, 5), masks.Prefix(3), masks.Dense(np.tri(140, 140, -20, dtype=bool)))
    )

    def run(implementation):
        options = {"mask": mask, "return_logsumexp": True, "implementation": implementation}
        return lambda *a: flash_attention(*a, **options, config=TINY_BLOCKS.get(implementation))

    with able_to_run(implementation):
        got = gradients(run(implementation), q, k, v)
    assert_alike(got, gradients(run("reference"), q, k, v))


@pytest.mark.slow
@implementations("pallas_tpu", "xla")
def test_a_pair_of_segment_ids_and_a_dense_mask_together(implementation: str) -> None:
    q, k, v = draw(b=2, t=130, s=260)
    q_ids = jnp.stack([jnp.arange(130) // 40, jnp.arange(130) // 130])
    kv_ids = jnp.stack([jnp.arange(260) // 70, jnp.arange(260) // 140])
    mask = np.random.default_rng(0).random((130, 260)) > 0.2

    def run(implementation):
        options = {
            "segment_ids": (q_ids, kv_ids),
            "mask": mask,
            "return_logsumexp": True,
            "implementation": implementation,
        }
        return lambda *a: flash_attention(*a, **options, config=TINY_BLOCKS.get(implementation))

    with able_to_run(implementation):
        got = gradients(run(implementation), q, k, v)
    assert_alike(got, gradients(run("reference"), q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_keys_far_from_every_query_are_no_error(implementation: str) -> None:
    """A split of a long sequence's keys, out of reach of the window: zeros, as for any query without keys."""
    q, k, v = draw(t=8, s=8)
    far = {"window": (3, 0), "return_logsumexp": True, "implementation": implementation}
    for mask in (None, masks.Causal()):
        out, logsumexp = flash_attention(q, k, v, mask=mask, q_offset=100, **far)
        assert not np.any(out)
        assert np.all(logsumexp == -np.inf)
    assert not np.any(flash_attention(q, k[:, :0], v[:, :0], window=(3, 0), mask=masks.Causal()))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_distances_beyond_int32_are_without_end(implementation: str) -> None:
    q, k, v = draw(t=8, s=8)

    def run(**options):
        return flash_attention(q, k, v, **options, implementation=implementation)

    np.testing.assert_array_equal(run(window=(2**40, 0)), run(causal=True))
    np.testing.assert_array_equal(run(mask=masks.Causal(2**31 - 3)), run())
    np.testing.assert_array_equal(run(causal=True, q_offset=2**30), run())
    assert not np.any(run(causal=True, q_offset=-(2**30)))


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize("segments", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_mask_array_of_the_keys_or_of_the_queries_alone(implementation: str, segments: bool) -> None:
    """[B, 1, 1, S] and [B, 1, T, 1], as people give padding."""
    q, k, v = draw(b=2, t=12, s=15)
    options = (
        {"segment_ids": (jnp.arange(24).reshape(2, 12) // 5, jnp.arange(30).reshape(2, 15) // 5)} if segments else {}
    )
    options |= {"return_logsumexp": True}
    keys = jnp.arange(15)[None, :] < jnp.array([[9], [0]])
    queries = jnp.arange(12)[None, :] < jnp.array([[12], [5]])
    for narrow in (
        keys[:, None, None, :],
        queries[:, None, :, None],
        keys[:, None, None, :] & queries[:, None, :, None],
    ):
        whole = jnp.broadcast_to(narrow, (2, 4, 12, 15))
        with able_to_run(implementation):
            got = jax.jit(lambda mask: flash_attention(q, k, v, mask=mask, **options, implementation=implementation))(
                narrow
            )
        assert_alike(got, flash_attention(q, k, v, mask=whole, **options, implementation="reference"))


def test_a_mask_of_the_keys_alone_is_taken_by_every_kernel() -> None:
    """It is segments there: nothing of T x S is made, and the Hopper kernel takes it too."""
    struct, mask = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16"), jax.ShapeDtypeStruct((2, 1, 1, 64), "bool")
    with tilewright.target("h200"):
        told = tilewright.explain(lambda q, mask: flash_attention(q, q, q, mask=mask), struct, mask)
    assert told.decisions[0].implementation == "pallas_gpu"


def test_explain_tells_about_the_gradient_of_a_bias_where_there_is_one() -> None:
    q, bias = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 128, 128), jnp.float32)
    with tilewright.target("v6e"):
        without = tilewright.explain(lambda q: flash_attention(q, q, q), q)
        given = tilewright.explain(lambda q, bias: flash_attention(q, q, q, bias=bias), q, bias)
    assert "bias" not in str(without)
    assert "the gradient of the bias is computed in plain JAX" in str(given)


def test_unbatched_and_empty_inputs() -> None:
    q, k, v = draw()
    np.testing.assert_allclose(
        flash_attention(q[0], k[0], v[0], causal=True), flash_attention(q, k, v, causal=True)[0], rtol=1e-6
    )
    out, logsumexp = flash_attention(q, k[:, :0], v[:, :0], return_logsumexp=True)
    assert not np.any(out)
    assert np.all(logsumexp == -np.inf)
    assert flash_attention(q[:, :0], k, v).shape == (1, 0, 4, 16)


def test_xla_holds_no_square_of_the_length() -> None:
    """Compiled temporary memory of value and gradients: the logits of 8 heads at 8,192 tokens alone would be 2 GiB."""
    op = find_op("flash_attention")
    record = bench_case(op, op.case("causal_8k"), "xla", "bfloat16", "forward+backward", Timing(run=False))
    assert 0 < record.metrics["temp_bytes"] < 0.3 * 2**30


def test_the_tpu_kernels_lower_without_a_tpu() -> None:
    """Forward and backward are one Mosaic kernel each, with a bias too."""
    struct = jax.ShapeDtypeStruct((1, 300, 4, 80), "bfloat16")
    bias = jax.ShapeDtypeStruct((1, 1, 300, 300), "float32")

    def loss(q, k, v, bias):
        return jnp.sum(flash_attention(q, k, v, causal=True, bias=bias, soft_cap=10.0).astype(jnp.float32))

    with tilewright.target("v6e"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(struct, struct, struct, bias)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


@pytest.mark.slow
def test_the_gradient_of_a_bias_that_nobody_differentiates_is_dropped() -> None:
    """Its loops are plain JAX, in the TPU kernel's backward too, and the compiled program has none that is not used."""
    struct, bias = jax.ShapeDtypeStruct((1, 30, 4, 8), "float32"), jax.ShapeDtypeStruct((1, 1, 30, 30), "float32")

    def loops(argnums: tuple[int, ...], bias: Any = bias) -> int:
        def loss(q, k, v, bias):
            options = {"implementation": "xla", "config": TINY_BLOCKS["xla"]}
            return jnp.sum(flash_attention(q, k, v, causal=True, bias=bias, **options))

        lowered = jax.jit(jax.grad(loss, argnums)).lower(struct, struct, struct, bias)
        return lowered.compile().as_text().count(" while(")

    assert loops((0, 1, 2)) == loops((0, 1, 2), None) < loops((0, 1, 2, 3))


def test_a_step_is_spent_on_no_empty_block() -> None:
    """The grid of a causal call has half the blocks, and of a window a band of them."""
    struct = jax.ShapeDtypeStruct((1, 8192, 2, 128), "bfloat16")

    def grid(**options):
        config = AttentionTpuForward(512, 512, 256, 512)
        with tilewright.target("v6e"):
            traced = jax.jit(lambda q, k, v: flash_attention(q, k, v, config=config, **options)).trace(*[struct] * 3)
        (call,) = [e for e in _equations(traced.jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
        return call.params["grid_mapping"].grid

    assert grid() == (1, 2, 256)
    assert grid(causal=True) == (1, 2, 16 * 17 // 2)
    assert grid(causal=True, window=(1023, 0)) == (1, 2, 3 * 16 - 3)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for leaf in jax.tree.leaves(
                parameter, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
            ):
                inner = getattr(leaf, "jaxpr", leaf)
                if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                    yield from _equations(inner)


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 64, 64), (8192, 8192, 128, 128), (131_072, 131_072, 256, 256), (77, 4000, 192, 128)]
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_heuristic_fits_every_tpu(chip: str, shape: tuple[int, ...], itemsize: int) -> None:
    known, (t, s, d, dv) = Chip.named(chip), shape
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    structs = (jax.ShapeDtypeStruct((1, *sizes), dtype) for sizes in ((t, 1, d), (s, 1, d), (s, 1, dv)))

    def check(q, k, v):
        absent = dict.fromkeys(("bias", "sinks", "q_segments", "kv_segments", "keep", "mask", "soft_cap"))
        call = AttentionCall(q=q, k=k, v=v, scale=1.0, q_offset=0, **absent)
        for one in IMPLEMENTATION.passes.values():
            config = one.heuristic(known, call)
            needed = one.memory(call, Launch(known, config, None))
            assert max(needed.values()) <= known.vmem_bytes
            assert -(-s // config.block_k) * config.block_k < 1.2 * s + 128

    jax.eval_shape(check, *structs)


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (None, (2048, 8192)),
        (masks.Causal(), (1024, 1024)),
        (masks.Causal() & masks.SlidingWindow(1023, None), (512, 512)),
        (masks.Causal() & masks.SlidingWindow(4095, None), (1024, 1024)),
    ],
)
def test_blocks_are_smaller_where_a_mask_leaves_little_of_large_ones(mask: Any, blocks: tuple[int, int]) -> None:
    array = jax.ShapeDtypeStruct((1, 8192, 8, 128), "bfloat16")

    def chosen(chip: str) -> tuple[int, int]:
        with tilewright.target(chip):
            (decision,) = tilewright.explain(flash_attention, array, array, array, mask=mask).decisions
        return decision.forward.config.block_q, decision.forward.config.block_k

    assert chosen("v6e") == blocks
    assert chosen("v5e") == (512, 512)


SMALL = draw()
LONG = jax.ShapeDtypeStruct((1, 131_072, 4, 16), "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((40, 16))}, r"q is float32\[40, 16\]; it must be \[B, T, H, D\] or \[T, H, D\]"),
        ({"q": jnp.zeros((1, 40, 3, 16))}, r"q has H=3 heads and k has KV=2; H must be a multiple of KV"),
        (
            {"q": jnp.zeros((1, 40, 4, 16), jnp.bfloat16)},
            r"k has dtype float32 and q has bfloat16.*k.astype\(q.dtype\)",
        ),
        ({"k": jnp.zeros((2, 40, 2, 16))}, r"k is float32\[2, 40, 2, 16\] and q .*the same batch"),
        ({"k": jnp.zeros((1, 40, 2, 8))}, r"k is float32\[1, 40, 2, 8\] and q .*last axes must be equal \(D=16\)"),
        ({"v": jnp.zeros((1, 41, 2, 16))}, r"v is float32\[1, 41, 2, 16\] and k .*the same S and KV"),
        ({"mask": "causal"}, r"mask='causal' is not a mask; use a value of tilewright.masks, such as Causal\(\)"),
        (
            {"mask": np.zeros((40, 41), bool)},
            r"mask is bool\[40, 41\]; a numpy mask must be bool, \[T, S\] = \[40, 40\]",
        ),
        ({"mask": masks.Dense(np.zeros((8, 8), bool))}, r"mask=Dense\(\[8, 8\]\) is not \[T, S\] = \[40, 40\]"),
        (
            {"mask": masks.PerHead((masks.Causal(),) * 3)},
            r"made for 3 heads and q has H=4; stack one mask for each head",
        ),
        ({"mask": masks.Segments(np.zeros(8, int))}, r"Segments\(\[8\], \[8\]\) must have an id for each of T=40"),
        ({"mask": masks.BlockSparse(np.zeros((2, 2), bool), (8, 8))}, r"BlockSparse.* must have \[5, 5\] blocks"),
        ({"mask": jnp.zeros((40, 41), bool)}, r"mask is bool\[40, 41\]; it must broadcast to .*= \[1, 4, 40, 40\]"),
        ({"mask": jnp.zeros((40, 40))}, r"mask is float32\[40, 40\]; it must be bool: .* additive one as bias="),
        ({"window": 8}, r"window=8 must be a pair \(left, right\) of tokens beside the query's own; use \(8, 0\)"),
        ({"window": (8, -1)}, r"right=-1 of SlidingWindow must be a number of tokens"),
        (
            {"window": (8, 0), "mask": masks.SlidingWindow(4, 4) & masks.Causal()},
            r"window=\(8, 0\) together with a mask that has SlidingWindow\(left=4, right=4\) in it; which one",
        ),
        (
            {"window": (2, 0), "mask": masks.Causal(-5000), "q_offset": 4096},
            r"window=\(2, 0\) together with mask=Causal\(offset=-5000\) leaves no query anything .*contradict",
        ),
        (
            {"window": (2, 0), "mask": masks.Causal(-5)},
            r"window=\(2, 0\) together with mask=Causal\(offset=-5\) leaves no query anything .*contradict",
        ),
        (
            {"window": (0, 0), "mask": ~np.eye(40, dtype=bool)},
            r"window=\(0, 0\) together with mask=Dense\(\[40, 40\]\) leaves no query anything .*contradict",
        ),
        (
            {"window": (1, 0), "mask": masks.PerHead((masks.Prefix(2),) * 4), "q_offset": 10},
            r"window=\(1, 0\) together with mask=PerHead.* leaves no query anything .*mend q_offset=10",
        ),
        ({"causal": "no"}, r"causal='no' is not True or False; .*pass a bool, or give what changes as a mask array"),
        ({"segment_ids": jnp.zeros((1, 40))}, r"segment_ids has dtype float32; they must be integers"),
        ({"segment_ids": jnp.zeros((1, 39), jnp.int32)}, r"segment_ids of q is int32\[1, 39\]; it must be \[1, 40\]"),
        ({"bias": jnp.zeros((40, 40), jnp.int32)}, r"bias is int32\[40, 40\]; it must be floating"),
        (
            {"bias": jnp.zeros((3, 1, 40, 40))},
            r"bias is float32\[3, 1, 40, 40\]; it must broadcast to .*B, H, T may be 1",
        ),
        ({"sinks": jnp.zeros((2,))}, r"sinks is float32\[2\]; it must be floating \[H\] = \[4\]"),
        ({"soft_cap": -1.0}, r"soft_cap=-1.0 must be positive and finite; use None for no cap"),
        ({"scale": float("nan")}, r"scale=nan must be finite; use None for D \*\* -0.5"),
        ({"q_offset": 2**31 - 1}, r"q_offset=2147483647 must be within 1073741824 \(positions are int32\)"),
        ({"segment_ids": jnp.zeros((40,), jnp.int32)}, r"segment_ids of q is int32\[40\]; .*: pass one array \[B, T\]"),
        ({"scale": jnp.ones(())}, r"scale=.* is not a Python number; .*or multiply q by it"),
        ({"q_offset": jnp.ones((), jnp.int32)}, r"q_offset=.* is not a Python integer; .*use decode_attention"),
    ],
)
def test_bad_input_is_named_with_its_remedy(change: dict, message: str) -> None:
    q, k, v = SMALL
    with pytest.raises(ValueError, match=message):
        flash_attention(**{"q": q, "k": k, "v": v} | change)


def test_a_bias_of_the_square_of_a_long_length_says_what_it_costs() -> None:
    bias = jax.ShapeDtypeStruct((4, 131_072, 131_072), "float32")
    with pytest.raises(
        ValueError, match=r"bias is float32\[1, 4, 131072, 131072\], 256 GiB to hold .*tilewright.masks"
    ):
        jax.eval_shape(lambda q, bias: flash_attention(q, q, q, bias=bias), LONG, bias)


def test_a_config_that_breaks_a_rule_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"tile_k=96 must be a positive multiple of 128 \(TPU lanes\); use 128$"):
        AttentionTpuForward(128, 128, 128, 96)
    with pytest.raises(ValueError, match=r"block_q=384 must be a multiple of tile_q=256; use 512"):
        AttentionTpuForward(384, 128, 256, 128)
    with pytest.raises(ValueError, match=r"block_k=512 must be a multiple of tile_k=128 times unroll=3; use unroll=1"):
        AttentionTpuForward(256, 512, 128, 128, 3)
    with pytest.raises(ValueError, match=r"block_q=128 and tile_q=128 with unroll=1 are an odd number.*use an even"):
        AttentionTpuForward(128, 512, 128, 128, 1)
    with pytest.raises(ValueError, match=r"chunk_k=384 must be a multiple of block_k=256; use 512"):
        AttentionTpuBackward(128, 256, 128, 128, 384)
    with pytest.raises(ValueError, match=r"block_k=16384 has 128 tiles of tile_k=128, and a step takes 63 at most"):
        AttentionTpuBackward(128, 16384, 128, 128, 16384)
    with pytest.raises(ValueError, match=r"block_k=0 must be a positive integer; use 512"):
        AttentionXlaForward(8, 0)


def test_what_does_not_fit_is_refused_before_the_compiler() -> None:
    struct = jax.ShapeDtypeStruct((1, 131_072, 2, 128), "bfloat16")

    def trace(config, *, differentiated):
        with tilewright.target("v5p"):
            run = lambda q: flash_attention(q, q, q, causal=True, implementation="pallas_tpu", config=config)  # noqa: E731
            jax.eval_shape(jax.grad(lambda q: jnp.sum(run(q).astype(jnp.float32))) if differentiated else run, struct)

    with pytest.raises(
        tilewright.Unsupported,
        match=r"its backward kernel needs about \d+ MiB of VMEM .*a v5p has 64; use a smaller chunk_k",
    ):
        trace(AttentionTpuBackward(512, 512, 256, 512, 131_072), differentiated=True)
    # The forward alone fits.
    trace(AttentionTpuBackward(512, 512, 256, 512, 131_072), differentiated=False)
    with pytest.raises(
        tilewright.Unsupported,
        match=r"its block list of 1 x 524,800 steps needs 4,100 KiB of scalar memory.*larger block_q",
    ):
        trace(AttentionTpuForward(128, 128, 128, 128), differentiated=False)
