"""What kernels without tensor cores share: vectors of channels in registers, their sums, and the sigmoid of float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from tilewright.pallas.gpu.kernel import interpreted

THREADS = 128  # Of a warpgroup.
LANES = 32  # Of a warp.
VECTOR = 8
"""bfloat16 elements in 16 bytes, the widest access of a thread."""

_LOG2_E = 1.4426950408889634


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads from global memory, each thread its vectors of the layout, in one access each.

    A vector must begin at a multiple of its size. The accesses say so: where the compiler has to find that out from the
    index, which depends on the shapes, it may load the elements one by one.
    """
    if interpreted():
        return plgpu.load(ref, layout=layout, optimized=False)
    shape, dtype = ref.shape, jnp.dtype(ref.dtype)

    def body(_: Any, ref: Any) -> Any:
        own = layout.to_mgpu()
        length = own.vec_size if isinstance(own, mosaic.WGStridedFragLayout) else own.vector_length
        vector_type = ir.VectorType.get((length,), ir.MemRefType(ref.type).element_type)
        alignment = length * dtype.itemsize
        loaded = [vector.load(vector_type, ref, place, alignment=alignment) for place in own.thread_idxs(shape)]
        registers = np.array(loaded, dtype=object).reshape(own.registers_shape(shape))
        return mosaic.FragmentedArray(_registers=registers, _layout=own, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)
    return inline(body)(ref)


def store(ref: Any, value: jax.Array, layout: Any) -> None:
    """Stores to global memory, each thread its vectors of the layout, in one access each: see `load`."""
    if interpreted():
        ref[...] = value
        return

    def body(_: Any, ref: Any, value: Any) -> None:
        (length,) = ir.VectorType(value.registers.flat[0].type).shape
        alignment = length * value.mlir_dtype.width // 8
        for place, register in zip(value.layout.thread_idxs(value.shape), value.registers.flat, strict=True):
            vector.store(register, ref, place, alignment=alignment)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=None)
    inline(body)(ref, value)


def sigmoid(x: jax.Array, layout: Any) -> jax.Array:
    """1 / (1 + exp(-x)) of float32 values in this layout, to about 2 units in the last place.

    It takes two operations of the special function unit. `jax.nn.sigmoid` divides, which is rounded correctly and takes a
    dozen instructions per element.
    """
    return reciprocal(1.0 + jnp.exp2(x * -_LOG2_E), layout)


def sums_of_neighbours(x: jax.Array, size: int, layout: Any) -> jax.Array:
    """The sum of each `size` neighbouring elements, repeated over them, of float32 values with one vector per thread.

    size / (elements of a vector) lanes of a warp hold such a group: a power of two of them. Each lane adds up its own
    elements, and then the sums by shuffles, in an order that gives every lane the same bits.
    """
    if interpreted():
        return jnp.repeat(jnp.sum(x.reshape(-1, size), axis=1), size)

    def body(_: Any, x: Any) -> Any:
        f32, (register,) = ir.F32Type.get(), x.registers.flat
        length = ir.VectorType(register.type).shape[0]

        def element(n: int) -> Any:
            return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([n]))

        total = element(0)
        for n in range(1, length):
            total = arith.addf(total, element(n), fastmath=arith.FastMathFlags.contract)
        lanes = size // length
        while lanes > 1:
            lanes //= 2
            exchange = f"shfl.sync.bfly.b32 $0, $1, {lanes}, {LANES - 1}, -1;"
            total = arith.addf(total, llvm.inline_asm(f32, [total], exchange, "=f,f"))
        repeated = vector.from_elements(register.type, [total] * length)
        registers = np.array([repeated], dtype=object).reshape(x.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=returned)
    return inline(body)(x)


def reciprocal(x: jax.Array, layout: Any) -> jax.Array:
    """1 / x of float32 values in this layout, to about a unit in the last place, in one operation."""
    if interpreted():
        return 1.0 / x

    def body(_: Any, x: Any) -> Any:
        f32 = ir.F32Type.get()

        def each(register: Any) -> Any:
            parts = []
            for n in range(ir.VectorType(register.type).shape[0]):
                position = ir.DenseI64ArrayAttr.get([n])
                element = vector.extract(register, dynamic_position=[], static_position=position)
                parts.append(llvm.inline_asm(f32, [element], "rcp.approx.ftz.f32 $0, $1;", "=f,f"))
            return vector.from_elements(register.type, parts)

        registers = np.array([each(one) for one in x.registers.flat], dtype=object).reshape(x.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=returned)
    return inline(body)(x)
