"""The frequencies of a rotary embedding, and how they are scaled for long contexts. Numpy in float64, at trace time."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor` (position interpolation)."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self, "factor")


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: low frequencies are divided by `factor`, high ones unchanged, with a ramp between them."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} of Llama3 must be less than "
                f"high_freq_factor={self.high_freq_factor}; use 1 and 4"
            )


@dataclass(frozen=True)
class Yarn:
    """YaRN: frequencies that turn more than `beta_fast` times within the original context stay, those that turn less than
    `beta_slow` times are divided by `factor`, with a ramp between them. The rotated part is scaled by `attention_factor`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Defaults to 0.1 log(factor) + 1."""

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_max_position", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _check_positive(self, "attention_factor")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast={self.beta_fast} of Yarn must be more than beta_slow={self.beta_slow}; use 32 and 1"
            )


Scaling = Linear | Llama3 | Yarn


def _check_positive(scaling: object, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not isinstance(value, int | float | np.integer | np.floating) or not 0 < value < math.inf:
            raise ValueError(
                f"{name}={value!r} of {type(scaling).__name__} must be positive and finite; use a model's own value"
            )


def attention_factor(scaling: Scaling | None) -> float:
    """The factor that the rotated part is multiplied by."""
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


@functools.lru_cache(maxsize=64)
def frequencies(rotary_dim: int, theta: float, scaling: Scaling | None) -> np.ndarray:
    """Radians per position for each pair, [rotary_dim / 2] float64."""
    plain = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if isinstance(scaling, Linear):
        return plain / scaling.factor
    if isinstance(scaling, Llama3):
        turns = scaling.original_max_position * plain / (2 * math.pi)  # Within the original context.
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return plain * (keep + (1 - keep) / scaling.factor)
    if isinstance(scaling, Yarn):

        def pair_that_turns(times: float) -> float:
            ratio = scaling.original_max_position / (times * 2 * math.pi)
            return rotary_dim * math.log(ratio) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(scaling.beta_slow)), rotary_dim - 1)
        ramp = np.clip((np.arange(rotary_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return plain * ((1 - ramp) + ramp / scaling.factor)
    return plain


# A position is split into digits of 12 bits, and a frequency, in turns, into a part of 12 bits and the rest. A digit times
# such a part is exact in float32, so its whole turns can be dropped without loss; the rest is small.
_DIGIT_BITS = 12
_DIGITS = 3


@functools.lru_cache(maxsize=64)
def turns_by_digit(rotary_dim: int, theta: float, scaling: Scaling | None) -> tuple[np.ndarray, np.ndarray]:
    """The frequencies of each digit of a position, in turns: the exact part and the rest, [digits, pairs] float32."""
    turns = frequencies(rotary_dim, theta, scaling) / (2 * math.pi)
    coarse, rest = [], []
    for digit in range(_DIGITS):
        # Whole turns of a digit's unit change nothing, so only the fraction is kept. In float64, 2^24 f is exact to 2^-29
        # of a turn.
        fraction = np.mod(turns * 2.0 ** (_DIGIT_BITS * digit), 1.0)
        exact = np.round(fraction * 2**_DIGIT_BITS) / 2**_DIGIT_BITS
        coarse.append(exact)
        rest.append(fraction - exact)
    return np.stack(coarse).astype(np.float32), np.stack(rest).astype(np.float32)


def digits(position: Any) -> list[Any]:
    """The digits of uint32 positions, lowest first; numpy or jax."""
    mask = 2**_DIGIT_BITS - 1
    return [(position >> (_DIGIT_BITS * digit)) & mask for digit in range(_DIGITS)]
