"""Products on Hopper's tensor cores (wgmma), in a form that also runs in Pallas' interpreter.

The interpreter for GPUs takes neither operands in registers nor accumulators that start from a value. Kernels
accumulate through `Accumulator`, which is a wgmma accumulator on a GPU and a plain value in the interpreter. Nothing
here needs to be told which.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.pallas.gpu.kernel import interpreted

Shape = tuple[int, int]
Loop = tuple[Any, Any, Callable[..., None]]


def not_bfloat16(array: Any, names: tuple[str, ...] = ("q", "k", "v")) -> str | None:
    """Why a kernel that multiplies bfloat16 cannot take an array; or None. `names`: all of its dtype, its own first."""
    if array.dtype == jnp.bfloat16:
        return None
    return (
        f"{names[0]} is {jnp.dtype(array.dtype).name}, and it multiplies bfloat16 only (Hopper's tensor cores would round "
        f"float32 to 10 bits); pass {', '.join(names[:-1])} and {names[-1]} as bfloat16, or use implementation='xla'"
    )


class Accumulator:
    """A float32 sum of products. While products are in flight its registers belong to the tensor cores."""

    def __init__(self, ref: Any = None, value: Any = None):
        self.ref, self.value = ref, value

    def add(self, a: Any, b: Any) -> None:
        """Issues a product. `a` is a tile in shared memory or a value in registers; `b` is a tile in shared memory."""
        if self.ref is not None:
            plgpu.wgmma(self.ref, a, b)
            return
        dtype = self.value.dtype  # Integers are summed as integers.
        a, b = a[...].astype(dtype), b[...].astype(dtype)
        # wgmma reads through the proxy that copies write through, so it needs no fence in between. A plain read does.
        plgpu.commit_smem()
        self.value = self.value + jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)

    def read(self, in_flight: int = 0) -> jax.Array:
        """The sum, once at most `in_flight` products, the ones issued last, are outstanding."""
        if self.ref is not None:
            return plgpu.wgmma_accumulator_load(self.ref, wait_n=in_flight)
        return self.value

    def wait(self, in_flight: int) -> None:
        """Waits until at most `in_flight` products are outstanding: the operands of all others have been read."""
        if self.ref is not None:
            plgpu.wgmma_wait(in_flight)


def _plain(initial: Iterable[Any], add: Callable[..., tuple[Any, ...] | None]) -> tuple[Any, ...]:
    """In the interpreter: the sums that `add` makes of initial values, and what it returns."""
    accumulators = [Accumulator(value=value) for value in initial]
    returned = add(*accumulators)
    return *(accumulator.read() for accumulator in accumulators), *(returned or ())


def _zeros(shapes: tuple[Shape, ...], dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(shape, dtype) for shape in shapes)


def _scoped(shapes: tuple[Shape, ...], body: Callable[..., Any], dtype: Any = jnp.float32) -> Any:
    """Calls `body` with an accumulator of zeros in registers per shape."""
    refs = (plgpu.WGMMAAccumulatorRef(shape, dtype) for shape in shapes)
    return pl.run_scoped(lambda *refs: body(*map(Accumulator, refs)), *refs)


def accumulate(
    initial: tuple[jax.Array, ...],
    add: Callable[..., tuple[jax.Array, ...] | None],
    *,
    more: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> tuple[jax.Array, ...]:
    """Adds products to initial values and waits for all of them.

    `add` takes one accumulator per initial value and issues products. It may return further tiles, whose shapes and
    dtypes `more` declares; they follow the sums in the result.
    """
    if interpreted():
        return _plain(initial, add)

    def begin(refs: Any) -> None:
        returned = add(*(Accumulator(ref) for ref in refs[: len(initial)]))
        for ref, value in zip(refs[len(initial) :], returned or (), strict=True):
            ref[...] = value

    # The refs of the returned tiles are registers, too, and have to start with something.
    blank = (plgpu.layout_cast(jnp.zeros(one.shape, one.dtype), plgpu.Layout.WGMMA) for one in more)
    results: Any = pl.run_state(begin)((*(plgpu.WGMMAAccumulatorRef.init(value) for value in initial), *blank))
    return tuple(results)


def products(
    shapes: tuple[Shape, ...], add: Callable[..., tuple[Any, ...] | None], dtype: Any = jnp.float32
) -> tuple[Any, ...]:
    """Sums of products that start from zero, once all are done: `add` issues them, given an accumulator per shape.

    What `add` returns follows the sums, which are float32, or int32 for products of integers.
    """
    if interpreted():
        return _plain(_zeros(shapes, dtype), add)

    def run(*sums: Accumulator) -> tuple[Any, ...]:
        returned = add(*sums)
        return *(sum_.ref[...] for sum_ in sums), *(returned or ())

    return _scoped(shapes, run, dtype)


def product(shape: Shape, add: Callable[[Accumulator], None]) -> jax.Array:
    """One sum of products that starts from zero."""
    return products((shape,), add)[0]


def with_accumulators(shapes: tuple[Shape, ...], body: Callable[..., Any], dtype: Any = jnp.float32) -> Any:
    """Calls `body` with one accumulator per shape, each of them zero, and returns what it returns."""
    if interpreted():
        return body(*(Accumulator(value=value) for value in _zeros(shapes, dtype)))
    return _scoped(shapes, body, dtype)


def wait_for_products(in_flight: int) -> None:
    """Waits until at most `in_flight` products are outstanding: the operands of all others may be overwritten."""
    if not interpreted():
        plgpu.wgmma_wait(in_flight)


def accumulate_in_loops(
    shapes: tuple[Shape, ...], loops: list[Loop], dtype: Any = jnp.float32
) -> tuple[jax.Array, ...]:
    """Sums that start from zero and that loops of (first, end, body) add to; `body` takes the index and the
    accumulators.

    Products may stay in flight from one iteration to the next: a body waits for those whose operands it overwrites or
    releases.
    """
    if interpreted():

        def iteration(n: Any, values: Any, body: Callable[..., None]) -> Any:
            sums = tuple(Accumulator(value=value) for value in values)
            body(n, sums)
            return tuple(accumulator.read() for accumulator in sums)

        values = _zeros(shapes, dtype)
        for first, end, body in loops:
            values = jax.lax.fori_loop(first, end, functools.partial(iteration, body=body), values)
        return values

    def run(*sums: Accumulator) -> tuple[jax.Array, ...]:
        for first, end, body in loops:
            jax.lax.fori_loop(first, end, lambda n, _, body=body: body(n, sums), None)
        return tuple(sum_.ref[...] for sum_ in sums)

    return _scoped(shapes, run, dtype)
