"""`fp8_matmul`: a product whose forward and backward passes run in float8, for training with float weights."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, output_dtype, shown
from tilewright.core.boundary import not_differentiable, reverse_mode_only
from tilewright.core.call import Call, Shard, array, option
from tilewright.core.dispatch import ImplementationName
from tilewright.core.partitioning import (
    Axes,
    CallPass,
    Letters,
    axes_of_compiler,
    run_explicit,
    run_partitioned,
)
from tilewright.core.quantized import as_array, quantize
from tilewright.ops.matmul.api import matmul

_BLOCK = 128  # Values of the contracted axis that share a scale.


class _Fp8Call(Call):
    """y = x w, with both quantised in every pass."""

    independent = (("*tokens",), ("N",))
    outputs = ("*tokens N",)

    x: Float[Array, "*tokens K"] = array(batch=True)
    w: Float[Array, "K N"] = array()
    out_dtype: str = option()
    implementation: ImplementationName | None = option()


def fp8_matmul(
    x: Float[Array, "*tokens K"],
    w: Float[Array, "K N"],
    *,
    out_dtype: Any = None,
    implementation: ImplementationName | None = None,
) -> Float[Array, "*tokens N"]:
    """x w with all three of its products in float8: for training with float32 or bfloat16 weights.

    Forward, x and w are quantised to e4m3; backward, the gradient of y to e5m2. Scales are those of the current values:
    one per row and 128 of the contracted axis, and one per 128 x 128 weights. Gradients go straight through the
    quantisation to x and w, which are float: the optimizer's master weights.

    Errors, relative in the 2-norm, for normal values: y 3.7 %, the gradients of x and w 5.7 % each (e5m2 has one bit less).

    Args:
      x: [..., K], float32 or bfloat16.
      w: [K, N], float32 or bfloat16.
      out_dtype: of y; x's by default.
      implementation: as in `matmul`.

    Returns:
      y [..., N].
    """
    x, w = as_array("x", x), as_array("w", w)
    if x.ndim < 1:
        raise ValueError(f"x is {shown(x)}, a scalar; it must be [..., K]: pass a row of K channels")
    for name, given, axes in (("x", x, "[..., K]"), ("w", w, "[K, N]")):
        if given.dtype.name not in FLOATING:
            raise ValueError(
                f"{name} is {shown(given)}; it must be {axes} of float32 or bfloat16: {name}.astype(jnp.bfloat16)"
            )
    if w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(f"w is {shown(w)} and x is {shown(x)}; w must be [K, N] with K={x.shape[-1]}")
    out_dtype = output_dtype(out_dtype, x.dtype)
    if 0 in (*x.shape, *w.shape):
        return matmul(x, w.astype(x.dtype), out_dtype=out_dtype)

    def run(part: Any) -> jax.Array:
        told = "fp8_matmul has no forward-mode derivative; use reverse mode (jax.grad, jax.vjp), or matmul"
        return _product(reverse_mode_only(part.varying_alike(), told))

    # On Explicit mesh axes each device has its rows and columns; the gradients are summed over the others.
    return run_explicit("fp8_matmul", _Fp8Call(x=x, w=w, out_dtype=out_dtype, implementation=implementation), run)


def _whole(x: jax.Array) -> jax.Array:
    """The matrix with zeros behind it, to whole blocks in both axes."""
    return jnp.pad(x, [(0, -size % _BLOCK) for size in x.shape])


def _multiply(
    call: _Fp8Call, a: jax.Array, b: jax.Array, dtypes: tuple[str, str], b_block: tuple[int, int], out_dtype: Any
) -> jax.Array:
    """a b with both quantised, of their shapes."""
    a8 = quantize(_whole(a), dtypes[0], block=(1, _BLOCK), layout="row_major")
    b8 = quantize(_whole(b), dtypes[1], block=b_block)
    whole = matmul(a8, b8, out_dtype=out_dtype, implementation=call.implementation)
    return whole[: a.shape[0], : b.shape[1]]


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


class _Decision(NamedTuple):
    """What the partitioning reads of a decision. The products' own are those of `matmul`, for each device's part."""

    op: str
    implementation: str


class _Settled(NamedTuple):
    decision: _Decision


@dataclass(frozen=True)
class _Pass:
    """What both passes share (core/partitioning.py has the protocol)."""

    def settle(self, call: Call) -> _Settled:
        assert isinstance(call, _Fp8Call)
        return _Settled(_Decision("fp8_matmul", call.implementation or "matmul"))


@dataclass(frozen=True)
class _ForwardPass(_Pass):
    sums: ClassVar[bool] = False

    def run(self, call: Any, operands: Any, settled: Any, shard: Shard | None = None) -> jax.Array:
        dtypes = ("float8_e4m3fn", "float8_e4m3fn")
        y = _multiply(call, _rows(call.x), call.w, dtypes, (_BLOCK, _BLOCK), call.out_dtype)
        return y.reshape(*call.x.shape[:-1], call.w.shape[1])

    def operand_letters(self, axes: Axes, operands: Any, settled: Any) -> list[Letters]:
        return []

    def result_letters(self, axes: Axes, results: Any, settled: Any) -> list[Letters]:
        return axes.of_outputs(results)


@dataclass(frozen=True)
class _BackwardPass(_Pass):
    """The gradient of a call. Its operand is that of y."""

    sums: ClassVar[bool] = True

    def run(self, call: Any, operands: Any, settled: Any, shard: Shard | None = None) -> Any:
        x, w, dy = _rows(call.x), call.w, _rows(operands)
        dx = _multiply(call, dy, w.T, ("float8_e5m2", "float8_e4m3fn"), (_BLOCK, _BLOCK), x.dtype)
        # The rows are contracted, so each operand has its own scales along them.
        dw = _multiply(call, x.T, dy, ("float8_e4m3fn", "float8_e5m2"), (_BLOCK, 1), jnp.float32)
        return call.gradients(x=dx.reshape(call.x.shape), w=dw)

    def operand_letters(self, axes: Axes, operands: Any, settled: Any) -> list[Letters]:
        return axes.of_outputs(operands)

    def result_letters(self, axes: Axes, results: Any, settled: Any) -> list[Letters]:
        return [axes.arrays[name] for name in results.given()]


def _run(one: CallPass, call: _Fp8Call, operands: Any) -> Any:
    """Runs a pass as one function that the compiler may cut: it would gather what is quantised along rows."""
    settled = one.settle(call)
    once = "fp8_matmul has no second derivative, since rounding has none; use matmul of float operands"
    call, operands = not_differentiable((call, operands), once)

    @jax.custom_batching.custom_vmap
    def function(call: _Fp8Call, operands: Any) -> Any:
        if axes_of_compiler() is None:
            return run_partitioned(one, call, operands, settled)
        return one.run(call, operands, settled)

    @function.def_vmap
    def _(size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(batched))
        results = jax.vmap(lambda given: one.run(given[0], given[1], settled), in_axes=(axes,), axis_size=size)(
            arguments
        )
        return results, jax.tree.map(lambda _: True, results)

    return function(call, operands)


_product = jax.custom_vjp(lambda call: _run(_ForwardPass(), call, ()))
_product.defvjp(
    lambda call: (_run(_ForwardPass(), call, ()), call),
    lambda call, dy: (_run(_BackwardPass(), call, dy),),
)
