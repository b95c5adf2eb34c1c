"""A call of `matmul_sum`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float

from tilewright.core.call import Call, array, power_of_two

MOST_PAIRS = 8


class MatmulSumCall(Call):
    """y = sum_i x_i w_i^T, accumulated in float32. Each pair of x_i and w_i has a size Ki of its own."""

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",), ("N",))
    reduced = tuple(f"K{n}" for n in range(MOST_PAIRS))
    outputs = ("*tokens N",)
    rows = True

    x0: Float[Array, "*tokens K0"] = array(batch=True)
    w0: Float[Array, "N K0"] = array()
    x1: Float[Array, "*tokens K1"] | None = array(batch=True)
    w1: Float[Array, "N K1"] | None = array()
    x2: Float[Array, "*tokens K2"] | None = array(batch=True)
    w2: Float[Array, "N K2"] | None = array()
    x3: Float[Array, "*tokens K3"] | None = array(batch=True)
    w3: Float[Array, "N K3"] | None = array()
    x4: Float[Array, "*tokens K4"] | None = array(batch=True)
    w4: Float[Array, "N K4"] | None = array()
    x5: Float[Array, "*tokens K5"] | None = array(batch=True)
    w5: Float[Array, "N K5"] | None = array()
    x6: Float[Array, "*tokens K6"] | None = array(batch=True)
    w6: Float[Array, "N K6"] | None = array()
    x7: Float[Array, "*tokens K7"] | None = array(batch=True)
    w7: Float[Array, "N K7"] | None = array()

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each x_i with its w_i."""
        every = ((getattr(self, f"x{n}"), getattr(self, f"w{n}")) for n in range(MOST_PAIRS))
        return [pair for pair in every if pair[0] is not None]

    @property
    def depths(self) -> tuple[Any, ...]:
        """The K of each pair."""
        return tuple(w.shape[1] for _, w in self.pairs)

    @property
    def sizes(self) -> tuple[Any, Any]:
        """M and N: rows and columns of y."""
        *tokens, _ = self.x0.shape
        return math.prod(tokens), self.w0.shape[0]

    def bucket(self) -> Mapping[str, Any]:
        m, n = self.sizes
        return {"dtype": self.x0.dtype.name, "M": power_of_two(m), "N": n, "K": sum(self.depths)}

    def on_shard(self, axes: tuple[str, ...]) -> "DepthShard":
        return DepthShard(self, axes)


@dataclass(frozen=True)
class DepthShard:
    """One device's part of every K, inside `shard_map` over the mesh axes `axes`. Its result is a term of the whole sum."""

    call: Any
    axes: tuple[str, ...]

    @property
    def compiled_call(self) -> Any:
        return self.call

    def combine(self, outputs: Any, saved: Any) -> tuple[Any, Any]:
        return jax.lax.psum(outputs, self.axes), saved

    def cotangents(self, cotangents: Any) -> Any:
        return cotangents
