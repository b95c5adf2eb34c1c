"""What only the Hopper kernels have: their tiles, chunks and limits, and that they lower without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import tilewright
from tests.ops.contract import able_to_run
from tilewright import linear_cross_entropy
from tilewright.configs import LinearCrossEntropySm90Backward, LinearCrossEntropySm90Forward
from tilewright.core.chip import MIB, Chip
from tilewright.core.dispatch import find_op
from tilewright.core.implementation import Launch
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.cases import _case
from tilewright.ops.linear_cross_entropy.pallas_gpu.sm90_bwd import BACKWARD
from tilewright.ops.linear_cross_entropy.pallas_gpu.sm90_fwd import FORWARD, special_tiles
from tilewright.workbench.check import CaseCheck


def configs(block_v: int, stages: int, band: int, chunk_v: int, stored_v: int = 0):
    return (
        LinearCrossEntropySm90Forward(block_v, stages, band, stored_v=stored_v),
        LinearCrossEntropySm90Backward(block_v, stages, band, chunk_v),
    )


NARROW = {"block_v": 128, "stages": 2, "band": 2, "chunk_v": 128}


def draw(n: int = 12, h: int = 16, v: int = 40, seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (n, h)).astype(jnp.bfloat16)
    w = (0.5 * jax.random.normal(keys[1], (h, v))).astype(jnp.bfloat16)
    return x, w, jax.random.randint(keys[2], (n,), 0, v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stored_v"),
    [
        # Three blocks of rows in bands of two; one block of columns that is stored, and two that are not, the last of
        # them half as wide; stages are reused.
        (_case("bands", 300, 200, 320, ignored=0.1, z_loss=1e-2), 128),
        (_case("one_row", 1, 8, 1, soft_cap=3.0), 0),
    ],
    ids=("bands", "one_row"),
)
def test_many_small_tiles_meet_the_oracle(case, stored_v: int) -> None:
    held = CaseCheck(find_op("linear_cross_entropy"), case, "bfloat16")
    with able_to_run("pallas_gpu"):
        results = held.check("pallas_gpu", config=configs(**NARROW, stored_v=stored_v))
    for result in results:
        assert result.verdict.ok, f"{result.quantity}: {result.verdict}"


@pytest.mark.slow
def test_labels_that_are_ignored_or_out_of_range() -> None:
    """-100 counts nothing; any other label outside the vocabulary is NaN in its row, and in no other."""
    x, w, labels = draw()
    labels = labels.at[5].set(-100).at[3].set(40)

    def run(x):
        return linear_cross_entropy(x, w, labels, implementation="pallas_gpu", config=configs(**NARROW, stored_v=128))

    with able_to_run("pallas_gpu"):
        loss, dx = jax.jit(lambda x: (run(x), jax.vjp(run, x)[1](jnp.ones(12))[0]))(x)
    others = np.arange(12) != 3
    assert np.isnan(loss[3])
    assert np.all(np.isnan(np.asarray(dx[3], np.float32)))
    assert loss[5] == 0
    assert np.all(np.asarray(dx[5], np.float32) == 0)
    assert np.all(np.isfinite(np.asarray(loss)[others]))
    assert np.all(np.isfinite(np.asarray(dx, np.float32)[others]))


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "stored_v"), [(-90.0, 128), (90.0, 0)])
def test_padding_beside_logits_that_are_all_far_from_zero(offset: float, stored_v: int) -> None:
    """Columns past V have logits of 0, which must count nothing where all others are near -1,000 or 1,000."""
    x, w, labels = draw(v=70)
    x, w = x.at[:, 0].set(12.0), w.at[0].set(offset)
    config = configs(**NARROW, stored_v=stored_v)

    def run(x, w, implementation, config=None):
        return linear_cross_entropy(x, w, labels, reduction="sum", implementation=implementation, config=config)

    with able_to_run("pallas_gpu"):
        got, gradients = jax.jit(jax.value_and_grad(lambda x, w: run(x, w, "pallas_gpu", config), (0, 1)))(x, w)
    expected, wanted = jax.value_and_grad(lambda x, w: run(x, w, "xla"), (0, 1))(x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    for one, other in zip(gradients, wanted, strict=True):
        # Not the first column of dx, which is a sum of large numbers that cancel.
        one, other = (np.asarray(gradient, np.float32)[:, 1:] for gradient in (one, other))
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.01)


def test_the_special_tiles_are_those_with_a_label_and_the_last() -> None:
    labels = jnp.array([0] * 64 + [130] * 63 + [299], jnp.int32)
    np.testing.assert_array_equal(special_tiles(labels, 300, 64, 128), [[1, 0, 1], [0, 1, 1]])
    np.testing.assert_array_equal(special_tiles(labels, 384, 64, 128), [[1, 0, 0], [0, 1, 1]])


def _largest_arrays(function, *structs) -> set[tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of more than 64 MiB that the function makes."""
    found = set()

    def walk(jaxpr) -> None:
        for equation in jaxpr.eqns:
            for variable in equation.outvars:
                aval = variable.aval
                if getattr(aval, "size", 0) * getattr(getattr(aval, "dtype", None), "itemsize", 0) > 2**26:
                    found.add((aval.shape, aval.dtype.name))
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*structs).jaxpr)
    return found


@pytest.mark.parametrize(("n", "h", "v"), [(8192, 2048, 151936), (8192, 4096, 128256), (32768, 1024, 50257)])
def test_what_is_stored_is_bounded(n: int, h: int, v: int) -> None:
    """Beside w, dw, what is cut out of them, dx and 12 bytes for a row of a tile: exponentials, which the gradients
    overwrite, of 2.5 GiB at most; and for the other columns a chunk of gradients, of 320 MiB at most.
    """
    struct = jax.ShapeDtypeStruct

    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction="mean")

    with tilewright.target("h200"):
        arrays = _largest_arrays(
            jax.grad(loss, (0, 1)), struct((n, h), "bfloat16"), struct((h, v), "bfloat16"), struct((n,), "int32")
        )
    whole, statistics = -(-v // 64) * 64, (-(-v // 256), 3, n)
    made = {shape for shape, dtype in arrays if shape[0] == n and shape != (n, h)}
    stored = max(shape[1] for shape in made)
    assert stored == whole or 2 * n * stored > 2500 * MIB
    assert 2 * n * stored <= 2560 * MIB
    assert {dtype for shape, dtype in arrays if shape == (n, stored)} == {"bfloat16"}
    assert (len(made) == 1) == (stored == whole)
    assert all(2 * n * width <= 320 * MIB for _, width in made - {(n, stored)})
    known = {(n, h), statistics} | {(h, width) for width in range(64, whole + 1)}
    assert {shape for shape, _ in arrays} - made <= known


@pytest.mark.slow
def test_the_kernels_lower_without_a_gpu() -> None:
    """One kernel forward; backward one for what was stored, one for the other whole chunks, in a loop, and one for the
    rest of the vocabulary.
    """
    struct = jax.ShapeDtypeStruct

    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction="mean", config=configs(256, 4, 16, 1024, stored_v=256))

    with tilewright.target("h200"):
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(
            struct((300, 256), "bfloat16"), struct((256, 2500), "bfloat16"), struct((300,), "int32")
        )
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu") == 4


def test_a_part_of_the_vocabulary_saves_what_the_whole_saves() -> None:
    """The compiler cuts a call after it is traced, when the shapes of what is saved are settled. A part's own
    exponentials have others, so it saves zeros, and its backward recomputes the logits.
    """
    chip, bf16, int32 = Chip.named("h200"), jnp.bfloat16, jnp.int32
    forward, backward = (Launch(chip, config, None) for config in configs(256, 4, 16, 256, stored_v=512))

    def call(v: int, whole_v: int | None) -> LinearCrossEntropyCall:
        x, w, labels = (jnp.zeros(shape, dtype) for shape, dtype in (((64, 64), bf16), ((64, v), bf16), ((64,), int32)))
        return LinearCrossEntropyCall(x=x, w=w, labels=labels, soft_cap=None, whole_v=whole_v)

    part, run = call(300, 600), functools.partial(FORWARD.run, launch=forward, save=True)
    (_, wanted), (outputs, saved) = jax.eval_shape(run, call(600, None)), jax.eval_shape(run, part)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), saved) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    jaxpr = jax.make_jaxpr(functools.partial(BACKWARD.run, launch=backward))(part, saved, outputs).jaxpr
    leaves = jax.tree.leaves((part, saved, outputs))
    (roots,) = (variable for leaf, variable in zip(leaves, jaxpr.invars, strict=True) if leaf is saved.stored.roots)
    assert not any(variable is roots for equation in jaxpr.eqns for variable in equation.invars)


def test_the_kernels_are_traced_inside_shard_map(cpu_devices: list) -> None:
    """Rows over four devices: the sums of the loop over chunks vary as the rows do."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])
    split, whole = PartitionSpec("rows"), PartitionSpec()
    struct = jax.ShapeDtypeStruct

    def total(x, w, labels):
        config = configs(256, 4, 16, 256)
        loss = linear_cross_entropy(x, w, labels, reduction="sum", implementation="pallas_gpu", config=config)
        return jax.lax.psum(loss, "rows")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(split, whole, split), out_specs=whole)
    with tilewright.target("h200"):
        dx, dw = jax.eval_shape(
            jax.grad(sharded, (0, 1)),
            struct((512, 128), "bfloat16"),
            struct((128, 700), "bfloat16"),
            struct((512,), "int32"),
        )
    assert (dx.shape, dw.shape) == ((512, 128), (128, 700))


@pytest.mark.parametrize(
    ("chip", "dtype", "config", "message"),
    [
        ("a100", "bfloat16", None, r"written for Hopper GPUs .*the chip is a100, with compute capability 8.0; use"),
        ("h200", "float32", None, r"x is float32, and it multiplies bfloat16 only .*pass x and w as bfloat16, or"),
        (
            "h200",
            "bfloat16",
            configs(256, 5, 16, 256),
            r"its forward kernel needs about \d+ KiB of shared memory .* a h200 has 227; use a smaller block_v or stages",
        ),
    ],
)
def test_what_it_does_not_take_is_refused_with_the_way_out(chip: str, dtype: str, config, message: str) -> None:
    struct = jax.ShapeDtypeStruct
    arrays = struct((16, 64), dtype), struct((64, 512), dtype), struct((16,), "int32")
    with tilewright.target(chip):
        with pytest.raises(tilewright.Unsupported, match=message):
            jax.eval_shape(lambda *a: linear_cross_entropy(*a, implementation="pallas_gpu", config=config), *arrays)
        if config is None:
            (decision,) = tilewright.explain(linear_cross_entropy, *arrays).decisions
            assert decision.implementation == "xla"


def test_a_hopper_gpu_is_served_by_the_kernel() -> None:
    struct = jax.ShapeDtypeStruct
    arrays = struct((16, 64), "bfloat16"), struct((64, 512), "bfloat16"), struct((16,), "int32")
    for chip in ("h100", "h200"):
        with tilewright.target(chip):
            (decision,) = tilewright.explain(linear_cross_entropy, *arrays).decisions
        assert decision.implementation == "pallas_gpu"


def test_a_backward_that_does_not_fit_is_refused_where_it_is_needed() -> None:
    struct = jax.ShapeDtypeStruct
    x, w, labels = struct((16, 64), "bfloat16"), struct((64, 512), "bfloat16"), struct((16,), "int32")
    huge = LinearCrossEntropySm90Backward(256, 5, 16, 256)

    def loss(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction="sum", implementation="pallas_gpu", config=huge)

    with tilewright.target("h200"):
        jax.eval_shape(loss, x, w, labels)
        needs = (
            r"cannot differentiate this call: its backward kernel needs about \d+ KiB of shared memory for .*stages=5"
        )
        with pytest.raises(tilewright.Unsupported, match=needs):
            jax.eval_shape(jax.grad(loss), x, w, labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_v": 96}, r"block_v=96 must be a multiple of 64, at most 256 .*; use 256"),
        ({"stages": 1}, r"stages=1 must be 2 or more \(a copy .*\); use 4"),
        ({"band": 0}, r"band=0 must be a positive integer; use 16"),
        ({"chunk_v": 300}, r"chunk_v=300 must be a positive multiple of 256 \(block_v\); use 16384"),
        ({"cluster": 3}, r"cluster=3 must be 1 or 2 .*; use 2"),
        ({"band": 7}, r"band=7 must be a multiple of cluster=2; use 8, or cluster=1"),
        ({"producer_registers": 44}, r"producer_registers=44 must be a positive multiple of 8 \(setmaxnreg\); use 48"),
        ({"consumer_registers": 240}, r"consumer_registers=240 and .* 504 together \(520 here\); use 232 and 40"),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused_when_built(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropySm90Backward(**{"block_v": 256, "stages": 4, "band": 16, "chunk_v": 256} | fields)


def test_stored_columns_are_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"stored_v=300 must be a multiple of block_v=256; use 512, which may be more"):
        LinearCrossEntropySm90Forward(256, 4, 16, stored_v=300)
    with pytest.raises(ValueError, match=r"stored_v=-256 must be 0 or more \(columns\); use 0"):
        LinearCrossEntropySm90Forward(256, 4, 16, stored_v=-256)


@pytest.mark.parametrize(("n", "v"), [(1, 1), (5, 70), (8192, 151936), (8192, 128256), (100000, 50257), (2**21, 300)])
def test_the_heuristic_fits(n: int, v: int) -> None:
    struct = jax.ShapeDtypeStruct
    arrays = struct((n, 64), "bfloat16"), struct((64, v), "bfloat16"), struct((n,), "int32")
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(linear_cross_entropy, *arrays).decisions
    assert decision.implementation == "pallas_gpu"
    assert decision.backward.refusal is None
    assert 2 * n * min(decision.forward.config.stored_v, v) <= 2560 * MIB
    config = decision.backward.config
    # A single block of columns is the least there can be.
    assert 2 * n * min(config.chunk_v, v) <= 320 * MIB or config.chunk_v == config.block_v
