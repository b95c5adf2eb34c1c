"""Small TPU kernels whose cost can be counted by hand, to test the compiler's reports on."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def matmul(x: jax.Array, w: jax.Array, *, block: int = 512) -> jax.Array:
    """A blocked product: block^3 multiply-adds a step, and each operand read as often as the other has blocks."""

    def kernel(x_ref, w_ref, out_ref, acc_scratch):
        @pl.when(pl.program_id(2) == 0)
        def _start():
            acc_scratch[...] = jnp.zeros_like(acc_scratch)

        acc_scratch[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _finish():
            out_ref[...] = acc_scratch[...].astype(out_ref.dtype)

    (m, k), n = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, w)


def copy(x: jax.Array, *, block: int = 1024) -> jax.Array:
    """Reads and writes each element once."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0)),
        name="copy",
    )(x)


def looped(x: jax.Array, *, times: int = 6) -> jax.Array:
    """A loop inside of each step, `times` times, and blocks for the first and the last step."""

    def kernel(x_ref, out_ref, acc_scratch):
        @pl.when(pl.program_id(0) == 0)
        def _start():
            acc_scratch[...] = jnp.zeros_like(acc_scratch)

        def step(_, carry):
            return jnp.exp(carry) * x_ref[...]

        acc_scratch[...] += jax.lax.fori_loop(0, times, step, x_ref[...])

        @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
        def _finish():
            out_ref[...] = acc_scratch[...]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
        name="looped",
    )(x)


def looped_by_data(counts: jax.Array, x: jax.Array) -> jax.Array:
    """A loop that runs as often as a prefetched number says."""

    def kernel(counts_ref, x_ref, out_ref):
        count = counts_ref[pl.program_id(0)]
        out_ref[...] = jax.lax.fori_loop(0, count, lambda _, carry: jnp.exp(carry) * x_ref[...], x_ref[...])

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0] // 8,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, counts: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, counts: (i, 0)),
        ),
        name="looped_by_data",
    )(counts, x)


def roomy(x: jax.Array, *, rows: int) -> jax.Array:
    """Asks for a scratch of rows x 1024 float32, and uses little of it."""

    def kernel(x_ref, out_ref, large_scratch):
        large_scratch[0:8, 0:128] = x_ref[...]
        out_ref[...] = large_scratch[0:8, 0:128]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, 1024), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=128 * 2**20),
        name="roomy",
    )(x)


def sorting(x: jax.Array) -> jax.Array:
    """Has a primitive that Pallas does not lower for TPU."""

    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...], axis=0)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="sorting")(x)


def struct(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


RECORDED = {
    # Name: the function, its arguments, and the chip it was recorded for.
    "matmul-v5e": (functools.partial(matmul, block=128), (struct(512, 256), struct(256, 384)), "v5e"),
    "looped-v6e": (looped, (struct(64, 128, dtype="float32"),), "v6e"),
    "looped_by_data-v6e": (looped_by_data, (struct(8, dtype="int32"), struct(64, 128, dtype="float32")), "v6e"),
}
