"""The dtypes that ops accept, and how error messages show an array."""

from typing import Any

FLOATING = ("float32", "bfloat16", "float64")
"""The dtypes that ops accept, by name. float64 is for the oracle."""


def shown(array: Any) -> str:
    """The dtype and shape of an array, for an error message: float32[2, 3]."""
    return f"{array.dtype.name}{list(array.shape)}"
