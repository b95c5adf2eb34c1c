"""What every api asks of an array argument, and how its errors show one."""

from typing import Any

FLOATING = ("float32", "bfloat16", "float64")
"""The dtypes that ops take, by name: two to work in, and float64 for the oracle."""


def shown(array: Any) -> str:
    """The dtype and shape of an array, for an error: float32[2, 3]."""
    return f"{array.dtype.name}{list(array.shape)}"
