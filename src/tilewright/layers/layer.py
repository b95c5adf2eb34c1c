"""What the layers share: parameters that are declared once, the weights made from them, and argument checks."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.derivatives import forward_only, with_derivatives
from tilewright.core.manual_axes import vary_alike
from tilewright.core.partitioning import axes_named, explicit_axes, placed
from tilewright.core.quantized import QuantizedArray, quantize
from tilewright.core.target import current_chip
from tilewright.ops.attention.decode_residual.api import decode_residual, has_kernel
from tilewright.ops.matmul.api import matmul
from tilewright.ops.matmul.sum.api import MOST_PAIRS, matmul_sum, named
from tilewright.ops.matmul.sum.api import has_kernel as sum_has_kernel

_INT4_BLOCK = 128
_FEW_ROWS, _WHOLE = 64, 64
# A gradient of so many numbers has 128 tiles of 128 x 256: about one for each multiprocessor of an H200. For fewer numbers
# XLA takes smaller tiles.
_LARGE, _TILE_ROWS = 2**22, 8
_THIN = 256  # Columns that are copied first where they are no multiple of _WHOLE.
_MOST_NAMED = 24  # Tensors that an error lists.
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
    heads: int = 1
    """The number of heads along its last axis, which a mesh axis of tensor parallelism has to divide."""
    axes: tuple[str | None, ...] = ()
    """What its axes are, for sharding: "embed" (the model's width), "heads", "mlp" (hidden channels), "experts", or None.
    Empty: none of its axes is sharded."""


def linear(name: str, d_in: int, d_out: int, heads: int = 1, axes: tuple[str | None, ...] | None = None) -> Parameter:
    """A projection [d_in, d_out]: normal, with a deviation of d_in ** -0.5, which keeps the variance per channel."""
    axes = ("embed", "heads" if heads > 1 else None) if axes is None else axes

    def draw(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return d_in**-0.5 * jax.random.normal(key, shape, jnp.float32)

    return Parameter((d_in, d_out), draw, f"{name}.weight", transposed=True, heads=heads, axes=axes)


def norm(name: str, channels: int, value: float = 1.0) -> Parameter:
    """The weights of a norm."""
    return Parameter((channels,), value, f"{name}.weight")


def norm_weights(norm: jax.Array, x: jax.Array) -> jax.Array:
    """The weights of a norm of x, whole on every device: in x's dtype, or in float32 where they are float32."""
    return placed(norm if norm.dtype == jnp.float32 else norm.astype(x.dtype), [()])


def project(
    x: Float[Array, "*tokens D"],
    w: Float[Array, "D E"] | QuantizedArray,
    dtype: Any = None,
    *,
    transposed: bool = False,
) -> Float[Array, "*tokens E"]:
    """x @ w in x's dtype, or in `dtype`. w is cast to x's, so that float32 weights train with bfloat16 activations.

    On Explicit mesh axes, which ask for it to be said, the result is sharded as x's tokens and w's columns are. Tokens that
    are sharded over a mesh axis gather a w that is sharded over it (FSDP). Where D is sharded over other axes, each device
    multiplies its part of D, and the products are summed. A quantised w goes through `matmul`, and so do few rows on a GPU,
    where XLA reads w at a fraction of the memory's bandwidth: unless w is the transpose of what lies in memory
    (`transposed`), which the kernel would copy.
    """
    if isinstance(w, QuantizedArray):
        return matmul(x, w) if dtype is None else matmul(x, w).astype(dtype)
    precision, w = _precision(x), w.astype(x.dtype)
    (*tokens, channels), (rows, columns) = explicit_axes(x), explicit_axes(w)
    if not any((*tokens, channels, rows, columns)):
        if not transposed and _is_decoded(x, w):
            return matmul(x, w, out_dtype=dtype)
        return jnp.dot(x, w, precision=precision, preferred_element_type=dtype)
    columns = _without(columns, *tokens)
    inner = _without(channels or rows, *tokens, columns)
    x, w = placed(x, [*tokens, inner]), placed(w, [inner, columns])
    mesh = jax.typeof(w if inner or columns else x).sharding.mesh
    sharding = NamedSharding(mesh, P(*tokens, columns))
    return jnp.dot(x, w, precision=precision, preferred_element_type=dtype, out_sharding=sharding)


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    """Of products of x. With bfloat16 in and out, the matrix unit accumulates in float32, and the backward's products are
    bfloat16 too.
    """
    return None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


def project_each(x: Float[Array, "*tokens D"], weights: Sequence[Any]) -> list[Float[Array, "*tokens _"]]:
    """`project(x, w)` for each of the weights [D, E].

    On a Hopper GPU the gradient of a large x is one kernel (`matmul_sum`). Autodiff would write a gradient per weight to
    memory, and add them up.
    """
    if not _sums_gradients(x, weights):
        return [project(x, w) for w in weights]
    # A weight that is the same on every device has the sum of their gradients (inside `shard_map`).
    x, *cast = vary_alike(x, *(w.astype(x.dtype) for w in weights))
    return _projected_by_each(x, cast)


def _sums_gradients(x: jax.Array, weights: Sequence[Any]) -> bool:
    """Whether a kernel computes the gradient of x, of sizes that it reads as they are, or nearly so."""
    if not 1 < len(weights) <= MOST_PAIRS or any(isinstance(w, QuantizedArray) for w in weights):
        return False
    (*tokens, channels), columns = x.shape, [w.shape[1] for w in weights]
    rows = math.prod(tokens)
    if not isinstance(rows, int) or rows * channels < _LARGE or rows % _TILE_ROWS or channels % _WHOLE:
        return False
    if any(each % _WHOLE and each > _THIN for each in columns):
        return False
    if current_chip((x, *weights)).platform != "gpu" or any(any(explicit_axes(each)) for each in (x, *weights)):
        return False
    return sum_has_kernel(tuple(tokens), channels, columns, x.dtype)


def _each_forward(x: jax.Array, weights: list[jax.Array]) -> tuple[list[jax.Array], tuple[jax.Array, list[jax.Array]]]:
    return [project(x, w) for w in weights], (x, weights)


def _each_tangent(saved: tuple[jax.Array, list[jax.Array]], tangents: tuple[jax.Array, list[jax.Array]]) -> Any:
    (x, weights), (dx, d_weights) = saved, tangents
    return [project(dx, w) + project(x, dw) for w, dw in zip(weights, d_weights, strict=True)]


def _each_backward(saved: tuple[jax.Array, list[jax.Array]], cotangents: list[jax.Array]) -> Any:
    x, weights = saved
    tokens = tuple(range(x.ndim - 1))
    over = (tokens, tokens), ((), ())
    d_weights = [jax.lax.dot_general(x, dy, over, precision=_precision(x)) for dy in cotangents]

    def kernel(cotangents: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        return matmul_sum(**named(cotangents, weights))

    def products(cotangents: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        first, *others = (project(dy, w.T, transposed=True) for dy, w in zip(cotangents, weights, strict=True))
        return sum(others, first)

    return forward_only(kernel, products)(cotangents, weights), d_weights


_projected_by_each = with_derivatives(
    lambda x, weights: _each_forward(x, weights)[0],
    forward=_each_forward,
    tangent=_each_tangent,
    backward=_each_backward,
    differentiable=2,
)


def _is_decoded(x: jax.Array, w: jax.Array) -> bool:
    """Whether x has the few rows of decoding, and w the sizes that a GPU's kernel reads as they are."""
    rows = math.prod(x.shape[:-1])
    few = isinstance(rows, int) and rows <= _FEW_ROWS and x.dtype == jnp.bfloat16  # Symbolic sizes may be any.
    return few and not any(size % _WHOLE for size in w.shape) and current_chip((x, w)).platform == "gpu"


@dataclasses.dataclass(frozen=True)
class Residual:
    """The residual stream that a layer's output is added to while single tokens are decoded, and the norm behind it."""

    x: Leaf  # [B, 1, D]
    norm: Leaf  # [D]
    eps: float
    norm_offset: float

    def takes(self, w: Any) -> bool:
        """Whether a kernel adds a product with w [F, D]. Its other factor would be of x's dtype."""
        if isinstance(w, QuantizedArray) or w.dtype != self.x.dtype:
            return False
        h = jnp.zeros((self.x.shape[0], w.shape[0]), w.dtype)  # Only its shape is looked at.
        return has_kernel(h, w, self.x[:, 0], self.norm, eps=self.eps, norm_offset=self.norm_offset)

    def plus(self, h: Float[Array, "B 1 F"], w: Float[Array, "F D"]) -> tuple[jax.Array, jax.Array]:
        """x + h w and its norm, [B, 1, D] each."""
        y, normed = decode_residual(h[:, 0], w, self.x[:, 0], self.norm, eps=self.eps, norm_offset=self.norm_offset)
        return y[:, None], normed[:, None]


def _without(axes: tuple[str, ...], *used: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if not any(axis in each for each in used))


def split_heads(y: Float[Array, "B T E"], heads: int) -> Float[Array, "B T H K"]:
    """Channels as heads. Explicit mesh axes that channels are sharded over go to the heads; one head is gathered."""
    b, t, channels = y.shape
    *tokens, over = explicit_axes(y)
    y = placed(y, [*tokens, over if heads > 1 else ()])
    return y.reshape(b, t, heads, channels // heads)


def placed_state(state: Any, apply: Callable[..., Any], like: tuple[Any, Any] | None) -> Any:
    """A state, sharded over Explicit mesh axes as `apply` returns it for the weights and tokens of `like`."""
    if like is None:
        return state
    after = jax.eval_shape(apply, *like, state)[1]
    return jax.tree.map(lambda x, shape: placed(x, explicit_axes(shape)), state, after)


def quantized_weight(w: Any, dtype: str) -> QuantizedArray | None:
    """A matrix [..., R, C] quantised as `Layer.quantized` says; None stays None."""
    if w is None:
        return None
    by_blocks = dtype == "int4" and w.shape[-2] % _INT4_BLOCK == 0
    return quantize(w, dtype, block=(_INT4_BLOCK, 1) if by_blocks else None)


def side_by_side(name: str, w: jax.Array) -> jax.Array:
    """Gates and values [..., D, 2, F] as [..., D, 2 F], as they are quantised. Raises where a mesh axis cuts F."""
    *outer, of_parts, of_columns = explicit_axes(w)
    if cut := (*of_parts, *of_columns):
        kept = [axes[0] if len(axes) == 1 else axes or None for axes in outer]
        while kept and kept[-1] is None:
            kept.pop()
        raise ValueError(
            f"weights.{name} {list(w.shape)} is sharded over {axes_named(cut)} along its last axes, and gates and values "
            f"are quantised side by side, {[*w.shape[:-2], 2 * w.shape[-1]]}, which cannot be sharded like that; pass "
            f"jax.sharding.reshard(weights.{name}, P({', '.join(map(repr, kept))})) as {name}"
        )
    return w.reshape(*w.shape[:-2], 2 * w.shape[-1])


class Layer[W]:
    """Base of the layers, which are frozen dataclasses of sizes. W is the type of their weights, a dataclass too."""

    d_model: int
    weights: ClassVar[type]
    state: ClassVar[type]
    quantizable: ClassVar[tuple[str, ...]] = ()
    """The weights that `quantized` quantises: matrices that activations are multiplied with by `project`."""
    packed_fields: ClassVar[tuple[str, ...]] = ()
    """The weights that `packed` writes."""

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

    def packed(self, weights: Any) -> dict[str, Any]:
        """The tensors of a checkpoint that `unpacked` reads, by name: its inverse."""
        return {}

    def to_checkpoint(self, weights: W, prefix: str = "") -> dict[str, Any]:
        """The tensors of a checkpoint under `prefix`: the inverse of `from_checkpoint`."""
        start = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
        tensors = self.packed(weights)
        for name, parameter in self.parameters().items():
            if name in self.packed_fields:
                continue
            value = getattr(weights, name)
            if isinstance(value, QuantizedArray):
                raise ValueError(
                    f"weights.{name} is quantised, and a checkpoint has no name for that; save float weights"
                )
            tensors[parameter.name] = value.T if parameter.transposed else value
        return {start + name: tensor for name, tensor in tensors.items()}

    def cast(self, weights: W, dtype: Any) -> W:
        """The weights in `dtype`; those that are always float32 stay so."""
        parameters = self.parameters()
        values = {
            name: value
            if value is None
            else value.astype(jnp.float32 if name in parameters and parameters[name].float32 else dtype)
            for name, value in vars(weights).items()
        }
        return self.weights(**values)

    def quantized(self, weights: W, dtype: str) -> W:
        """The weights of the large projections quantised, with one scale per output column; int4 has one per 128 rows of a
        column where 128 divides them.
        """
        changed = {name: quantized_weight(getattr(weights, name), dtype) for name in self.quantizable}
        return dataclasses.replace(weights, **{name: value for name, value in changed.items() if value is not None})  # type: ignore[type-var]

    def can_decode(self, weights: W, x: jax.Array, state: Any, residual: Residual) -> bool:
        """Whether `decode` takes these: one token per row on a device that has kernels for it."""
        return False

    def decode(self, weights: W, x: jax.Array, state: Any, residual: Residual) -> tuple[jax.Array, jax.Array, Any]:
        """The residual stream after this layer's output for x [B, 1, D] is added to it, its norm, and the state.

        The same as `apply`, a sum and a norm, in fewer kernels. `can_decode` has to hold.
        """
        raise NotImplementedError

    def decode_weights(self, weights: W) -> W:
        """Stacks of the weights of equal layers, such that a layer's part of each is what `decode` takes.

        It is called once for all layers, before the loop over them.
        """
        return weights

    def decode_layers_arguments(self, weights: Any, state: Any) -> dict[str, Any] | None:
        """What `decode_layers` takes of equal layers, by name; None where it does not compute them.

        The weights and the state are stacks over the layers.
        """
        return None

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

    def check_shardings(self, weights: Any, x: jax.Array, state: Any) -> str | None:
        """The Explicit mesh axis that x [B, T, D] is cut over along T; None where sequences are whole.

        Raises where T is cut and there is a state, and where heads are cut into parts that are not whole heads.
        """
        own, tokens = type(self).__name__, explicit_axes(x)
        if len(tokens[1]) > 1 or (tokens[1] and state is not None):
            several = "one mesh axis can cut it" if state is None else "a state continues whole sequences only"
            raise ValueError(
                f"{own}: x is sharded over {axes_named(tokens[1])} along its axis T, and {several}; pass "
                f"jax.sharding.reshard(x, ...) without it"
            )
        heads = {name: parameter.heads for name, parameter in self.parameters().items() if parameter.heads > 1}
        for name in heads:
            w = getattr(weights, name)
            if isinstance(w, QuantizedArray):
                continue
            over = _without(explicit_axes(w)[-1], *tokens)
            parts = math.prod(jax.typeof(w).sharding.mesh.shape[axis] for axis in over)
            for other, count in heads.items():
                if count % parts:
                    raise ValueError(
                        f"{own}: weights.{name} is sharded over {axes_named(over)} along its heads, into {parts} parts, "
                        f"and weights.{other} has {count} heads; use a mesh whose axis divides them, or pass "
                        f"jax.sharding.reshard(weights.{name}, ...) without it"
                    )
        return tokens[1][0] if tokens[1] else None

    def check_state(self, state: Any, x: jax.Array, **wanted: tuple[int, ...]) -> None:
        """Raises where a state is not this layer's, or of another batch. `wanted`: the shapes of its fields after B."""
        own, remedy = type(self).__name__, "pass the state that this layer returned, or None to begin"
        if not isinstance(state, self.state):
            raise ValueError(f"state is of type {type(state).__name__} and {own} takes {self.state.__name__}; {remedy}")
        for name, shape in wanted.items():
            value = getattr(state, name)
            if value.shape[1:] != shape:
                takes = f"[B, {', '.join(map(str, shape))}]"
                raise ValueError(f"state.{name} is {shown(value)} and this {own} takes {takes}; {remedy}")
            if value.shape[0] != x.shape[0]:
                raise ValueError(
                    f"state.{name} has batch {value.shape[0]} and x has batch {x.shape[0]}; they must "
                    f"be equal: use initial_state(batch={x.shape[0]}), or pass the states of these rows"
                )

    def check_tokens(self, x: jax.Array) -> None:
        """Raises where x is not [B, T, d_model] of a dtype that the ops take."""
        d_model = self.d_model
        if not hasattr(x, "ndim"):
            raise TypeError(f"x is of type {type(x).__name__}; it must be an array [B, T, D]: pass jnp.asarray(x)")
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


def _same_axes(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether each axis of a tensor is one of these, or several in a row, but for those of 1."""
    rest = [size for size in wanted if size != 1]
    for size in (size for size in found if size != 1):
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest


class Tensors:
    """The tensors of one layer in a checkpoint: those whose names start with `prefix`."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str):
        self._tensors = tensors
        self._prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self._prefix + name in self._tensors

    def array(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """The tensor of that name, reshaped: axes of 1 are added or dropped, and an axis may be split into several."""
        full = self._prefix + name
        if full not in self._tensors:
            near = sorted(key for key in self._tensors if key.startswith(self._prefix))
            there = ", ".join(near) if near else f"none; names look like {next(iter(self._tensors), 'nothing')!r}"
            if len(near) > _MOST_NAMED:
                close = difflib.get_close_matches(full, near, 4, cutoff=0.0)
                there = f"{len(near)} others, such as {', '.join(close)}"
            raise ValueError(f"tensors has no {full!r}; with prefix={self._prefix!r} it has {there}")
        tensor = jnp.asarray(self._tensors[full])
        if not _same_axes(tensor.shape, shape):
            raise ValueError(
                f"{full} has shape {list(tensor.shape)} and this layer needs {list(shape)}; give the layer the sizes of "
                f"the checkpoint's config.json"
            )
        return tensor.reshape(shape)
