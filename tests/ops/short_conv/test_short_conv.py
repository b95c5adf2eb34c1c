"""short_conv: the contract, and what is its own: states, segments, single steps, widths, blocks, shards, errors."""

import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import tilewright
from tests.ops.contract import OpContract, able_to_run, implementations
from tilewright import short_conv, short_conv_step
from tilewright.configs import (
    ShortConvSm90Backward,
    ShortConvSm90Forward,
    ShortConvTpuBackward,
    ShortConvTpuForward,
)
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.cases import _case
from tilewright.workbench.check import CaseCheck

IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")
every_implementation = implementations(*IMPLEMENTATIONS)


class TestContract(OpContract):
    op_name = "short_conv"
    wrapper_is_interpreted = True
    call_type = ShortConvCall
    plainly_differentiable = ("xla",)
    cuts: ClassVar = {"batch": {"B": "x"}, "channels": {"D": "y"}}
    property_case = _case("properties", 2, 75, 512, state=True, segments=True, activation="silu")
    default_case = "runs"
    # The GPU kernels take a multiple of 256 channels.
    not_taken = frozenset(("pallas_gpu", case) for case in ("odd", "shorter_than_the_filter", "packed", "many_blocks"))
    tokens = ("x", "segment_ids", "y")
    state = ("initial_state", "final_state")
    segments = "segment_ids"
    segments_end_where_ids_change = True

    def extreme(self, arrays: dict) -> dict:
        """Sums whose sigmoid is 0 or 1 in float32, beside small ones."""
        return arrays | {"x": arrays["x"].at[:, 3::7].multiply(1e4)}


def draw(b: int = 2, t: int = 12, d: int = 6, width: int = 4, dtype: str = "float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (b, t, d)).astype(dtype)
    w = jax.random.normal(keys[1], (width, d)).astype(dtype)
    bias = jax.random.normal(keys[2], (d,)).astype(dtype)
    return x, w, bias, jax.random.normal(keys[3], (b, width - 1, d)).astype(dtype)


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_agrees_with_jax_lax(width: int) -> None:
    """An oracle that is not ours: a grouped convolution with the padding on the left."""
    x, w, bias, _ = draw(width=width)
    expected = jax.lax.conv_general_dilated(
        x,
        w[:, None, :],
        window_strides=(1,),
        padding=[(width - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
        precision="highest",
    )
    expected = jax.nn.silu(expected + bias[None, None, :])
    y, final_state = short_conv(x, w, bias=bias, activation="silu")
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(final_state, x[:, 12 - (width - 1) :])


def test_the_last_tap_is_the_token_itself() -> None:
    x, w, *_ = draw()
    only_last = jnp.zeros_like(w).at[-1].set(1.0)
    only_first = jnp.zeros_like(w).at[0].set(1.0)
    np.testing.assert_array_equal(short_conv(x, only_last)[0], x)
    np.testing.assert_array_equal(short_conv(x, only_first)[0][:, 3:], x[:, :-3])


def segments_apart(x, w, segment_ids, initial_state):
    """Each run of equal ids as a call of its own, from zeros; the first from the state. A row at a time."""
    ys, states = [], []
    for row in range(x.shape[0]):
        ids = np.asarray(segment_ids)[row]
        cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        pieces, state = [], initial_state[row]
        for start, stop in itertools.pairwise(cuts):
            before = state if start == 0 else jnp.zeros_like(state)
            y, state = short_conv(x[row, start:stop], w, initial_state=before, implementation="reference")
            pieces.append(y)
        ys.append(jnp.concatenate(pieces))
        states.append(state)
    return jnp.stack(ys), jnp.stack(states)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_packed_sequences_are_the_sequences_apart(implementation: str) -> None:
    """Segments of one to six tokens, an id that comes back, and a last one shorter than the state."""
    x, w, _, state = draw(t=14)
    ids = jnp.array([[7, 7, 7, 7, 7, 7, 2, 7, 7, 7, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 5, 5]])

    def packed(x, w, state):
        return short_conv(x, w, initial_state=state, segment_ids=ids, implementation=implementation)

    def apart(x, w, state):
        return segments_apart(x, w, ids, state)

    def with_gradients(function):
        def both(cotangents, *arrays):
            out, pull = jax.vjp(function, *arrays)
            return *out, *pull(cotangents)

        return jax.jit(both)((x, state), x, w, state)

    for got, expected in zip(with_gradients(packed), with_gradients(apart), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_two_calls_chained_by_the_state_are_one(implementation: str) -> None:
    """At any split, those that leave fewer tokens than the state holds too; gradients as well."""
    x, w, bias, state = draw(t=7)

    def whole(x, state):
        return short_conv(x, w, bias=bias, activation="silu", initial_state=state, implementation=implementation)

    def chained(x, state, split):
        first, middle = whole(x[:, :split], state)
        second, last = whole(x[:, split:], middle)
        return jnp.concatenate([first, second], axis=1), last

    def with_gradients(function):
        def both(x, state):
            out, pull = jax.vjp(function, x, state)
            return *out, *pull((x, state))

        return jax.jit(both)(x, state)

    expected = with_gradients(whole)
    for split in (0, 1, 2, 5):
        got = with_gradients(lambda x, state, split=split: chained(x, state, split))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_split_of_packed_sequences() -> None:
    """Inside a segment the state goes on; between two it must not, and the docstring's `where` sees to it."""
    x, w, *_ = draw(t=10)
    ids = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]])
    expected, expected_state = short_conv(x, w, segment_ids=ids)
    for split in range(1, 10):
        first, state = short_conv(x[:, :split], w, segment_ids=ids[:, :split])
        same = ids[:, split - 1] == ids[:, split]
        state = jnp.where(same[:, None, None], state, 0)
        second, state = short_conv(x[:, split:], w, segment_ids=ids[:, split:], initial_state=state)
        np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(state, expected_state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_the_whole_call(dtype: str) -> None:
    x, w, bias, state = draw(dtype=dtype)
    expected, expected_state = short_conv(x, w, bias=bias, activation="silu", initial_state=state)
    step = jax.jit(lambda state, x_t: short_conv_step(state, x_t, w, bias=bias, activation="silu"))
    ys = []
    for t in range(x.shape[1]):
        y, state = step(state, x[:, t])
        assert y.dtype == state.dtype == x.dtype
        ys.append(y)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    got = np.asarray(jnp.stack(ys, axis=1), np.float32)
    np.testing.assert_allclose(got, np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(state, expected_state)


def test_a_step_has_gradients_and_needs_no_batch() -> None:
    x, w, bias, state = draw()
    y, new_state = short_conv_step(state[0], x[0, 0], w, bias=bias, activation="silu")
    whole, _ = short_conv(x[0, :1], w, bias=bias, activation="silu", initial_state=state[0])
    np.testing.assert_allclose(y, whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new_state, jnp.concatenate([state[0, 1:], x[0, :1]]))
    gradient = jax.grad(lambda w: jnp.sum(short_conv_step(state, x[:, 0], w)[0]))(w)
    np.testing.assert_allclose(gradient[-1], jnp.sum(x[:, 0], axis=0), rtol=1e-5)


@every_implementation
def test_no_tokens_at_all(implementation: str) -> None:
    _, w, _, state = draw()
    y, final_state = short_conv(jnp.zeros((2, 0, 6)), w, initial_state=state, implementation=implementation)
    assert y.shape == (2, 0, 6)
    np.testing.assert_array_equal(final_state, state)
    y, final_state = short_conv(jnp.zeros((0, 6)), w, implementation=implementation)
    assert (y.shape, final_state.shape) == ((0, 6), (3, 6))
    assert short_conv(jnp.zeros((0, 5, 6)), w)[1].shape == (0, 3, 6)


@every_implementation
def test_weights_may_be_float32_and_their_gradients_are(implementation: str) -> None:
    x, w, bias, _ = draw()
    x = x.astype(jnp.bfloat16)

    def total(x, w, bias):
        y, _ = short_conv(x, w, bias=bias, activation="silu", implementation=implementation)
        assert y.dtype == jnp.bfloat16
        return jnp.sum(y.astype(jnp.float32))

    # Traced, not run: it is about dtypes.
    with able_to_run(implementation):
        gradients = jax.eval_shape(jax.grad(total, (0, 1, 2)), x, w, bias)
    assert [g.dtype.name for g in gradients] == ["bfloat16", "float32", "float32"]


# Ragged edges in time and channels, several tiles per block, every kind of filter; a v5p has two TensorCores per device.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "b", "t", "d", "width", "segments"),
    [
        ("v6e", 1, 1, 1, 8, False),
        ("v5p", 2, 200, 300, 3, True),
        ("v6e", 1, 100, 130, 8, True),
    ],
)
def test_any_shape_in_many_small_blocks(chip: str, b: int, t: int, d: int, width: int, segments: bool) -> None:
    """What lies past the end of an array never reaches a result."""
    case = _case("drawn", b, t, d, width=width, state=True, segments=segments, activation="silu")
    held = CaseCheck(find_op("short_conv"), case, "float32", seed=t)
    blocks = {"block_t": 96, "block_d": 128, "tile_t": 16}
    with tilewright.target(chip), able_to_run("pallas_tpu"):
        results = held.check("pallas_tpu", config=(ShortConvTpuForward(**blocks), ShortConvTpuBackward(**blocks)))
    for result in results:
        assert result.verdict.ok, f"B={b} T={t} D={d} W={width} {result.quantity}: {result.verdict}"


# Runs that end inside a group of tokens, shorter than the filter, and of one group; each width of a thread's vector.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "d", "width", "block_t", "block_d", "unroll", "segments"),
    [(21, 1024, 8, 4, 1024, 4, True), (2, 512, 4, 16, 512, 8, False), (9, 512, 2, 3, 256, 1, True)],
)
def test_the_gpu_kernels_in_other_blocks(
    t: int, d: int, width: int, block_t: int, block_d: int, unroll: int, segments: bool
) -> None:
    case = _case("drawn", 2, t, d, width=width, state=True, segments=segments, activation="silu")
    held = CaseCheck(find_op("short_conv"), case, "bfloat16", seed=t)
    blocks = block_t, block_d, unroll
    with able_to_run("pallas_gpu"):
        results = held.check("pallas_gpu", config=(ShortConvSm90Forward(*blocks), ShortConvSm90Backward(*blocks)))
    for result in results:
        assert result.verdict.ok, f"T={t} D={d} W={width} {result.quantity}: {result.verdict}"


def test_what_the_gpu_kernels_refuse() -> None:
    x, w = jax.ShapeDtypeStruct((2, 9, 768), "bfloat16"), jax.ShapeDtypeStruct((4, 768), "bfloat16")

    def told(x: Any, w: Any, config: Any = None) -> str:
        with tilewright.target("h200"):
            return str(tilewright.explain(lambda x, w: short_conv(x, w, config=config), x, w))

    assert told(x, w).startswith("short_conv: pallas_gpu")
    half = told(jax.ShapeDtypeStruct((2, 9, 384), "bfloat16"), jax.ShapeDtypeStruct((4, 384), "bfloat16"))
    assert "not pallas_gpu: D=384 must be a multiple of 256" in half
    wide = jax.ShapeDtypeStruct(x.shape, "float32"), jax.ShapeDtypeStruct(w.shape, "float32")
    assert "not pallas_gpu: x has dtype float32 and the GPU kernels take bfloat16; use x.astype" in told(*wide)
    assert "D=768 must be a multiple of block_d=512; use block_d=256" in told(x, w, ShortConvSm90Forward(16, 512))
    with pytest.raises(ValueError, match=r"block_d=300 must be one of 256, 512, 1024 .*; use 512"):
        ShortConvSm90Forward(16, 300)
    with pytest.raises(ValueError, match=r"block_t=18 must be a multiple of unroll=4; use 20"):
        ShortConvSm90Backward(18)


@pytest.mark.slow
@every_implementation
def test_shard_map_over_the_batch(implementation: str, cpu_devices: list) -> None:
    """Four devices with a sequence each; w is replicated, and its gradient is the sum over the devices."""
    x, w, bias, state = draw(b=4)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])
    split, whole = PartitionSpec("rows"), PartitionSpec()

    def total(x, w, bias, state, implementation=implementation):
        y, final = short_conv(x, w, bias=bias, activation="silu", initial_state=state, implementation=implementation)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(final))

    def summed(*arrays):
        return jax.lax.psum(total(*arrays), "rows")

    sharded = jax.shard_map(summed, mesh=mesh, in_specs=(split, whole, whole, split), out_specs=whole)
    with able_to_run(implementation):
        got = jax.jit(jax.grad(sharded, (0, 1, 2, 3)))(x, w, bias, state)
    expected = jax.grad(lambda *arrays: total(*arrays, implementation="reference"), (0, 1, 2, 3))(x, w, bias, state)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": jnp.zeros((2, 12, 6), jnp.int32)},
            r"x is int32\[2, 12, 6\]; it must be float32 or bfloat16: pass x.astype",
        ),
        ({"x": jnp.zeros((6,))}, r"x is float32\[6\]; it must be \[B, T, D\] or \[T, D\]"),
        ({"w": jnp.zeros((6, 4))}, r"w is float32\[6, 4\] and x is .*\(D=6\); it looks transposed: pass w.T"),
        ({"w": jnp.zeros((4, 5))}, r"w is float32\[4, 5\] and x is .*\(D=6\); pass a w with 6 columns"),
        (
            {"w": jnp.zeros((4, 1, 6))},
            r"w is float32\[4, 1, 6\]; it must be \[W, D\], a row for each tap: w\[:, 0, :\]",
        ),
        ({"w": jnp.zeros((1, 6))}, r"w is float32\[1, 6\], of width W=1; the width must be 2 to 8: use jax.lax.conv"),
        ({"w": jnp.zeros((9, 6))}, r"w is float32\[9, 6\], of width W=9; the width must be 2 to 8"),
        ({"w": jnp.zeros((4, 6), jnp.bfloat16)}, r"w has dtype bfloat16 and x has float32; .*pass w.astype\(x.dtype\)"),
        ({"bias": jnp.zeros((4,))}, r"bias is float32\[4\] and x is .*bias must be \[D\], here \[6\]; None for none"),
        ({"activation": "gelu"}, r"activation='gelu' is not an activation of short_conv; use None or 'silu'"),
        (
            {"initial_state": jnp.zeros((2, 4, 6))},
            r"initial_state is float32\[2, 4, 6\] .* must be \[2, 3, 6\]: the W-1",
        ),
        (
            {"initial_state": jnp.zeros((2, 3, 6), jnp.bfloat16)},
            r"initial_state has dtype bfloat16 .*astype\(x.dtype\)",
        ),
        ({"segment_ids": jnp.zeros((2, 12))}, r"segment_ids has dtype float32; segment_ids must be integers: pass seg"),
        (
            {"segment_ids": jnp.zeros((12,), jnp.int32)},
            r"segment_ids is int32\[12\]; it must be \[B, T\] = \[2, 12\], one id for each token",
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(change: dict, message: str) -> None:
    x, w, *_ = draw()
    with pytest.raises(ValueError, match=message):
        short_conv(**{"x": x, "w": w} | change)


def test_bad_input_to_a_step_is_named_with_its_remedy() -> None:
    x, w, _, state = draw()
    with pytest.raises(ValueError, match=r"x_t is float32\[2, 12, 6\]; it must be \[B, D\] or \[D\] .*: one token"):
        short_conv_step(state, x, w)
    with pytest.raises(ValueError, match=r"state is float32\[2, 2, 6\] .* state must be \[2, 3, 6\]"):
        short_conv_step(state[:, 1:], x[:, 0], w)


@pytest.mark.parametrize("config", [ShortConvTpuForward, ShortConvTpuBackward])
def test_a_config_that_breaks_alignment_is_refused_when_built(config) -> None:
    with pytest.raises(ValueError, match=r"block_t=24 must be a positive multiple of 16 \(sublanes .*; use 32$"):
        config(24, 128)
    with pytest.raises(ValueError, match=r"block_d=96 must be a positive multiple of 128 \(TPU lanes\); use 128$"):
        config(32, 96)
    with pytest.raises(ValueError, match=r"block_t=96 must be a multiple of tile_t=64, or less than it; use 128"):
        config(96, 128)
    with pytest.raises(ValueError, match=r"unroll=0 must be a positive integer; use 1"):
        config(32, 128, unroll=0)


def test_a_config_that_does_not_fit_memory_is_refused_before_the_compiler() -> None:
    x, w = jax.ShapeDtypeStruct((1, 8192, 8192), "bfloat16"), jax.ShapeDtypeStruct((4, 8192), "bfloat16")
    with tilewright.target("v5p"):
        told = tilewright.explain(short_conv, x, w, implementation="pallas_tpu", config=ShortConvTpuForward(4096, 4096))
    assert "its forward kernel needs about 131 MiB of VMEM for dtype=bfloat16 B=1 T=8192 D=8192 W=4 with" in str(told)
    assert "a v5p has 64; use a smaller block_t or block_d, or implementation='xla'" in str(told)


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize(("t", "d", "itemsize"), [(1, 64, 2), (8192, 4096, 2), (8192, 16384, 4), (100_000, 1, 4)])
def test_the_heuristic_fits_every_tpu(chip: str, t: int, d: int, itemsize: int) -> None:
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    x, w, ids = (jax.ShapeDtypeStruct(*given) for given in (((1, t, d), dtype), ((8, d), dtype), ((1, t), jnp.int32)))
    with tilewright.target(chip):
        told = tilewright.explain(short_conv, x, w, segment_ids=ids, implementation="pallas_tpu")
    (decision,) = told.decisions
    assert decision.backward.refusal is None
    for config in decision.configs.values():
        assert d <= 128 or -(-d // config.block_d) >= Chip.named(chip).cores_per_device


def test_the_tpu_kernels_lower_without_a_tpu() -> None:
    """Forward and backward lower to a Mosaic kernel each on a machine that has no TPU."""
    x, w = jax.ShapeDtypeStruct((2, 300, 200), "bfloat16"), jax.ShapeDtypeStruct((4, 200), "float32")

    def both(x, w, dy):
        y, pullback = jax.vjp(lambda x, w: short_conv(x, w, activation="silu")[0], x, w)
        return y, pullback(dy)

    with tilewright.target("v5p"):
        text = jax.jit(both).trace(x, w, x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2
