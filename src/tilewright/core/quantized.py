"""Quantised arrays: values of 8 or 4 bits, and one float32 scale per block of them.

    w8 = tilewright.quantize(w, "int8")                             # one scale per output column
    w8 = tilewright.quantize(w, "float8_e4m3fn", block=(128, 128))  # one per 128 x 128 weights
    x8 = tilewright.quantize(x, "float8_e4m3fn", block=(1, 128))    # one per row and 128 channels
    tilewright.dequantize(w8)                                       # values times scales, float32

A scale is the largest magnitude of its block divided by the largest number of the dtype, so nothing is clipped, and a
block of zeros has the scale 0. The error of an element is at most scale / 2 for integers; for float8 it is at most 2^-4
(e4m3) or 2^-3 (e5m2) of its magnitude, or half of the smallest subnormal times the scale.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from tilewright.core.arguments import dtype_name, is_integer, shown
from tilewright.core.chip import CHIPS
from tilewright.core.nearest import did_you_mean
from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import axes_named, explicit_axes, run_on_parts
from tilewright.core.target import current_chip

Layout = Literal["row_major", "column_major"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The dtypes of quantised values, and the magnitude that the largest element of a block is scaled to."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("stored", "scales"), meta_fields=("dtype", "layout"))
@dataclass(frozen=True)
class QuantizedArray:
    """An array [..., R, C] as small values times float32 scales. A pytree: it jits, shards, and is saved leaf by leaf.

    The number of elements that share a scale follows from the shapes of the two leaves, so that it survives slicing,
    stacking and sharding.
    """

    stored: Any
    """The values as they lie in memory. int4: int8 of half the rows, row 2 i in the low four bits of row i and row
    2 i + 1 in the high four. "column_major": the last two axes are exchanged."""
    scales: Any
    """float32, one per block: [..., R / block rows, C / block columns]."""
    dtype: str
    """Of the values: "int8", "int4", "float8_e4m3fn" or "float8_e5m2"."""
    layout: Layout = "row_major"

    @property
    def rows_first(self) -> Any:
        """The values as stored, with the rows before the columns. XLA makes no copy where a kernel exchanges them again."""
        return self.stored if self.layout == "row_major" else jnp.swapaxes(self.stored, -1, -2)

    @property
    def values(self) -> Any:
        """The values [..., R, C]: of the dtype itself, and int8 for int4."""
        return unpacked(self.rows_first) if self.dtype == "int4" else self.rows_first

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, rows, columns = self.stored.shape
        if self.layout == "column_major":
            rows, columns = columns, rows
        return (*outer, 2 * rows if self.dtype == "int4" else rows, columns)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns that share one scale."""
        rows, columns = (size // max(1, n) for size, n in zip(self.shape[-2:], self.scales.shape[-2:], strict=True))
        return rows, columns

    def __repr__(self) -> str:
        """The shape, and the leaves without their contents: in a tree they may be flags or shardings as well."""
        leaves = ", ".join(f"{name}={_leaf_shown(getattr(self, name))}" for name in ("stored", "scales"))
        shape = list(self.shape) if getattr(self.stored, "ndim", 0) >= 2 else ""
        return f"QuantizedArray({self.dtype}{shape}, {leaves}, layout={self.layout!r})"


def _leaf_shown(leaf: Any) -> str:
    return shown(leaf) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else repr(leaf)


def as_array(name: str, x: Any) -> jax.Array:
    """An argument that is not quantised as an array. Raises with the argument's name where it is something else."""
    if isinstance(x, QuantizedArray):
        raise ValueError(f"{name} is quantised, {x!r}; it must be a float array: pass tilewright.dequantize({name})")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is of type {type(x).__name__}; it must be an array of numbers") from None


def packed(values: Array) -> Array:
    """int8 values of four bits [..., R, C] as int8 [..., R / 2, C]: two rows in one."""
    low, high = values[..., 0::2, :], values[..., 1::2, :]
    return (low & 0xF) | (high << 4)


def unpacked(stored: Array) -> Array:
    """The inverse of `packed`."""
    low, high = (stored << 4) >> 4, stored >> 4  # Shifts of int8 keep the sign.
    *outer, rows, columns = stored.shape
    return jnp.stack([low, high], axis=-2).reshape(*outer, 2 * rows, columns)


def expanded_scales(scales: Array, shape: tuple[int, int]) -> Array:
    """One scale per element of the last two axes, from one per block."""
    for axis, size in zip((-2, -1), shape, strict=True):
        if (n := scales.shape[axis]) not in (1, size):
            # Not `jnp.repeat`, which takes no array that is sharded over Explicit mesh axes.
            at = scales.ndim + axis
            kept = [each for each in range(scales.ndim + 1) if each != at + 1]
            times = (*scales.shape[: at + 1], size // n, *scales.shape[at + 1 :])
            repeated = (*scales.shape[:at], n * (size // n), *scales.shape[at + 1 :])
            scales = jax.lax.broadcast_in_dim(scales, times, kept).reshape(repeated)
    return scales


def quantize(
    x: Float[Array, "*batch R C"],
    dtype: Any,
    *,
    block: int | tuple[int | None, int | None] | None = None,
    layout: Layout | None = None,
) -> QuantizedArray:
    """Quantises an array, with scales from its current values.

    The gradient stops here: values are integers, or too coarse to carry one. `tilewright.fp8_matmul` trains through
    quantised products with gradients to the float arrays.

    Args:
      x: [..., R, C], floating. Leading axes, such as layers or experts, have scales of their own.
      dtype: "int8", "int4", "float8_e4m3fn" or "float8_e5m2", or the JAX dtype. int4 needs an even R.
      block: the rows and columns that share one scale. None for an element of the pair means the whole axis:
        (None, 1) has one scale per column, (1, None) one per row, (None, None) one for the matrix. A number n is (n, n).
        Without a block there is one scale per column, which for weights [K, N] is an output column.
      layout: "column_major" stores a column's values next to each other, which is how the kernels for GPUs read weights:
        other layouts cost them a copy. It is the default for float8, and on a GPU; otherwise integers are "row_major".

    Returns:
      a `QuantizedArray` of shape [..., R, C].
    """
    x, name = as_array("x", x), dtype_name(dtype)
    if name is None or name not in LARGEST:
        given = dtype if name is None else name
        raise ValueError(
            f"dtype={given!r} is not a dtype to quantise to; use one of {', '.join(map(repr, LARGEST))}"
            f"{did_you_mean(given, LARGEST)}"
        )
    if x.ndim < 2:
        raise ValueError(f"x is {shown(x)}; it must be [..., R, C]: pass x[None] for a single row")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {shown(x)}; it must be [..., R, C] of a floating dtype: x.astype(jnp.float32)")
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={layout!r} is not a layout; use 'row_major', 'column_major', or None")
    sizes = _block_sizes(x, block, even_rows=name == "int4")
    layout = layout or ("row_major" if name.startswith("int") and current_chip().platform != "gpu" else "column_major")
    *outer, of_rows, of_columns = explicit_axes(x)
    if not (of_rows or of_columns):
        return QuantizedArray(*_quantized(x, name, sizes, layout, ()), name, layout)
    # On Explicit mesh axes each device quantises its own part. Where a block is a whole axis, the parts share their scales.
    whole = [size == n for size, n in zip(sizes, x.shape[-2:], strict=True)]
    parts = _part_sizes(x, name, sizes, whole, (of_rows, of_columns))
    shared = (*(of_rows if whole[0] else ()), *(of_columns if whole[1] else ()))
    of_stored = (of_rows, of_columns) if layout == "row_major" else (of_columns, of_rows)
    of_scales = (() if whole[0] else of_rows, () if whole[1] else of_columns)
    stored, scales = run_on_parts(
        lambda x: _quantized(x, name, parts, layout, shared), [x], (P(*outer, *of_stored), P(*outer, *of_scales))
    )
    return QuantizedArray(stored, scales, name, layout)


def _quantized(x: Array, name: str, sizes: tuple[int, int], layout: Layout, shared: tuple[str, ...]) -> tuple[Any, Any]:
    """Values as they are stored, and scales. Scales are the same along the mesh axes `shared` (`jax.shard_map`)."""
    x = jax.lax.stop_gradient(x).astype(accumulator(x.dtype))
    *outer, rows, columns = x.shape
    blocks = x.reshape(*outer, rows // sizes[0], sizes[0], columns // sizes[1], sizes[1])
    highest = jnp.max(jnp.abs(blocks), axis=(-3, -1), initial=0.0)  # [..., R / rows, C / columns]
    highest = jax.lax.pmax(highest, shared) if shared else highest
    scales = highest / LARGEST[name]
    scaled = blocks / jnp.where(scales == 0, 1.0, scales)[..., :, None, :, None]
    integer = name.startswith("int")
    values = jnp.round(scaled) if integer else scaled
    stored = values.reshape(x.shape).astype(jnp.int8 if integer else name)
    stored = packed(stored) if name == "int4" else stored
    stored = stored if layout == "row_major" else jnp.swapaxes(stored, -1, -2)
    return stored, scales.astype(jnp.float32)


def _part_sizes(
    x: Array, name: str, sizes: tuple[int, int], whole: list[bool], axes: tuple[tuple[str, ...], tuple[str, ...]]
) -> tuple[int, int]:
    """The block sizes of one device's part. Raises where a block, or the two rows of an int4 byte, have two parts."""
    mesh = jax.typeof(x).sharding.mesh
    found = []
    for axis, (size, over) in enumerate(zip(sizes, axes, strict=True)):
        part = x.shape[axis - 2] // math.prod(mesh.shape[each] for each in over)
        step = 1 if whole[axis] else size
        step = math.lcm(step, 2) if name == "int4" and axis == 0 else step
        if part % step:
            letter, unit = ("R", "rows") if axis == 0 else ("C", "columns")
            of_block = not whole[axis] and part % size
            why = f"a block has {size} {unit}" if of_block else "a byte of int4 has two rows"
            raise ValueError(
                f"quantize: x is sharded over {axes_named(over)} along its axis {letter}, of [..., R, C], in parts of "
                f"{part} {unit}, and {why}; pass jax.sharding.reshard(x, ...) without it, or make the parts whole "
                f"multiples of {step}"
            )
        found.append(part if whole[axis] else size)
    return found[0], found[1]


def dequantize(x: QuantizedArray, dtype: Any = jnp.float32) -> Array:
    """Values times scales, [..., R, C]: computed in float32 and rounded once to `dtype`.

    JAX differentiates it: the gradient reaches the scales, and float8 values, whose gradient is rounded to float8 itself.
    Integer values have none. In an op gradients stop at a quantised array.
    """
    if not isinstance(x, QuantizedArray):
        raise ValueError(f"x is of type {type(x).__name__}; dequantize takes the QuantizedArray that quantize returned")
    check_quantized("x", x)
    name = dtype_name(dtype)
    if name is None or not jnp.issubdtype(name, jnp.floating):
        raise ValueError(f"dtype={dtype!r} is not a floating dtype; use jnp.float32 or jnp.bfloat16")
    accumulate = accumulator(dtype)
    scales = expanded_scales(jnp.asarray(x.scales), (x.shape[-2], x.shape[-1]))
    return (jnp.asarray(x.values).astype(accumulate) * scales.astype(accumulate)).astype(dtype)


def _block_sizes(x: Array, block: Any, *, even_rows: bool) -> tuple[int, int]:
    """The rows and columns that share one scale. Raises where they do not divide x, or int4 has an odd number of rows."""
    pair = (None, 1) if block is None else (block, block) if is_integer(block) else block
    if (
        not isinstance(pair, tuple | list)
        or len(pair) != 2
        or any(size is not None and (not is_integer(size) or size < 1) for size in pair)
    ):
        raise ValueError(
            f"block={block!r} must be rows and columns, such as (128, 128), or None for an axis as a whole"
        )
    shape = x.shape[-2:]
    sizes = tuple(max(1, whole) if size is None else int(size) for size, whole in zip(pair, shape, strict=True))
    divides = [whole % size == 0 for size, whole in zip(sizes, shape, strict=True)]
    larger = tuple(size and int(size) if fits else None for size, fits in zip(pair, divides, strict=True))
    for at, (size, whole, axis) in enumerate(zip(sizes, shape, ("rows", "columns"), strict=True)):
        odd = even_rows and at == 0 and whole % 2
        if divides[at] and not odd:
            continue
        step = math.lcm(1 if pair[at] is None else size, 2 if even_rows and at == 0 else 1)
        padded = f"pad x to {-(-whole // step) * step} {axis}"
        if divides[at]:
            raise ValueError(
                f"x is {shown(x)}; int4 stores two rows per byte, so its rows must be even: {padded} of zeros"
            )
        raise ValueError(
            f"block={block!r} does not divide the {whole} {axis} of x; {padded}, or use block={larger}, where all "
            f"{whole} {axis} share a scale"
        )
    return sizes[0], sizes[1]


def _ragged(shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Whether scales of this shape do not divide values of that one into blocks."""
    if len(scales) != len(shape) or scales[:-2] != shape[:-2]:
        return True
    return any(size % n if n else size for size, n in zip(shape[-2:], scales[-2:], strict=True))


def check_quantized(name: str, x: QuantizedArray) -> None:
    """Raises where the fields of an argument contradict each other. It is asked where one is used, not where it is made:
    JAX makes trees of shardings and flags, too.
    """
    if x.dtype not in LARGEST:
        raise ValueError(f"{name} has dtype {x.dtype!r}; use one of {', '.join(map(repr, LARGEST))}")
    if x.layout not in LAYOUTS:
        raise ValueError(f"{name} has layout {x.layout!r}; use the one that it was quantised with, one of {LAYOUTS}")
    for field, leaf in (("stored", x.stored), ("scales", x.scales)):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise ValueError(f"{name}.{field} is of type {type(leaf).__name__}; it must be an array")
    _check_dtypes(name, x)
    if len(x.stored.shape) < 2:
        raise ValueError(f"{name}.stored is {shown(x.stored)}; it must be [..., R, C]: use tilewright.quantize")
    shape, scales = x.shape, x.scales.shape
    if _ragged(shape, scales):
        raise ValueError(
            f"{name} has shape {list(shape)} and scales of shape {list(scales)}; each of the last two axes of the scales "
            f"must divide that of the values, and the others be equal: use tilewright.quantize"
        )


_BYTES = ("int8", "uint8", "void8", "float8_e4m3fn", "float8_e5m2")


def _check_dtypes(name: str, x: QuantizedArray) -> None:
    """Raises where the leaves do not have the dtypes that `x.dtype` says: values would be read as other numbers."""
    wanted, stored = jnp.dtype("int8" if x.dtype == "int4" else x.dtype), x.stored.dtype
    # The oracle of the checks has all of its floating arrays as float64.
    exact = x.scales.dtype == jnp.float64 and stored in (wanted, jnp.float64) and unit_of(x.dtype) == "float8"
    if stored != wanted and not exact:
        remedy = "use tilewright.quantize, and leave the leaves of a quantised array out where weights are cast"
        if stored.name in _BYTES:
            remedy = f"where the bytes are right, pass stored.view(jnp.{wanted.name})"
        raise ValueError(f"{name}.stored is {shown(x.stored)}, and {x.dtype} is stored as {wanted.name}; {remedy}")
    if x.scales.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"{name}.scales is {shown(x.scales)}; scales are float32: keep those of tilewright.quantize, and leave the "
            f"leaves of a quantised array out where weights are cast"
        )


def stored_operand(name: str, x: Any) -> tuple[Array, Array | None]:
    """The values of an op's argument, as they are stored but rows first, and its scales; None where it is not quantised.

    Gradients stop at both: in every implementation, since what is plain JAX would be differentiated by JAX.
    """
    if not isinstance(x, QuantizedArray):
        return as_array(name, x), None
    check_quantized(name, x)
    return jax.lax.stop_gradient(jnp.asarray(x.rows_first)), jax.lax.stop_gradient(jnp.asarray(x.scales))


def result_dtype(x: Array, x_scales: Array | None) -> Any:
    """The default dtype of a product: x's, and bfloat16 where x is quantised; float64 for the oracle."""
    if x_scales is None or x_scales.dtype == jnp.float64:
        return x.dtype if x_scales is None else x_scales.dtype
    return jnp.bfloat16


def check_operands(x: Any, w: Any) -> None:
    """Raises where x cannot be multiplied with w.

    A quantised x has at least 8 bits, and a scale per row or one for all rows, per block of K or one for all of K. w is
    quantised too, and where both have several scales along K, their blocks of K are equal.
    """
    if not isinstance(x, QuantizedArray):
        if not isinstance(w, QuantizedArray) and w.dtype != x.dtype:
            raise ValueError(f"w is {w.dtype.name} and x is {x.dtype.name}; they must be equal: pass w.astype(x.dtype)")
        return
    if x.dtype == "int4":
        raise ValueError("x is int4, and activations have at least 8 bits; use quantize(x, 'int8') or 'float8_e4m3fn'")
    if not isinstance(w, QuantizedArray):
        raise ValueError("x is quantised and w is not; quantise w too, or pass dequantize(x, w.dtype)")
    if x.block[0] > 1 < x.scales.shape[-2]:
        raise ValueError(
            f"x has blocks of {x.block}; it must have a scale per row, or one for all rows: use "
            f"quantize(x, {x.dtype!r}, block=(1, {x.block[1]})), or block=(None, {x.block[1]})"
        )
    if 1 < x.scales.shape[-1] != w.scales.shape[-2] > 1:
        of_x, of_w = x.block[1], w.block[0]
        finer = f"w, {w.dtype!r}, block=({of_x}, {w.block[1]})" if of_w < of_x else f"x, {x.dtype!r}, block=(1, {of_w})"
        raise ValueError(
            f"x has a scale per {of_x} of K and w per {of_w}; they must be equal, or one of them be all of K: pass "
            f"quantize({finer})"
        )


def transposed_again(w: Any, transposed: str) -> str:
    """The remedy for a w whose axes are exchanged: to pass `transposed`, or where it is quantised, to quantise that."""
    if not isinstance(w, QuantizedArray):
        return f"it looks transposed: pass {transposed}"
    return f"it looks transposed: quantise the float matrix as quantize({transposed}, {w.dtype!r})"


def check_parts(w: Any, parts: int) -> None:
    """Raises where a block of scales of a `QuantizedArray` has columns of two parts of it, such as gates and values."""
    if w.scales.shape[-1] > 1 and w.scales.shape[-1] % parts:
        raise ValueError(
            f"w has {w.shape[-1]} columns in blocks of {w.block[1]}, of which one has gates and values both; quantise it "
            f"with blocks that divide its {w.shape[-1] // parts} gates, such as block=({w.block[0]}, 1)"
        )


def chips_with(unit: str) -> str:
    """The chips whose matrix units take a dtype ("int8", "float8"), for a message."""
    return ", ".join(chip.name for chip in CHIPS if unit in dict(chip.peak_flops))


def unit_of(dtype: str) -> str:
    """The name of the matrix unit of a quantised dtype in the table of chips."""
    return "float8" if dtype.startswith("float8") else "int8"
