"""What arguments may be: the dtypes that ops accept, numbers, and how error messages show an array."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

FLOATING = ("float32", "bfloat16", "float64")
"""The dtypes that ops accept, by name. float64 is for the oracle."""

SEEDS = 1 << 32
"""Seeds of random numbers are from 0 to this, which is left out: JAX takes 32 bits of others."""


def is_integer(value: Any) -> bool:
    """Whether it is a Python or NumPy integer; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_number(name: str, value: Any) -> None:
    """Raises unless it is a Python or NumPy number."""
    if isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be a number, not True or False")
    if not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(
            f"{name}={value!r} is not a Python number; it is built into the kernel, so it must be known when traced: "
            f"pass a number"
        )


def check_eps(eps: Any) -> None:
    """Raises unless it can be added to a mean of squares."""
    check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps} must be finite and not negative; use 1e-6")


def shown(array: Any) -> str:
    """The dtype and shape of an array, for an error message: float32[2, 3]."""
    return f"{array.dtype.name}{list(array.shape)}"


def check_operands(x: Any, w: Any) -> None:
    """Raises unless x [..., K] and w [K, heads, channels] can be multiplied, and are of one floating dtype."""
    if x.ndim < 1:
        raise ValueError(f"x is {shown(x)}; it must be [..., K], the left operand of a product")
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: pass x.astype(jnp.bfloat16)")
    k = x.shape[-1]
    if w.ndim != 3 or w.shape[0] != k:
        joined = w.ndim == 2 and w.shape[0] == k
        remedy = f": pass w.reshape({k}, heads, -1)" if joined else ", with the K that x has"
        raise ValueError(f"w is {shown(w)} and x is {shown(x)}; w must be [{k}, heads, channels]{remedy}")
    if w.dtype != x.dtype:
        raise ValueError(f"w is {shown(w)} and x is {shown(x)}; they must be of one dtype: pass w.astype(x.dtype)")


def dtype_name(dtype: Any) -> str | None:
    """The name of a dtype that is given by name, as a NumPy dtype or as a scalar type; None where it is no dtype."""
    try:
        return None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        return None


def output_dtype(out_dtype: Any, default: Any) -> str:
    """The name of an op's `out_dtype`, or of `default` where it is None. Raises where an op cannot return it."""
    name = dtype_name(default if out_dtype is None else out_dtype)
    if name not in FLOATING:
        raise ValueError(f"out_dtype={name or out_dtype!r} must be float32 or bfloat16")
    return name
