"""The norms: their contracts, and what is their own: other definitions, narrow heads, blocks, shards, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import tilewright
from tests.ops.contract import OpContract, able_to_run, implementations
from tilewright import gated_rms_norm, layer_norm, rms_norm
from tilewright.configs import NormSm90Forward, NormTpuBackward, NormTpuForward
from tilewright.core.dispatch import find_op
from tilewright.ops.norm.call import NormCall
from tilewright.ops.norm.cases import _case
from tilewright.workbench.check import CaseCheck

IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")
every_implementation = implementations(*IMPLEMENTATIONS)
CUTS = {"batch": {"tokens0": "x"}, "heads": {"tokens1": "y"}, "both": {"tokens0": "x", "tokens1": "y"}}


class TestRmsNorm(OpContract):
    op_name = "rms_norm"
    call_type = NormCall
    plainly_differentiable = ("xla",)
    cuts = CUTS
    whole_letter = "D"
    mesh_case = _case("rms_norm", "mesh", (4, 6, 64))
    any_leading_axes = True


class TestLayerNorm(OpContract):
    op_name = "layer_norm"
    call_type = NormCall
    plainly_differentiable = ("xla",)
    cuts = CUTS
    whole_letter = "D"
    mesh_case = _case("layer_norm", "mesh", (4, 6, 64))
    shares_code_with = "rms_norm"
    any_leading_axes = True


class TestGatedRmsNorm(OpContract):
    op_name = "gated_rms_norm"
    call_type = NormCall
    plainly_differentiable = ("xla",)
    cuts = CUTS
    whole_letter = "D"
    mesh_case = _case("gated_rms_norm", "mesh", (4, 32, 64))
    property_case = _case("gated_rms_norm", "properties", (2, 8, 128))
    any_leading_axes = True
    default_case = "heads_of_64"
    not_taken = frozenset({("pallas_gpu", "odd")})  # Rows of 7 are no vectors.

    def extreme(self, arrays: dict) -> dict:
        """Gates whose sigmoid is 0 or 1 in float32, or whose exponential overflows."""
        return arrays | {"gate": arrays["gate"].at[..., ::3].set(-200.0).at[..., 1::3].set(200.0)}


def draw(*shape: int, dtype: str = "float32"):
    shape = shape or (12, 16)
    keys = jax.random.split(jax.random.key(0), 4)
    x, gate = (jax.random.normal(key, shape).astype(dtype) for key in keys[:2])
    w, bias = (jax.random.normal(key, shape[-1:]).astype(dtype) for key in keys[2:])
    return x, gate, w, bias


def test_layer_norm_agrees_with_jax_nn() -> None:
    """An oracle that is not ours: `jax.nn.standardize`."""
    x, _, w, bias = draw()
    x = x + 3.0
    expected = jax.nn.standardize(x, axis=-1, epsilon=1e-5) * w[None, :] + bias[None, :]
    np.testing.assert_allclose(layer_norm(x, w, bias), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norms_agree_with_the_definitions_of_transformers(dtype: str) -> None:
    """Their norms round xhat to the inputs' dtype before the weights; that is a rounding more than ours."""
    x, gate, w, _ = draw(dtype=dtype)

    def rounded(x, offset):
        x32 = x.astype(jnp.float32)
        xhat = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6)
        if offset:
            # Qwen3-Next's norm multiplies in float32.
            return (xhat * (1.0 + w.astype(jnp.float32))[None, :]).astype(dtype)
        return w[None, :] * xhat.astype(dtype)

    tolerance = 1e-5 if dtype == "float32" else 2e-2
    gated = (rounded(x, 0).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)
    for got, expected in (
        (rms_norm(x, w), rounded(x, 0)),
        (rms_norm(x, w, offset=1.0), rounded(x, 1)),
        (gated_rms_norm(x, gate, w), gated),
    ):
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@every_implementation
def test_leading_axes_are_restored(implementation: str) -> None:
    x, gate, w, bias = draw()
    with able_to_run(implementation):
        flat = gated_rms_norm(x, gate, w, implementation=implementation)
        cube = gated_rms_norm(x.reshape(2, 3, 2, 16), gate.reshape(2, 3, 2, 16), w, implementation=implementation)
        one = layer_norm(x[7], w, bias, implementation=implementation)
        each = layer_norm(x, w, bias, implementation=implementation)
    np.testing.assert_array_equal(cube, flat.reshape(2, 3, 2, 16))
    np.testing.assert_allclose(one, each[7], rtol=1e-6)


def test_no_rows_at_all() -> None:
    _, _, w, _ = draw()
    empty = jnp.zeros((3, 0, 16))
    assert rms_norm(empty, w).shape == empty.shape
    assert gated_rms_norm(empty, empty, w).shape == empty.shape
    assert not np.any(jax.grad(lambda w: jnp.sum(layer_norm(empty, w)))(w))


def test_the_variance_survives_a_large_mean() -> None:
    """The difference of two means would lose it."""
    x, _, w, bias = draw()
    with able_to_run("pallas_tpu"):
        got = layer_norm(x + 1000.0, w, bias, implementation="pallas_tpu")
    np.testing.assert_allclose(got, layer_norm(x, w, bias), rtol=1e-2, atol=1e-3)


# Narrow heads side by side (64: in pairs, and alone where they do not pair; 32), ragged last columns, several chunks of
# columns. A v5p has two TensorCores per device, so its sums over rows have two parts, which do not divide five blocks. The
# smallest row has two columns: the gradient of a single one is what two equal terms leave, which are rounded differently.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "chip", "shape"),
    [
        ("rms_norm", "v5p", (70, 600)),
        ("layer_norm", "v5p", (67, 530)),
        ("rms_norm", "v6e", (34, 64)),
        ("gated_rms_norm", "v6e", (41, 4, 32)),
        ("gated_rms_norm", "v5p", (33, 64)),
        ("gated_rms_norm", "v6e", (1, 2)),
    ],
)
def test_any_shape_in_many_small_blocks(op: str, chip: str, shape: tuple[int, ...]) -> None:
    """A ragged last block: what lies past the end of an array never reaches a result."""
    held = CaseCheck(find_op(op), _case(op, "drawn", shape, bias=op == "layer_norm"), "float32", seed=shape[0])
    with tilewright.target(chip), able_to_run("pallas_tpu"):
        results = held.check("pallas_tpu", config=(NormTpuForward(block_n=16), NormTpuBackward(block_n=16)))
    for result in results:
        assert result.verdict.ok, f"{op} {shape} {result.quantity}: {result.verdict}"


def test_heads_of_64_fill_the_lanes() -> None:
    """The kernel sees [B, T, H, 64] as [B T, 64 H]: no lane is empty, and no byte is read for padding."""
    x, w = jax.ShapeDtypeStruct((2, 300, 6, 64), "bfloat16"), jax.ShapeDtypeStruct((64,), "bfloat16")
    with tilewright.target("v6e"):
        assert "bf16[600,384]" in str(jax.make_jaxpr(rms_norm)(x, w))


@pytest.mark.slow
@pytest.mark.parametrize("op", [rms_norm, layer_norm, gated_rms_norm])
@every_implementation
def test_shard_map_over_rows(op, implementation: str, cpu_devices: list) -> None:
    """Four devices with a quarter of the rows each; w is replicated, and its gradient is the sum over the devices."""
    if implementation == "pallas_tpu" and op is rms_norm:
        pytest.skip("one kernel for all three: the others show it")
    x, gate, w, bias = draw(24, 16)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])
    split, whole = PartitionSpec("rows"), PartitionSpec()
    arrays, specs = {
        rms_norm: ((x, w), (split, whole)),
        layer_norm: ((x, w, bias), (split, whole, whole)),
        gated_rms_norm: ((x, gate, w), (split, split, whole)),
    }[op]

    def total(*arrays, implementation=implementation):
        return jnp.sum(jnp.sin(op(*arrays, implementation=implementation)))

    sharded = jax.shard_map(
        lambda *arrays: jax.lax.psum(total(*arrays), "rows"), mesh=mesh, in_specs=specs, out_specs=whole
    )
    wanted = tuple(range(len(arrays)))
    with able_to_run(implementation):
        got = jax.jit(jax.grad(sharded, wanted))(*arrays)
    expected = jax.grad(lambda *arrays: total(*arrays, implementation="reference"), wanted)(*arrays)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@every_implementation
def test_weights_and_gate_may_be_float32_and_their_gradients_are(implementation: str) -> None:
    x, gate, w, _ = draw()

    def total(x, gate, w):
        y = gated_rms_norm(x, gate, w, implementation=implementation)
        assert y.dtype == jnp.bfloat16
        return jnp.sum(y.astype(jnp.float32))

    # Traced, not run: it is about dtypes.
    with able_to_run(implementation):
        gradients = jax.eval_shape(jax.grad(total, (0, 1, 2)), x.astype(jnp.bfloat16), gate, w)
    assert [g.dtype.name for g in gradients] == ["bfloat16", "float32", "float32"]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (
            rms_norm,
            {"x": jnp.zeros((12, 16), jnp.int32)},
            r"x is int32\[12, 16\]; it must be \[..., D\] of float32 or bf",
        ),
        (rms_norm, {"x": jnp.zeros((12, 0))}, r"x is float32\[12, 0\]; D must be at least 1"),
        (rms_norm, {"w": jnp.zeros(17)}, r"w is float32\[17\] and x .*\(D=16\): use jnp.ones\(16\) for no scale"),
        (
            rms_norm,
            {"w": jnp.zeros(16, jnp.bfloat16)},
            r"w has dtype bfloat16 and x has float32; .*w.astype\(x.dtype\)",
        ),
        (rms_norm, {"eps": -1e-6}, r"eps=-1e-06 must be finite and not negative; use 1e-6"),
        (rms_norm, {"eps": jnp.ones(())}, r"eps=.* is not a Python number; .*known when traced: pass a number"),
        (rms_norm, {"offset": jnp.ones(())}, r"offset=.* is not a Python number; .*known when traced: pass a number"),
        (layer_norm, {"bias": jnp.zeros((1, 16))}, r"bias is float32\[1, 16\] and x .*use None for no bias"),
        (gated_rms_norm, {"gate": jnp.zeros((12, 1))}, r"gate is float32\[12, 1\] and x is .*broadcast_to\(gate, x.sh"),
        (
            gated_rms_norm,
            {"gate": jnp.zeros((12, 16), jnp.int32)},
            r"gate has dtype int32 .* pass gate.astype\(x.dtype\)",
        ),
        (
            gated_rms_norm,
            {"activation": "gelu"},
            r"activation='gelu' is not an activation of gated_rms_norm; use 'silu' or",
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(op, change: dict, message: str) -> None:
    x, gate, w, _ = draw()
    given = {"x": x, "w": w} | ({"gate": gate} if op is gated_rms_norm else {})
    with pytest.raises(ValueError, match=message):
        op(**given | change)


@pytest.mark.parametrize("config", [NormTpuForward, NormTpuBackward])
def test_a_config_that_breaks_alignment_is_refused_when_built(config) -> None:
    with pytest.raises(ValueError, match=r"block_n=24 must be a positive multiple of 16 \(sublanes .*; use 32$"):
        config(block_n=24)
    with pytest.raises(ValueError, match=r"block_n=96 must be a multiple of tile_n=64, or less than it; use 128"):
        config(block_n=96, tile_n=64)


def test_a_config_that_does_not_fit_memory_is_refused_before_the_compiler() -> None:
    x, w = jax.ShapeDtypeStruct((4096, 8192), "bfloat16"), jax.ShapeDtypeStruct((8192,), "bfloat16")

    def explained(function, config):
        with tilewright.target("v5p"):
            return str(tilewright.explain(lambda x, w: function(x, w, config), x, w))

    def run(x, w, config):
        return rms_norm(x, w, implementation="pallas_tpu", config=config)

    def differentiated(x, w, config):
        return jax.grad(lambda x: jnp.sum(run(x, w, config).astype(jnp.float32)))(x)

    told = explained(run, NormTpuForward(block_n=2048))
    assert "its forward kernel needs about 129 MiB of VMEM for dtype=bfloat16 N=4096 D=8192 with tilewright.con" in told
    assert "a v5p has 64; use a smaller block_n, or implementation='xla'" in told
    # A backward that does not fit is no reason to refuse a call that is not differentiated; it is shown.
    config = NormTpuBackward(block_n=2048)
    assert "  backward: cannot run: its backward kernel needs about" in explained(run, config)
    refused = explained(differentiated, config)
    assert "cannot differentiate this call: its backward kernel needs about" in refused
    assert "a v5p has 64; use a smaller block_n, or implementation='xla'" in refused


def test_rows_too_wide_for_a_tpu_fall_to_xla_and_say_why() -> None:
    x, w = jax.ShapeDtypeStruct((64, 2**20), "bfloat16"), jax.ShapeDtypeStruct((2**20,), "bfloat16")
    with tilewright.target("v6e"):
        (decision,) = tilewright.explain(rms_norm, x, w).decisions
    assert decision.implementation == "xla"
    assert "a v6e has 128; use a smaller block_n, or implementation='xla'" in decision.rejected["pallas_tpu"]


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize(("n", "d"), [(1, 64), (8192, 4096), (1_000_000, 1), (300, 16384), (262144, 128)])
def test_the_heuristic_fits_every_tpu(chip: str, n: int, d: int) -> None:
    """The forward and the backward, in float32, with a gate where rows are not as wide as can be."""
    x, w = jax.ShapeDtypeStruct((n, d), "float32"), jax.ShapeDtypeStruct((d,), "float32")
    op, arrays = (gated_rms_norm, (x, x, w)) if d <= 4096 else (rms_norm, (x, w))
    with tilewright.target(chip):
        (decision,) = tilewright.explain(op, *arrays, implementation="pallas_tpu").decisions
    assert decision.backward.refusal is None
    assert {type(config) for config in decision.configs.values()} == {NormTpuForward, NormTpuBackward}


@pytest.mark.slow
def test_vmap_is_one_larger_call_with_its_config() -> None:
    """The calls of a vmap share one kernel launch, whose blocks are chosen for all rows, forward and backward."""
    x, w = jax.random.normal(jax.random.key(0), (32, 16, 256)), jnp.ones(256)

    def total(x, w):
        return jnp.sum(jnp.sin(rms_norm(x, w, implementation="pallas_tpu")))

    mapped = jax.vmap(jax.value_and_grad(total), in_axes=(0, None))
    with tilewright.target("v6e"):
        (one,) = tilewright.explain(total, x[0], w).decisions
        (larger,) = tilewright.explain(jax.vmap(total, in_axes=(0, None)), x, w).decisions
        (whole,) = tilewright.explain(total, x.reshape(-1, 256), w).decisions
        text = jax.jit(mapped).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert one.configs["forward"] == NormTpuForward(16, 16)
    assert larger.configs == whole.configs != one.configs
    assert text.count("tpu_custom_call") == 2
    with able_to_run("pallas_tpu", plain=True):
        got = mapped(x[:3], w)
        each = [jax.value_and_grad(total)(x[n], w) for n in range(3)]
    for n, (value, gradient) in enumerate(each):
        np.testing.assert_allclose(got[0][n], value, rtol=1e-5)
        np.testing.assert_allclose(got[1][n], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_vmap_over_weights_gives_each_element_its_gradient() -> None:
    """Weights that differ, or whose gradients would be summed by a larger call, are left to JAX's own rule."""
    x, w = jax.random.normal(jax.random.key(0), (3, 16, 128)), jax.random.normal(jax.random.key(1), (3, 128))

    @jax.jit
    def gradients(x, w):
        return jax.grad(lambda x, w: jnp.sum(rms_norm(x, w, implementation="pallas_tpu") ** 3), (0, 1))(x, w)

    for axes in ((0, 0), (0, None), (None, 0)):
        given = [array if axis == 0 else array[0] for array, axis in zip((x, w), axes, strict=True)]
        with able_to_run("pallas_tpu", plain=True):
            got = jax.vmap(gradients, in_axes=axes)(*given)
            each = [
                gradients(*(a[n] if axis == 0 else a for a, axis in zip(given, axes, strict=True))) for n in range(3)
            ]
        for one, other in zip(got, zip(*each, strict=True), strict=True):
            np.testing.assert_allclose(one, jnp.stack(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [NormTpuForward(64), NormTpuBackward(256, 32)])
def test_a_config_can_be_pasted_back_and_goes_through_json(config) -> None:
    assert eval(repr(config), {"tilewright": tilewright}) == config
    assert tilewright.configs.from_json(tilewright.configs.to_json(config)) == config
    assert type(tilewright.configs.from_json(tilewright.configs.to_json(config))) is type(config)


def test_bad_json_of_a_config_is_named() -> None:
    with pytest.raises(ValueError, match=r"config='NormTpu' is not a config of tilewright; see tilewright.configs"):
        tilewright.configs.from_json('{"config": "NormTpu", "block_n": 64}')
    with pytest.raises(ValueError, match=r"NormTpuForward has no field 'block_m'; its fields are block_n, tile_n"):
        tilewright.configs.from_json('{"config": "NormTpuForward", "block_m": 64}')
    with pytest.raises(ValueError, match=r"block_n=24 must be a positive multiple of 16"):
        tilewright.configs.from_json('{"config": "NormTpuForward", "block_n": 24}')


def test_a_config_of_another_op_is_refused() -> None:
    x, w = jnp.ones((4, 16)), jnp.ones(16)
    config = tilewright.configs.ShortConvTpuForward(64, 128)
    with pytest.raises(
        TypeError, match=r"is not a config that rms_norm takes; configs: NormTpuForward for 'pallas_tpu'"
    ):
        rms_norm(x, w, config=config)
    with pytest.raises(TypeError, match=r"is not a config that implementation='xla' of rms_norm takes"):
        rms_norm(x, w, implementation="xla", config=NormTpuForward(64))


def test_what_the_gpu_kernels_refuse() -> None:
    def run(*shape: int, dtype: str = "bfloat16", config: NormSm90Forward | None = None) -> str:
        x, w = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], dtype)
        options: Any = {"implementation": "pallas_gpu", "config": config}
        with tilewright.target("h200"):
            return str(tilewright.explain(lambda *arrays: gated_rms_norm(*arrays, **options), x, x, w))

    for shape in ((8, 128), (3, 512), (4, 768), (1, 4096), (2, 1536)):
        assert run(*shape).startswith("gated_rms_norm: pallas_gpu"), shape
    for shape, given, text in (
        ((8, 128), {"dtype": "float32"}, "x has dtype float32 and the GPU kernels take bfloat16"),
        *(
            ((8, d), {}, f"D={d} must be 32, 64, 128 or a multiple of 256, above 1024 of 512, up to 4096")
            for d in (96, 1280, 8192)
        ),
        ((3, 4, 128), {}, "the 12 rows of x must be a multiple of 8"),
        (
            (24, 128),
            {"config": NormSm90Forward(16)},
            "block_n=16 must divide the 24 rows of x and be a multiple of 8; use block_n=8",
        ),
    ):
        assert text in run(*shape, **given)


@pytest.mark.parametrize("op", [rms_norm, layer_norm, gated_rms_norm])
def test_the_tpu_kernels_lower_without_a_tpu(op) -> None:
    """Forward and backward lower to a Mosaic kernel each on a machine that has no TPU."""
    x, w = jax.ShapeDtypeStruct((300, 200), "bfloat16"), jax.ShapeDtypeStruct((200,), "float32")
    arrays = (x, x, w) if op is gated_rms_norm else (x, w)

    def both(dy, *arrays):
        y, pullback = jax.vjp(op, *arrays)
        return y, pullback(dy)

    with tilewright.target("v5p"):
        text = jax.jit(both).trace(x, *arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2
