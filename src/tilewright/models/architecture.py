"""A language model: its runs of equal blocks, the embedding and the head, and the states of its layers.

The weights of a run are stacked, and `jax.lax.scan` goes over them, so that the program that is compiled does not grow with
the depth. With states it is a loop that updates them in place (in_place.py).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.layers.layer import Leaf, project
from tilewright.models.block import Block, BlockWeights, Run, applied, runs_of
from tilewright.models.in_place import blocks_that_decode, decode_in_one_kernel, decode_in_place, run_in_place
from tilewright.ops.norm.api import rms_norm
from tilewright.parallel.mesh import MeshError
from tilewright.parallel.pipeline import PIPELINE, Pipeline, Stage, is_staged, run_stages
from tilewright.parallel.prefetch import can_prefetch, run_prefetched

_CACHE_TILE = 64


@dataclass(frozen=True)
class Architecture:
    """A language model."""

    family: str
    vocab_size: int
    blocks: tuple[Block, ...]
    eps: float
    norm_offset: float = 0.0
    tied: bool = False
    """Whether the head is the embedding, transposed."""
    prefix: str = "model."
    """What the names of its tensors begin with, but for the head's."""
    head_name: str = "lm_head.weight"
    skipped: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may have, and that this model does not use."""

    @property
    def d_model(self) -> int:
        return self.blocks[0].mixer.d_model

    @property
    def runs(self) -> tuple[Run, ...]:
        return runs_of(self.blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelWeights:
    embedding: Leaf  # [V, D]
    runs: Any
    """A tuple per run of a `BlockWeights` per block of its pattern, each leaf stacked over the repeats."""
    norm: Leaf  # [D]
    head: Leaf = None  # [D, V]; None where it is tied


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps everything but gathered weights, which would be whole on every device.

    A gather is a `reshard`; the next two return what they are given, and an op saves a weight behind them. Broadcasts cost
    memory and no time: with them a layer of width 4096 took a quarter more of it (docs/measurements).
    """
    name = primitive.name
    dropped = ("reshard", "pvary", "without_axes", "broadcast_in_dim", "iota")
    return name not in dropped and not name.startswith("tilewright_")


def hidden_states(
    architecture: Architecture,
    weights: ModelWeights,
    ids: jax.Array,
    states: Any = None,
    segment_ids: jax.Array | None = None,
    *,
    capacity: int | None = None,
    remat: Any = None,
    pipeline: Pipeline | None = None,
    prefetch: bool = False,
) -> tuple[jax.Array, Any, list[Any]]:
    """The last hidden states [B, T, D], normalised; the states after; and the routings, stacked per block of a pattern.

    `states` continue earlier calls, which return no routings and have no gradients. Without them no states are returned,
    unless there is a `capacity`: then ids are the first tokens, and the states have room for so many. `remat` is a policy
    of `jax.checkpoint` for each repeat of a pattern, or None to keep everything. On Explicit mesh axes None does not keep
    weights that were gathered (FSDP): the backward pass gathers them again. Where the layers of a run are cut over the mesh
    axis "pipeline", they run as its stages, and `pipeline` says how; the rows of the results are cut over it, too.
    `prefetch`: where tokens and weights are cut over "fsdp", the backward pass of a run outside of the stages gathers the
    weights that it reads first one repeat ahead (parallel/prefetch.py).
    """
    if any(is_staged(run) for run in weights.runs):
        if states is not None or capacity is not None:
            raise MeshError(
                "the stages of a pipeline keep no states, so they cannot generate; use a mesh without pipeline"
            )
        ids, segment_ids = over_pipeline(weights, (ids, segment_ids))
        pipeline = pipeline_of(weights, ids, pipeline)
    # On Explicit mesh axes an update in place would have to say its sharding.
    in_place = states is not None and not any(any(explicit_axes(x)) for x in jax.tree.leaves((weights, ids, states)))
    norm = architecture.eps, architecture.norm_offset
    x = embedded(weights.embedding, ids)  # [B, T, D]
    after, routings, last = [], [], None
    for number, run in enumerate(architecture.runs):
        own = weights.runs[number]
        if in_place:
            assert states is not None
            before, last = states[number], None  # `last`: x behind the norm of the head, where the run has computed it.
            if segment_ids is None and (decoded := decode_in_one_kernel(run, own, x, before)) is not None:
                x, state = decoded
            elif segment_ids is None and any(decodes := blocks_that_decode(run, own, x, before, norm)):
                x, last, state = decode_in_place(run, own, x, before, weights.norm, decodes)
            else:
                x, state = run_in_place(run, own, x, before, segment_ids)
            after.append(state)
            continue
        if is_staged(own):
            assert pipeline is not None
            x, routing = run_stages(stage_of(run, own, remat), own, x, segment_ids, pipeline)
        else:
            before = None if states is None else states[number]
            x, state, routing = _run_layers(run, own, x, before, segment_ids, capacity, remat, prefetch)
            after.append(state)
        routings += [each for each in routing if each is not None]
    x = normed(architecture, weights, x) if last is None else last
    return x, None if states is None and capacity is None else tuple(after), routings


def normed(architecture: Architecture, weights: ModelWeights, x: jax.Array) -> jax.Array:
    """The last hidden states, normalised for the head."""
    return rms_norm(x, weights.norm, eps=architecture.eps, offset=architecture.norm_offset)


def run_layers(
    runs: tuple[Run, ...], weights: Any, x: jax.Array, segment_ids: Any, *, remat: Any, prefetch: bool
) -> tuple[jax.Array, list[Any]]:
    """x after some runs outside of the stages of a pipeline, and the routings, as `hidden_states` has them."""
    routings = []
    for run, own in zip(runs, weights, strict=True):
        x, _, routing = _run_layers(run, own, x, None, segment_ids, None, remat, prefetch)
        routings += [each for each in routing if each is not None]
    return x, routings


def stage_of(run: Run, weights: Any, remat: Any) -> Stage:
    """Some repeats of a run, as a stage of a pipeline; `weights` are those of the run."""
    _, step, _ = _repeat(run, weights, remat, None)

    def stage(own: Any, x: jax.Array, segment_ids: Any) -> tuple[jax.Array, Any]:
        x, (_, routing) = jax.lax.scan(functools.partial(step, segment_ids), x, (own, None))
        return x, routing

    return stage


def _repeat(run: Run, weights: Any, remat: Any, capacity: int | None) -> tuple[Any, Any, Any]:
    """One repeat of a run as the body of a scan, the same under a policy of `jax.checkpoint`, and that policy."""

    def body(segment_ids: Any, x: jax.Array, layer: Any) -> Any:
        own, before = layer
        results = []
        for position, block in enumerate(run.pattern):
            state = None if before is None else before[position]
            x, state, routing = applied(block, own[position], x, state, segment_ids)
            if before is None:
                state = None if capacity is None else _with_room(state, capacity)
            results.append((state, routing))
        return x, tuple(zip(*results, strict=True))

    sharded = any(any(explicit_axes(leaf)) for leaf in jax.tree.leaves(weights))
    policy = _all_but_gathered if remat is None and sharded else remat
    step = body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=False)
    return body, step, policy


def _run_layers(
    run: Run,
    weights: Any,
    x: jax.Array,
    states: Any,
    segment_ids: jax.Array | None,
    capacity: int | None,
    remat: Any,
    prefetch: bool,
) -> tuple[jax.Array, Any, Any]:
    """x after a run, the states after it, and the routings of its blocks."""
    body, step, policy = _repeat(run, weights, remat, capacity)
    if prefetch and states is None and capacity is None and can_prefetch(weights, x):

        def repeat(own: Any, x: jax.Array, segment_ids: Any) -> Any:
            x, (_, routing) = body(segment_ids, x, (own, None))
            return x, routing

        first = _read_first_backward(run, policy)
        x, routing = run_prefetched(repeat, weights, x, segment_ids, first=first, policy=policy)
        return x, None, routing
    x, (state, routing) = jax.lax.scan(functools.partial(step, segment_ids), x, (weights, states))
    return x, state, routing


def _read_first_backward(run: Run, policy: Any) -> tuple[BlockWeights, ...]:
    """Which weights the backward pass of a repeat reads first: the last MLP's, or the first mixer's to recompute it."""
    last = len(run.pattern) - 1
    if policy in (_all_but_gathered, jax.checkpoint_policies.dots_with_no_batch_dims_saveable):
        return tuple(BlockWeights(False, False, False, place == last) for place in range(last + 1))
    return tuple(BlockWeights(False, place == 0, False, False) for place in range(last + 1))


def over_pipeline(weights: ModelWeights, tokens: Any) -> Any:
    """Arrays [B, T] whose rows are cut over the pipeline, and over what they are cut over already."""
    mesh = jax.typeof(weights.embedding).sharding.mesh

    def cut(x: jax.Array) -> jax.Array:
        rows, *others = explicit_axes(x)
        rows = (PIPELINE, *(axis for axis in rows if axis != PIPELINE))
        parts = math.prod(mesh.shape[axis] for axis in rows)
        if x.shape[0] % parts:
            spelled = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in rows)
            whole = -(-x.shape[0] // parts) * parts
            raise MeshError(
                f"a batch of {x.shape[0]} rows cannot be cut into {parts} parts, {spelled}; use {whole} rows"
            )
        return jax.sharding.reshard(x, NamedSharding(mesh, P(rows, *others)))

    return jax.tree.map(cut, tokens)


def pipeline_of(weights: ModelWeights, ids: jax.Array, pipeline: Pipeline | None) -> Pipeline:
    """The pipeline with a number of microbatches, for ids [B, T] whose rows are cut over it."""
    mesh = jax.typeof(weights.embedding).sharding.mesh
    parts = math.prod(mesh.shape[axis] for axis in explicit_axes(ids)[0])
    return (pipeline or Pipeline()).of_rows(ids.shape[0], parts, mesh.shape[PIPELINE])


def room(capacity: int) -> int:
    """The tokens that a cache for `capacity` has room for. Kernels read keys by the tile, and would copy another cache."""
    return -(-capacity // _CACHE_TILE) * _CACHE_TILE


def _with_room(state: Any, capacity: int) -> Any:
    """A layer's state after its first tokens, as one with room for `capacity` tokens and a length per row."""
    if not hasattr(state, "with_capacity"):
        return state  # A delta rule's, which does not grow.
    cache = getattr(state, state.caches[0])
    length = placed(jnp.full((cache.shape[0],), cache.shape[1], jnp.int32), explicit_axes(cache)[:1])
    return dataclasses.replace(state.with_capacity(room(capacity)), length=length)


def embedded(embedding: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The embeddings of ids. An id outside of the vocabulary gives NaN, never another token's embedding.

    On Explicit mesh axes that V is sharded over, each device looks up the ids of its own rows, and the results are summed.
    D is gathered.
    """
    if not any((*explicit_axes(embedding), *explicit_axes(ids))):
        outside = jnp.where(ids < 0, embedding.shape[0], ids)  # JAX would count negative ones from the end.
        return jnp.take(embedding, outside, axis=0, mode="fill", fill_value=jnp.nan)
    tokens, vocabulary = explicit_axes(ids), embedding.shape[0]
    over = tuple(axis for axis in explicit_axes(embedding)[0] if not any(axis in each for each in tokens))
    mesh = jax.typeof(embedding if any(explicit_axes(embedding)) else ids).sharding.mesh

    def own(rows: jax.Array, ids: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(over) * rows.shape[0] if over else 0
        held = (ids >= first) & (ids < first + rows.shape[0])
        x = jnp.take(rows, jnp.where(held, ids - first, 0), axis=0, mode="clip")
        x = jnp.where(held[..., None], x, jnp.zeros_like(x))
        x = jax.lax.psum(x, over) if over else x
        return jnp.where(((ids >= 0) & (ids < vocabulary))[..., None], x, jnp.nan)

    looked_up = jax.shard_map(
        own,
        mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
        in_specs=(P(over, None), P(*tokens)),
        out_specs=P(*tokens, None),
    )
    return looked_up(placed(embedding, [over, ()]), ids)


def head_of(weights: ModelWeights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The head [D, V] in x's dtype, and x. On Explicit mesh axes D is gathered (FSDP), and V stays sharded."""
    head = weights.embedding.T if weights.head is None else weights.head
    *tokens, _ = explicit_axes(x)
    over = tuple(axis for axis in explicit_axes(head)[1] if not any(axis in each for each in tokens))
    return placed(head.astype(x.dtype), [(), over]), placed(x, [*tokens, ()])


def logits_of(weights: ModelWeights, x: jax.Array) -> jax.Array:
    """Logits [..., V] in float32."""
    head, x = head_of(weights, x)
    return project(x, head, jnp.float32, transposed=weights.head is None)


def initial_states(architecture: Architecture, batch: int, capacity: int, dtype: Any) -> Any:
    """The states of every layer before the first token, with a length per row."""

    def stacked(block: Block, count: int) -> Any:
        state = block.mixer.initial_state(batch, capacity=room(capacity), dtype=dtype)  # type: ignore[attr-defined]
        if getattr(state, "length", None) is not None:
            state = dataclasses.replace(state, length=jnp.zeros((batch,), jnp.int32))
        return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), state)

    return tuple(tuple(stacked(block, run.count) for block in run.pattern) for run in architecture.runs)
