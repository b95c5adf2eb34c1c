"""linear_cross_entropy: the contract, and what is its own: labels, reductions, blocks, shards, memory, errors."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
from tests.ops.contract import OpContract, able_to_run, assert_close, implementations
from tilewright import linear_cross_entropy
from tilewright.configs import (
    LinearCrossEntropyTpuBackward,
    LinearCrossEntropyTpuForward,
    LinearCrossEntropyXlaBackward,
    LinearCrossEntropyXlaForward,
)
from tilewright.core.dispatch import find_op
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.cases import _case
from tilewright.ops.linear_cross_entropy.pallas_tpu import stored
from tilewright.workbench.bench import Timing, bench_case
from tilewright.workbench.check import CaseCheck

IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")
every_implementation = implementations(*IMPLEMENTATIONS)
GIB = 2**30


class TestContract(OpContract):
    op_name = "linear_cross_entropy"
    any_leading_axes = True
    call_type = LinearCrossEntropyCall
    cuts: ClassVar = {
        "rows": {"tokens0": "x", "tokens1": "y"},
        "vocabulary": {"V": "y"},
        "both": {"tokens0": "x", "V": "y"},
    }
    only_compiler = ("vocabulary", "both")
    whole_letter = "H"
    mesh_case = _case("mesh", (4, 6), 64, 300, ignored=0.2, weights=True, z_loss=1e-2, reduction="none")
    property_case = _case("properties", (3, 37), 64, 300, ignored=0.2, weights=True, z_loss=1e-2)

    def extreme(self, arrays: dict) -> dict:
        """Logits of about 600."""
        return arrays | {"x": arrays["x"] * 300}


def draw(n: int = 12, h: int = 16, v: int = 40, dtype: str = "float32", seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (n, h)).astype(dtype)
    w = (0.5 * jax.random.normal(keys[1], (h, v))).astype(dtype)
    return x, w, jax.random.randint(keys[2], (n,), 0, v)


def test_agrees_with_jax_nn() -> None:
    """An oracle that is not ours."""
    x, w, labels = draw()
    log_p = jax.nn.log_softmax(jnp.dot(x, w, precision="highest"), axis=-1)
    expected = -jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(linear_cross_entropy(x, w, labels), expected, rtol=1e-5)
    mean = linear_cross_entropy(x, w, labels, reduction="mean")
    np.testing.assert_allclose(mean, jnp.mean(expected), rtol=1e-5)


@pytest.mark.slow
@every_implementation
def test_ignored_labels_count_nothing(implementation: str) -> None:
    x, w, labels = draw()
    ignored = labels.at[jnp.array([0, 5, 11])].set(-100)
    keep = np.setdiff1d(np.arange(12), [0, 5, 11])

    def loss(x, w, labels, reduction):
        return linear_cross_entropy(x, w, labels, reduction=reduction, z_loss=0.1, implementation=implementation)

    with able_to_run(implementation):
        each = loss(x, w, ignored, "none")
        dx, dw = jax.grad(loss, (0, 1))(x, w, ignored, "mean")
        dx_kept, dw_kept = jax.grad(loss, (0, 1))(x[keep], w, labels[keep], "mean")
    assert np.all(np.asarray(each)[[0, 5, 11]] == 0)
    assert np.all(np.asarray(dx)[[0, 5, 11]] == 0)
    np.testing.assert_allclose(np.asarray(dx)[keep], dx_kept, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(dw, dw_kept, rtol=2e-4, atol=1e-6)


@every_implementation
@pytest.mark.parametrize("label", [-1, -101, 40, 2**31 - 1, -(2**31)])
def test_a_label_out_of_range_is_nan_in_its_row_alone(implementation: str, label: int) -> None:
    x, w, labels = draw()
    labels = labels.at[3].set(label)

    def loss(x):
        return linear_cross_entropy(x, w, labels, implementation=implementation)

    with able_to_run(implementation):
        each, pullback = jax.vjp(loss, x)
        (dx,) = pullback(jnp.ones_like(each))
    others = np.arange(12) != 3
    assert np.isnan(each[3])
    assert np.all(np.isfinite(np.asarray(each)[others]))
    assert np.all(np.isnan(dx[3]))
    assert np.all(np.isfinite(np.asarray(dx)[others]))


@every_implementation
def test_reductions_and_weights(implementation: str) -> None:
    x, w, labels = draw()
    labels = labels.at[2].set(-100)
    weights = jnp.linspace(0.0, 2.0, 12)
    with able_to_run(implementation):
        each = linear_cross_entropy(x, w, labels, implementation=implementation)
        weighed = linear_cross_entropy(x, w, labels, weights=weights, implementation=implementation)
        total = linear_cross_entropy(x, w, labels, weights=weights, reduction="sum", implementation=implementation)
        mean = linear_cross_entropy(x, w, labels, weights=weights, reduction="mean", implementation=implementation)
    np.testing.assert_allclose(weighed, each * weights, rtol=1e-6)
    np.testing.assert_allclose(total, np.sum(weighed), rtol=1e-6)
    np.testing.assert_allclose(mean, np.sum(weighed) / (np.sum(weights) - weights[2]), rtol=1e-6)


def test_a_mean_over_nothing_is_zero_with_zero_gradients() -> None:
    x, w, labels = draw()
    nothing = jnp.full_like(labels, -100)
    value, (dx, dw) = jax.value_and_grad(
        lambda x, w: linear_cross_entropy(x, w, nothing, reduction="mean", z_loss=0.1), (0, 1)
    )(x, w)
    assert value == 0
    assert not np.any(dx)
    assert not np.any(dw)


def test_no_rows_at_all() -> None:
    _, w, _ = draw()
    x, labels = jnp.zeros((0, 16)), jnp.zeros((0,), jnp.int32)
    loss, logsumexp = linear_cross_entropy(x, w, labels, return_logsumexp=True)
    assert loss.shape == logsumexp.shape == (0,)
    assert linear_cross_entropy(x, w, labels, reduction="mean") == 0


@every_implementation
def test_leading_axes_are_restored_and_scalars_accepted(implementation: str) -> None:
    x, w, labels = draw()
    with able_to_run(implementation):
        flat, flat_lse = linear_cross_entropy(x, w, labels, return_logsumexp=True, implementation=implementation)
        cube = linear_cross_entropy(
            x.reshape(2, 3, 2, 16), w, labels.reshape(2, 3, 2), return_logsumexp=True, implementation=implementation
        )
        one = linear_cross_entropy(x[7], w, labels[7], implementation=implementation)
    np.testing.assert_array_equal(cube[0], flat.reshape(2, 3, 2))
    np.testing.assert_array_equal(cube[1], flat_lse.reshape(2, 3, 2))
    assert one.shape == ()
    np.testing.assert_allclose(one, flat[7], rtol=1e-6)


def test_a_traced_z_loss_has_a_gradient() -> None:
    x, w, labels = draw()

    def loss(z):
        return linear_cross_entropy(x, w, labels, z_loss=z, reduction="sum")

    _, logsumexp = linear_cross_entropy(x, w, labels, return_logsumexp=True)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(1e-3), jnp.sum(logsumexp**2), rtol=1e-5)


TINY_BLOCKS = {
    "pallas_tpu": (
        LinearCrossEntropyTpuForward(32, 128, block_h=128, tile_n=16),
        LinearCrossEntropyTpuBackward(32, 128, 48, 256, block_h=128, tile_n=16),
    ),
    "xla": (LinearCrossEntropyXlaForward(7, 13), LinearCrossEntropyXlaBackward(7, 13)),
}


@pytest.mark.slow
@implementations("pallas_tpu", "xla")
@settings(max_examples=3, deadline=None, derandomize=True)
@given(n=st.integers(1, 70), h=st.integers(1, 300), v=st.integers(1, 400), cap=st.sampled_from([None, 3.0]))
def test_any_shape_in_many_small_blocks(implementation: str, n: int, h: int, v: int, cap: float | None) -> None:
    """Ragged edges on every axis: what lies past the end of an array never reaches a result."""
    held = CaseCheck(find_op("linear_cross_entropy"), _case("drawn", n, h, v, soft_cap=cap), "float32", seed=n)
    with able_to_run(implementation):
        results = held.check(implementation, config=TINY_BLOCKS[implementation])
    for result in results:
        assert result.verdict.ok, f"N={n} H={h} V={v} {result.quantity}: {result.verdict}"


@pytest.mark.slow
@implementations("pallas_tpu", "xla")
def test_bfloat16_at_a_real_vocabulary(implementation: str) -> None:
    """50,257 columns: not a multiple of anything, and no padding by the caller."""
    held = CaseCheck(find_op("linear_cross_entropy"), _case("gpt2_rows", 24, 32, 50257), "bfloat16")
    with able_to_run(implementation):
        results = held.check(implementation)
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


STORED = (
    LinearCrossEntropyTpuForward(48, 512, tile_n=16, stored=True),
    LinearCrossEntropyTpuBackward(
        32, 128, 32, 128, tile_n=16, block_n_stored=32, block_v_stored=512, block_h_stored=128
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "h", "v", "options"),
    [
        (96, 128, 1024, {}),
        (70, 200, 1100, {"soft_cap": 3.0, "ignored": 0.2, "z_loss": 1e-2}),
        (33, 72, 513, {"logit_scale": 300.0}),
    ],
)
def test_gradients_from_stored_exponentials(n: int, h: int, v: int, options: dict) -> None:
    """Whole and ragged blocks on every axis, an odd number of tiles, and several parts of H."""
    held = CaseCheck(find_op("linear_cross_entropy"), _case("drawn", n, h, v, **options), "bfloat16", seed=n)
    with able_to_run("pallas_tpu"):
        results = held.check("pallas_tpu", config=STORED)
    for result in results:
        assert result.verdict.ok, f"N={n} H={h} V={v} {result.quantity}: {result.verdict}"


@pytest.mark.slow
def test_stored_exponentials_are_as_exact_as_recomputed_ones() -> None:
    """What is stored has a bit more than the bfloat16 that the gradients of the logits are rounded to."""
    case = _case("drawn", 64, 128, 1024)
    held = CaseCheck(find_op("linear_cross_entropy"), case, "bfloat16", seed=3)
    recomputed = dataclasses.replace(STORED[0], stored=False), STORED[1]
    with able_to_run("pallas_tpu"):
        errors = [
            {result.quantity: result.verdict.error.relative for result in held.check("pallas_tpu", config=config)}
            for config in (STORED, recomputed)
        ]
    for quantity, error in errors[1].items():
        assert errors[0][quantity] <= 1.05 * error, quantity


def test_exponentials_survive_16_bits() -> None:
    """Nine bits of the mantissa, truncated; 0 and 1 are exact; pairs do not mix; and any word is two finite numbers."""
    first = jnp.concatenate([jnp.array([0.0, 1.0]), jnp.exp(-jnp.linspace(0.0, 80.0, 1022))])
    second = first[::-1]
    for exact, decoded in zip((first, second), stored.decoded(stored.encoded(first, second)), strict=True):
        assert np.all(decoded <= exact)
        assert np.all(decoded >= exact * (1 - 2.0**-9))
        assert np.all((decoded == exact)[(exact == 0) | (exact == 1)])
    every = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint32) * 0x10001, jnp.int32)
    assert all(np.all(np.isfinite(half)) for half in stored.decoded(every))


def test_exponentials_are_stored_where_they_fit() -> None:
    struct = jax.ShapeDtypeStruct

    def decided(n: int, dtype: str, chip: str) -> bool:
        arrays = struct((n, 2048), dtype), struct((2048, 151936), dtype), struct((n,), "int32")
        with tilewright.target(chip):
            (decision,) = tilewright.explain(linear_cross_entropy, *arrays).decisions
        return decision.forward.config.stored

    assert decided(8192, "bfloat16", "v6e")
    assert not decided(8192, "float32", "v6e")
    assert not decided(8192, "bfloat16", "v5e")
    assert decided(4096, "bfloat16", "v5e")
    assert not decided(16384, "bfloat16", "v6e")


def test_stored_exponentials_are_for_bfloat16_and_whole_pairs() -> None:
    with pytest.raises(
        ValueError, match=r"block_v=256 must be a multiple of 512 where exponentials are stored; use 512"
    ):
        LinearCrossEntropyTpuForward(16, 256, stored=True)
    with pytest.raises(ValueError, match=r"slots=3 must be 1 or 2"):
        LinearCrossEntropyTpuForward(16, 256, slots=3)
    x, w, labels = draw(v=600)
    with (
        tilewright.target("v6e"),
        pytest.raises(
            tilewright.Unsupported, match=r"stored=True is for bfloat16, and x is float32; use a config with"
        ),
    ):
        linear_cross_entropy(x, w, labels, implementation="pallas_tpu", config=STORED[0])


@pytest.mark.parametrize("case", ["qwen3", "gpt2", "llama3"])
def test_xla_never_holds_the_logits(case: str) -> None:
    """Compiled temporary memory of value and gradients, at full size: the logits of qwen3 alone would be 4.6 GiB."""
    op = find_op("linear_cross_entropy")
    record = bench_case(op, op.case(case), "xla", "bfloat16", "forward+backward", Timing(run=False))
    assert 0 < record.metrics["temp_bytes"] < 1 * GIB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((12, 16), jnp.int32)}, r"x is int32\[12, 16\]; it must be \[..., H\] of float32 or bfloat16"),
        ({"w": jnp.zeros((16,))}, r"w is float32\[16\]; it must be \[H, V\]"),
        ({"w": jnp.zeros((40, 16))}, r"w is float32\[40, 16\] and x .*\(H=16\); it looks transposed: pass w.T"),
        ({"w": jnp.zeros((17, 40))}, r"w is float32\[17, 40\] and x .*pass a w with 16 rows"),
        ({"w": jnp.zeros((16, 40), jnp.bfloat16)}, r"w has dtype bfloat16 and x has float32.*pass w.astype\(x.dtype\)"),
        ({"w": jnp.zeros((16, 0))}, r"w is float32\[16, 0\]; H and V must be at least 1"),
        ({"labels": jnp.zeros((12,))}, r"labels has dtype float32; labels must be integers: pass labels.astype"),
        ({"labels": jnp.zeros((3, 4), jnp.int32)}, r"labels is int32\[3, 4\] .* must have x's leading axes \[12\]"),
        ({"weights": jnp.ones((1,))}, r"weights is float32\[1\] and labels is int32\[12\].*broadcast_to"),
        ({"weights": jnp.ones((12,), jnp.int32)}, r"weights has dtype int32; weights must be floating"),
        ({"reduction": "avg"}, r"reduction='avg' is not a reduction; use one of 'none', 'sum', 'mean'"),
        ({"z_loss": -1.0}, r"z_loss=-1.0 is negative; it must be 0 \(off\) or a small positive"),
        ({"z_loss": jnp.zeros((2,))}, r"z_loss has shape \(2,\); it must be a scalar"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be positive and finite; use None for no cap"),
        ({"soft_cap": jnp.ones(())}, r"soft_cap=.* is not a Python number; .*known when traced"),
        ({"implementation": "triton"}, r"implementation='triton' is not an implementation of linear_cross_entropy"),
        (
            {"config": LinearCrossEntropyXlaForward(8, 8), "implementation": "pallas_tpu"},
            r"config=tilewright.configs.LinearCrossEntropyXlaForward.*'pallas_tpu' of .* takes",
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(change: dict, message: str) -> None:
    x, w, labels = draw()
    with pytest.raises((ValueError, TypeError), match=message):
        linear_cross_entropy(**{"x": x, "w": w, "labels": labels} | change)


def test_a_config_that_breaks_alignment_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"block_v=96 must be a positive multiple of 128 \(TPU lanes\); use 128$"):
        LinearCrossEntropyTpuForward(16, 96)
    with pytest.raises(ValueError, match=r"block_n_dw=24 must be a positive multiple of 16 \(sublanes .*; use 32$"):
        LinearCrossEntropyTpuBackward(16, 128, 24, 128)
    with pytest.raises(ValueError, match=r"block_n_dx=96 must be a multiple of tile_n=64, or less than it; use 128"):
        LinearCrossEntropyTpuBackward(96, 128, 16, 128, tile_n=64)
    with pytest.raises(ValueError, match=r"block_v=0 must be a positive integer; use 1024"):
        LinearCrossEntropyXlaForward(8, 0)


def test_a_config_that_does_not_fit_memory_is_refused_before_the_compiler() -> None:
    x, w, labels = jnp.zeros((64, 8192), jnp.bfloat16), jnp.zeros((8192, 256), jnp.bfloat16), jnp.zeros(64, jnp.int32)
    needs = r"its {} kernel needs about \d+ MiB of VMEM for .*H=8192 .* a v5p has 64; use a smaller block_n or block_v"

    def run(x, config):
        return linear_cross_entropy(x, w, labels, reduction="sum", implementation="pallas_tpu", config=config)

    with tilewright.target("v5p"):
        with pytest.raises(tilewright.Unsupported, match=needs.format("forward")):
            jax.eval_shape(lambda: run(x, LinearCrossEntropyTpuForward(2048, 2048)))
        # A backward that does not fit is refused where the call is differentiated, and only there.
        huge = LinearCrossEntropyTpuBackward(16, 128, 2048, 2048)
        jax.eval_shape(lambda: run(x, huge))
        with pytest.raises(tilewright.Unsupported, match=needs.format("dw")):
            jax.eval_shape(lambda: jax.grad(run)(x, huge))


def test_h_too_wide_for_a_tpu_falls_to_xla_and_says_why() -> None:
    struct = jax.ShapeDtypeStruct
    with tilewright.target("v4"):
        told = tilewright.explain(
            linear_cross_entropy,
            struct((16, 65536), "bfloat16"),
            struct((65536, 512), "bfloat16"),
            struct((16,), "int32"),
        )
    (decision,) = told.decisions
    assert decision.implementation == "xla"
    assert "MiB of VMEM for dtype=bfloat16 N=16 H=65536 V=512 with" in decision.rejected["pallas_tpu"]


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "v7x"])
@pytest.mark.parametrize(("n", "h", "v"), [(1, 64, 10), (8192, 2048, 151936), (8192, 4096, 128256), (512, 8192, 50257)])
def test_the_heuristic_fits_every_tpu(chip: str, n: int, h: int, v: int) -> None:
    struct = jax.ShapeDtypeStruct
    arrays = struct((n, h), "bfloat16"), struct((h, v), "bfloat16"), struct((n,), "int32")
    with tilewright.target(chip):
        (decision,) = tilewright.explain(linear_cross_entropy, *arrays).decisions
    assert decision.implementation == "pallas_tpu"
    assert decision.backward.refusal is None


@pytest.mark.parametrize(("stored", "kernels"), [(True, 2), (False, 3)])
def test_the_tpu_kernels_lower_without_a_tpu(stored: bool, kernels: int) -> None:
    """Forward and backward lower to Mosaic kernels on a machine that has no TPU: with stored exponentials, to two."""
    struct = jax.ShapeDtypeStruct
    config = LinearCrossEntropyTpuForward(256, 512, stored=stored)

    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction="mean", config=config)

    with tilewright.target("v6e"):
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(
            struct((300, 256), "bfloat16"), struct((256, 1000), "bfloat16"), struct((300,), "int32")
        )
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == kernels


def test_a_jitted_function_is_traced_anew_for_another_target() -> None:
    x, w, labels = draw()
    jitted = jax.jit(lambda x: linear_cross_entropy(x, w, labels))
    assert "linear_cross_entropy_forward" not in str(jitted.trace(x).jaxpr)
    with tilewright.target("v5e"):
        assert "linear_cross_entropy_forward" in str(jitted.trace(x).jaxpr)
    assert "linear_cross_entropy_forward" not in str(jitted.trace(x).jaxpr)


@pytest.mark.slow
def test_a_gradient_taken_after_the_target_closed_is_still_the_targets() -> None:
    x, w, labels = draw()
    with tilewright.target("v5e"), tilewright.interpret():
        out, pullback = jax.vjp(lambda x: linear_cross_entropy(x, w, labels), x)
    (dx,) = pullback(jnp.ones_like(out))
    _, plain = jax.vjp(lambda x: linear_cross_entropy(x, w, labels, implementation="reference"), x)
    assert_close(dx, plain(jnp.ones_like(out))[0], plain(jnp.ones_like(out))[0], "dx")
