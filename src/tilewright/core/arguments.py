"""What arguments may be: the dtypes that ops accept, integers, and how error messages show an array."""

from typing import Any

import numpy as np

FLOATING = ("float32", "bfloat16", "float64")
"""The dtypes that ops accept, by name. float64 is for the oracle."""


def is_integer(value: Any) -> bool:
    """Whether it is a Python or NumPy integer; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def shown(array: Any) -> str:
    """The dtype and shape of an array, for an error message: float32[2, 3]."""
    return f"{array.dtype.name}{list(array.shape)}"
