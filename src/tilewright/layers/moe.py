"""Mixture of experts of Qwen3-MoE, Qwen3-Next and Kimi Linear: routed experts, a shared expert, a gate for it.

It is dropless: every token reaches all of its experts. The pairs of token and expert are sorted by expert, two
`grouped_matmul` multiply each with its expert's weights, and each token's results are summed.

On a mesh of Explicit axes each device sorts its own tokens (B and T may be sharded), and has all experts, or the part
that the weights' shardings say: F sharded (tensor parallelism) or E (expert parallelism). Over an axis that the tokens are
not sharded over, the results of the parts are summed. Over one that they are sharded over, E stays sharded too, and the
tokens are exchanged, in one of two ways that both drop nothing. With n devices and k experts per token:

- k < n: each row is sent once to each device that has one of its experts, which computes these experts and sends their
  weighted sum back (`core/row_exchange.py`). How many rows go where is exchanged first.
- k >= n: nearly every device needs every row. Every device gets the rows of all devices (an all-gather), computes the pairs
  of its own experts, and the results are summed where each row came from (a reduce-scatter).

docs/parallel.md counts the bytes of both. Weights that are sharded otherwise (FSDP) are gathered. Under Auto axes the
compiler sorts all tokens of the mesh together, which is right and slow: use Explicit axes or `jax.shard_map` there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from tilewright.core.dispatch import ImplementationName
from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.core.quantized import QuantizedArray, quantize
from tilewright.core.row_exchange import exchange_sizes, return_rows, send_rows
from tilewright.layers.layer import Layer, Leaf, Parameter, Tensors, linear, side_by_side
from tilewright.ops.grouped_matmul.api import grouped_matmul
from tilewright.ops.matmul.api import matmul
from tilewright.ops.moe.api import Scoring, check_routing, moe_combine, moe_dispatch, moe_route, moe_sort

_QUANTIZABLE = ("gate_up", "down", "shared_gate_up", "shared_down")
# The tensors of one expert in a checkpoint: gate, up and down.
_NAMES = ("gate_proj", "up_proj", "down_proj")
_KIMI_NAMES = ("w1", "w3", "w2")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEWeights:
    """E experts of F channels, and a shared expert of S.

    `gate_up` and `down`, and those of the shared expert, may be `QuantizedArray`s, [E, D, 2 F] and [E, F, D]
    (`MoE.quantize`).
    """

    router: Leaf  # [D, E]
    gate_up: Leaf  # [E, D, 2, F]
    down: Leaf  # [E, F, D]
    bias: Leaf = None  # [E] float32, with selection_bias
    shared_gate_up: Leaf = None  # [D, 2, S], with shared_dim
    shared_down: Leaf = None  # [S, D], with shared_dim
    shared_gate: Leaf = None  # [D, 1], with shared_gate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """What the router decided: for `moe_load_balance_loss(routing.logits, routing.experts)` and `moe_z_loss`."""

    logits: Leaf  # [B, T, E] float32
    weights: Leaf  # [B, T, k] float32
    experts: Leaf  # [B, T, k] int32


@dataclass(frozen=True)
class _MeshAxes:
    """The mesh axes that a device's part of the weights is of; none outside of a mesh."""

    experts: tuple[str, ...] = ()
    exchanged: tuple[str, ...] = ()
    """Those of the experts that the tokens are sharded over, too."""
    hidden: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MoE(Layer[MoEWeights]):
    r"""Mixture of experts.

    For tokens x:

        w, e = moe_route(x Wr)
        y = sum_j w_j (silu(x Wgate_e) * (x Wup_e)) Wdown_e,  over the k experts e = e_j of a token
        y += the same of the shared expert, times sigmoid(x Ws) where it has a gate
    """

    weights = MoEWeights

    d_model: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    """F, the hidden channels of an expert (`moe_intermediate_size`)."""
    scoring: Scoring = "softmax"
    """"sigmoid" in Kimi Linear."""
    normalize: bool = True
    """Whether a token's weights are divided by their sum (`norm_topk_prob`)."""
    scale: float = 1.0
    """Multiplies the weights (`routed_scaling_factor`)."""
    groups: tuple[int, int] | None = None
    """Groups of experts, and how many of them a token may choose from (`n_group`, `topk_group`); None for no groups."""
    selection_bias: bool = False
    """Whether a bias per expert takes part in the choice (`e_score_correction_bias`). It takes no gradient: it is for a
    training loop to move it."""
    shared_dim: int = 0
    """S, the hidden channels of the shared expert, or of all of them together; 0 for none."""
    kimi_names: bool = False
    """Whether `to_checkpoint` writes the names of Kimi Linear (experts.N.w1, shared_experts); both are read."""
    shared_gate: bool = False
    """Whether the shared expert is multiplied by sigmoid(x Ws), as in Qwen3-Next."""

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "num_experts", "experts_per_token", "expert_dim")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} cannot be chosen from num_experts={self.num_experts}; use "
                f"1 to {self.num_experts}"
            )
        check_routing(self.num_experts, self.experts_per_token, scoring=self.scoring, groups=self.groups)
        if not isinstance(self.shared_dim, int) or self.shared_dim < 0:
            raise ValueError(f"shared_dim={self.shared_dim!r} must be the channels of the shared expert, or 0 for none")
        if self.shared_gate and not self.shared_dim:
            raise ValueError("shared_gate=True and shared_dim=0: there is no shared expert to gate; give shared_dim")

    def parameters(self) -> dict[str, Parameter]:
        """With the names of Qwen3's checkpoints ("model.layers.3.mlp"); `from_checkpoint` reads Kimi Linear's, too."""
        d, e, f, s = self.d_model, self.num_experts, self.expert_dim, self.shared_dim
        declared = {
            "router": linear("gate", d, e),
            "gate_up": _product("experts.gate_up_proj", (e, d, 2, f), d, ("experts", "embed", None, "mlp")),
            "down": _product("experts.down_proj", (e, f, d), f, ("experts", "mlp", "embed")),
        }
        if self.selection_bias:
            declared["bias"] = Parameter((e,), 0.0, "gate.e_score_correction_bias", float32=True)
        if s:
            declared["shared_gate_up"] = _product("shared_expert.gate_up_proj", (d, 2, s), d, ("embed", None, "mlp"))
            declared["shared_down"] = _product("shared_expert.down_proj", (s, d), s, ("mlp", "embed"))
        if self.shared_gate:
            declared["shared_gate"] = linear("shared_expert_gate", d, 1)
        return declared

    def from_checkpoint(self, tensors: Mapping[str, Any], prefix: str = "") -> MoEWeights:
        """The weights from the tensors under `prefix`, in the checkpoint's dtype.

        It reads Qwen3-MoE and Qwen3-Next ("model.layers.0.mlp": experts.N.gate_proj, or all experts in
        experts.gate_up_proj) and Kimi Linear ("model.layers.1.block_sparse_moe": experts.N.w1, shared_experts).
        """
        checkpoint, d, e = Tensors(tensors, prefix), self.d_model, self.num_experts
        has = checkpoint.has

        def expert(of: str, channels: int, names: tuple[str, str, str]) -> tuple[jax.Array, jax.Array]:
            """gate_up [D, 2, channels] and down [channels, D] of one expert."""
            gate, up = (checkpoint.array(f"{of}.{name}.weight", (channels, d)).T for name in names[:2])
            return jnp.stack([gate, up], axis=1), checkpoint.array(f"{of}.{names[2]}.weight", (d, channels)).T

        found = {}
        if has("experts.gate_up_proj"):
            packed = checkpoint.array("experts.gate_up_proj", (e, 2, self.expert_dim, d))
            found["gate_up"] = jnp.moveaxis(packed, 3, 1)
            found["down"] = jnp.swapaxes(checkpoint.array("experts.down_proj", (e, d, self.expert_dim)), 1, 2)
        else:
            names = _KIMI_NAMES if has(f"experts.0.{_KIMI_NAMES[0]}.weight") else _NAMES
            each = [expert(f"experts.{number}", self.expert_dim, names) for number in range(e)]
            found["gate_up"], found["down"] = (jnp.stack(parts) for parts in zip(*each, strict=True))
        if self.shared_dim:
            of = "shared_experts" if has("shared_experts.gate_proj.weight") else "shared_expert"
            found["shared_gate_up"], found["shared_down"] = expert(of, self.shared_dim, _NAMES)
        for name, parameter in self.parameters().items():
            if name not in found:
                shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
                tensor = checkpoint.array(parameter.name, shape)
                found[name] = tensor.T if parameter.transposed else tensor
        return MoEWeights(**found)

    @property
    def packed_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("gate_up", "down", *(("shared_gate_up", "shared_down") if self.shared_dim else ()))

    def packed(self, weights: MoEWeights) -> dict[str, Any]:
        """A tensor per expert and product, with the names of Qwen3, or with `kimi_names` of Kimi Linear."""
        names, shared = (_KIMI_NAMES, "shared_experts") if self.kimi_names else (_NAMES, "shared_expert")

        def expert(of: str, gate_up: Any, down: Any, names: tuple[str, ...]) -> dict[str, Any]:
            values = (gate_up[:, 0].T, gate_up[:, 1].T, down.T)
            return {f"{of}.{name}.weight": value for name, value in zip(names, values, strict=True)}

        for name in self.packed_fields:
            if isinstance(getattr(weights, name), QuantizedArray):
                raise ValueError(
                    f"weights.{name} is quantised, and a checkpoint has no name for that; save float weights"
                )
        tensors: dict[str, Any] = {}
        for number in range(self.num_experts):
            tensors |= expert(f"experts.{number}", weights.gate_up[number], weights.down[number], names)
        if self.shared_dim:
            tensors |= expert(shared, weights.shared_gate_up, weights.shared_down, _NAMES)
        return tensors

    def quantized(self, weights: MoEWeights, dtype: str) -> MoEWeights:
        by_blocks = dtype == "int4" and self.d_model % 128 == self.expert_dim % 128 == self.shared_dim % 128 == 0
        return self.quantize(weights, dtype, block=(128, 1) if by_blocks else None)

    def quantize(self, weights: MoEWeights, dtype: Any, *, block: Any = None) -> MoEWeights:
        """The weights with the experts' products quantised (`tilewright.quantize`); the router and the gate stay."""

        def quantized(name: str) -> QuantizedArray:
            w = getattr(weights, name)
            if isinstance(w, QuantizedArray):
                raise ValueError(f"weights.{name} is quantised already, {w!r}; quantise the float weights instead")
            w = side_by_side(name, w) if name.endswith("gate_up") else w
            try:
                return quantize(w, dtype, block=block)
            except ValueError as error:
                raise ValueError(f"weights.{name}, as x [..., {w.shape[-2]}, {w.shape[-1]}]: {error}") from None

        named = [name for name in _QUANTIZABLE if name in self.parameters()]
        return replace(weights, **{name: quantized(name) for name in named})

    def check_weights(self, weights: Any) -> None:
        """Raises where the weights are not this layer's. Quantised ones have gate and up side by side, [..., 2 F]."""
        changed = {}
        for name, value in vars(weights).items() if isinstance(weights, MoEWeights) else ():
            if not isinstance(value, QuantizedArray):
                continue
            if name not in _QUANTIZABLE:
                raise ValueError(f"weights.{name} is quantised; only {', '.join(_QUANTIZABLE)} can be")
            *outer, columns = value.shape
            shape = (*outer, 2, columns // 2) if name.endswith("gate_up") and columns % 2 == 0 else value.shape
            changed[name] = jax.ShapeDtypeStruct(shape, value.stored.dtype)
        super().check_weights(replace(weights, **changed) if changed else weights)

    def apply(
        self,
        weights: Any,
        x: Float[Array, "*tokens D"],
        state: Any = None,
        *,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Returns y [B, T, D] and the routing of x [B, T, D], from which the losses of the router are computed.

        Tokens do not meet, so any part of a sequence may be given, and `state` is None always. `implementation` is that of
        `grouped_matmul`; the shared expert's products take the best that the device can run.
        """
        if state is not None:
            raise ValueError(f"state is a {type(state).__name__}, and MoE has no state; pass None")
        self.check_tokens(x)
        self.check_weights(weights)
        leaves = (x, *jax.tree.leaves(weights))
        meshes = [mesh for leaf in leaves if AxisType.Explicit in (mesh := jax.typeof(leaf).sharding.mesh).axis_types]
        if not meshes:
            return self._apply(weights, x, implementation, _MeshAxes())
        return self._apply_explicit(weights, x, implementation, meshes[0])

    def _apply_explicit(
        self, weights: MoEWeights, x: jax.Array, implementation: ImplementationName | None, mesh: Any
    ) -> tuple[jax.Array, Routing]:
        """`_apply` on each device's tokens and on its part of the experts, the rest of the weights gathered."""
        *tokens, _ = explicit_axes(x)
        over = _mesh_axes(weights, tokens)
        cut = {
            "gate_up": ((*over.experts, *over.exchanged), (), (), over.hidden),
            "down": ((*over.experts, *over.exchanged), over.hidden, ()),
            "shared_gate_up": ((), (), over.shared),
            "shared_down": (over.shared, ()),
        }

        def axes_of(name: str, leaf: Any) -> tuple[tuple[str, ...], ...]:
            whole = name not in cut or isinstance(getattr(weights, name), QuantizedArray)
            return ((),) * leaf.ndim if whole else cut[name]

        def of_each(function: Callable[[str, Any], Any]) -> MoEWeights:
            named = {
                name: jax.tree.map(lambda leaf, name=name: function(name, leaf), value)
                for name, value in vars(weights).items()
            }
            return MoEWeights(**named)

        explicit = {
            axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
        }
        run = jax.shard_map(
            lambda weights, x: self._apply(weights, x, implementation, over),
            mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
            in_specs=(of_each(lambda name, leaf: P(*axes_of(name, leaf))), P(*tokens, None)),
            out_specs=(P(*tokens, None), Routing(*[P(*tokens, None)] * 3)),
            axis_names=explicit,
        )
        return run(of_each(lambda name, leaf: placed(leaf, axes_of(name, leaf))), placed(x, [*tokens, ()]))

    def _apply(
        self, weights: MoEWeights, x: jax.Array, implementation: ImplementationName | None, over: _MeshAxes
    ) -> tuple[jax.Array, Routing]:
        b, t, d = x.shape
        rows = x.reshape(b * t, d)
        logits = _logits(rows, weights.router)  # [N, E]
        chosen, experts = moe_route(
            logits,
            self.experts_per_token,
            scoring=self.scoring,
            bias=weights.bias,
            normalize=self.normalize,
            scale=self.scale,
            groups=self.groups,
        )
        held, by = weights.gate_up.shape[0], (*over.experts, *over.exchanged)
        every_row, every_weight, every_choice, returned = _exchanged(rows, chosen, experts, held, over)
        mine = every_choice - jax.lax.axis_index(by) * held if by else every_choice
        sorting = moe_sort(mine, held)
        sizes = sorting.group_sizes
        h = grouped_matmul(  # [N k, F]
            moe_dispatch(every_row, sorting),
            _cast(weights.gate_up, x.dtype),
            sizes,
            activation="swiglu",
            implementation=implementation,
        )
        out = grouped_matmul(h, _cast(weights.down, x.dtype), sizes, implementation=implementation)  # [N k, D]
        y = _summed(returned(moe_combine(out, every_weight, sorting)), (*over.experts, *over.hidden))
        if self.shared_dim:
            y = y + _summed(self._shared(weights, rows), over.shared)
        routing = Routing(*(value.reshape(b, t, value.shape[1]) for value in (logits, chosen, experts)))
        return y.reshape(b, t, d), routing

    def _shared(self, weights: MoEWeights, rows: jax.Array) -> jax.Array:
        """The shared expert, [N, D]."""
        h = matmul(rows, _cast(weights.shared_gate_up, rows.dtype), activation="swiglu")  # [N, S]
        y = matmul(h, _cast(weights.shared_down, rows.dtype))  # [N, D]
        if not self.shared_gate:
            return y
        gate = jax.nn.sigmoid(_logits(rows, weights.shared_gate))  # [N, 1]
        return (y.astype(gate.dtype) * gate).astype(y.dtype)


def _product(name: str, shape: tuple[int, ...], d_in: int, axes: tuple[str | None, ...]) -> Parameter:
    """The weights of a product over d_in channels: normal, with a deviation of d_in ** -0.5, as `linear` has it."""

    def draw(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return d_in**-0.5 * jax.random.normal(key, shape, jnp.float32)

    return Parameter(shape, draw, name, axes=axes)


def _logits(rows: jax.Array, w: jax.Array) -> jax.Array:
    """rows [N, D] times w [D, E] in float32: the choice of experts should not depend on a rounding to bfloat16."""
    accumulate = accumulator(rows.dtype)
    if rows.dtype == w.dtype == jnp.bfloat16:
        return jnp.dot(rows, w, preferred_element_type=accumulate)
    return jnp.dot(rows.astype(accumulate), w.astype(accumulate), precision=jax.lax.Precision.HIGHEST)


def _cast(w: Any, dtype: Any) -> Any:
    return w if isinstance(w, QuantizedArray) else w.astype(dtype)


def _summed(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes, in float32 as the product that it is a part of."""
    return jax.lax.psum(y.astype(accumulator(y.dtype)), axes).astype(y.dtype) if axes else y


def _exchanged(
    rows: jax.Array, weights: jax.Array, experts: jax.Array, held: int, over: _MeshAxes
) -> tuple[jax.Array, jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """The rows [R, D] that this device works on, their weights and experts [R, k]; and the way back.

    The way back takes the sums of this device's experts [R, D], and returns for each of its own rows the sum over all
    devices of the exchange [N, D]. An expert of -1 is none.
    """
    axes = over.exchanged
    count = jax.lax.axis_size(axes) if axes else 1
    if count == 1:
        return rows, weights, experts, lambda y: y
    if experts.shape[1] < count:
        return _sent(rows, weights, experts, held, over, count)

    def gathered(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axes, axis=0, tiled=True)

    def returned(y: jax.Array) -> jax.Array:
        wide = y.astype(accumulator(y.dtype))
        return jax.lax.psum_scatter(wide, axes, scatter_dimension=0, tiled=True).astype(y.dtype)

    return gathered(rows), gathered(weights), gathered(experts), returned


def _sent(
    rows: jax.Array, weights: jax.Array, experts: jax.Array, held: int, over: _MeshAxes, count: int
) -> tuple[jax.Array, jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """`_exchanged`, where each row is sent once to each of the `count` devices that have one of its experts."""
    n, k = experts.shape
    owner = experts // held  # [N, k]
    if over.experts:  # The devices of this exchange have these experts of all.
        owner = jnp.where(owner // count == jax.lax.axis_index(over.experts), owner % count, count)
    earlier = jnp.tril(jnp.ones((k, k), bool), -1)
    repeated = jnp.any((owner[:, :, None] == owner[:, None, :]) & earlier[None], axis=2)  # [N, k], of the same device
    sorting = moe_sort(jnp.where(repeated, count, owner), count)
    exchange = exchange_sizes(sorting.group_sizes, over.exchanged, total=n * k, most=n)
    # Experts travel with their weights as float32, which is exact below 2^24. What nobody sends is 0: no expert.
    beside = jnp.concatenate([weights, (experts + 1).astype(weights.dtype)], axis=1)  # [N, 2 k]
    every_row, beside = (send_rows(moe_dispatch(x, sorting), exchange) for x in (rows, beside))

    def returned(y: jax.Array) -> jax.Array:
        sums = return_rows(y, exchange)  # [N k, D], zeros for what was not sent
        return moe_combine(sums, jnp.ones((n, k), weights.dtype), sorting)

    return every_row, beside[:, :k], beside[:, k:].astype(experts.dtype) - 1, returned


def _mesh_axes(weights: MoEWeights, tokens: list[tuple[str, ...]]) -> _MeshAxes:
    """The mesh axes that experts and their channels stay sharded over. Quantised ones do not, nor do channels over an axis
    of the tokens.
    """

    def free(w: Any, axis: int, *used: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in explicit_axes(w)[axis] if not any(name in each for each in used))

    experts, exchanged, hidden, shared = (), (), (), ()
    if not isinstance(weights.gate_up, QuantizedArray) and not isinstance(weights.down, QuantizedArray):
        hidden = free(weights.gate_up, 3, *tokens)
        experts = free(weights.gate_up, 0, hidden, *tokens)
        exchanged = free(weights.gate_up, 0, hidden, experts)
    both = (weights.shared_gate_up, weights.shared_down)
    if not any(w is None or isinstance(w, QuantizedArray) for w in both):
        shared = free(weights.shared_gate_up, 2, *tokens)
    return _MeshAxes(experts, exchanged, hidden, shared)
