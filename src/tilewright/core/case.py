"""Named shapes of an op. Tests, `check`, `bench` and every later tool read the one list in a family's cases.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def normal(scale: float = 1.0) -> Draw:
    """Values from a normal distribution."""
    return lambda key, shape: scale * jax.random.normal(key, shape, jnp.float32)


_STANDARD_NORMAL = normal()


@dataclass(frozen=True)
class Input:
    """One array argument of an op. Without a dtype it has the dtype under test."""

    shape: tuple[int, ...]
    draw: Draw = _STANDARD_NORMAL
    dtype: str | None = None
    differentiable: bool = True


@dataclass(frozen=True)
class Work:
    """The least that a call must do: FLOPs of its products, and bytes with each input read and each output written once.

    What an implementation recomputes is not in it: a fraction of a ceiling made from `Work` is of useful work.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Case:
    """One call of an op, to be checked and timed."""

    op: str
    name: str
    inputs: Mapping[str, Input]
    outputs: tuple[str, ...]
    """The names of what the op returns, for tables."""
    work: Callable[[int], Work]
    """Of the forward pass, given the bytes of an element of the dtype under test."""
    work_grad: Callable[[int], Work]
    """Of the forward and the backward pass together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()
    """Outputs and gradients that are float32 whatever the inputs, and whose plain version multiplies them without a matrix
    unit. Exact products are not what a bfloat16 version can be held to: the plain one is rounded to the dtype under test
    before its error is taken."""
    small: bool = False
    """Seconds on a CPU, interpreters included."""

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.inputs.items() if spec.differentiable)

    def structs(self, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype)) for name, spec in self.inputs.items()
        }

    def draw(self, dtype: str, seed: int = 0) -> dict[str, jax.Array]:
        """Random inputs. They are drawn in float32, so every dtype sees the same values up to its rounding."""
        keys = jax.random.split(jax.random.key(seed), len(self.inputs))
        return {
            name: spec.draw(key, spec.shape).astype(spec.dtype or dtype)
            for key, (name, spec) in zip(keys, self.inputs.items(), strict=True)
        }
