"""Elementwise parts of kernels: vectors of channels in registers, loops over tokens that load them ahead, their sums, and
functions of float32: the sigmoid, the activations and softplus.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from tilewright.core import activation as activations
from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

THREADS = 128  # Of a warpgroup.
LANES = 32  # Of a warp.
VECTOR = 8
"""bfloat16 elements in 16 bytes, the widest access of a thread."""

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
_LEAST_EXPONENT = -128.0  # exp of it is 0 in float32.
# (log(1 + u) / u - 1) / u for u from 0 to 1, by powers of u: a minimax fit, log(1 + u) within a relative error of 3.3e-8.
_LOG1P = (
    *(-0.49999648332595825, 0.333213210105896, -0.24857141077518463, 0.19153566658496857),
    *(-0.1375362128019333, 0.07920247316360474, -0.03006456233561039, 0.00536452466621995),
)


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


def for_tokens(count: Any, unroll: int, inputs: Any, body: Any, carry: Any, *, ragged: bool) -> Any:
    """carry = body(done, inputs(done, n), carry) for `count` tokens, n = `unroll` of them at a time.

    The inputs of the next ones are loaded before the body of these, so they are asked for behind the last token, too.
    `ragged`: `count` may not be a multiple of `unroll`; the rest then comes one by one.
    """
    groups, rest = divmod_nonnegative(count, unroll)

    def turn(group: Any, state: Any) -> Any:
        loaded, carry = state
        following = inputs((group + 1) * unroll, unroll)
        return following, body(group * unroll, loaded, carry)

    _, carry = lax.fori_loop(0, groups, turn, (inputs(0, unroll), carry))
    if not ragged:
        return carry

    def one(n: Any, carry: Any) -> Any:
        done = groups * unroll + n
        return body(done, inputs(done, 1), carry)

    return lax.fori_loop(0, rest, one, carry)


def sigmoid(x: jax.Array, layout: Any) -> jax.Array:
    """1 / (1 + exp(-x)) of float32 values in this layout: to 3 roundings near 0, and elsewhere as exact as x is.

    Each rounding of the exponent of 2 changes a small result by |x| roundings, as one of x does. It takes two operations of
    the special function unit and two others per element. `jax.nn.sigmoid` takes six others, or a dozen where divisions are
    rounded correctly.
    """
    return reciprocal(1.0 + jnp.exp2(x * -_LOG2_E), layout)


def exact_sigmoid(x: jax.Array, layout: Any) -> jax.Array:
    """1 / (1 + exp(-x)) of float32 values in this layout, to a few roundings for every x, for sums over many of them.

    `sigmoid` takes fewer instructions. Beside `softplus` of the same x this one takes as many, since both share `decay`.
    """
    u = decay(x, layout)
    s = reciprocal(1.0 + u, layout)
    return jnp.where(x < 0.0, u * s, s)


def sigmoid_slope(x: jax.Array, layout: Any) -> jax.Array:
    """s (1 - s) for s = 1 / (1 + exp(-x)) of float32 values in this layout, to a few roundings for every x."""
    u = decay(x, layout)
    s = reciprocal(1.0 + u, layout)
    return u * s * s


def decay(x: jax.Array, layout: Any) -> jax.Array:
    """exp(-|x|) of float32 values in this layout, to a few roundings: that of the exponent of 2 is put back."""
    if interpreted():
        return jnp.exp(-jnp.abs(x))

    def each(register: Any) -> Any:
        u, rest = _decay(register)
        return math.fma(u, rest, u)

    return inline_float32(lambda _, x: of_registers(each, x), x, layout)


def activate(activation: str | None, z: activations.Parts, layout: Any) -> jax.Array:
    """The activation of float32 values in this layout: `core.activation.activate` with the sigmoid above."""
    return activations.activate(activation, z, sigmoid=functools.partial(sigmoid, layout=layout))


def softplus(x: jax.Array, layout: Any) -> jax.Array:
    """log(1 + exp(x)) of float32 values in this layout, as max(x, 0) + log(1 + u) for u = exp(-|x|).

    The relative error is a few roundings also where the result is small: log(1 + u) is u plus u times a polynomial, and the
    rounding of the exponent of 2, which the result would have |x| times, is put back. From x = -20 on, what that leaves of
    the low part of ln 2 is below a rounding, too. It takes 15 instructions per element, one of them on the special function
    unit. XLA's has about three times as many, and is bound by them, not by memory. The largest relative error on an H200
    is 1.8e-7 from -20 on (XLA's: 1.5e-7), and 2.8e-7 from -80 to -20 (1.3e-7).
    """
    if interpreted():
        u = jnp.exp(-jnp.abs(x))
        series = jnp.full_like(u, _LOG1P[-1])
        for coefficient in _LOG1P[-2::-1]:
            series = series * u + coefficient
        return jnp.maximum(x, 0.0) + (u + u * (u * series))

    def body(_: Any, x: Any) -> Any:
        def each(register: Any) -> Any:
            u, rest = _decay(register)
            series = _constant(register, _LOG1P[-1])
            for coefficient in _LOG1P[-2::-1]:
                series = math.fma(series, u, _constant(register, coefficient))
            # log(1 + u exp(rest)) = u + u (u series + rest): where u is not small, rest is below a rounding.
            result = math.fma(u, math.fma(series, u, rest), u)
            return arith.addf(result, arith.maximumf(register, _constant(register, 0.0)))

        return of_registers(each, x)

    return inline_float32(body, x, layout)


def _decay(register: Any) -> tuple[Any, Any]:
    """u and rest for a vector of float32, in Mosaic's operations: exp(-|x|) is u exp(rest), and |rest| a rounding of x."""
    # Nothing here may be fused or reordered by the compiler, so the operations carry no fast-math flags.
    below = arith.maximumf(arith.negf(math.absf(register)), _constant(register, _LEAST_EXPONENT))
    exponent = arith.mulf(below, _constant(register, _LOG2_E))
    rest = math.fma(exponent, _constant(register, -_LN_2), below)  # below = exponent ln 2 + rest
    return _per_element(register.type, "ex2.approx.ftz.f32 $0, $1;", exponent), rest


def _constant(like: Any, value: float) -> Any:
    """A vector of this number, of the type of `like`."""
    splat = ir.DenseElementsAttr.get_splat(like.type, ir.FloatAttr.get(ir.F32Type.get(), value))
    return arith.constant(like.type, splat)


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
        return of_registers(lambda _: vector.from_elements(register.type, [total] * length), x)

    return inline_float32(body, x, layout)


def reciprocal(x: jax.Array, layout: Any, *, again: bool = False) -> jax.Array:
    """1 / x of float32 values in this layout, to about a unit in the last place, in one operation.

    With `again` each call computes it, where the compiler would otherwise keep the registers of an earlier one.
    """
    if interpreted():
        return 1.0 / x
    divide = functools.partial(_per_element, instruction="rcp.approx.ftz.f32 $0, $1;", again=again)

    def body(_: Any, x: Any) -> Any:
        return of_registers(lambda each: divide(each.type, register=each), x)

    return inline_float32(body, x, layout)


def element(register: Any, n: int) -> Any:
    """The n-th element of a vector, in Mosaic's operations."""
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([n]))


def _per_element(kind: Any, instruction: str, register: Any, again: bool = False) -> Any:
    """A vector of float32 of this type: an instruction of PTX for each element of a register."""
    f32, parts = ir.F32Type.get(), []
    for n in range(ir.VectorType(kind).shape[0]):
        parts.append(llvm.inline_asm(f32, [element(register, n)], instruction, "=f,f", has_side_effects=again))
    return vector.from_elements(kind, parts)


def of_registers(function: Any, x: Any) -> Any:
    """A value of x's layout, from a function of each register."""
    registers = np.array([function(one) for one in x.registers.flat], dtype=object).reshape(x.registers.shape)
    return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def inline_float32(body: Any, x: jax.Array, layout: Any) -> jax.Array:
    """A float32 value of x's shape in this layout, from a function in Mosaic's own operations."""
    returned = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=returned)
    return inline(body)(x)
