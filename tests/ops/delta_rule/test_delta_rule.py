"""The delta-rule family: the contract for its three ops, and what is its own: states, segments, causality, gates,
steps.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tests.ops.contract import OpContract, able_to_run, implementations
from tilewright.configs import DeltaRuleTpuBackward, DeltaRuleTpuForward, DeltaRuleXlaForward
from tilewright.core.case import Case
from tilewright.core.dispatch import find_op
from tilewright.core.numerics import discrepancy
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.cases import OPS, _case
from tilewright.workbench.bench import Timing, bench_case
from tilewright.workbench.check import CaseCheck, call, call_with_gradients

IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")
every_op = pytest.mark.parametrize("op", OPS)
every_implementation = implementations(*IMPLEMENTATIONS)
GATED = ("gated_delta_rule", "kda")
op_and_fast_implementation = pytest.mark.parametrize(
    ("op", "implementation"),
    [
        pytest.param(op, name, marks=[pytest.mark.slow] if name == "pallas_tpu" else [])
        for op, name in itertools.product(GATED, ("pallas_tpu", "xla"))
    ],
)
MIB = 2**20


class DeltaRuleContract(OpContract):
    """What the three ops share. Properties are tested on two chunks of 64 tokens, the second one not full."""

    tokens = ("q", "k", "v", "g", "beta", "segment_ids", "o")
    state = ("initial_state", "final_state")
    segments = "segment_ids"
    segments_end_where_ids_change = True
    call_type = DeltaRuleCall
    plainly_differentiable = ("xla",)
    widths = (16, 16)

    @classmethod
    def on_properties(cls) -> Case:
        return _case(cls.op_name, "properties", 2, 75, 1, *cls.widths, hv=2, state=True, segments=4, gate=0.3)

    def extreme(self, arrays: dict) -> dict:
        """Gates that forget everything or nothing; betas of 0 and 1, and one key twenty times."""
        if "g" in arrays:
            g = arrays["g"].at[:, jnp.array([3, 30, 31, 64])].set(-1e4).at[:, 12].set(-jnp.inf)
            arrays["g"] = g.at[:, 40:50].set(0.0)
        arrays["beta"] = arrays["beta"].at[:, 5].set(0.0).at[:, 6].set(1.0).at[:, 20:40].set(1.0)
        arrays["k"] = arrays["k"].at[:, 20:40].set(arrays["k"][:, 20:21])
        return arrays


class TestDeltaRule(DeltaRuleContract):
    op_name = "delta_rule"
    shares_code_with = "gated_delta_rule"
    is_a_special_case = True  # Without gates.
    not_interpreted = frozenset({"strong_gate"})


class TestGatedDeltaRule(DeltaRuleContract):
    op_name = "gated_delta_rule"
    properties_in_default_tier = True
    interpreted_slowly = frozenset({"pallas_gpu", "pallas_tpu"})  # Kernels are the same as those of `kda`, or near.


class TestKda(DeltaRuleContract):
    op_name = "kda"
    shares_code_with = "gated_delta_rule"
    # Not 16: the Hopper backward reads the states rounded to bfloat16, an error of dq as large as the rounding of dq. In
    # 60 draws of a model of these two roundings, dq's relative error was 0.6 of its bound at any width. Its largest error
    # was past the bound in 3 draws with heads of 16, whose few elements bound it by luck, and in none with 40.
    widths = (40, 40)


def draw(op: str, t: int = 40, *, b: int = 1, h: int = 1, hv: int = 2, k: int = 16, v: int = 16, seed: int = 0, **more):
    """Arguments of `op`, a state among them."""
    arrays = _case(op, "drawn", b, t, h, k, v, hv=hv, state=True, **more).draw("float32", seed)
    # Heavier gates than a trained layer has, so that there is something to get wrong.
    if "g" in arrays:
        arrays["g"] = arrays["g"] * 3
    return arrays


def run(op: str, arrays, implementation: str | None = None, *, plain: bool = True, **options):
    with able_to_run(implementation or "xla", plain=plain):
        # Jitted: op by op, each of a chunk's operations would be compiled alone.
        return jax.jit(lambda given: find_op(op).function(**given, implementation=implementation, **options))(arrays)


def over_time(arrays, part: slice, state=None):
    """The tokens of `part`, from `state`."""
    cut = {name: array if name == "initial_state" else array[:, part] for name, array in arrays.items()}
    return cut if state is None else cut | {"initial_state": state}


def close(got, want, tolerance: float = 2e-6) -> None:
    error = discrepancy(got, want)
    assert error.not_finite == 0
    assert error.max_abs <= tolerance * max(error.scale, 1e-30), error


# States, segments, batch.


@pytest.mark.slow
@pytest.mark.parametrize(("op", "split"), [("kda", 1), ("gated_delta_rule", 32)])
def test_two_calls_chained_through_the_state_are_one(op: str, split: int) -> None:
    """As the contract has it for the middle of a chunk: after one token, and at the end of a chunk."""
    arrays = draw(op)
    o, state = run(op, arrays, "xla")
    first, between = run(op, over_time(arrays, slice(0, split)), "xla")
    second, last = run(op, over_time(arrays, slice(split, None), between), "xla")
    close(jnp.concatenate([first, second], axis=1), o)
    close(last, state)


@pytest.mark.slow
@pytest.mark.parametrize("op", GATED)
def test_nothing_later_changes_what_was_on_a_tpu(op: str) -> None:
    """To the bit, with gates as strong as they come: the kernel takes mild and strong gates in different ways."""
    arrays, other, t = draw(op, 75), draw(op, 75, seed=1), 37
    arrays["g"] = arrays["g"].at[:, 20].set(-1e4).at[:, 38].set(0.0)
    other["g"] = other["g"].at[:, t + 1 :: 2].set(-1e4)
    arrays, other = (
        {name: x.astype(jnp.bfloat16) if name in ("q", "k", "v") else x for name, x in given.items()}
        for given in (arrays, other)
    )
    mixed = {
        name: array
        if name == "initial_state"
        else jnp.concatenate([array[:, : t + 1], other[name][:, t + 1 :]], axis=1)
        for name, array in arrays.items()
    }
    o, _ = run(op, arrays, "pallas_tpu")
    changed, _ = run(op, mixed, "pallas_tpu")
    np.testing.assert_array_equal(o[:, : t + 1], changed[:, : t + 1])
    assert not np.array_equal(o[:, t + 1 :], changed[:, t + 1 :])


@pytest.mark.slow
@every_op
def test_unbatched_inputs(op: str) -> None:
    arrays = draw(op)
    o, state = run(op, arrays)
    alone_o, alone_state = run(op, {name: array[0] for name, array in arrays.items()})
    np.testing.assert_array_equal(alone_o, o[0])
    np.testing.assert_array_equal(alone_state, state[0])


@every_op
def test_no_tokens_leave_the_state_as_it_is(op: str) -> None:
    arrays = over_time(draw(op), slice(0, 0))
    o, state = run(op, arrays)
    assert o.shape == (1, 0, 2, 16)
    np.testing.assert_array_equal(state, arrays["initial_state"])


# Gates.


@pytest.mark.slow
@pytest.mark.parametrize("strongest", [1.0, 2.5, 6.0])
def test_channels_that_fall_too_far_for_one_product_are_halved(strongest: float) -> None:
    """kda on a CPU: rows of a chunk are computed one way until a channel has decayed by e^-64, and another way then."""
    arrays = draw("kda", 75)
    # By itself channel 3 decays by e^-`strongest` per token: never too far, after 26 tokens of a chunk, after 11.
    arrays["g"] = arrays["g"].at[..., 3].set(-strongest)
    case = _case("kda", "drawn", 1, 75, 1, 16, 16, hv=2, state=True)
    cotangents = (jnp.ones_like(arrays["v"]), jnp.ones_like(arrays["initial_state"]))
    got, want = (
        jax.jit(call_with_gradients(call(find_op("kda"), case, name), case))(arrays, cotangents)
        for name in ("xla", "reference")
    )
    for quantity in want:
        close(got[quantity], want[quantity], 4e-6)


@pytest.mark.slow
def test_rows_before_a_channel_falls_too_far_do_not_change() -> None:
    arrays = draw("kda", 75)
    o, _ = run("kda", arrays, "xla")
    changed, _ = run("kda", arrays | {"g": arrays["g"].at[:, 40:, :, 3].set(-70.0)}, "xla")
    np.testing.assert_array_equal(o[:, :40], changed[:, :40])
    assert not np.array_equal(o[:, 40:], changed[:, 40:])


@pytest.mark.parametrize("op", GATED)
def test_a_positive_gate_lets_the_state_grow(op: str) -> None:
    arrays = draw(op)
    arrays["g"] = jnp.abs(arrays["g"]) * 0.2
    o, state = run(op, arrays, "xla")
    want_o, want_state = run(op, arrays, "reference")
    assert float(jnp.max(jnp.abs(want_state))) > float(jnp.max(jnp.abs(arrays["initial_state"])))
    close(o, want_o, 2e-5)
    close(state, want_state, 2e-5)


@pytest.mark.slow
def test_like_keys_do_not_break_the_inverse() -> None:
    """One key 64 times with beta 1: a Neumann series of the chunk's matrix has terms of 1e18 here."""
    arrays = draw("delta_rule", 64)
    arrays["k"] = jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays["beta"] = jnp.ones_like(arrays["beta"])
    for implementation in ("pallas_tpu", "xla"):
        o, _ = run("delta_rule", arrays, implementation)
        close(o, run("delta_rule", arrays, "reference")[0])


def test_gates_from_raw_inputs() -> None:
    a = jnp.asarray([[-3.0, 0.0, 40.0]])
    A_log, dt_bias = jnp.asarray([0.0, 1.0, -1.0]), jnp.asarray([0.5, -0.5, 0.0])
    want = -np.exp(A_log) * np.log1p(np.exp(np.float64(a + dt_bias[None])))
    np.testing.assert_allclose(tilewright.gdn_gate(a, A_log, dt_bias), want, rtol=1e-6)
    x = jnp.stack([a, -a], axis=-1)  # [1, 3, 2]
    bias = jnp.stack([dt_bias, dt_bias], axis=-1)
    got = tilewright.kda_gate(x, A_log, bias)
    np.testing.assert_allclose(got[..., 0], want, rtol=1e-6)
    bounded = tilewright.kda_gate(x, A_log, bias, lower_bound=-5.0)
    rate = np.exp(A_log)[None, :, None]
    np.testing.assert_allclose(bounded, -5.0 / (1 + np.exp(-rate * (x + bias[None]))), rtol=1e-6)
    assert np.all(bounded >= -5.0)


# Steps.


@pytest.mark.slow
@every_op
def test_steps_are_the_sequence(op: str) -> None:
    arrays = draw(op, 9, b=2)
    o, final = run(op, arrays, "xla", normalize_qk=True)
    step, state, outputs = getattr(tilewright, f"{op}_step"), arrays["initial_state"], []
    for t in range(9):
        token = {name: array[:, t] for name, array in arrays.items() if name != "initial_state"}
        o_t, state = step(state, **token, normalize_qk=True)
        outputs.append(o_t)
    close(jnp.stack(outputs, axis=1), o)
    close(state, final)
    alone, _ = step(state[0], **{name: array[0, 3] for name, array in arrays.items() if name != "initial_state"})
    assert alone.shape == (2, 16)


@pytest.mark.slow
@every_op
def test_a_step_has_gradients(op: str) -> None:
    arrays = draw(op, 1)
    step = getattr(tilewright, f"{op}_step")
    token = {name: array[:, 0] for name, array in arrays.items() if name != "initial_state"}

    def by_step(state, token):
        o, after = step(state, **token)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(after))

    def by_sequence(state, token):
        o, after = run(op, {name: x[:, None] for name, x in token.items()} | {"initial_state": state}, "xla")
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(after))

    got, want = (jax.grad(f, (0, 1))(arrays["initial_state"], token) for f in (by_step, by_sequence))
    jax.tree.map(close, got, want)


# Exactness.


@pytest.mark.slow
@op_and_fast_implementation
def test_bfloat16_is_as_good_as_a_recurrence_that_rounds_its_output_alone(op: str, implementation: str) -> None:
    """The recurrence in float32 on the same bfloat16 inputs, rounded at the end: its error is one rounding.

    Outputs and gradients in bfloat16 are within twice that, and float32 states and gradients within 1e-4.
    """
    held = CaseCheck(find_op(op), _case(op, "drawn", 1, 75, 1, 32, 32, hv=2, state=True), "bfloat16")
    with able_to_run(implementation, plain=True):
        results = held.check(implementation)
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"
        if result.quantity in held.case.rounded:
            assert result.verdict.error.relative < 1e-4, f"{result.quantity}: {result.verdict}"


TINY_BLOCKS = {
    "pallas_tpu": (DeltaRuleTpuForward(block_chunks=1, heads=2), DeltaRuleTpuBackward(2)),
    "xla": DeltaRuleXlaForward(8, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "implementation"),
    [
        pytest.param("gated_delta_rule", "pallas_tpu", marks=pytest.mark.slow),
        pytest.param("kda", "pallas_tpu", marks=pytest.mark.slow),
        ("kda", "xla"),
    ],
)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    t=st.integers(1, 100),
    heads=st.sampled_from([(1, 2), (2, 2), (1, 4)]),
    k=st.integers(16, 40),
    v=st.integers(16, 40),
    segments=st.integers(0, 6),
)
def test_any_shape_through_many_blocks(op: str, implementation: str, t, heads, k, v, segments) -> None:
    h, hv = heads
    case = _case(op, "drawn", 1, t, h, k, v, hv=hv, state=True, segments=segments, gate=1.0)
    held = CaseCheck(find_op(op), case, "float32")
    with able_to_run(implementation, plain=True):
        results = held.check(implementation, TINY_BLOCKS[implementation])
    for result in results:
        assert result.verdict.error.not_finite == 0
        assert result.verdict.error.relative < 5e-6, f"{result.quantity}: {result.verdict}"


@pytest.mark.slow
def test_mild_and_strong_chunks_are_worked_on_together() -> None:
    """kda's TPU kernels take two chunks at a time, of which one may have strong gates, and compute that one again."""
    arrays = draw("kda", 130)
    arrays["g"] = arrays["g"].at[:, 64:128].add(-5.0)
    weights = jax.random.normal(jax.random.key(1), arrays["v"].shape, jnp.bfloat16).astype(jnp.float32)
    narrow = {name: x.astype(jnp.bfloat16) if name in ("q", "k", "v") else x for name, x in arrays.items()}
    config = (DeltaRuleTpuForward(block_chunks=2, heads=2, interleave=2), DeltaRuleTpuBackward(2, 2))

    def gradients(given, implementation: str, config):
        def loss(given):
            o, state = find_op("kda").function(**given, implementation=implementation, config=config)
            return jnp.sum(o.astype(jnp.float32) * weights) + jnp.sum(state)

        with able_to_run(implementation, plain=True):
            return jax.jit(jax.grad(loss))(given)

    got = gradients(narrow, "pallas_tpu", config)
    want = gradients({name: x.astype(jnp.float32) for name, x in narrow.items()}, "xla", None)
    for name in arrays:
        close(got[name].astype(jnp.float32), want[name], 1e-4 if name in ("g", "beta", "initial_state") else 2**-8)


@pytest.mark.slow
def test_wide_heads_in_the_kernel() -> None:
    arrays = draw("gated_delta_rule", 20, hv=1, k=256, v=256)
    o, state = run("gated_delta_rule", arrays, "pallas_tpu")
    want_o, want_state = run("gated_delta_rule", arrays, "reference")
    close(o, want_o)
    close(state, want_state)


# Memory and speed.


@pytest.mark.slow
@pytest.mark.parametrize("op", GATED)
def test_memory_beyond_the_results_does_not_grow_with_the_states(op: str) -> None:
    """Value and gradients of 8,192 tokens compile to less than a tenth of the 2 GiB of one state per token."""

    def temporary(t: int) -> int:
        case = _case(op, "drawn", 1, t, 4, 128, 128)
        record = bench_case(find_op(op), case, "xla", "bfloat16", "forward+backward", Timing(run=False))
        taken = record.metrics["temp_bytes"]
        assert isinstance(taken, int)
        return taken

    assert temporary(8192) < 200 * MIB


# Under transformations.


@pytest.mark.slow
def test_hessian_vector_products_on_a_mesh_and_under_vmap() -> None:
    """Forward over reverse of everything, several blocks of chunks, each device with its part of the batch."""
    op, case = find_op("gated_delta_rule"), _case("gated_delta_rule", "drawn", 2, 11, 1, 16, 16, hv=2, state=True)
    arrays, tangents = case.draw("float32"), case.draw("float32", 1)

    def product(arrays, tangents, implementation):
        config = DeltaRuleXlaForward(8, 1) if implementation == "xla" else None
        function = call(op, case, implementation, config=config)

        def gradient(arrays):
            return jax.grad(lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in function(**arrays)))(arrays)

        return jax.jvp(gradient, (arrays,), (tangents,))[1]

    specs = {name: jax.sharding.PartitionSpec("x") for name in arrays}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    one = functools.partial(product, implementation="xla")
    sharded = jax.shard_map(one, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (arrays, tangents))
    got, vmapped = jax.jit(sharded)(arrays, tangents), jax.jit(jax.vmap(one))(*stacked)
    for name, want in jax.jit(functools.partial(product, implementation="reference"))(arrays, tangents).items():
        close(got[name], want)
        close(vmapped[name][0], want)


# What is refused.


def spoiled(op: str, **changes):
    return draw(op, 8, h=2, hv=4) | changes


@pytest.mark.parametrize(
    ("op", "changes", "text"),
    [
        ("kda", {"v": jnp.zeros((1, 8, 3, 16))}, r"v has HV=3 heads and q has H=2; HV must be a multiple of H.*use HV=4"),
        (
            "gated_delta_rule",
            {"g": jnp.zeros((1, 8, 4, 16))},
            r"g is float32\[1, 8, 4, 16\], one gate per key channel, .* gate of kda; .* = \[1, 8, 4\]: use kda",
        ),
        (
            "kda",
            {"g": jnp.zeros((1, 8, 4))},
            r"g is float32\[1, 8, 4\], one gate per head, .* gated_delta_rule; .*broadcast_to\(g\[\.\.\., None\]",
        ),
        ("gated_delta_rule", {"g": jnp.zeros((1, 4, 8))}, r"g is .*; it must be \[B, T, HV\] = \[1, 8, 4\]"),
        ("delta_rule", {"beta": jnp.zeros((1, 8))}, r"beta is float32\[1, 8\]; it must be \[B, T, HV\] = \[1, 8, 4\]"),
        (
            "delta_rule",
            {"initial_state": jnp.zeros((1, 4, 16, 17))},
            r"initial_state is .*\[1, 4, 16, 17\]; it must be \[B, HV, K, V\] = \[1, 4, 16, 16\]",
        ),
        (
            "delta_rule",
            {"v": jnp.zeros((1, 8, 4, 32)), "initial_state": jnp.zeros((1, 4, 32, 16))},
            r"it looks transposed: pass jnp\.swapaxes",
        ),
        (
            "delta_rule",
            {"initial_state": jnp.zeros((1, 4, 16, 16), jnp.bfloat16)},
            r"initial_state has dtype bfloat16; states are float32: pass initial_state\.astype",
        ),
        (
            "kda",
            {"segment_ids": jnp.zeros((1, 8))},
            r"segment_ids has dtype float32; segment_ids must be integers: pass segment_ids\.astype\(jnp\.int32\)",
        ),
        (
            "kda",
            {"segment_ids": jnp.zeros((8, 1), jnp.int32)},
            r"segment_ids is int32\[8, 1\]; it must be \[B, T\] = \[1, 8\]",
        ),
        ("kda", {"q": jnp.zeros((1, 8, 2, 16), jnp.int32)}, r"q is int32.*; it must be float32 or bfloat16"),
        (
            "kda",
            {"q": jnp.zeros((1, 8, 2, 16), jnp.bfloat16)},
            r"q, k and v have dtypes bfloat16, float32 and float32; .*equal",
        ),
        ("kda", {"k": jnp.zeros((1, 8, 2, 32))}, r"k is .*\[1, 8, 2, 32\] and q is .*; they must have one shape"),
        ("kda", {"q": jnp.zeros((8, 2, 16))}, r"both with B or both without"),
        ("kda", {"k": None}, r"k is None; kda needs an array there"),
        ("gated_delta_rule", {"g": None}, r"g is None; .* use delta_rule, which has no gate"),
        ("delta_rule", {"scale": "x"}, r"scale='x' is not a Python number"),
        ("delta_rule", {"normalize_qk": "no"}, r"normalize_qk='no' must be True or False"),
        (
            "delta_rule",
            {"q": jnp.zeros((1, 8, 2, 8)), "k": jnp.zeros((1, 8, 2, 8))},
            r"K=8 must be from 16 to 256; pad it with zeros",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_and_what_to_do(op: str, changes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_op(op).function(**spoiled(op, **changes))


def test_gates_refuse_by_argument() -> None:
    with pytest.raises(ValueError, match=r"lower_bound=-7 must be at least -5 and negative; use -5\.0, or None"):
        tilewright.kda_gate(jnp.zeros((1, 2, 16)), jnp.zeros(2), jnp.zeros((2, 16)), lower_bound=-7)
    with pytest.raises(ValueError, match=r"dt_bias has shape \[32\].*pass dt_bias\.reshape\(2, 16\)"):
        tilewright.kda_gate(jnp.zeros((1, 2, 16)), jnp.zeros(2), jnp.zeros(32))
    with pytest.raises(ValueError, match=r"A_log has shape \[3\] and a \[1, 2\]; A_log must be \[HV\]"):
        tilewright.gdn_gate(jnp.zeros((1, 2)), jnp.zeros(3), jnp.zeros(2))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: DeltaRuleTpuForward(heads=0), r"heads=0 must be a positive integer; use 4"),
        (lambda: DeltaRuleTpuForward(block_chunks=0), r"block_chunks=0 must be a positive integer; use 8"),
        (lambda: DeltaRuleTpuForward(interleave=0), r"interleave=0 must be a positive integer; use 4"),
        (lambda: DeltaRuleTpuBackward(heads=0), r"heads=0 must be a positive integer; use 4"),
        (lambda: DeltaRuleTpuBackward(interleave=0), r"interleave=0 must be a positive integer; use 2"),
        (lambda: DeltaRuleXlaForward(chunk=1), r"chunk=1 must be a power of two, at least 2; use 64"),
        (lambda: DeltaRuleXlaForward(block_chunks=-1), r"block_chunks=-1 must be a positive integer; use 16"),
    ],
)  # fmt: skip
def test_block_sizes_are_checked_when_built(build, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.parametrize("config", [DeltaRuleTpuForward(heads=3), DeltaRuleTpuBackward(heads=3)])
def test_heads_that_cannot_share_evenly_are_refused(config) -> None:
    def loss(arrays):
        return jnp.sum(run("kda", arrays, "pallas_tpu", config=config)[0])

    with pytest.raises(tilewright.Unsupported, match=r"config\.heads=3 does not share 2 query heads and 4 value heads"):
        jax.grad(loss)(spoiled("kda"))


def test_a_backward_kernel_that_does_not_fit_is_refused() -> None:
    """Whether its own config asks for too much, or the blocks that the forward saved states for."""
    structs = find_op("kda").case("d128").structs("bfloat16")

    def gradient(q, **others):
        return jax.grad(lambda q: jnp.sum(tilewright.kda(q, **others, config=config)[0].astype(jnp.float32)))(q)

    def refusal(function):
        with tilewright.target("v4"):
            return str(tilewright.explain(function, **structs))

    config = (DeltaRuleTpuBackward(heads=16),)
    assert re.search(
        r"backward kernel needs about \d+ MiB of VMEM for .*DeltaRuleTpuBackward\(heads=16", refusal(gradient)
    )
    config = (DeltaRuleTpuForward(block_chunks=32, heads=1), DeltaRuleTpuBackward(heads=2))
    assert "for the blocks of 32 chunks of 64 tokens that the forward saved states for" in refusal(gradient)


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
@every_op
def test_the_heuristic_fits_every_tpu(op: str, chip: str) -> None:
    for name in ("d128", "gva"):
        case = find_op(op).case(name)
        with tilewright.target(chip):
            (decision,) = tilewright.explain(op, **case.structs("bfloat16")).decisions
        assert decision.implementation == "pallas_tpu", str(decision)
        assert decision.backward.refusal is None, str(decision)
