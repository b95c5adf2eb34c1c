"""decode_kda: the contract, stacks of states, tokens one after the other, and what the Hopper kernels have of their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tilewright
from tests.ops.composition import assert_the_kernel_refuses, kernels_in
from tests.ops.contract import OpContract, able_to_run
from tilewright import decode_kda, gated_rms_norm, kda_gate, kda_step, matmul, short_conv_step
from tilewright.configs import DecodeKdaSm90Forward
from tilewright.ops.delta_rule.decode_kda.call import DecodeKdaCall
from tilewright.ops.delta_rule.decode_kda.cases import _case

STATES = DecodeKdaCall.stacks
SHARED = tuple(name for name in DecodeKdaCall.arrays if name not in ("x", "layer", *STATES))


class TestDecodeKda(OpContract):
    op_name = "decode_kda"
    call_type = DecodeKdaCall
    shared = SHARED
    whole_letter = "D"
    mesh_case = _case("mesh", 4, 128, 4)
    default_case = "two"
    not_taken = frozenset({("pallas_gpu", "narrow")})
    values_are_slow = True

    def extreme(self, arrays):
        """Decays from almost none to all of a channel."""
        return {**arrays, "dt_bias": 40 * arrays["dt_bias"]}

    @classmethod
    def output_specs(cls, outputs: tuple, cut: dict) -> tuple[PartitionSpec, ...]:
        """States of one layer come back without the axis of layers that the call has."""
        inputs = ("B", "W-1", "H", "K")
        letters = ("B", "H", "K"), inputs, inputs, inputs, ("B", "H", "K", "K")
        return tuple(cls.spec(each, x.shape, cut) for each, x in zip(letters, outputs, strict=True))


def draw(*, dtype=jnp.bfloat16, layers=None, seed=0, **shape):
    """The arrays of a call. States are one layer's, or stacks of several layers' that differ."""
    sizes = {"b": 2, "d": 128, "h": 1} | shape
    arrays = _case("drawn", **sizes).draw(jnp.dtype(dtype).name, seed)
    if layers is None:
        return arrays
    factors = [1 + 0.1 * n for n in range(layers)]
    return arrays | {name: jnp.stack([factor * arrays[name] for factor in factors]) for name in STATES}


def structs(**shape):
    return jax.eval_shape(lambda: draw(**shape))


def zeros(**shape):
    """float32 arrays of a small call."""
    sizes = {"d": 24, "h": 2, "k": 16, "r": 8, "w": 3} | shape
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in structs(dtype=jnp.float32, **sizes).items()}


def run(arrays, implementation="reference", config=None, **options):
    def call(given):
        return decode_kda(**given, **options, implementation=implementation, config=config)

    with able_to_run(implementation):
        return jax.jit(call)(arrays)


def assert_alike(got, want, tolerance=1e-2):
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1.0, np.abs(other).max()))


@pytest.mark.slow
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_it_is_the_ops_that_it_takes_the_place_of(lower_bound):
    arrays = draw(dtype=jnp.float32, d=24, h=2, k=16, r=8, w=3)
    x, heads = arrays["x"], arrays["dt_bias"].shape

    def product(x, w):
        return matmul(x, w.reshape(w.shape[0], -1)).reshape(x.shape[0], *w.shape[1:])

    def convolved(of, normalize):
        flat = [arrays[f"{of}_state"].reshape(2, 2, -1), product(x, arrays[f"{of}_proj"]).reshape(2, -1)]
        y, state = short_conv_step(*flat, arrays[f"{of}_conv"].reshape(3, -1), activation="silu", normalize=normalize)
        return y.reshape(2, *heads), state.reshape(2, 2, *heads)

    (q, q_state), (k, k_state), (v, v_state) = (convolved(of, None if of == "v" else 16) for of in "qkv")
    raw, gate = (product(product(x, arrays[f"{of}_down"]), arrays[f"{of}_up"]) for of in ("decay", "gate"))
    g = kda_gate(raw, arrays["A_log"], arrays["dt_bias"], lower_bound)
    beta = jax.nn.sigmoid(product(x, arrays["beta_proj"]))
    o, memory = kda_step(arrays["memory"], q, k, v, g, beta)
    y = gated_rms_norm(o, gate, arrays["norm"], activation="sigmoid", eps=1e-3)
    got = decode_kda(**arrays, lower_bound=lower_bound, eps=1e-3)
    assert_alike(got, (y, q_state, k_state, v_state, memory), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("b", "rows", "splits"), [(1, 1, 4), (3, 2, 1), (6, 4, 1), (8, 4, 2)])
def test_sequences_of_a_thread_block_follow_each_other(b, rows, splits):
    """One, two or four at once, also where the last block has fewer sequences than the others."""
    arrays = draw(b=b, h=2, d=128 * splits)
    config = DecodeKdaSm90Forward(block_b=16, stages=2, splits=splits, rows=rows)
    assert_alike(run(arrays, "pallas_gpu", config), run(arrays))


@pytest.mark.slow
def test_rates_may_differ_between_channels():
    """Equal rates per channel are those of the head, in both implementations, and others are others."""
    arrays = draw(h=2)
    per_channel = arrays | {"A_log": jnp.broadcast_to(arrays["A_log"][:, None], arrays["dt_bias"].shape)}
    for implementation in ("reference", "pallas_gpu"):
        for one, other in zip(run(per_channel, implementation), run(arrays, implementation), strict=True):
            np.testing.assert_array_equal(one, other)
    sloped = per_channel | {"A_log": per_channel["A_log"] + jnp.linspace(0, 2, 128)[None]}
    want = run(sloped)
    assert_alike(run(sloped, "pallas_gpu"), want)
    assert np.abs(np.asarray(want[4] - run(arrays)[4])).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "pallas_gpu"])
def test_a_stack_is_updated_in_one_layer(implementation):
    """And in none where the layer is not there."""
    arrays = draw(layers=3)
    y, *stacks = run(arrays, implementation, layer=jnp.int32(1))
    want = run({**arrays, **{name: arrays[name][1] for name in STATES}})
    assert_alike([y, *(stack[1] for stack in stacks)], want)
    for stack, name in zip(stacks, STATES, strict=True):
        np.testing.assert_array_equal(stack[::2], arrays[name][::2])
    for layer in (-1, 3):
        _, *after = run(arrays, implementation, layer=jnp.int32(layer))
        assert all(np.array_equal(stack, arrays[name]) for stack, name in zip(after, STATES, strict=True))


@pytest.mark.slow
def test_tokens_in_a_loop_over_layers_are_computed_in_place():
    """Two layers of one stack: the carry of a loop goes through the kernel, as a model's decoding does."""
    arrays = draw(layers=2)

    def decoded(implementation):
        def layer(index, carry):
            states, total = carry
            y, *states = decode_kda(**{**arrays, **states}, layer=index, implementation=implementation)
            return dict(zip(STATES, states, strict=True)), total + y.astype(jnp.float32)

        start = {name: arrays[name] for name in STATES}, jnp.zeros((2, 1, 128))
        return jax.jit(lambda start: jax.lax.fori_loop(0, 2, layer, start))(start)

    with able_to_run("pallas_gpu"):
        got = decoded("pallas_gpu")
    assert_alike(jax.tree.leaves(got), jax.tree.leaves(decoded("reference")))


def test_an_h200_gets_two_kernels_that_work_in_place():
    arrays = structs(b=64, d=2048, h=16, layers=18)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda x, n: decode_kda(**x, layer=n), arrays, layer).decisions
        traced = jax.jit(lambda x, n: decode_kda(**x, layer=n)).trace(arrays, layer)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert decision.implementation == "pallas_gpu"
    assert decision.configs == {"forward": DecodeKdaSm90Forward(block_b=64, stages=4, splits=2, rows=4)}
    assert "backward: the gradient of implementation='reference'" in str(decision)
    assert kernels_in(traced.jaxpr) == text.count("stablehlo.custom_call @mosaic_gpu") == 2
    aliased = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert [int(output) for output, _ in aliased] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"b": 65}, r"B=65 must be from 1 to 64 \(the weights are read once\)"),
        ({"k": 64}, r"K=64 and R=128 must be 128"),
        ({"r": 64}, r"K=128 and R=64 must be 128"),
        ({"d": 192}, r"D=192 must be a multiple of 128"),
        ({"dtype": jnp.float32}, r"x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text):
    assert_the_kernel_refuses(decode_kda, structs(**shape), text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.zeros((2, 1, 24))}, r"x is float32\[2, 1, 24\]; it must be \[B, D\].*: pass x\[:, 0\]"),
        ({"q_proj": jnp.zeros((24, 32))}, r"q_proj is float32\[24, 32\] and x has D=24; .* q_proj.reshape\(D, H, K\)"),
        (
            {"q_conv": jnp.zeros((1, 2, 16))},
            r"q_conv is float32\[1, 2, 16\]; it must be \[W, H, K\] with a W of 2 or more",
        ),
        ({"decay_down": jnp.zeros((24,))}, r"decay_down is float32\[24\]; it must be \[D, R\]"),
        ({"gate_up": jnp.zeros((8, 32))}, r"gate_up is float32\[8, 32\]; it must be \[R, H, K\] = \[8, 2, 16\]"),
        ({"A_log": jnp.zeros((3,))}, r"A_log is float32\[3\]; it must be \[H\] = \[2\]"),
        (
            {"norm": jnp.zeros((16,), jnp.int32)},
            r"norm is int32\[16\]; it must be float32 or bfloat16: pass norm.astype",
        ),
        (
            {"memory": jnp.zeros((2, 2, 16, 8))},
            r"memory is float32\[2, 2, 16, 8\]; it must be \[B, H, K, K\] = \[2, 2, 16, 16\]",
        ),
        ({"memory": jnp.zeros((2, 2, 16, 16), jnp.bfloat16)}, r"memory has dtype bfloat16; it must be float32: pass"),
        ({"k_state": jnp.zeros((2, 3, 2, 16))}, r"k_state is .* must be \[B, W-1, H, K\] = \[2, 2, 2, 16\]"),
        ({"v_state": jnp.zeros((2, 2, 2, 16), jnp.bfloat16)}, r"v_state has dtype bfloat16 and x float32; .*astype"),
        (
            {"layer": 0},
            r"layer=0 and memory is .*; a stack .* needs the number of a layer, and a single layer's states",
        ),
        ({"lower_bound": 1.0}, r"lower_bound=1.0 must be at least -5 and negative"),
        ({"eps": None}, r"eps=None is not a Python number; .* pass a number"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text):
    with pytest.raises(ValueError, match=text):
        decode_kda(**{**zeros(), **changed})


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_in_the_stack_is_told(layer):
    with pytest.raises(ValueError, match=rf"layer={layer} is not a layer of memory .*; use 0 to 2"):
        decode_kda(**zeros(layers=3), layer=layer)


def test_a_config_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"block_b=8 must be 16, 32 or 64 \(columns of a product\); use 16"):
        DecodeKdaSm90Forward(block_b=8, stages=4, splits=1, rows=1)
    with pytest.raises(ValueError, match=r"rows=0 must be a positive integer"):
        DecodeKdaSm90Forward(block_b=16, stages=4, splits=1, rows=0)


def test_no_sequences_give_empty_results():
    results = decode_kda(**zeros(b=0))
    assert [x.shape for x in results] == [(0, 2, 16), (0, 2, 2, 16), (0, 2, 2, 16), (0, 2, 2, 16), (0, 2, 16, 16)]
