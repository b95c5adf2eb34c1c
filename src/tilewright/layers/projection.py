"""What every layer does with its weights: draw them, read them from a checkpoint, multiply by them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tilewright.core.arguments import FLOATING

# A field of a pytree: an array, or what a tree.map has put in its place (a ShapeDtypeStruct, a sharding).
Leaf = Any


def project(x: Float[Array, "*tokens D"], w: Float[Array, "D E"]) -> Float[Array, "*tokens E"]:
    """x w in x's dtype. Weights of another dtype are cast, so that float32 weights train with bfloat16 activations."""
    # bfloat16 in and out: the sum is float32 inside the matrix unit, and the backward's products are bfloat16 too.
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.dot(x, w.astype(x.dtype), precision=precision)


def draw_projection(key: PRNGKeyArray, d_in: int, d_out: int, dtype: Any) -> Float[Array, "D E"]:
    """Normal, with a standard deviation of d_in ** -0.5: what goes in with length 1 a channel comes out so."""
    return (d_in**-0.5 * jax.random.normal(key, (d_in, d_out), jnp.float32)).astype(dtype)


def check_sizes(layer: Any, *names: str) -> None:
    """Each named field is a positive integer."""
    for name in names:
        value = getattr(layer, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")


def check_tokens(x: jax.Array, d_model: int) -> None:
    """x is [B, T, d_model] of a dtype that the ops take."""
    shown = f"{x.dtype.name}{list(x.shape)}"
    if x.ndim != 3:
        remedy = "; pass x[None] for a single sequence" if x.ndim == 2 else ""
        raise ValueError(f"x is {shown}; it must be [B, T, D] with D={d_model}{remedy}")
    if x.shape[-1] != d_model:
        raise ValueError(
            f"x is {shown}; its last axis must be d_model={d_model}: make the layer with d_model={x.shape[-1]}"
        )
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown}; it must be float32 or bfloat16: x.astype(jnp.bfloat16)")


def check_batch(state: Any, held: jax.Array, x: jax.Array) -> None:
    """The state was made for x's batch."""
    if held.shape[0] != x.shape[0]:
        raise ValueError(
            f"state is a {type(state).__name__} of batch {held.shape[0]} and x has batch {x.shape[0]}; they must be equal: "
            f"use initial_state(batch={x.shape[0]}), or give each row the state that belongs to it"
        )


class Tensors:
    """The tensors of one layer in a checkpoint: those whose names begin with `prefix`."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str):
        self._tensors = tensors
        self._prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."

    def array(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """The tensor of that name, reshaped; its elements must be as many as the layer has room for."""
        full = self._prefix + name
        if full not in self._tensors:
            near = sorted(key for key in self._tensors if key.startswith(self._prefix))
            there = ", ".join(near) if near else f"none; names look like {next(iter(self._tensors), 'nothing')!r}"
            raise ValueError(f"tensors has no {full!r}; with prefix={self._prefix!r} it has {there}")
        tensor = jnp.asarray(self._tensors[full])
        size = 1
        for extent in shape:
            size *= extent
        if tensor.size != size:
            raise ValueError(
                f"{full} has shape {list(tensor.shape)} and this layer wants {list(shape)}; its sizes must be those of the "
                f"checkpoint's config.json"
            )
        return tensor.reshape(shape)

    def projection(self, name: str, d_in: int, d_out: int) -> jax.Array:
        """The weight of a linear map, [d_in, d_out]; a checkpoint holds it transposed."""
        return self.array(f"{name}.weight", (d_out, d_in)).T

    def convolution(self, name: str, channels: int, width: int) -> jax.Array:
        """The filters of a depthwise convolution, [W, channels]; a checkpoint holds them as [channels, 1, W]."""
        return self.array(f"{name}.weight", (channels, width)).T
