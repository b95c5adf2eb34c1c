"""decode_qkv: the contract, stacks of caches, tokens that do not fit, angles, and what the Hopper kernel has of its own."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tilewright
from tests.ops.composition import assert_the_kernel_refuses, kernels_in
from tests.ops.contract import OpContract, able_to_run
from tilewright import apply_rope, decode_attention, decode_qkv, matmul, rms_norm
from tilewright.configs import DecodeQkvSm90Forward
from tilewright.ops.attention.decode_qkv.call import DecodeQkvCall
from tilewright.ops.attention.decode_qkv.cases import _case
from tilewright.ops.attention.decode_qkv.pallas_gpu.sm90_fwd import angle_tables
from tilewright.ops.rope.api import Linear, Yarn, rope_tables


class TestDecodeQkv(OpContract):
    op_name = "decode_qkv"
    call_type = DecodeQkvCall
    shared = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    whole_letter = "D"
    mesh_case = _case("mesh", 4, 64, 4, (8, 8), 64)
    default_case = "plain"
    interpreted_slowly = frozenset({"pallas_gpu"})

    @classmethod
    def output_specs(cls, outputs: tuple, cut: dict) -> tuple[PartitionSpec, ...]:
        """Caches of one layer come back without the axis of layers that the call has."""
        letters = ("B", "H", "C"), ("B", "S", "KV", "C"), ("B", "S", "KV", "C")
        return tuple(cls.spec(each, x.shape, cut) for each, x in zip(letters, outputs, strict=True))


def draw(b=2, d=64, s=4, h=4, kv=4, c=32, layers=None, dtype=jnp.bfloat16, lengths=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), 8)
    cache = (b, s, kv, c) if layers is None else (layers, b, s, kv, c)
    shapes = {
        "x": (b, d),
        "q_proj": (d, h, c),
        "k_proj": (d, kv, c),
        "v_proj": (d, kv, c),
        "keys": cache,
        "values": cache,
        "q_norm": (c,),
        "k_norm": (c,),
    }
    arrays = {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    lengths = jnp.arange(b, dtype=jnp.int32) % s if lengths is None else jnp.asarray(lengths, jnp.int32)
    return {**arrays, "lengths": lengths}


def structs(**shape):
    return jax.eval_shape(lambda: draw(**shape))


def run(arrays, implementation="reference", **options):
    with able_to_run(implementation):
        return jax.jit(lambda given: decode_qkv(**given, **options, implementation=implementation))(arrays)


@pytest.mark.slow
def test_it_is_the_ops_that_it_takes_the_place_of():
    """Products, norms, rotations, and writes behind the lengths."""
    arrays = draw(dtype=jnp.float32, c=16, lengths=[2, 0])
    x, positions = arrays["x"], arrays["lengths"][:, None]

    def heads(name, norm):
        w = arrays[name]
        y = matmul(x, w.reshape(w.shape[0], -1)).reshape(x.shape[0], 1, *w.shape[1:])  # [B, T, heads, C]
        if norm is None:
            return y
        y = rms_norm(y, arrays[norm], eps=1e-5, offset=1.0)
        return apply_rope(y, positions, theta=100.0, scaling=Linear(2.0), rotary_dim=8)

    got = decode_qkv(**arrays, eps=1e-5, norm_offset=1.0, theta=100.0, scaling=Linear(2.0), rotary_dim=8)
    written = [
        jax.vmap(lambda cache, new, at: cache.at[at].set(new))(arrays[cache], new[:, 0], arrays["lengths"])
        for cache, new in (("keys", heads("k_proj", "k_norm")), ("values", heads("v_proj", None)))
    ]
    for one, other in zip(got, (heads("q_proj", "q_norm")[:, 0], *written), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("pallas_gpu", marks=pytest.mark.slow)])
def test_a_stack_is_written_in_one_layer_and_nothing_past_a_cache_is(implementation):
    """Lengths of a full cache, past it and below zero write nothing, nor does a layer that is not there."""
    arrays = draw(b=4, c=64, layers=3, lengths=[1, 4, 5, -1])
    q, keys, values = run(arrays, implementation, layer=jnp.int32(1))
    single = {name: arrays[name][1] for name in ("keys", "values")}
    expected = run({**arrays, **single})
    for got, cache, one in ((keys, "keys", expected[1]), (values, "values", expected[2])):
        changed = np.any(np.asarray(got != arrays[cache]), axis=(3, 4))  # [L, B, S]
        assert np.argwhere(changed).tolist() == [[1, 0, 1]]
        np.testing.assert_allclose(got[1].astype(jnp.float32), one.astype(jnp.float32), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(q.astype(jnp.float32), expected[0].astype(jnp.float32), rtol=1e-2, atol=2e-2)
    for layer in (-1, 3):
        after = run(arrays, implementation, layer=jnp.int32(layer))
        assert all(np.array_equal(after[1 + n], arrays[name]) for n, name in enumerate(("keys", "values")))


@pytest.mark.slow
def test_tokens_in_a_loop_over_layers_are_written_in_place():
    """Two layers of one stack, two tokens: the carry of a loop goes through the kernel, as a model's decoding does."""
    arrays = draw(c=64, layers=2, s=3, lengths=[0, 1])

    def decoded(implementation):
        def layer(index, carry):
            caches, total = carry
            q, *caches = decode_qkv(**{**arrays, **caches}, layer=index, implementation=implementation)
            return dict(zip(("keys", "values"), caches, strict=True)), total + q.astype(jnp.float32)

        start = {name: arrays[name] for name in ("keys", "values")}, jnp.zeros((2, 4, 64))
        return jax.jit(lambda start: jax.lax.fori_loop(0, 2, layer, start))(start)

    with able_to_run("pallas_gpu"):
        got = decoded("pallas_gpu")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(decoded("reference")), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("scaling", [None, Yarn(4.0, 1024)])
def test_angles_are_exact_at_any_position(scaling):
    """As the kernel computes them, in numpy: products modulo 2^32, and a rest."""
    whole, rest = angle_tables(128, 1e6, scaling)
    positions = np.array([0, 1, 1023, 40_960, 1_000_000, 2**31 - 1], np.int64)
    wrapped = (positions[:, None] * whole.astype(np.int64) % 2**32).astype(np.uint32).view(np.int32)
    turned = wrapped.astype(np.float32) * np.float32(2 * math.pi * 2.0**-32)
    angle = turned + rest * positions[:, None].astype(np.float32)
    factor = 1.0 if scaling is None else 0.1 * math.log(4.0) + 1.0
    tables = rope_tables(positions.astype(np.int32), 128, theta=1e6, scaling=scaling)
    for got, want in zip((np.cos(angle), np.sin(angle)), tables, strict=True):
        np.testing.assert_allclose(factor * got, want, rtol=0, atol=2e-6)


def test_an_h200_gets_two_kernels_that_work_in_place():
    arrays = structs(b=1, d=2048, s=1088, h=16, kv=8, c=128, layers=28)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda x, n: decode_qkv(**x, layer=n), arrays, layer).decisions
        traced = jax.jit(lambda x, n: decode_qkv(**x, layer=n)).trace(arrays, layer)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert decision.implementation == "pallas_gpu"
    assert decision.configs == {"forward": DecodeQkvSm90Forward(block_b=16, stages=5, splits=8)}
    assert "backward: the gradient of implementation='reference'" in str(decision)
    assert kernels_in(traced.jaxpr) == text.count("stablehlo.custom_call @mosaic_gpu") == 2
    aliased = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert [int(output) for output, _ in aliased] == [1, 2]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"b": 65}, r"B=65 must be from 1 to 64 \(the weights are read once\)"),
        ({"kv": 2}, r"H=4 and KV=2 must be multiples of 4 \(one head per warp\)"),
        ({"c": 48}, r"C=48 with rotary_dim=48 must have halves and a rest of multiples of 32 channels"),
        ({"d": 72}, r"D=72 must be a multiple of 64"),
        ({"dtype": jnp.float32}, r"x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text):
    assert_the_kernel_refuses(decode_qkv, structs(**shape), text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.zeros((2, 1, 64))}, r"x is float32\[2, 1, 64\]; it must be \[B, D\].*: pass x\[:, 0\]"),
        (
            {"q_proj": jnp.zeros((64, 128))},
            r"q_proj is float32\[64, 128\] and x has D=64; .* q_proj.reshape\(D, H, C\)",
        ),
        ({"k_proj": jnp.zeros((64, 3, 32))}, r"k_proj .* and q_proj has H=4 heads; .* H a multiple of KV"),
        (
            {"v_proj": jnp.zeros((64, 2, 32))},
            r"v_proj is float32\[64, 2, 32\]; it must be \[D, KV, C\] = \[64, 4, 32\]",
        ),
        (
            {"keys": jnp.zeros((3, 4, 4, 32))},
            r"keys is float32\[3, 4, 4, 32\]; it must be \[B, S, KV, C\] = \[2, S, 4, 32\]",
        ),
        ({"values": jnp.zeros((2, 5, 4, 32))}, r"values is .* and keys is .*; they must have the same shape"),
        ({"values": jnp.zeros((2, 4, 4, 32), jnp.bfloat16)}, r"values has dtype bfloat16 and x float32; .*astype"),
        ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths is int32\[3\]; it must be integers \[B\] = \[2\]"),
        (
            {"layer": 0},
            r"layer=0 and keys is .*; a stack .* needs the number of a layer, and a single cache takes None",
        ),
        ({"q_norm": jnp.zeros((16,))}, r"q_norm is float32\[16\]; it must be floating \[C\] = \[32\]"),
        ({"eps": None}, r"eps=None is not a Python number; .* pass a number"),
        ({"theta": 1.0}, r"theta=1.0 must be more than 1 and finite; use 10000, or None for no rotation"),
        ({"scaling": 2.0}, r"scaling=2.0 is not a scaling; use Linear, Llama3 or Yarn"),
        ({"rotary_dim": 34}, r"rotary_dim=34 must be an even number from 2 to C=32"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text):
    with pytest.raises(ValueError, match=text):
        decode_qkv(**{**draw(dtype=jnp.float32), **changed})


@pytest.mark.slow
def test_a_length_that_needs_64_bits_is_outside_of_the_cache():
    arrays = draw(lengths=[1, 2])
    with jax.enable_x64(True):
        wide = {**arrays, "lengths": jnp.asarray([1, 2**32 + 2], jnp.int64)}
        _, keys, _ = decode_qkv(**wide)
    changed = np.any(np.asarray(keys != arrays["keys"]), axis=(2, 3))
    assert np.argwhere(changed).tolist() == [[0, 1]]


def test_a_config_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"block_b=8 must be 16, 32 or 64 \(columns of a product\); use 16"):
        DecodeQkvSm90Forward(block_b=8, stages=4, splits=1)


def test_vmap_is_one_launch_with_more_sequences():
    """Each call has a stack of its own; they are joined into one."""
    arrays = structs(b=2, layers=3, c=64)
    shared = TestDecodeQkv.shared
    mapped = {name: x if name in shared else jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for name, x in arrays.items()}
    axes = ({name: None if name in shared else 0 for name in arrays},)
    with tilewright.target("h200"):
        traced = jax.jit(jax.vmap(lambda x: decode_qkv(**x, layer=jnp.int32(2)), axes)).trace(mapped)
    assert kernels_in(traced.jaxpr) == 2
    assert "bf16[12,2,4,4,64]" in str(traced.jaxpr)


def test_vmapped_calls_that_are_too_many_for_the_kernel_take_another_implementation():
    """A kernel has 64 rows at most, and these are 80."""
    arrays = structs(b=16, c=64)
    shared = TestDecodeQkv.shared
    mapped = {name: x if name in shared else jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for name, x in arrays.items()}
    axes = ({name: None if name in shared else 0 for name in arrays},)
    with tilewright.target("h200"):
        traced = jax.jit(jax.vmap(lambda x: decode_qkv(**x), axes)).trace(mapped)
        assert kernels_in(jax.jit(lambda x: decode_qkv(**x)).trace(arrays).jaxpr) == 2
    assert kernels_in(traced.jaxpr) == 0
    assert jax.tree.leaves(traced.out_info)[0].shape == (5, 16, *arrays["q_proj"].shape[1:])


@pytest.mark.slow
@pytest.mark.parametrize("caches_differ", [True, False])
def test_vmapped_calls_are_the_calls_one_by_one(caches_differ):
    """Caches come back once per call, also where all calls are given the same."""
    each = [draw(layers=2, dtype=jnp.float32, seed=n) for n in range(3)]
    names = ("x", "lengths", *(("keys", "values") if caches_differ else ()))
    mapped = {name: jnp.stack([one[name] for one in each]) if name in names else x for name, x in each[0].items()}
    axes = ({name: 0 if name in names else None for name in mapped},)
    got = jax.vmap(lambda x: decode_qkv(**x, layer=jnp.int32(1)), axes)(mapped)
    for n in range(3):
        want = decode_qkv(**{name: x[n] if name in names else x for name, x in mapped.items()}, layer=1)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[n], other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_decode_attention_continues_from_it():
    """Past the capacity the result is NaN, and only there."""
    arrays = draw(dtype=jnp.float32, lengths=[3, 4])
    q, keys, values = decode_qkv(**arrays)
    out = decode_attention(q, keys, values, arrays["lengths"] + 1)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_no_sequences_give_empty_results() -> None:
    x, w, cache = jnp.zeros((0, 16)), [jnp.zeros((16, heads, 16)) for heads in (4, 2, 2)], jnp.zeros((0, 8, 2, 16))
    q, keys, values = decode_qkv(x, *w, cache, cache, jnp.zeros(0, jnp.int32))
    assert (q.shape, keys.shape, values.shape) == ((0, 4, 16), cache.shape, cache.shape)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_in_the_stack_is_told(layer: int) -> None:
    x, w, stack = jnp.zeros((1, 16)), [jnp.zeros((16, heads, 16)) for heads in (4, 2, 2)], jnp.zeros((3, 1, 8, 2, 16))
    with pytest.raises(ValueError, match=rf"layer={layer} is not a layer of keys .*; use 0 to 2"):
        decode_qkv(x, *w, stack, stack, jnp.zeros(1, jnp.int32), layer=layer)
