"""decode_layers: the contract, the ops that it takes the place of, and what the persistent Hopper kernel has of its own."""

import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import kernels_in
from tests.ops.contract import OpContract, able_to_run
from tilewright import decode_attention, decode_layers, decode_qkv, decode_residual, matmul, rms_norm
from tilewright.core.chip import Chip
from tilewright.ops.attention.decode_layers.call import DecodeLayersCall
from tilewright.ops.attention.decode_layers.cases import _case
from tilewright.ops.attention.decode_layers.pallas_gpu import block, sm90_fwd
from tilewright.ops.attention.decode_layers.pallas_gpu.plan import plan_for
from tilewright.ops.rope.api import Linear


class TestDecodeLayers(OpContract):
    op_name = "decode_layers"
    call_type = DecodeLayersCall
    batched = False  # The batch is not the first axis of a stack of caches.
    values_are_slow = True
    whole_letter = "D"
    cuts: ClassVar = {"batch": {"B": "x"}}
    not_taken = frozenset({("pallas_gpu", "grouped"), ("pallas_gpu", "plain")})
    mesh_case = _case("mesh", 1, 256, (2, 1), 256, 32, b=2)
    # The kernel takes the one sequence that each device has of a mesh's batch, and not the whole batch.
    test_auto_axes_of_the_kernel = None
    test_export_takes_each_platform_s_kernel_or_refuses = None


def structs(layers=1, d=256, heads=(2, 1), f=256, s=64, b=1, c=128, dtype="bfloat16", **options):
    return _case("drawn", layers, d, heads, f, s, b=b, c=c, **options).structs(dtype)


def draw(length=0, **shape):
    """Arrays of numpy's: to draw them with JAX is a program per shape."""
    rng = np.random.default_rng(0)

    def array(name, like):
        if name == "lengths":
            return jnp.full(like.shape, length, like.dtype)
        scale = 1.0 if name in ("x", "keys", "values") else 0.3 if "norm" in name else like.shape[1] ** -0.5
        return jnp.asarray(("norm" in name) + scale * rng.standard_normal(like.shape, np.float32)).astype(like.dtype)

    return {name: array(name, like) for name, like in structs(**shape).items()}


@pytest.mark.slow
def test_it_is_the_ops_that_it_takes_the_place_of():
    """Two layers of the ops of one layer each, for two sequences."""
    arrays = draw(layers=2, d=64, heads=(4, 2), f=96, s=6, b=2, c=16, dtype="float32", length=3)
    norms = {"eps": 1e-5, "norm_offset": 0.5}
    rotation = {"theta": 100.0, "scaling": Linear(2.0), "rotary_dim": 8}

    @jax.jit
    def one_by_one(arrays):
        x, lengths, *caches = (arrays[name] for name in ("x", "lengths", "keys", "values"))
        for layer in range(2):
            own = {name: value[layer] for name, value in arrays.items() if name not in ("x", "lengths")}
            n = rms_norm(x, own["mixer_norm"], eps=1e-5, offset=0.5)
            weights = (own[name] for name in ("q_proj", "k_proj", "v_proj"))
            of_heads = {name: own[name] for name in ("q_norm", "k_norm")}
            q, *caches = decode_qkv(n, *weights, *caches, lengths, layer=layer, **of_heads, **norms, **rotation)
            o = decode_attention(q, caches[0][layer], caches[1][layer], lengths + 1)
            x, n = decode_residual(o.reshape(2, -1), own["o_proj"].reshape(-1, 64), x, own["mlp_norm"], **norms)
            h = matmul(n, own["gate_up"], activation="swiglu")
            x, _ = decode_residual(h, own["down"], x, own["mlp_norm"], **norms)
        return x, *caches

    got = jax.jit(lambda arrays: decode_layers(**arrays, **norms, **rotation))(arrays)
    for one, other in zip(got, one_by_one(arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_a_token_that_does_not_fit_is_nan_and_not_written():
    arrays = draw(layers=2, d=32, heads=(2, 1), f=32, s=4, b=4, c=16, dtype="float32")
    lengths = jnp.array([3, 4, -1, 2**30], jnp.int32)
    x, *caches = decode_layers(**{**arrays, "lengths": lengths})
    assert np.isnan(x).all(axis=1).tolist() == [False, True, True, True]
    for name, cache in zip(("keys", "values"), caches, strict=True):
        changed = np.any(np.asarray(cache != arrays[name]), axis=(3, 4))  # [L, B, S]
        assert np.argwhere(changed).tolist() == [[0, 0, 3], [1, 0, 3]]


@pytest.mark.slow
def test_vmapped_calls_run_one_by_one():
    """No array has the batch in front, so calls that differ in x and lengths alone are not merged."""
    arrays = draw(layers=1, d=32, f=32, s=4, c=16, dtype="float32")
    x, lengths = jnp.stack([arrays["x"], -arrays["x"]]), jnp.array([[1], [3]], jnp.int32)
    run = jax.jit(lambda x, lengths: decode_layers(**{**arrays, "x": x, "lengths": lengths}))
    got = jax.jit(jax.vmap(run))(x, lengths)
    for n in range(2):
        for one, other in zip(got, run(x[n], lengths[n]), strict=True):
            np.testing.assert_allclose(one[n], other, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_kernel_at_any_length(monkeypatch):
    """A cache that is empty, and one that is full: NaN behind the last token is not read, and x is NaN without room.

    The six tiles of gate_up go through four stages.
    """
    for module in (block, sm90_fwd):
        monkeypatch.setattr(module, "STAGES", 4)
    arrays = draw(s=32, f=384)

    def run(length, implementation):
        behind = (jnp.arange(32) >= length)[None, None, :, None, None]
        dirty = {name: jnp.where(behind, jnp.nan, arrays[name]) for name in ("keys", "values")}
        return decode_layers(
            **{**arrays, **dirty, "lengths": jnp.full((1,), length, jnp.int32)}, implementation=implementation
        )

    compiled = jax.jit(run, static_argnums=1)
    for length in (0, 32):
        with able_to_run("pallas_gpu"):
            got = compiled(jnp.int32(length), "pallas_gpu")
        for one, other in zip(got, compiled(jnp.int32(length), "reference"), strict=True):
            one, other = (np.asarray(each, np.float32) for each in (one, other))
            bound = 2**-6 * np.max(np.abs(other), where=np.isfinite(other), initial=1.0)
            np.testing.assert_allclose(one, other, rtol=0, atol=bound, equal_nan=True)
        assert np.isnan(np.asarray(got[0], np.float32)).all() == (length == 32)


@pytest.mark.parametrize(("d", "f"), [pytest.param(1024, 3072, marks=pytest.mark.slow), (2048, 6144)])
def test_an_h200_gets_one_kernel_that_works_in_place(d, f):
    """Qwen3-0.6B's sizes and Qwen3-1.7B's."""
    arrays = structs(28, d, (16, 8), f, 1088)
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda x: decode_layers(**x), arrays).decisions
        traced = jax.jit(lambda x: decode_layers(**x)).trace(arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert decision.implementation == "pallas_gpu"
    assert "backward: the gradient of implementation='reference'" in str(decision)
    assert kernels_in(traced.jaxpr) == text.count("stablehlo.custom_call @mosaic_gpu") == 1
    aliased = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert len(aliased) == 3  # Both caches, and the words that blocks exchange.


@pytest.mark.parametrize(("d", "kv", "f"), [(1024, 8, 3072), (2048, 8, 6144), (256, 1, 256), (512, 2, 384)])
def test_a_plan_divides_every_product_evenly(d, kv, f):
    """Every tile of each product has one block, and the rows of qkv that a block reads are those of x that it has."""
    sizes = {"layers": 2, "d": d, "kv": kv, "hidden": f, "capacity": 64, "eps": 1e-6, "norm_offset": 0.0}
    plan = plan_for(**sizes, multiprocessors=132)
    assert plan is not None
    assert plan.blocks <= 132
    for phase, rows, columns in (("qkv", d, 4 * kv * 128), ("o", 256 * kv, d), ("gate_up", d, 2 * f), ("down", f, d)):
        product = plan.product(phase)
        assert product.groups * product.splits == plan.blocks
        assert product.stages * plan.blocks * 128 * 64 == rows * columns
    for number in range(plan.blocks):
        first = number // plan.qkv.groups * plan.qkv.own_rows
        own = number // plan.gate_up.groups * plan.gate_up.own_rows
        assert own <= first < first + plan.qkv.own_rows <= own + plan.gate_up.own_rows
    ends = [first + int(np.prod(shape)) for first, shape in plan.mail.values()]
    assert all(end <= first for end, (first, _) in zip(ends, list(plan.mail.values())[1:], strict=False))
    assert plan.words == ends[-1]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"b": 2}, r"B=2 must be 1 \(one token, whose products need no tensor cores\)"),
        ({"dtype": "float32"}, r"x is float32, and it multiplies bfloat16 only"),
        ({"c": 64}, r"H=2, KV=1 and C=64 must be 2 KV query heads of 128 channels"),
        ({"heads": (4, 1)}, r"H=4, KV=1 and C=128 must be 2 KV query heads of 128 channels"),
        ({"norms": False}, r"q_norm or k_norm is None, and it normalises queries and keys"),
        ({"s": 40}, r"S=40 must be a multiple of 32 \(keys of a copy\)"),
        ({"d": 320}, r"D=320, KV=1 and F=256 cannot be divided between the 132 multiprocessors"),
    ],
)
def test_what_the_kernel_refuses(shape, text):
    arrays = structs(**shape)
    with tilewright.target("h200"):
        told = tilewright.explain(lambda x: decode_layers(**x, implementation="pallas_gpu"), arrays)
        (decision,) = tilewright.explain(lambda x: decode_layers(**x), arrays).decisions
    assert told.refusal is not None
    assert "use implementation='reference'" in told.refusal
    assert decision.implementation == "reference"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(told.refusal)


@pytest.mark.parametrize(
    ("multiprocessors", "text"),
    [
        (None, "how many multiprocessors the chip has is not known"),
        (6, "cannot be divided between the 6 multiprocessors"),
    ],
)
def test_a_chip_that_cannot_hold_all_blocks_is_refused(multiprocessors, text):
    """Blocks that are not resident would be waited for."""
    chip = Chip(name="unknown", platform="gpu", compute_capability=(9, 0), multiprocessors=multiprocessors)
    arrays = structs(28, 2048, (16, 8), 6144, 1088)
    with tilewright.target(chip):
        told = tilewright.explain(lambda x: decode_layers(**x, implementation="pallas_gpu"), arrays)
    assert told.refusal is not None
    assert text in told.refusal


def test_half_of_a_head_that_rotates_is_refused():
    with tilewright.target("h200"):
        told = tilewright.explain(lambda x: decode_layers(**x, rotary_dim=64, implementation="pallas_gpu"), structs())
    assert "rotary_dim=64 must be C=128 (both halves of a head rotate)" in (told.refusal or "")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.zeros((2, 1, 64))}, r"x is float32\[2, 1, 64\]; it must be \[B, D\].*: pass x\[:, 0\]"),
        (
            {"q_proj": jnp.zeros((2, 64, 32))},
            r"q_proj is float32\[2, 64, 32\]; it must be \[L, D, H, C\] = \[2, 64, H, C\]",
        ),
        (
            {"o_proj": jnp.zeros((2, 16, 4, 64))},
            r"o_proj is float32\[2, 16, 4, 64\]; it must be \[L, H, C, D\] = \[2, 4, 16, 64\]",
        ),
        ({"gate_up": jnp.zeros((2, 64, 3, 96))}, r"gate_up .* must be \[L, D, 2, F\] = \[2, 64, 2, 96\]"),
        ({"keys": jnp.zeros((2, 6, 2, 16))}, r"keys .* must be \[L, B, S, KV, C\] = \[2, 2, S, 2, 16\]"),
        ({"values": jnp.zeros((2, 2, 5, 2, 16))}, r"values .* must be \[L, B, S, KV, C\] = \[2, 2, 6, 2, 16\]"),
        ({"down": jnp.zeros((2, 96, 64), jnp.bfloat16)}, r"down has dtype bfloat16 and x float32; .*astype"),
        ({"lengths": jnp.zeros((2,))}, r"lengths is float32\[2\]; it must be integer"),
        ({"mlp_norm": jnp.zeros((2, 64), jnp.int32)}, r"mlp_norm is int32\[2, 64\]; it must be floating"),
        ({"q_norm": jnp.zeros((16,))}, r"q_norm is float32\[16\]; it must be \[L, C\] = \[2, 16\]"),
        ({"eps": None}, r"eps=None is not a Python number; .* pass a number"),
        ({"rotary_dim": 18}, r"rotary_dim=18 must be an even number from 2 to C=16"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text):
    arrays = draw(layers=2, d=64, heads=(4, 2), f=96, s=6, b=2, c=16, dtype="float32")
    with pytest.raises(ValueError, match=text):
        decode_layers(**{**arrays, **changed})


def test_query_heads_are_a_multiple_of_key_heads():
    arrays = draw(layers=2, d=64, heads=(4, 3), f=96, s=6, c=16, dtype="float32")
    with pytest.raises(ValueError, match=r"H=4 query heads must be a multiple of KV=3 key and value heads"):
        decode_layers(**arrays)
