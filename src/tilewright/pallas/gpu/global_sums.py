"""Integer sums in global memory that many thread blocks add to, tile by tile, through the copy engine.

Sums of integers do not depend on the order of the additions, so results are the same from run to run. The interpreter
has no additions in memory: there, each contributor writes an array of its own, and `total` adds them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.pallas.gpu.kernel import interpreted


def new_sums(shape: tuple[int, ...], *, contributors: int) -> Any:
    """A ref to int32 sums that start from zero, an input of a kernel."""
    return jax.new_ref(jnp.zeros((contributors if interpreted() else 1, *shape), jnp.int32))


def add_to_sums(source: Any, sums_ref: Any, contributor: Any, index: tuple[Any, ...]) -> None:
    """In a kernel: adds a tile in shared memory to the sums at `index`. `contributor` numbers who adds there."""
    target = sums_ref.at[(contributor if interpreted() else 0, *index)]
    plgpu.copy_smem_to_gmem(source, target, reduction_op=None if interpreted() else "add")


def total(sums: Any) -> jax.Array:
    """The sums, after the kernels that add to them."""
    return jnp.sum(sums[...], axis=0)
