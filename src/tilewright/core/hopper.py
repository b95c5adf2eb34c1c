"""What Mosaic GPU kernels for Hopper share: whether a chip is one, and sums of products on its matrix unit.

Pallas' interpreter for GPUs takes neither operands in registers nor accumulators that begin with a value. Kernels that are
to run in it as well add through `Accumulator`, which is a plain value there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip

HOPPER = (9, 0)


def not_hopper(chip: Chip) -> str | None:
    """Why a chip cannot run a kernel with Hopper's instructions, or None."""
    if chip.compute_capability == HOPPER:
        return None
    has = "an unknown one" if chip.compute_capability is None else ".".join(map(str, chip.compute_capability))
    return (
        f"it is made for Hopper GPUs (compute capability 9.0: H100, H200), and this is a {chip.name} with {has}; "
        f"use implementation='xla'"
    )


class Accumulator:
    """A sum of products that the matrix unit adds to.

    On a GPU its registers are the unit's own while products are in flight. The interpreter takes neither a first value nor
    operands in registers: there it is a plain value.
    """

    def __init__(self, ref: Any = None, value: jax.Array | None = None):
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
        assert self.value is not None
        return self.value


def accumulate(
    sums: tuple[jax.Array, ...],
    fresh: tuple[tuple[int, int], ...],
    add: Callable[..., None],
    *,
    interpreted: bool,
) -> tuple[jax.Array, ...]:
    """The sums, after `add` has issued products onto them, once all are done.

    `add` takes an accumulator for each of the sums, and one that begins with zero for each of the shapes in `fresh`.
    """
    if interpreted:
        accumulators = [Accumulator(value=value) for value in sums]
        add(*accumulators, *(Accumulator(value=jnp.zeros(shape, jnp.float32)) for shape in fresh))
        return tuple(accumulator.read() for accumulator in accumulators)

    def begin(sum_refs: Any) -> None:
        def run(*fresh_refs: Any) -> None:
            add(*(Accumulator(ref) for ref in (*sum_refs, *fresh_refs)))

        if fresh:
            pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in fresh))
        else:
            run()

    return tuple(pl.run_state(begin)(tuple(plgpu.ACC.init(value) for value in sums)))


def product(shape: tuple[int, int], add: Callable[[Accumulator], None], *, interpreted: bool) -> jax.Array:
    """A product by itself: what `add` has issued, once it is done."""
    if interpreted:
        accumulator = Accumulator(value=jnp.zeros(shape, jnp.float32))
        add(accumulator)
        return accumulator.read()

    def run(ref: Any) -> jax.Array:
        add(Accumulator(ref))
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
