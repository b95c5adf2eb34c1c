"""Named calls of an op. Tests, `check`, `bench` and other tools all read the list in a family's cases.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.quantized import quantize

Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def normal(scale: float = 1.0) -> Draw:
    """Draws from a normal distribution."""
    return lambda key, shape: scale * jax.random.normal(key, shape, jnp.float32)


_STANDARD_NORMAL = normal()


@dataclass(frozen=True)
class Input:
    """One array argument of an op. `dtype` defaults to the dtype under test."""

    shape: tuple[int, ...]
    draw: Draw = _STANDARD_NORMAL
    dtype: str | None = None
    differentiable: bool = True
    quantized: tuple[str, Any] | None = None
    """The dtype and block that it is quantised to (`tilewright.quantize`), or None."""

    def array(self, key: jax.Array, dtype: str) -> Any:
        """A random array, drawn in float32, or quantised."""
        x = self.draw(key, self.shape)
        return (
            x.astype(self.dtype or dtype)
            if self.quantized is None
            else quantize(x, self.quantized[0], block=self.quantized[1])
        )


@dataclass(frozen=True)
class Work:
    """The minimum work of a call: FLOPs of its products, and bytes with each input read and each output written once.

    Recomputation is not counted, so a fraction of peak computed from `Work` is a fraction of useful work.
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
    """The names of the op's results, for tables."""
    work: Callable[[int], Work]
    """The work of the forward pass, given the bytes per element of the dtype under test."""
    work_grad: Callable[[int], Work]
    """The work of the forward and backward pass together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()
    """Outputs and gradients that are float32 for inputs of any dtype, and that the plain version computes without a
    matrix unit. A bfloat16 implementation cannot be held to exact products, so the plain result is rounded to the dtype
    under test before its error is taken."""
    small: bool = False
    """Whether it takes only seconds on a CPU, interpreters included."""
    in_place: tuple[str, ...] = ()
    """Inputs that are also outputs, and that the forward pass updates in place where they are donated, such as caches."""

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.inputs.items() if spec.differentiable)

    def structs(self, dtype: str) -> dict[str, Any]:
        return {
            name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype))
            if spec.quantized is None
            else jax.eval_shape(lambda spec=spec: spec.array(jax.random.key(0), dtype))
            for name, spec in self.inputs.items()
        }

    def draw(self, dtype: str, seed: int = 0) -> dict[str, Any]:
        """Random inputs. They are drawn in float32, so every dtype gets the same values up to rounding."""
        keys = jax.random.split(jax.random.key(seed), len(self.inputs))
        return {name: spec.array(key, dtype) for key, (name, spec) in zip(keys, self.inputs.items(), strict=True)}
