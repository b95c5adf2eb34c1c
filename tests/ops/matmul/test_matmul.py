"""matmul: the contract, and what is its own: epilogues, dtypes, quantised operands, float8 training, errors."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tilewright
from tests.ops.composition import collectives, mesh_of
from tests.ops.contract import OpContract
from tilewright import QuantizedArray, dequantize, fp8_matmul, matmul, quantize
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.cases import _case


class TestContract(OpContract):
    op_name = "matmul"
    wrapper_is_interpreted = True
    any_leading_axes = True
    call_type = MatmulCall
    cuts: ClassVar = {"rows": {"tokens0": "x"}, "columns": {"N": "y"}, "both": {"tokens0": "x", "N": "y"}}
    whole_letter = "K"
    not_interpreted = frozenset({"cpu_bench", "gelu", "relu"})  # One epilogue has every activation.
    mesh_case = _case("mesh", (4, 6), 64, 128, bias=True, residual=True, activation="silu")


def draw(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def relative(got: Any, want: Any) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "relu", "swiglu"])
def test_agrees_with_jax_nn(activation: Any) -> None:
    """An oracle that is not ours."""
    x, w, residual = draw(3, 5, 16), draw(16, 24, seed=1), draw(3, 5, 12 if activation == "swiglu" else 24, seed=2)
    z = jnp.einsum("btk,kn->btn", x, w, precision="highest")
    if activation == "swiglu":
        want = jax.nn.silu(z[..., :12]) * z[..., 12:]
    else:
        want = z if activation is None else getattr(jax.nn, activation)(z)
    got = matmul(x, w, activation=activation, residual=residual)
    np.testing.assert_allclose(got, want + residual, rtol=2e-5, atol=2e-5)


def test_swiglu_takes_gates_and_values_as_an_axis() -> None:
    x, w = draw(7, 16), draw(16, 24, seed=1)
    both = matmul(x, w.reshape(16, 2, 12), activation="swiglu")
    np.testing.assert_array_equal(both, matmul(x, w, activation="swiglu"))


def test_float32_means_float32() -> None:
    """Whatever the default precision is."""
    x, w = draw(64, 256), draw(256, 64, seed=1)
    with jax.default_matmul_precision("bfloat16"):
        got = jax.jit(lambda x, w: matmul(x, w))(x, w)
    assert relative(got, np.asarray(x, np.float64) @ np.asarray(w, np.float64)) < 1e-6


def test_out_dtype() -> None:
    x, w = draw(8, 32, dtype="bfloat16"), draw(32, 16, dtype="bfloat16", seed=1)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    got = matmul(x, w, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    assert relative(got, exact) < 1e-6
    assert matmul(x, w).dtype == jnp.bfloat16


def test_no_columns_and_no_channels_of_quantised_operands() -> None:
    assert matmul(draw(4, 8), quantize(jnp.zeros((8, 0)), "int8")).shape == (4, 0)
    assert not np.any(fp8_matmul(jnp.zeros((3, 0)), jnp.zeros((0, 4))))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, w = jnp.zeros(shape), draw(16, 8)
    assert matmul(x, w).shape == (*shape[:-1], 8)
    assert jax.grad(lambda w: jnp.sum(matmul(x, w)))(w).shape == w.shape


# Quantised arrays.

BLOCKS = [None, (None, None), (1, None), (None, 1), (16, 8), (1, 16), 8]


@pytest.mark.parametrize("block", BLOCKS)
def test_quantised_within_half_a_step(block: Any) -> None:
    for dtype, bound in (("int8", 0.5), ("int4", 0.5), ("float8_e4m3fn", None)):
        _within_half_a_step(dtype, bound, block)


def _within_half_a_step(dtype: str, bound: float | None, block: Any) -> None:
    x = draw(3, 32, 48)
    q = quantize(x, dtype, block=block)
    assert (q.shape, q.dtype) == (x.shape, dtype)
    rows, columns = q.block
    scales = np.repeat(np.repeat(q.scales, rows, axis=1), columns, axis=2)
    error = np.abs(np.asarray(dequantize(q)) - x)
    limit = bound * scales if bound else 2.0**-4 * np.abs(x) + 2.0**-10 * scales
    assert np.all(error <= limit * (1 + 1e-5))


def test_quantised_array_is_a_pytree() -> None:
    """It goes through jit, scan, slicing of its leading axis, donation and a round trip by leaves."""
    w = draw(3, 32, 16)
    q = quantize(w, "int4", block=(8, 1))
    leaves, structure = jax.tree.flatten(q)
    assert [leaf.shape for leaf in leaves] == [(3, 16, 16), (3, 4, 16)]
    again = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    assert isinstance(again, QuantizedArray)
    np.testing.assert_array_equal(dequantize(again), dequantize(q))
    x = draw(5, 32, seed=1)
    _, scanned = jax.lax.scan(lambda carry, layer: (carry, matmul(x, layer)), None, q)
    for n in range(3):
        np.testing.assert_array_equal(scanned[n], matmul(x, jax.tree.map(lambda leaf, n=n: leaf[n], q)))
    flags = jax.tree.map(lambda leaf: True, q)
    assert (
        repr(q)
        == "QuantizedArray(int4[3, 32, 16], stored=int8[3, 16, 16], scales=float32[3, 4, 16], layout='row_major')"
    )
    assert repr(flags) == "QuantizedArray(int4, stored=True, scales=True, layout='row_major')"


def test_zeros_quantise_to_zeros() -> None:
    for dtype in ("int8", "float8_e5m2"):
        assert not np.any(dequantize(quantize(jnp.zeros((4, 8)), dtype)))


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        ("int8", None),
        ("int4", (16, 8)),
        pytest.param("int8", (1, None), marks=pytest.mark.slow),
        pytest.param("int4", (1, None), marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", (16, 8), marks=pytest.mark.slow),
        pytest.param("float8_e5m2", (None, None), marks=pytest.mark.slow),
    ],
)
def test_weight_only(dtype: str, block: Any) -> None:
    """The product with quantised weights is the product with the dequantised ones; so is the gradient of x."""
    x, w = draw(6, 32), draw(32, 24, seed=1)
    q = quantize(w, dtype, block=block)

    def loss(x: jax.Array, w: Any) -> jax.Array:
        return jnp.sum(jnp.sin(matmul(x, w, activation="silu")))

    (got, dx), (want, d_plain) = (jax.value_and_grad(loss)(x, each) for each in (q, dequantize(q)))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(dx, d_plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("x_block", "w_block"), [((1, None), None), ((None, None), (None, None)), ((1, 16), (16, 8))])
def test_both_sides(dtype: str, x_block: Any, w_block: Any) -> None:
    x, w = quantize(draw(6, 32), dtype, block=x_block), quantize(draw(32, 24, seed=1), dtype, block=w_block)
    got = matmul(x, w, out_dtype=jnp.float32)
    assert relative(got, np.asarray(dequantize(x), np.float64) @ np.asarray(dequantize(w), np.float64)) < 1e-6
    assert matmul(x, w).dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gradients_stop_at_quantised_operands(implementation: Any) -> None:
    x, w = quantize(draw(6, 8), "float8_e4m3fn", block=(1, None)), quantize(draw(8, 4, seed=1), "float8_e4m3fn")
    floats = dequantize(x)

    def loss(x: Any, w: Any) -> jax.Array:
        return jnp.sum(matmul(x, w, out_dtype=jnp.float32, implementation=implementation))

    for gradients in (jax.grad(loss, (0, 1))(x, w), jax.grad(loss, 1)(floats, w)):
        assert not any(np.any(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(gradients))
    d_scales = jax.grad(lambda w: jnp.sum(dequantize(w)))(w).scales
    np.testing.assert_allclose(d_scales[0], jnp.sum(w.values.astype(jnp.float32), axis=0), rtol=1e-6)


@pytest.mark.slow
def test_fp8_matmul_error_and_straight_through_gradients() -> None:
    """The errors that its docstring states."""
    x, w, dy = draw(2, 150, 500), draw(500, 260, seed=1), draw(2, 150, 260, seed=2)
    y, pullback = jax.vjp(fp8_matmul, x, w)
    dx, dw = pullback(dy)
    rows, d_rows = x.reshape(300, 500), dy.reshape(300, 260)
    assert relative(y.reshape(300, 260), rows @ w) < 0.038
    assert relative(dx.reshape(300, 500), d_rows @ w.T) < 0.059
    assert relative(dw, rows.T @ d_rows) < 0.059


@pytest.mark.slow
def test_a_small_model_trains_in_fp8_to_the_same_loss() -> None:
    """Within 10 % of the loss that float32 reaches, a sixtieth of the first one."""
    keys = jax.random.split(jax.random.key(3), 5)
    x = jax.random.normal(keys[0], (256, 128))
    teacher, start = ([jax.random.normal(key, (128, 128)) / 11.3 for key in pair] for pair in (keys[1:3], keys[3:]))
    target = jax.nn.silu(x @ teacher[0]) @ teacher[1]

    def loss(weights: list[jax.Array], product: Any) -> jax.Array:
        hidden = jax.nn.silu(product(x, weights[0]))
        return jnp.mean(jnp.square(product(hidden, weights[1]) - target))

    def trained(product: Any) -> tuple[float, float]:
        def step(carry: Any, _: None) -> Any:
            weights, momentum = carry
            value, gradient = jax.value_and_grad(loss)(weights, product)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
            return (jax.tree.map(lambda w, m: w - m, weights, momentum), momentum), value

        carry = (start, jax.tree.map(jnp.zeros_like, start))
        (weights, _), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=200))(carry)
        return float(losses[0]), float(loss(weights, jnp.dot))

    (first, plain), (_, in_fp8) = trained(jnp.dot), trained(fp8_matmul)
    assert plain < first / 60
    assert in_fp8 < 1.1 * plain


@pytest.mark.slow
def test_fp8_matmul_on_meshes() -> None:
    """Inside `shard_map` and on Explicit axes the gradient of shared weights is the sum over devices."""
    x, w, dy = draw(256, 128), draw(128, 128, seed=1), draw(256, 128, seed=2)
    want = jax.grad(lambda w: jnp.sum(fp8_matmul(x, w) * dy))(w)
    specs = {"in_specs": (PartitionSpec("x"), PartitionSpec()), "out_specs": PartitionSpec("x")}
    run = jax.shard_map(fp8_matmul, mesh=mesh_of(AxisType.Auto), **specs)
    assert relative(jax.jit(jax.grad(lambda w: jnp.sum(run(x, w) * dy)))(w), want) < 0.06
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), (None, "y")))
        sharded = jax.device_put(x, rows), jax.device_put(w, columns), jax.device_put(dy, rows)
        got = jax.jit(
            jax.grad(lambda w, x, dy: jnp.sum(fp8_matmul(x, w) * jax.sharding.reshard(dy, PartitionSpec("x", "y"))))
        )(sharded[1], sharded[0], sharded[2])
    assert got.sharding.spec == PartitionSpec(None, "y")
    assert relative(got, want) < 0.06


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "reduced"), [((), 1), (("y",), 2)], ids=["rows", "rows and columns"])
def test_fp8_matmul_is_cut_by_the_compiler(columns: tuple[str, ...], reduced: int) -> None:
    """Under Auto axes nothing is gathered; dw is summed over the devices that share its columns, and dx its rows."""
    arrays, mesh = (draw(2, 128, 128), draw(128, 256, seed=1), draw(2, 128, 256, seed=2)), mesh_of(AxisType.Auto)
    specs = (("x",), (None, *columns), ("x", None, *columns))
    cut = [jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes))) for a, axes in zip(arrays, specs, strict=True)]

    def gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(fp8_matmul, x, w)[1](dy)

    compiled = jax.jit(gradients).lower(*cut).compile()
    assert collectives(compiled) == {"all-reduce": reduced}
    for got, want in zip(compiled(*cut), jax.jit(gradients)(*arrays), strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, rtol=1e-4, atol=1e-4)


def test_fp8_matmul_refuses_what_matmul_refuses_on_explicit_axes() -> None:
    mesh = mesh_of(AxisType.Explicit)
    for x_axes, w_axes, told in (
        ((None, "x"), (), "x is sharded over mesh axis 'x' along its axis K"),
        (("x",), (None, "x"), "w is sharded over mesh axis 'x' along its axis N, .* another axis of this call"),
    ):
        x, w = (jax.device_put(draw(8, 8), NamedSharding(mesh, PartitionSpec(*axes))) for axes in (x_axes, w_axes))
        for product in (matmul, fp8_matmul):
            with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"{product.__name__}: {told}"):
                product(x, w)


def test_explain_of_fp8_matmul_shows_no_float_products() -> None:
    assert "backward: no products: quantised operands take no gradient" in str(
        tilewright.explain(fp8_matmul, jnp.ones((4, 8)), jnp.ones((8, 4)), implementation="xla")
    )


def test_fp8_matmul_has_one_reverse_derivative() -> None:
    x, w = draw(4, 8), draw(8, 4, seed=1)
    with pytest.raises(tilewright.Unsupported, match="fp8_matmul has no second derivative"):
        jax.grad(lambda w: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.square(fp8_matmul(x, w))))(x)))(w)


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        ("int4", (4, None)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("int8", None), ("float8_e4m3fn", 2))),
    ],
)
def test_quantised_on_explicit_axes_as_on_one_device(dtype: str, block: Any) -> None:
    """By parts: blocks inside of one, or along a whole axis, whose scales the parts share."""
    mesh, x = mesh_of(AxisType.Explicit), draw(16, 12)

    @jax.jit
    def there_and_back(x: jax.Array) -> tuple[QuantizedArray, jax.Array]:
        x8 = quantize(x, dtype, block=block)
        return x8, dequantize(x8)

    with jax.set_mesh(mesh):
        got = there_and_back(jax.device_put(x, NamedSharding(mesh, PartitionSpec("x", "y"))))
    assert str(jax.typeof(got[1])) == "float32[16@x,12@y]"
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(jax.device_get(a), b), got, there_and_back(x))


# What is refused.


@pytest.mark.parametrize(
    ("rows", "dtype", "block", "told"),
    [
        (
            16,
            "int8",
            (16, 4),
            "along its axis C, of .*parts of 6 columns, and a block has 4 columns; pass jax.sharding.res",
        ),
        (
            6,
            "int4",
            None,
            "mesh axis 'x' along its axis R, .*parts of 3 rows, and a byte of int4 has two rows; .* of 2$",
        ),
    ],
)
def test_blocks_of_two_devices_get_the_remedy(rows: int, dtype: str, block: Any, told: str) -> None:
    mesh = mesh_of(AxisType.Explicit)
    x = jax.device_put(draw(rows, 12), NamedSharding(mesh, PartitionSpec("x", "y")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=told):
        quantize(x, dtype, block=block)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (lambda: (draw(4, 8), draw(9, 3)), r"K=8 channels; pass a w with 8 rows"),
        (lambda: (draw(4, 8), draw(3, 8)), r"it looks transposed: pass w.T"),
        (lambda: (draw(4, 8), draw(8, 3, dtype="bfloat16")), r"they must be equal: pass w.astype\(x.dtype\)"),
        (lambda: (jnp.ones((4, 8), jnp.int32), draw(8, 3)), r"float32 or bfloat16: x.astype"),
        (lambda: (jnp.float32(1), draw(8, 3)), r"x is float32\[\], a scalar; it must be \[..., K\]"),
        (lambda: (None, draw(8, 3)), "x is of type NoneType; it must be an array"),
        (lambda: (quantize(draw(4, 8), "int4", block=(1, None)), quantize(draw(8, 3), "int8")), "x is int4, and act"),
        (lambda: (quantize(draw(4, 8), "int8", block=(1, None)), draw(8, 3)), "quantise w too, or pass dequantize"),
        (
            lambda: (quantize(draw(4, 8), "int8", block=(2, 8)), quantize(draw(8, 3), "int8")),
            r"a scale per row, or one for all rows: use quantize\(x, 'int8', block=\(1, 8\)\), or block=\(None, 8\)",
        ),
        (
            lambda: (draw(4, 8), quantize(draw(3, 8), "int8", block=(1, None))),
            r"it looks transposed: quantise the float matrix as quantize\(w.T, 'int8'\)",
        ),
    ],
)
def test_bad_operands_get_the_remedy(arguments: Any, told: str) -> None:
    x, w = arguments()
    with pytest.raises(ValueError, match=told):
        matmul(x, w)


@pytest.mark.parametrize(
    ("x_block", "w_block", "told"),
    [
        ((1, 4), (1, 2), r"w per 1; .* or one of them be all of K: pass quantize\(w, 'int8', block=\((4), (2)\)\)$"),
        ((None, 2), (4, 1), r"per 2 of K and w per 4; .*: pass quantize\(x, 'float8_e4m3fn', block=\((1), (4)\)\)$"),
    ],
)
def test_blocks_of_k_that_differ_get_the_remedy(x_block: Any, w_block: Any, told: str) -> None:
    x, w = draw(2, 8), draw(8, 4, seed=1)
    x8, w8 = quantize(x, "float8_e4m3fn", block=x_block), quantize(w, "int8", block=w_block)
    with pytest.raises(ValueError, match=told) as error:
        matmul(x8, w8)
    found = re.search(told, str(error.value))
    assert found
    block = tuple(map(int, found.groups()))
    again = (x8, quantize(w, "int8", block=block)) if "(w," in told else (quantize(x, "float8_e4m3fn", block=block), w8)
    assert jax.eval_shape(matmul, *again).shape == (2, 4)


@pytest.mark.parametrize("block", [(1, 4), (1, None), (None, 4), (None, None), (None, 1)])
def test_scales_of_x_per_row_or_for_all_rows(block: Any) -> None:
    x, w = quantize(draw(6, 8), "int8", block=block), quantize(draw(8, 4, seed=1), "int8")
    want = np.asarray(dequantize(x), np.float64) @ np.asarray(dequantize(w), np.float64)
    assert relative(matmul(x, w, out_dtype=jnp.float32), want) < 1e-6


EIGHT = QuantizedArray(np.zeros((8, 8), "int8"), np.ones((1, 8), "float32"), "int8")


@pytest.fixture
def _unchecked() -> Iterator[None]:
    """Arguments of other types than annotated reach the functions, as they do in a user's program."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize(
    ("dtype", "change", "told"),
    [
        (
            "float8_e4m3fn",
            {"stored": np.zeros((16, 8), "uint8")},
            r"uint8\[16, 8\], .*stored.view\(jnp.float8_e4m3fn\)",
        ),
        ("int8", {"stored": np.zeros((16, 8), jnp.bfloat16)}, r"bfloat16\[16, 8\], and int8 is .* weights are cast"),
        ("int4", {"stored": np.zeros((8, 8), jnp.bfloat16)}, r"bfloat16\[8, 8\], and int4 is stored as int8"),
        ("int8", {"scales": np.ones((1, 8), "int32")}, r"scales is int32\[1, 8\]; scales are float32"),
        ("int8", {"scales": np.ones((1, 8), jnp.bfloat16)}, r"scales is bfloat16\[1, 8\]; scales are float32"),
        ("int8", {"scales": np.ones(8, "float32")}, r"shape \[16, 8\] and scales of shape \[8\]"),
        ("int8", {"layout": "xx"}, "has layout 'xx'; use the one that it was quantised with"),
        ("int8", {"stored": None}, "stored is of type NoneType; it must be an array"),
    ],
)
def test_a_quantised_array_that_contradicts_itself_gets_the_remedy(dtype: str, change: dict, told: str) -> None:
    x, right = np.ones((4, 16), "float32"), {"stored": np.zeros((16, 8), "int8"), "scales": np.ones((1, 8), "float32")}
    q = QuantizedArray(**{**right, "dtype": dtype, **change})
    for run in (matmul, jax.jit(matmul), lambda x, q: dequantize(q)):
        with pytest.raises(ValueError, match=told):
            run(x, q)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: quantize(x, "fp8"), "dtype='fp8' is not a dtype to quantise to; use one of 'int8'"),
        (lambda x: quantize(x, "INT8"), "dtype='INT8' is not .*; did you mean int8"),
        (lambda x: quantize(x, None), "dtype=None is not a dtype to quantise to"),
        (lambda x: quantize(x, "int8", block=2.0), r"block=2.0 must be rows and columns, such as \(128, 128\)"),
        (lambda x: quantize(None, "int8"), "x is of type NoneType; it must be an array"),
        (lambda x: quantize(x[0], "int8"), r"x is float32\[8\]; it must be \[..., R, C\]: pass x\[None\]"),
        (
            lambda x: quantize(EIGHT, "int8"),
            r"x is quantised, QuantizedArray\(int8\[8, 8\].*pass tilewright.dequantize",
        ),
        (lambda x: dequantize(x), "dequantize takes the QuantizedArray that quantize returned"),
        (lambda x: dequantize(EIGHT, "nope"), "dtype='nope' is not a floating dtype"),
        (lambda x: matmul(x, x, bias=EIGHT), r"bias is quantised.*tilewright.dequantize\(bias\)"),
        (lambda x: matmul(x, x, out_dtype="nope"), "out_dtype='nope' must be float32 or bfloat16"),
        (lambda x: fp8_matmul(x, x.astype("float16")), r"w is float16\[8, 8\]; .*: w.astype\(jnp.bfloat16\)"),
        (lambda x: fp8_matmul(x, EIGHT), r"w is quantised.*tilewright.dequantize\(w\)"),
        (
            lambda x: tilewright.linear_cross_entropy(x, EIGHT, np.zeros(8, "int32")),
            r"w is quantised.*tilewright.dequantize\(w\)",
        ),
    ],
)
def test_arguments_of_another_kind_get_the_remedy(function: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        function(np.ones((8, 8), "float32"))


@pytest.mark.usefixtures("_unchecked")
def test_a_block_may_be_of_numpy_integers() -> None:
    assert jax.eval_shape(lambda: quantize(jnp.ones((8, 8)), "int8", block=np.int64(2))).block == (2, 2)  # type: ignore[arg-type]


def test_bad_epilogues_get_the_remedy() -> None:
    x, w = draw(4, 8), draw(8, 6)
    with pytest.raises(ValueError, match=r"activation='tanh' is not an activation; use one of 'silu', 'gelu'"):
        matmul(x, w, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bias is float32\[5\]; it must be \[6\], floating"):
        matmul(x, w, bias=jnp.zeros(5))
    with pytest.raises(ValueError, match=r"residual is float32\[4, 5\]; it must be \[4, 6\]"):
        matmul(x, w, residual=jnp.zeros((4, 5)))
    with pytest.raises(ValueError, match=r"w has 5 columns; activation='swiglu' takes \[K, 2 N\]"):
        matmul(x, w[:, :5], activation="swiglu")
    with pytest.raises(ValueError, match=r"are \[K, 2 N\] = \[8, 6\]: pass quantize\(w.reshape\(8, 6\), 'int8'\)"):
        jax.eval_shape(lambda: matmul(x, quantize(w.reshape(8, 2, 3), "int8"), activation="swiglu"))


def test_blocks_that_do_not_divide_get_the_remedy() -> None:
    for shape, dtype, block, told in (
        ((10, 8), "int8", (8, 8), r"the 10 rows of x; pad x to 16 rows, or use block=\(None, 8\), where all 10 rows"),
        ((5, 10), "float8_e4m3fn", (1, 8), r"the 10 columns of x; pad x to 16 columns, or use block=\(1, None\)"),
        ((16, 4), "int4", (7, 1), r"pad x to 28 rows, or use block=\(None, 1\)"),
        ((21, 4), "int4", (7, 1), "its rows must be even: pad x to 28 rows"),
    ):
        with pytest.raises(ValueError, match=told):
            quantize(jnp.asarray(np.ones(shape, "float32")), dtype, block=block)
    with pytest.raises(ValueError, match=r"dtype='int16' is not a dtype to quantise to; use one of 'int8'"):
        quantize(draw(10, 8), "int16")
    with pytest.raises(ValueError, match="its rows must be even: pad x to 10 rows"):
        quantize(draw(9, 8), "int4")
    with pytest.raises(ValueError, match=r"of which one has gates and values both; .* block=\(8, 1\)"):
        matmul(draw(4, 8), quantize(draw(8, 24), "int8", block=(8, 8)), activation="swiglu")


def test_a_dtype_that_the_kernel_has_no_unit_for_names_the_way_out() -> None:
    x, w = quantize(draw(128, 128), "int8", block=(1, None)), quantize(draw(128, 128), "int4")
    with tilewright.target("h200"), pytest.raises(tilewright.Unsupported, match="implementation='xla'"):
        jax.eval_shape(lambda: matmul(x, w, implementation="pallas_gpu"))
