"""The weights of the layers: drawing them, reading them from a checkpoint, multiplying by them; and argument checks."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tilewright.core.arguments import FLOATING, shown

# A field of a pytree: an array, or what a tree.map has put in its place, such as a ShapeDtypeStruct or a sharding.
Leaf = Any


def project(x: Float[Array, "*tokens D"], w: Float[Array, "D E"]) -> Float[Array, "*tokens E"]:
    """x @ w in x's dtype. w is cast to it, so that float32 weights train with bfloat16 activations."""
    # With bfloat16 in and out, the matrix unit accumulates in float32, and the backward's products are bfloat16 too.
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.dot(x, w.astype(x.dtype), precision=precision)


def draw_projection(key: PRNGKeyArray, d_in: int, d_out: int, dtype: Any) -> Float[Array, "D E"]:
    """Normal with a standard deviation of d_in ** -0.5, which keeps the variance per channel."""
    return (d_in**-0.5 * jax.random.normal(key, (d_in, d_out), jnp.float32)).astype(dtype)


def check_sizes(layer: Any, *names: str) -> None:
    """Raises where a named field is not a positive integer."""
    for name in names:
        value = getattr(layer, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")


def check_tokens(x: jax.Array, d_model: int) -> None:
    """Raises where x is not [B, T, d_model] of a dtype that the ops take."""
    if x.ndim != 3:
        remedy = "; pass x[None] for a single sequence" if x.ndim == 2 else ""
        raise ValueError(f"x is {shown(x)}; it must be [B, T, D] with D={d_model}{remedy}")
    if x.shape[-1] != d_model:
        raise ValueError(
            f"x is {shown(x)}; its last axis must be d_model={d_model}: make the layer with d_model={x.shape[-1]}"
        )
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: x.astype(jnp.bfloat16)")


def check_batch(state: Any, array: jax.Array, x: jax.Array) -> None:
    """Raises where the state has another batch size than x."""
    if array.shape[0] != x.shape[0]:
        raise ValueError(
            f"state is a {type(state).__name__} of batch {array.shape[0]} and x has batch {x.shape[0]}; they must be "
            f"equal: use initial_state(batch={x.shape[0]}), or pass the states of these rows"
        )


class Tensors:
    """The tensors of one layer in a checkpoint: those whose names start with `prefix`."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str):
        self._tensors = tensors
        self._prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."

    def array(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """The tensor of that name, reshaped. It must have as many elements as `shape`."""
        full = self._prefix + name
        if full not in self._tensors:
            near = sorted(key for key in self._tensors if key.startswith(self._prefix))
            there = ", ".join(near) if near else f"none; names look like {next(iter(self._tensors), 'nothing')!r}"
            raise ValueError(f"tensors has no {full!r}; with prefix={self._prefix!r} it has {there}")
        tensor = jnp.asarray(self._tensors[full])
        if tensor.size != math.prod(shape):
            raise ValueError(
                f"{full} has shape {list(tensor.shape)} and this layer needs {list(shape)}; give the layer the sizes of "
                f"the checkpoint's config.json"
            )
        return tensor.reshape(shape)

    def projection(self, name: str, d_in: int, d_out: int) -> jax.Array:
        """The weight of a linear map, [d_in, d_out]; it is transposed in the checkpoint."""
        return self.array(f"{name}.weight", (d_out, d_in)).T

    def convolution(self, name: str, channels: int, width: int) -> jax.Array:
        """The filters of a depthwise convolution, [W, channels]; they are [channels, 1, W] in the checkpoint."""
        return self.array(f"{name}.weight", (channels, width)).T
