"""What the layers share: parameters that are declared once, the weights made from them, and argument checks."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tilewright.core.arguments import FLOATING, shown

# A field of a pytree: an array, or what a tree.map has put in its place, such as a ShapeDtypeStruct or a sharding.
Leaf = Any


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A weight of a layer."""

    shape: tuple[int, ...]
    draw: Callable[[PRNGKeyArray, tuple[int, ...]], jax.Array] | float
    """Draws it in float32; or the number that all of its elements begin with."""
    name: str
    """Its name in a checkpoint."""
    transposed: bool = False
    """Whether its axes are exchanged in a checkpoint."""
    float32: bool = False
    """Whether it is float32 whatever the dtype of the others."""


def linear(name: str, d_in: int, d_out: int) -> Parameter:
    """A projection [d_in, d_out]: normal, with a deviation of d_in ** -0.5, which keeps the variance per channel."""

    def draw(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return d_in**-0.5 * jax.random.normal(key, shape, jnp.float32)

    return Parameter((d_in, d_out), draw, f"{name}.weight", transposed=True)


def norm(name: str, channels: int, value: float = 1.0) -> Parameter:
    """The weights of a norm."""
    return Parameter((channels,), value, f"{name}.weight")


def project(x: Float[Array, "*tokens D"], w: Float[Array, "D E"]) -> Float[Array, "*tokens E"]:
    """x @ w in x's dtype. w is cast to it, so that float32 weights train with bfloat16 activations."""
    # With bfloat16 in and out, the matrix unit accumulates in float32, and the backward's products are bfloat16 too.
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.dot(x, w.astype(x.dtype), precision=precision)


class Layer[W]:
    """Base of the layers, which are frozen dataclasses of sizes. W is the type of their weights, a dataclass too."""

    d_model: int
    weights: ClassVar[type]
    state: ClassVar[type]

    def parameters(self) -> dict[str, Parameter]:
        """The parameters that this layer has, by the fields of its weights. Fields that it lacks are None."""
        raise NotImplementedError

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> W:
        """Random weights. A_log and dt_bias of gates are always float32."""
        parameters, drawn = self.parameters(), {}
        keys = iter(jax.random.split(key, len(parameters)))
        for name in (field.name for field in dataclasses.fields(self.weights) if field.name in parameters):
            shape, draw = parameters[name].shape, parameters[name].draw
            value = draw(next(keys), shape) if callable(draw) else jnp.full(shape, draw, jnp.float32)
            drawn[name] = value if parameters[name].float32 else value.astype(dtype)
        return self.weights(**drawn)

    def from_checkpoint(self, tensors: Mapping[str, Any], prefix: str = "") -> W:
        """The weights from the tensors under `prefix` ("model.layers.0.self_attn"), in the checkpoint's dtype."""
        checkpoint = Tensors(tensors, prefix)
        found = self.unpacked(checkpoint)
        for name, parameter in self.parameters().items():
            if name not in found:
                shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
                tensor = checkpoint.array(parameter.name, shape)
                found[name] = tensor.T if parameter.transposed else tensor
        return self.weights(**found)

    def unpacked(self, checkpoint: "Tensors") -> dict[str, jax.Array]:
        """The weights that a checkpoint has packed into larger tensors."""
        return {}

    def check_weights(self, weights: Any) -> None:
        """Raises where the weights are not this layer's."""
        own, remedy = type(self).__name__, "pass what init or from_checkpoint of this layer returned"
        if not isinstance(weights, self.weights):
            raise ValueError(f"weights is a {type(weights).__name__} and {own} takes {self.weights.__name__}; {remedy}")
        parameters = self.parameters()
        for name, value in vars(weights).items():
            wanted = parameters[name].shape if name in parameters else None
            if (None if value is None else value.shape) != wanted:
                given = "None" if value is None else shown(value)
                takes = "None" if wanted is None else list(wanted)
                raise ValueError(f"weights.{name} is {given} and this {own} takes {takes}; {remedy}")

    def check_state(self, state: Any, x: jax.Array, **wanted: tuple[int, ...]) -> None:
        """Raises where a state is not this layer's, or of another batch. `wanted`: the shapes of its fields after B."""
        own, remedy = type(self).__name__, "pass the state that this layer returned, or None to begin"
        if not isinstance(state, self.state):
            raise ValueError(f"state is a {type(state).__name__} and {own} takes a {self.state.__name__}; {remedy}")
        for name, shape in wanted.items():
            value = getattr(state, name)
            if value.shape[1:] != shape:
                takes = f"[B, {', '.join(map(str, shape))}]"
                raise ValueError(f"state.{name} is {shown(value)} and this {own} takes {takes}; {remedy}")
            if value.shape[0] != x.shape[0]:
                raise ValueError(
                    f"state is a {type(state).__name__} of batch {value.shape[0]} and x has batch {x.shape[0]}; they must "
                    f"be equal: use initial_state(batch={x.shape[0]}), or pass the states of these rows"
                )

    def check_tokens(self, x: jax.Array) -> None:
        """Raises where x is not [B, T, d_model] of a dtype that the ops take."""
        d_model = self.d_model
        if x.ndim != 3:
            remedy = "; pass x[None] for a single sequence" if x.ndim == 2 else ""
            raise ValueError(f"x is {shown(x)}; it must be [B, T, D] with D={d_model}{remedy}")
        if x.shape[-1] != d_model:
            raise ValueError(
                f"x is {shown(x)}; its last axis must be d_model={d_model}: make the layer with d_model={x.shape[-1]}"
            )
        if x.dtype.name not in FLOATING:
            raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: x.astype(jnp.bfloat16)")

    def check_sizes(self, *names: str) -> None:
        """Raises where a named field is not a positive integer."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")


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
