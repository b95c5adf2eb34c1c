"""What only the Hopper kernels have: their blocks, their limits, and that they lower on a machine without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import able_to_run
from tilewright import gated_delta_rule, kda
from tilewright.configs import DeltaRuleSm90Backward, DeltaRuleSm90Forward
from tilewright.core.dispatch import find_op
from tilewright.core.numerics import judge
from tilewright.core.target import finding_races
from tilewright.ops.delta_rule.cases import _case
from tilewright.ops.delta_rule.gates import coarse_and_fine
from tilewright.ops.delta_rule.pallas_gpu.sm90_gates import PairLevel, Range
from tilewright.ops.delta_rule.pallas_gpu.sm90_inverse import inverses
from tilewright.ops.delta_rule.pallas_gpu.tiles import CHUNK, Row, Sizes
from tilewright.workbench.check import CaseCheck


def draw(t=150, h=1, hv=1, depth=64, width=80, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    k = jax.random.normal(keys[1], (1, t, h, depth))
    return {
        "q": jax.random.normal(keys[0], (1, t, h, depth)).astype(jnp.bfloat16),
        "k": (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(jnp.bfloat16),
        "v": jax.random.normal(keys[2], (1, t, hv, width)).astype(jnp.bfloat16),
        "g": -jax.nn.softplus(jax.random.normal(keys[3], (1, t, hv))),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (1, t, hv))),
        "initial_state": jax.random.normal(keys[5], (1, hv, depth, width)),
    }


def on_gpu(arrays, config=None):
    with able_to_run("pallas_gpu"):
        return jax.jit(lambda given: gated_delta_rule(**given, implementation="pallas_gpu", config=config))(arrays)


@pytest.mark.slow
def test_chunks_and_value_channels_that_are_not_whole():
    """Three chunks, the last of 22 tokens; channels of two warpgroups, the second's mostly padding."""
    arrays = draw()
    wide = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    oracle = gated_delta_rule(**wide, implementation="reference")
    got, narrow = (on_gpu(arrays, DeltaRuleSm90Forward(block_v=block_v)) for block_v in (128, 32))
    rounded = [np.asarray(value.astype(jnp.bfloat16), np.float32) for value in oracle]
    for block_v, values in ((128, got), (32, narrow)):
        for quantity, value, plain, want in zip(("o", "final_state"), values, rounded, oracle, strict=True):
            verdict = judge(value, plain, want)
            assert verdict.ok, f"block_v={block_v}, {quantity}: {verdict}"
    # Half the channels per block: other blocks, the same sums.
    for one, other in zip(got, on_gpu(arrays, DeltaRuleSm90Forward(block_v=64)), strict=True):
        np.testing.assert_array_equal(one, other)
    # What comes later changes nothing, to the bit, strong gates included.
    t = 70
    later = {
        name: array if name == "initial_state" else array.at[:, t:].set(-9.0 if name == "g" else 0.3)
        for name, array in arrays.items()
    }
    np.testing.assert_array_equal(on_gpu(later, DeltaRuleSm90Forward(block_v=128))[0][:, :t], got[0][:, :t])


@pytest.mark.slow
def test_like_keys_do_not_break_the_inverse():
    """One key 64 times with beta 1 and no decay: powers of A, rather than merged blocks, have terms of 1e18."""
    arrays = draw(t=64, width=64)
    arrays["k"] = jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays |= {"g": jnp.zeros_like(arrays["g"]), "beta": jnp.ones_like(arrays["beta"])}
    oracle = gated_delta_rule(
        **{name: array.astype(jnp.float32) for name, array in arrays.items()}, implementation="reference"
    )
    for value, want in zip(on_gpu(arrays), oracle, strict=True):
        verdict = judge(value, want.astype(jnp.bfloat16).astype(jnp.float32), want)
        assert verdict.ok, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 4, 6])
def test_four_inverses_per_thread_block(group: int):
    """Of four chunks of a head, of two chunks of two heads or of a chunk of four heads; some blocks have chunks to spare.

    The keys of the last chunk are almost alike, with beta near 1 and next to no decay.
    """
    h, chunks = 2, 3
    rng = np.random.default_rng(group)
    k = rng.normal(size=(1, chunks, CHUNK, h, 64))
    k[:, -1] = k[:, -1, :1] + 0.02 * k[:, -1]
    k = jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), jnp.bfloat16)
    beta = rng.uniform(size=(1, h * group, chunks, CHUNK))
    beta[:, :, -1] = 1 - 1e-3 * beta[:, :, -1]
    g = -rng.exponential(size=beta.shape) * np.array([1.0, 30.0, 1e-3])[:, None]
    coarse, fine = coarse_and_fine(jnp.asarray(g, jnp.float32), lambda x: jnp.cumsum(x, axis=-1))
    rows = {Row.COARSE: coarse, Row.FINE: fine, Row.BETA: jnp.asarray(beta, jnp.float32)}
    gates = jnp.stack([rows.get(row, jnp.full_like(coarse, jnp.nan)) for row in range(Row.COUNT)], axis=-2)
    sizes = Sizes(b=1, chunks=chunks, h=h, hv=h * group, depth=64, width=64)
    with able_to_run("pallas_gpu"):
        hi_lo = jax.jit(lambda k, gates: inverses(k, gates, sizes))(k.reshape(1, -1, h, 64), gates)
    hi, lo = np.split(np.asarray(hi_lo, np.float64).reshape(*beta.shape, 2 * CHUNK), 2, axis=-1)

    keys = np.repeat(np.asarray(k, np.float64).transpose(0, 3, 1, 2, 4), group, axis=1)
    sums = np.asarray(coarse, np.float64) + np.asarray(fine, np.float64)
    decay = np.exp(np.minimum(sums[..., :, None] - sums[..., None, :], 0))
    lower = np.tril(keys @ keys.mT * decay * np.asarray(rows[Row.BETA], np.float64)[..., None, :], -1)
    np.testing.assert_allclose(hi + lo, np.linalg.inv(np.eye(CHUNK) + lower), rtol=0, atol=2**-12)


def test_the_levels_of_kda_have_every_pair_once_with_its_gates():
    """Whichever rows decay too far: two tokens are scaled by the decay between them in the one level that has them."""
    i = jnp.arange(CHUNK)
    g = np.random.default_rng(0).normal(size=CHUNK)
    between = np.array([[g[b + 1 : a + 1].sum() for b in range(CHUNK)] for a in range(CHUNK)])

    def mask(bounds: Range) -> np.ndarray:
        first, end = (np.asarray(bound)[:, None] for bound in bounds)
        return ((np.arange(CHUNK) >= first) & (np.arange(CHUNK) < end)).astype(int)

    for in_chunk, in_block in ((CHUNK, CHUNK), (20, CHUNK), (40, 8), (10, 3), (0, 0)):
        # From these tokens on, rows have decayed too far from the chunk's start, and from the start of their block.
        lowest = [jnp.where(i % size >= first, -1e3, 0.0) for size, first in ((64, in_chunk), (16, in_block))]
        levels = int(PairLevel.count(*(jnp.any(of_rows < 0) for of_rows in lowest)))
        found = np.zeros((CHUNK, CHUNK), int)
        for level in range(levels):
            now = PairLevel.of(jnp.int32(level))
            pairs = mask(now.pairs(i, PairLevel.rank(*lowest)))
            scaled = mask(now.exponents(i)) @ g
            sign = -1 if bool(now.from_start) else 1
            found += pairs
            between_pairs = (scaled[:, None] + sign * scaled[None])[pairs > 0]
            np.testing.assert_allclose(between_pairs, between[pairs > 0], atol=1e-12)
        np.testing.assert_array_equal(found, np.tri(CHUNK, dtype=int))


@pytest.mark.slow
@pytest.mark.parametrize("gate", [2.0, 4.0, 16.0])
def test_kda_with_gates_that_decay_too_far_for_one_level(gate: float):
    """In 64 tokens, as exponents of 2: by 161, which a product has with a shift; by 322; by more than that in 16."""
    case = _case("kda", "falls", 1, 70, 1, 64, 64, gate=gate, state=True)
    held = CaseCheck(find_op("kda"), case, "bfloat16")
    with able_to_run("pallas_gpu"):
        results = held.check("pallas_gpu")
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


@pytest.mark.slow
def test_kda_does_not_change_with_later_gates():
    """Not a bit, in the chunk in which gates become so strong that its products are shifted, or taken in levels."""
    arrays = draw(t=64, width=64)
    g = -0.4 * jax.nn.softplus(jax.random.normal(jax.random.key(7), (1, 64, 1, 64)))

    @jax.jit
    def run(g: jax.Array) -> jax.Array:
        q, k, v, _, beta, before = arrays.values()
        return kda(q, k, v, g, beta, initial_state=before, implementation="pallas_gpu")[0]

    with able_to_run("pallas_gpu"):
        mild, *stronger = (run(g.at[:, 37:].add(-gate)) for gate in (0.0, 4.0, 20.0))
    for later in stronger:
        np.testing.assert_array_equal(later[:, :37], mild[:, :37])
        assert not np.array_equal(later[:, 37:], mild[:, 37:])


@pytest.mark.slow
@pytest.mark.parametrize("gate", [0.1, 4.0])
def test_no_races_where_a_warpgroup_is_alone(gate: float):
    """The interpreter sees which buffers share memory only where these belong to one warpgroup (`InTurns`). Of five chunks
    with two tiles of channels each, a warpgroup has two: gates are copied for the next tile, and for the next chunk.
    """
    arrays = draw(t=300, depth=128, width=64)
    arrays["g"] = -gate * jax.nn.softplus(jax.random.normal(jax.random.key(7), (1, 300, 1, 128)))
    config = DeltaRuleSm90Forward(block_v=64, score_chunks=1)
    with finding_races():
        got = jax.jit(lambda given: kda(**given, implementation="pallas_gpu", config=config))(arrays)
    wide = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    for value, want in zip(got, kda(**wide, implementation="reference"), strict=True):
        assert judge(value, want.astype(jnp.bfloat16).astype(jnp.float32), want).ok


@pytest.mark.parametrize(
    ("chip", "change", "text"),
    [
        (
            "a100",
            {},
            r"written for Hopper GPUs .* the chip is a100, with compute capability 8.0; use implementation='xla'",
        ),
        (
            "b200",
            {},
            r"written for Hopper GPUs .* the chip is b200, with compute capability 10.0; use implementation='xla'",
        ),
        (
            "h200",
            {"dtype": jnp.float32},
            r"q is float32, and it multiplies bfloat16 only .*pass q, k and v as bfloat16",
        ),
        ("h200", {"depth": 192}, r"K=192 must be 128 at most \(the state is in registers\); use implementation='xla'"),
    ],
)
def test_what_it_refuses(chip, change, text):
    arrays = draw(depth=change.get("depth", 64))
    if "dtype" in change:
        arrays = {name: array.astype(change["dtype"]) for name, array in arrays.items()}
    with tilewright.target(chip):
        with pytest.raises(tilewright.Unsupported, match=text):
            gated_delta_rule(**arrays, implementation="pallas_gpu")
        (decision,) = tilewright.explain("gated_delta_rule", **arrays).decisions
    assert decision.implementation == "xla"
    assert "not pallas_gpu: " in str(decision)


@pytest.mark.parametrize(
    ("config", "fields", "text"),
    [
        (
            config,
            {"block_v": block_v},
            rf"block_v={block_v} must be one of {allowed} \(a warpgroup carries 64 channels\); use",
        )
        for config, block_v, allowed in (
            (DeltaRuleSm90Forward, 96, "32, 64, 128"),
            (DeltaRuleSm90Backward, 32, "64, 128"),
        )
    ]
    + [
        (DeltaRuleSm90Forward, {"block_v": True}, r"block_v=True must be one of 32, 64, 128"),
        (DeltaRuleSm90Forward, {"stages": 3}, r"stages=3 must be a positive multiple of 2 \(two warpgroups write"),
        (DeltaRuleSm90Forward, {"state_registers": 250}, r"state_registers=250 must be a multiple of 8 from 24 to 240"),
        (DeltaRuleSm90Backward, {"stages": 1}, r"stages=1 must be 2 or more; use 2"),
        (DeltaRuleSm90Backward, {"gradient_registers": 12}, r"gradient_registers=12 must be a multiple of 8 from 24"),
    ],
)
def test_configs_that_no_kernel_has_are_refused(config, fields, text):
    with pytest.raises(ValueError, match=text):
        config(**fields)


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_stages_that_do_not_fit_shared_memory_are_refused(op):
    case = find_op(op).case("h96")
    loss = jax.grad(lambda given, **kw: find_op(op).function(**given, **kw)[0].astype(jnp.float32).sum())
    for config in (DeltaRuleSm90Forward(stages=8), DeltaRuleSm90Backward(stages=8)):
        with (
            tilewright.target("h200"),
            pytest.raises(tilewright.Unsupported, match=r"KiB of shared memory .* fewer stages"),
        ):
            jax.eval_shape(
                lambda given, config=config: loss(given, implementation="pallas_gpu", config=config),
                case.structs("bfloat16"),
            )


def test_kda_has_no_blocks_of_32_channels():
    case = find_op("kda").case("h96")
    with (
        tilewright.target("h200"),
        pytest.raises(tilewright.Unsupported, match=r"block_v=32 is for one gate per head; use"),
    ):
        jax.eval_shape(
            lambda given: tilewright.kda(**given, implementation="pallas_gpu", config=DeltaRuleSm90Forward(block_v=32)),
            case.structs("bfloat16"),
        )


@pytest.mark.slow
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_more_stages_change_no_bit(op):
    """Five chunks in pipelines of two and of four stages, KDA's with two chunks per thread block of its score kernel."""
    arrays = _case(op, "stages", 1, 300, 1, 64, 64, state=True).draw("bfloat16", 0)

    def run(config):
        with able_to_run("pallas_gpu"):
            return jax.jit(lambda given: find_op(op).function(**given, implementation="pallas_gpu", config=config))(
                arrays
            )

    four = DeltaRuleSm90Forward(block_v=64, stages=4, score_chunks=2)
    for one, other in zip(run(DeltaRuleSm90Forward(block_v=64)), run(four), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_parts_of_the_sequence_change_no_bit():
    """Two parts of one chunk each, with a state before and after them, and a segment that begins inside of the second."""
    case = _case("kda", "parts", 1, 128, 1, 64, 64, state=True)
    arrays = case.draw("bfloat16", 0)
    resets = {"segment_ids": (jnp.arange(128) >= 100).astype(jnp.int32)[None]}

    def run(config):
        def function(given):
            return tilewright.kda(**given, **resets, implementation="pallas_gpu", config=config)

        def both(arrays):
            outputs, pull_back = jax.vjp(function, arrays)
            return outputs, pull_back(outputs)

        with able_to_run("pallas_gpu"):
            return jax.jit(both)(arrays)

    whole, parts = (jax.tree.leaves(run(DeltaRuleSm90Forward(block_v=64, parts=parts))) for parts in (1, 2))
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_parts_that_are_not_of_whole_chunks_are_refused():
    with (
        tilewright.target("h200"),
        pytest.raises(tilewright.Unsupported, match=r"T=150 is not parts=2 of whole chunks of 64 tokens; use parts=1"),
    ):
        gated_delta_rule(**draw(), implementation="pallas_gpu", config=DeltaRuleSm90Forward(parts=2))


@pytest.mark.slow
@pytest.mark.parametrize("hv", [1, 2])
def test_the_backward_takes_any_config_beside_any_of_the_forward(hv: int):
    """V=144 is padded to 192 for blocks of 32 channels, and to 256 for blocks of 128: more than shared memory has."""
    case = _case("gated_delta_rule", "wide", 1, 70, 1, 64, 144, hv=hv)
    check = CaseCheck(find_op("gated_delta_rule"), case, "bfloat16")
    configs = DeltaRuleSm90Forward(block_v=32), DeltaRuleSm90Backward(block_v=128, stages=3)
    with able_to_run("pallas_gpu"):
        results = check.check("pallas_gpu", configs)
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "block_v"), [(96, 128), (64, 64), (32, 32)])
def test_it_lowers_for_a_gpu_that_is_not_there(heads, block_v):
    """And is what an H200 gets when nothing is named; blocks of heads too few to fill it are narrower."""
    arrays = {
        name: jax.ShapeDtypeStruct((1, 8192, heads, *rest), dtype)
        for name, rest, dtype in (
            *((name, (128,), jnp.bfloat16) for name in "qkv"),
            *((name, (), jnp.float32) for name in ("g", "beta")),
        )
    }
    with tilewright.target("h200"):
        (decision,) = tilewright.explain("gated_delta_rule", **arrays).decisions
        lowered = jax.jit(lambda given: gated_delta_rule(**given)).trace(arrays).lower(lowering_platforms=("cuda",))
    assert decision.implementation == "pallas_gpu"
    assert (decision.forward.config.block_v, decision.backward.config.block_v) == (block_v, max(block_v, 64))
    assert lowered.as_text().count("mosaic_gpu") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("op", "kernels"), [("delta_rule", 6), ("gated_delta_rule", 6), ("kda", 5)])
def test_its_gradient_lowers_for_a_gpu_that_is_not_there(op, kernels):
    """With inputs of every kind: a state, segments, grouped heads, sizes that are not whole tiles."""
    b, t, h, hv, k, v = 2, 300, 2, 4, 48, 80
    shapes = {
        "q": (b, t, h, k),
        "k": (b, t, h, k),
        "v": (b, t, hv, v),
        "beta": (b, t, hv),
        "initial_state": (b, hv, k, v),
    }
    shapes |= {"delta_rule": {}, "gated_delta_rule": {"g": (b, t, hv)}, "kda": {"g": (b, t, hv, k)}}[op]
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if name in ("q", "k", "v") else jnp.float32)
        for name, shape in shapes.items()
    }
    segments = jax.ShapeDtypeStruct((b, t), jnp.int32)

    def loss(given, segment_ids):
        o, state = find_op(op).function(**given, segment_ids=segment_ids, implementation="pallas_gpu")
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    with tilewright.target("h200"):
        lowered = jax.jit(jax.grad(loss)).trace(arrays, segments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == kernels
