"""The order in which thread blocks take sequences: the longest first.

The GPU gives a thread block to the multiprocessor that is free first. Where the last ones are short, all multiprocessors
end at nearly the same time. Each thread block finds its sequence by itself, from all lengths: a launch before it would take
longer. The order says who computes a result and when, never how it is summed.

For 64 sequences it is about 290 instructions of a thread, most of them comparisons. Of shared memory it takes four words,
for a sum over the warps, with barriers before and after they are read.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from tilewright.pallas.gpu.elementwise import THREADS, element
from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

MOST_RANKED = THREADS
"""Sequences: each thread finds the rank of one."""
MOST_KEYS = 2**24 - 2
"""Keys in a sequence: a length and the number of a sequence are packed into an int32."""

_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
_SUMS = 4  # Of comparisons, so that one need not wait for the one before.
_AT_A_TIME = 4  # Lengths in 16 bytes, the widest access of a thread.


def sequence_of_rank(lengths_ref: Any, rank: Any, room: int) -> tuple[Any, Any]:
    """The sequence that as many others are longer than as `rank` says, and its length, or room + 1 for one out of range.

    Of equal lengths, the sequence that comes first is taken for longer. Lengths out of range are ordered somehow.
    """
    batch = lengths_ref.shape[0]
    thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_PER_THREAD)
    own, lengths = _load(lengths_ref)
    # No two keys are equal, not even where a product overflows: their last bits are the number of the sequence. Threads
    # without a sequence have one of the others' lengths, and are left out below. A length of -1 would do that too, but
    # Mosaic takes jnp.where(of a vector, a scalar, a vector) for unsigned, and -1 was the longest on an H200.
    own_key = own * THREADS + (THREADS - 1 - thread)
    longer = [(own_key < length * THREADS + (THREADS - 1 - n)).astype(jnp.int32) for n, length in enumerate(lengths)]
    longer = [sum(longer[n + _SUMS :: _SUMS], start=longer[n]) for n in range(min(_SUMS, batch))]
    before = sum(longer[1:], start=longer[0])
    # One sum has both. To load the length afterwards would be another access in turn.
    own = jnp.where((own >= 0) & (own <= room), own, room + 1)
    found = jnp.sum(jnp.where((before == rank) & (thread < batch), own * THREADS + thread, 0))
    length, sequence = divmod_nonnegative(found, THREADS)
    return sequence, length


def _load(ref: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The element of each thread, [THREADS] (the last one past the end), and all of them as scalars.

    Every thread loads all elements, four in one access. Where the compiler does not know that they are aligned, it loads
    them one by one, in four times as many accesses.
    """
    (count,) = ref.shape
    if interpreted():
        values = ref[...]
        return values[jnp.minimum(jnp.arange(THREADS), count - 1)], tuple(values[n] for n in range(count))

    def body(_: Any, ref: Any) -> Any:
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

        def load(place: Any, length: int = 1) -> Any:
            return vector.load(ir.VectorType.get((length,), i32), ref, [place], alignment=4 * length)

        elements = []
        while (first := len(elements)) < count:
            length = _AT_A_TIME if first + _AT_A_TIME <= count else 1
            loaded = load(arith.constant(index, first), length)
            elements += [element(loaded, n) for n in range(length)]
        thread = arith.remui(mosaic.utils.thread_idx(), mosaic.c(THREADS, i32))
        own = load(arith.index_cast(index, arith.minui(thread, mosaic.c(count - 1, i32))))
        layout = _PER_THREAD.to_mgpu()
        registers = np.array([own], dtype=object).reshape(layout.registers_shape((THREADS,)))
        return (
            mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True),
            tuple(mosaic.FragmentedArray.splat(one, (), is_signed=True) for one in elements),
        )

    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)
    own = plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=_PER_THREAD)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(own, (scalar,) * count))
    return inline(body)(ref)
