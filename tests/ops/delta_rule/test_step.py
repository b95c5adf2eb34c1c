"""The steps of the delta rule: the contract of each, and what the Hopper kernel has of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import tilewright
from tests.ops.contract import OpContract, able_to_run
from tilewright import gated_delta_rule_step
from tilewright.configs import DeltaRuleStepSm90Forward
from tilewright.ops.delta_rule.step.call import DeltaRuleStepCall


class TestDeltaRuleStep(OpContract):
    op_name = "delta_rule_step"
    call_type = DeltaRuleStepCall
    whole_letter = "V"
    shares_code_with = "gated_delta_rule_step"
    not_interpreted = frozenset({"strong_gate"})


class TestGatedDeltaRuleStep(OpContract):
    op_name = "gated_delta_rule_step"
    call_type = DeltaRuleStepCall
    whole_letter = "V"

    def extreme(self, arrays: dict) -> dict:
        """Gates that forget everything or nothing."""
        return arrays | {"g": arrays["g"].at[:, 0].set(-1e4).at[:, 1].set(-jnp.inf).at[:, 2].set(0.0)}


class TestKdaStep(OpContract):
    op_name = "kda_step"
    call_type = DeltaRuleStepCall
    whole_letter = "V"
    shares_code_with = "gated_delta_rule_step"

    def extreme(self, arrays: dict) -> dict:
        """Gates that forget everything or nothing."""
        return arrays | {"g": arrays["g"].at[:, 0].set(-1e4).at[:, 1].set(-jnp.inf).at[:, 2].set(0.0)}


def draw(b=1, h=1, hv=1, depth=32, width=64, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "state": jax.random.normal(keys[0], (b, hv, depth, width)),
        "q": jax.random.normal(keys[1], (b, h, depth)).astype(dtype),
        "k": (depth**-0.5 * jax.random.normal(keys[2], (b, h, depth))).astype(dtype),
        "v": jax.random.normal(keys[3], (b, hv, width)).astype(dtype),
        "g": -jax.nn.softplus(jax.random.normal(keys[4], (b, hv))),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[5], (b, hv))),
    }


def structs(**shape):
    return jax.eval_shape(lambda: draw(**shape))


@pytest.mark.slow
def test_blocks_of_other_widths_are_the_same_step():
    """Also wider than V, which is padded; the interpreter sums in an order that depends on the width."""
    arrays = draw(hv=2, width=64)
    want = gated_delta_rule_step(**arrays, implementation="reference")
    for block_v in (64, 128):
        config = DeltaRuleStepSm90Forward(block_v)
        with able_to_run("pallas_gpu"):
            got = jax.jit(lambda x: gated_delta_rule_step(**x, implementation="pallas_gpu", config=config))(arrays)  # noqa: B023
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_tokens_in_a_loop_are_the_sequence():
    """The state is carried in place, through a kernel that overwrites what it is given."""
    t, arrays = 4, draw(dtype=jnp.bfloat16)
    state = arrays.pop("state")
    tokens = {name: jnp.stack([array * (n + 1) / t for n in range(t)]) for name, array in arrays.items()}
    tokens = {name: array.astype(arrays[name].dtype) for name, array in tokens.items()}

    def carried(implementation):
        def one(held, token):
            o, held = gated_delta_rule_step(held, **token, implementation=implementation)
            return held, o

        return jax.jit(lambda state, tokens: jax.lax.scan(one, state, tokens))(state, tokens)

    with able_to_run("pallas_gpu"):
        after, o = carried("pallas_gpu")
    expected_after, expected_o = carried("reference")
    np.testing.assert_allclose(after, expected_after, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(o.astype(jnp.float32), expected_o.astype(jnp.float32), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_every_implementation_sees_rounded_unit_keys():
    """A cast to bfloat16 and back is what XLA leaves out on a GPU: the plain step's keys would not be the kernel's."""
    arrays = draw(dtype=jnp.bfloat16)
    step = jax.jit(lambda a: gated_delta_rule_step(**a, normalize_qk=True, implementation="reference"))
    assert step.lower(arrays).as_text().count("reduce_precision") == 2  # q and k

    def unit(x):
        wide = np.asarray(x, np.float32)
        return jnp.asarray(wide / np.sqrt(np.sum(wide**2, axis=-1, keepdims=True) + 1e-6), jnp.bfloat16)

    by_hand = arrays | {name: unit(arrays[name]) for name in ("q", "k")}
    want = gated_delta_rule_step(**by_hand, implementation="reference")
    jax.tree.map(np.testing.assert_array_equal, step(arrays), want)


@pytest.mark.parametrize(("op", "gate"), [("delta_rule", None), ("gated_delta_rule", ()), ("kda", (128,))])
def test_an_h200_gets_one_kernel_that_works_in_place(op, gate):
    arrays = structs(b=16, h=16, hv=32, depth=128, width=128, dtype=jnp.bfloat16)
    state, g = arrays.pop("state"), arrays.pop("g")
    if gate is not None:
        arrays["g"] = jax.ShapeDtypeStruct((*g.shape, *gate), g.dtype)
    step = getattr(tilewright, f"{op}_step")
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(f"{op}_step", state, **arrays).decisions
        text = jax.jit(lambda s, x: step(s, **x)).trace(state, arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert (decision.implementation, decision.configs) == ("pallas_gpu", {"forward": DeltaRuleStepSm90Forward(32)})
    assert "backward: the gradient of implementation='reference'" in str(decision)
    assert text.count("stablehlo.custom_call") == 1
    assert "output_tuple_indices = [1], operand_index = 0" in text


def test_the_kernel_is_traced_inside_shard_map(cpu_devices):
    mesh = Mesh(np.array(cpu_devices[:2]), ("data",))
    split = PartitionSpec("data")
    arrays = structs(b=4)

    def total(given):
        o, after = gated_delta_rule_step(**given)
        return o, after

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(split,), out_specs=split)
    with tilewright.target("h200"):
        traced = jax.jit(sharded).trace(arrays)
    assert "delta_rule_step" in str(traced.jaxpr)


@pytest.mark.parametrize(
    ("chip", "b", "text"),
    [
        (
            "a100",
            1,
            r"for Hopper GPUs .* the chip is a100, with compute capability 8.0; use implementation='reference'",
        ),
        ("h200", 0, r"B=0 leaves no block to launch; use implementation='reference'"),
    ],
)
def test_what_it_refuses(chip, b, text):
    arrays = draw(b=b)
    with tilewright.target(chip):
        with pytest.raises(tilewright.Unsupported, match=text):
            gated_delta_rule_step(**arrays, implementation="pallas_gpu")
        (decision,) = tilewright.explain("gated_delta_rule_step", **arrays).decisions
    assert decision.implementation == "reference"
    assert "not pallas_gpu: " in str(decision)


def test_a_block_of_other_channels_is_refused():
    with pytest.raises(ValueError, match=r"block_v=48 must be one of 16, 32, 64, 128 \(threads take .*; use 32"):
        DeltaRuleStepSm90Forward(block_v=48)


def test_the_block_is_the_one_with_the_least_padding():
    def block_v(width):
        with tilewright.target("h200"):
            (decision,) = tilewright.explain("gated_delta_rule_step", **structs(width=width)).decisions
        return decision.forward.config.block_v

    assert [block_v(width) for width in (16, 32, 48, 50, 128)] == [16, 32, 16, 32, 32]


def test_vmap_is_one_launch_with_more_sequences():
    arrays = structs(b=2, h=1, hv=2)
    mapped = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), arrays)
    with tilewright.target("h200"):
        traced = jax.jit(jax.vmap(lambda x: gated_delta_rule_step(**x))).trace(mapped)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.while" not in text
    assert "(tensor<6x2x32x64xf32>" in text


def test_bad_input_names_the_step():
    arrays = draw()
    arrays["g"] = jnp.zeros((1, 1, 32))
    with pytest.raises(
        ValueError, match=r"g is float32\[1, 1, 32\], one gate per key channel, which is the gate of kda"
    ):
        gated_delta_rule_step(**arrays)
