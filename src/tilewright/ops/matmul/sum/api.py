"""`matmul_sum`: several matrix products, added up."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.quantized import as_array
from tilewright.ops.matmul.sum.call import MOST_PAIRS as MOST_PAIRS
from tilewright.ops.matmul.sum.call import MatmulSumCall

OP = register(
    Op(name="matmul_sum", family="tilewright.ops.matmul.sum", implementations=("pallas_gpu", "xla", "reference"))
)


def matmul_sum(  # noqa: D417, arguments of one kind are described together
    x0: Float[Array, "*tokens K0"],
    w0: Float[Array, "N K0"],
    x1: Float[Array, "*tokens K1"] | None = None,
    w1: Float[Array, "N K1"] | None = None,
    x2: Float[Array, "*tokens K2"] | None = None,
    w2: Float[Array, "N K2"] | None = None,
    x3: Float[Array, "*tokens K3"] | None = None,
    w3: Float[Array, "N K3"] | None = None,
    x4: Float[Array, "*tokens K4"] | None = None,
    w4: Float[Array, "N K4"] | None = None,
    x5: Float[Array, "*tokens K5"] | None = None,
    w5: Float[Array, "N K5"] | None = None,
    x6: Float[Array, "*tokens K6"] | None = None,
    w6: Float[Array, "N K6"] | None = None,
    x7: Float[Array, "*tokens K7"] | None = None,
    w7: Float[Array, "N K7"] | None = None,
    *,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens N"]:
    r"""The sum of up to eight matrix products, accumulated in float32 and rounded once.

        y = x0 w0^T + x1 w1^T + ...

    It is the gradient of an x that is multiplied by several weights w_i [N, Ki], with the gradients of the products as x_i.
    The layers take it for that (`tilewright.layers`).

    Args:
      x0, x1, x2, x3, x4, x5, x6, x7: [..., Ki], float32 or bfloat16, all of one dtype and with the same leading axes.
      w0, w1, w2, w3, w4, w5, w6, w7: [N, Ki], of that dtype: one for each x. No pair follows one that is left out.
      implementation: "pallas_gpu" (Hopper, bfloat16), "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      y [..., N], of the dtype of x0. Gradients flow to every array.
    """
    xs, ws = (x0, x1, x2, x3, x4, x5, x6, x7), (w0, w1, w2, w3, w4, w5, w6, w7)
    required = ("x0", "w0")
    given = {
        name: None if each is None and name not in required else as_array(name, each)
        for name, each in named(xs, ws).items()
    }
    _validate(given)
    call = MatmulSumCall(**given)  # type: ignore[arg-type]
    if 0 in (*call.sizes, *call.depths):
        return OP.run(call, implementation="reference", config=None)
    return OP.run(call, implementation=implementation, config=config)


def named(xs: Sequence[Any], ws: Sequence[Any]) -> dict[str, Any]:
    """The arguments of `matmul_sum` by name."""
    return {f"x{n}": x for n, x in enumerate(xs)} | {f"w{n}": w for n, w in enumerate(ws)}


def has_kernel(tokens: tuple[Any, ...], n: Any, depths: Sequence[Any], dtype: Any) -> bool:
    """Whether a call of `matmul_sum` with y [*tokens, n] takes a kernel on this device. `depths` are the Ki."""
    xs = [jax.ShapeDtypeStruct((*tokens, k), dtype) for k in depths]
    ws = [jax.ShapeDtypeStruct((n, k), dtype) for k in depths]
    return OP.takes_kernel(MatmulSumCall.of_shapes(named(xs, ws)))


def _validate(given: dict[str, Any]) -> None:
    for n in range(MOST_PAIRS):
        x, w = given[f"x{n}"], given[f"w{n}"]
        if (x is None) != (w is None):
            missing, there = (f"x{n}", f"w{n}") if x is None else (f"w{n}", f"x{n}")
            raise ValueError(f"{there} is given and {missing} is not; pass both, or neither")
        if x is not None and n and given[f"x{n - 1}"] is None:
            raise ValueError(f"x{n} is given and x{n - 1} is not; pass the pairs in order, from x0 and w0 on")
    x0, w0 = given["x0"], given["w0"]
    for name, each in given.items():
        if each is None:
            continue
        if each.dtype.name not in FLOATING:
            raise ValueError(
                f"{name} is {shown(each)}; it must be float32 or bfloat16: pass {name}.astype(jnp.bfloat16)"
            )
        if each.dtype != x0.dtype:
            raise ValueError(
                f"{name} is {shown(each)} and x0 is {shown(x0)}; they must be of one dtype: pass "
                f"{name}.astype({x0.dtype.name!r})"
            )
    if x0.ndim < 1:
        raise ValueError(f"x0 is {shown(x0)}; it must be [..., K0], the left operand of a product")
    for n in range(MOST_PAIRS):
        x, w = given[f"x{n}"], given[f"w{n}"]
        if x is None:
            continue
        if x.shape[:-1] != x0.shape[:-1]:
            raise ValueError(f"x{n} is {shown(x)} and x0 is {shown(x0)}; all but their last axes must be equal")
        if w.ndim != 2 or w.shape[1] != x.shape[-1] or w.shape[0] != w0.shape[0]:
            rows = w0.shape[0] if w0.ndim == 2 else "N"
            turned = w.ndim == 2 and w.shape[0] == x.shape[-1]
            remedy = f": pass w{n}.T" if turned else ""
            raise ValueError(
                f"w{n} is {shown(w)} and x{n} is {shown(x)}; w{n} must be [{rows}, {x.shape[-1]}], the columns of y and "
                f"those of x{n}{remedy}"
            )
