"""What Mosaic GPU kernels for Hopper share: whether a chip is one, tiles, and sums of products on its matrix unit.

Pallas' interpreter for GPUs takes neither operands in registers nor accumulators that begin with a value. Kernels that are
to run in it as well add through `Accumulator`, which is a plain value there.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from tilewright.core.chip import Chip
from tilewright.core.manual_axes import output_like, varying_axes
from tilewright.core.target import Interpret, gpu_interpret_params

_HOPPER = (9, 0)
_SWIZZLE_BYTES = 128
_WARPS = 4  # Of a warpgroup.


def not_hopper(chip: Chip, plain: str = "xla") -> str | None:
    """Why a kernel for Hopper cannot run on a chip, or None. `plain` is the implementation to use instead."""
    if chip.compute_capability == _HOPPER:
        return None
    has = "an unknown one" if chip.compute_capability is None else ".".join(map(str, chip.compute_capability))
    return (
        f"it is made for Hopper GPUs (compute capability 9.0: H100, H200), and this is a {chip.name} with {has}; "
        f"use implementation={plain!r}"
    )


def refusal(chip: Chip, q: Any, names: tuple[str, ...] = ("q", "k", "v")) -> str | None:
    """Why a kernel of bfloat16 products on Hopper cannot run on a chip, or take q and what is of its dtype; or None.

    `names` are those of the arrays that are of that dtype, q's first.
    """
    if (reason := not_hopper(chip)) is not None:
        return reason
    if q.dtype != jnp.bfloat16:
        return (
            f"{names[0]} is {jnp.dtype(q.dtype).name}, and it multiplies bfloat16 only (Hopper's matrix unit would round "
            f"float32 to 10 bits); pass {', '.join(names[:-1])} and {names[-1]} as bfloat16, or use implementation='xla'"
        )
    return None


def padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    return jnp.pad(array, [(0, missing if a == axis else 0) for a in range(array.ndim)])


def tile(*shape: int, dtype: Any) -> Any:
    """Shared memory for operands of the matrix unit, [..., rows, columns]; the columns are a multiple of 32 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(_SWIZZLE_BYTES, shape[-1] * itemsize)
    transforms = (
        plgpu.TilingTransform((8, swizzle // itemsize)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(swizzle),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def quotient(a: Any, b: int) -> tuple[Any, Any]:
    """The quotient and the remainder of numbers that are not negative: // would look at signs."""
    return jax.lax.div(a, jnp.int32(b)), jax.lax.rem(a, jnp.int32(b))


class Accumulator:
    """A sum of products that the matrix unit adds to.

    On a GPU its registers are the unit's own while products are in flight. The interpreter takes neither a first value nor
    operands in registers: there it is a plain value.
    """

    def __init__(self, ref: Any = None, value: Any = None):
        self.ref, self.value = ref, value

    def add(self, a: Any, b: Any) -> None:
        """Issue a product. `a` is a tile in shared memory, or a value in registers; `b` is a tile."""
        if self.ref is not None:
            plgpu.wgmma(self.ref, a, b)
            return
        a, b = a[...].astype(jnp.float32), b[...].astype(jnp.float32)
        # The matrix unit reads by the same way as copies write, so no fence is needed between; a plain read needs one.
        plgpu.commit_smem()
        self.value = self.value + jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)

    def read(self, in_flight: int = 0) -> jax.Array:
        """The sum, once at most so many products, the last ones issued, are still in flight."""
        if self.ref is not None:
            return plgpu.wgmma_accumulator_load(self.ref, wait_n=in_flight)
        return self.value

    def wait(self, in_flight: int) -> None:
        """Until at most so many products, the last ones issued, are in flight: the tiles of the others are read."""
        if self.ref is not None:
            plgpu.wgmma_wait(in_flight)


def accumulate(
    sums: tuple[jax.Array, ...],
    add: Callable[..., tuple[jax.Array, ...] | None],
    *,
    more: tuple[jax.ShapeDtypeStruct, ...] = (),
    interpreted: bool,
) -> tuple[jax.Array, ...]:
    """The sums, after `add`, which takes an accumulator for each, has issued products onto them, once all are done.

    They are followed by the tiles that `add` returns, of which `more` has the shapes and dtypes.
    """
    if interpreted:
        accumulators = [Accumulator(value=value) for value in sums]
        made = add(*accumulators)
        return *(accumulator.read() for accumulator in accumulators), *(made or ())

    def begin(refs: Any) -> None:
        made = add(*(Accumulator(ref) for ref in refs[: len(sums)]))
        for ref, value in zip(refs[len(sums) :], made or (), strict=True):
            ref[...] = value

    # The refs of what is made are registers, too. They have to begin with something.
    nothing = (plgpu.layout_cast(jnp.zeros(one.shape, one.dtype), plgpu.Layout.WGMMA) for one in more)
    held: Any = pl.run_state(begin)((*(plgpu.WGMMAAccumulatorRef.init(value) for value in sums), *nothing))
    return tuple(held)


def products(
    shapes: tuple[tuple[int, int], ...], add: Callable[..., tuple[Any, ...] | None], *, interpreted: bool
) -> tuple[Any, ...]:
    """Products by themselves: what `add`, which takes an accumulator for each, has issued, once all are done.

    They are followed by what `add` returns.
    """
    if interpreted:
        accumulators = [Accumulator(value=jnp.zeros(shape, jnp.float32)) for shape in shapes]
        more = add(*accumulators)
        return *(accumulator.read() for accumulator in accumulators), *(more or ())

    def run(*refs: Any) -> tuple[Any, ...]:
        more = add(*(Accumulator(ref) for ref in refs))
        return *(ref[...] for ref in refs), *(more or ())

    return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))


def inlined(body: Callable[..., Any], *arguments: Any, out: jax.ShapeDtypeStruct | None = None) -> Any:
    """Calls `body`, which is written in Mosaic GPU's own operations, with refs and tiles. What it returns is a tile."""
    tile_layout = plgpu.Layout.WGMMA
    types = tuple(tile_layout if isinstance(argument, jax.Array) else plgpu.RefType() for argument in arguments)
    returned = None if out is None else plgpu.ShapeDtypeStruct(out.shape, jnp.dtype(out.dtype), layout=tile_layout)
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=returned)
    return inline(lambda _, *given: body(*given))(*arguments)


def truncated(x: jax.Array, *, interpreted: bool) -> jax.Array:
    """A tile of float32 as int32, towards zero. It has to be in range: `astype` would look, two instructions a number."""
    if interpreted:
        return x.astype(jnp.int32)

    def convert(x: Any) -> Any:
        return x.astype(ir.IntegerType.get_signless(32), is_signed=True)

    return inlined(convert, x, out=jax.ShapeDtypeStruct(x.shape, jnp.int32))


def hidden_zero(number: Any) -> Any:
    """0, of a number below 2^30 that a loop counts, which the compiler does not know: what it is added to stays inside.

    Else addresses of all operands, and masks, are made in front of a loop where they do not change, and keep registers: two
    for each operand. Where registers are short those are spilled, and each product waits until they are back.
    """
    return jax.lax.shift_right_logical(number, jnp.int32(30))


def product(shape: tuple[int, int], add: Callable[[Accumulator], None], *, interpreted: bool) -> jax.Array:
    return products((shape,), add, interpreted=interpreted)[0]


def wait_for_products(in_flight: int, *, interpreted: bool) -> None:
    """Until at most so many products, the last ones issued, are in flight: what the others read may be written again."""
    if not interpreted:
        plgpu.wgmma_wait(in_flight)


def with_accumulators(shapes: tuple[tuple[int, int], ...], body: Callable[..., None], *, interpreted: bool) -> None:
    """Calls `body` with accumulators that begin with zero."""
    if interpreted:
        body(*(Accumulator(value=jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return
    pl.run_scoped(
        lambda *refs: body(*(Accumulator(ref) for ref in refs)),
        *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes),
    )


def loop_with_sums(
    shapes: tuple[tuple[int, int], ...],
    loops: list[tuple[Any, Any, Callable[..., None]]],
    *,
    interpreted: bool,
) -> tuple[jax.Array, ...]:
    """Sums that begin with zero, and that loops of (first, end, body) add to; `body` takes the number and the sums.

    Products may stay in flight from one round to the next: a body waits for those it reads.
    """
    if interpreted:

        def round_of(n: Any, values: Any, body: Callable[..., None]) -> Any:
            sums = tuple(Accumulator(value=value) for value in values)
            body(n, sums)
            return tuple(accumulator.read() for accumulator in sums)

        values = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        for first, end, body in loops:
            values = jax.lax.fori_loop(first, end, functools.partial(round_of, body=body), values)
        return values

    def run(*refs: Any) -> tuple[jax.Array, ...]:
        sums = tuple(Accumulator(ref) for ref in refs)
        for first, end, body in loops:
            jax.lax.fori_loop(first, end, lambda n, _, body=body: body(n, sums), None)
        return tuple(ref[...] for ref in refs)

    return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))


def few_rows(rows: int, lanes: int, channels: int) -> Any:
    """A layout of few rows, a multiple of 4, for a warpgroup: each warp has a quarter of them, and a row so many lanes.

    A thread has `channels` neighbours of a row; wider tiles repeat that.
    """
    columns = lanes * channels
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, columns), (rows // _WARPS, columns), (channels,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def store(ref: Any, value: jax.Array) -> None:
    """Store to global memory in pieces of less than a line, which jax 0.12 takes for a mistake unless told."""
    unoptimized = getattr(plgpu, "store", None)
    if unoptimized is None:
        ref[...] = value
    else:
        unoptimized(ref, value, optimized=False)


def updated_in_place(
    body: Callable[..., None],
    held: jax.Array,
    arrays: tuple[jax.Array, ...],
    *,
    out_type: Any,
    grid: dict[str, int],
    interpret: Interpret | None,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """What a kernel of one warpgroup a block makes of `held`, which it reads and writes, and `arrays`.

    `body` takes refs of `held`, of the arrays, of its output, and of the new `held`: that and the old one are one buffer.
    XLA copies it first, unless it is used nowhere else: donated, or carried by a loop. `plgpu.kernel` cannot say so; and
    what can does not take values that vary over a mesh: inside `shard_map` they are two buffers.
    """
    common: dict[str, Any] = {
        # One warpgroup writes what no other reads, and layouts follow from the operands.
        "compiler_params": plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        "interpret": gpu_interpret_params(interpret, alone=True),
    }
    shape: dict[str, Any] = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
    if varying_axes(held, *arrays):
        types = (out_type, output_like(held.shape, held.dtype, held))
        return plgpu.kernel(body, out_type=types, kernel_name=name, **shape, **common)(held, *arrays)

    def in_place(held_ref: Any, *refs: Any) -> None:
        body(held_ref, *refs, held_ref)

    ref = jax.new_ref(held)
    kernel: Any = pl.kernel(in_place, out_type=out_type, mesh=plgpu.Mesh(**shape), name=name, **common)
    out: jax.Array = kernel(ref, *arrays)
    return out, jax.freeze(ref)
