"""What a model is made of: blocks, and the runs of equal blocks that are scanned.

A block is a token mixer (attention or a delta rule) and a feed-forward layer, each behind a norm and added to its input.
The blocks of a model repeat with some period: every layer of Qwen3 is equal, and Qwen3-Next repeats three Gated DeltaNet
blocks and one of attention. A run is a pattern of blocks and how often it comes; its weights are stacked, and
`jax.lax.scan` goes over them, so that the program that is compiled does not grow with the depth.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.layers.attention import StackedCache, layer_of
from tilewright.layers.layer import Layer, Leaf, Residual, project
from tilewright.layers.moe import Routing
from tilewright.ops.attention.decode_layers.api import decode_layers, has_kernel
from tilewright.ops.norm.api import rms_norm
from tilewright.parallel.mesh import MeshError
from tilewright.parallel.pipeline import PIPELINE, Pipeline, Stage, is_staged, run_stages
from tilewright.parallel.prefetch import can_prefetch, run_prefetched

_LONGEST_PERIOD = 8
_CACHE_TILE = 64
_MOST_UNROLLED = 4
"""Blocks of a turn of the loop over layers, where a token is computed by kernels. A turn costs about 2 us on an H200, next
to 55 us for a block of Qwen3-1.7B; all 28 of its blocks in one turn save 70 us a token, and compile 4 s longer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    mixer_norm: Leaf  # [D]
    mixer: Any
    mlp_norm: Leaf  # [D]
    mlp: Any


@dataclass(frozen=True)
class Block:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    mixer: Layer[Any]
    mlp: Layer[Any]
    eps: float
    norm_offset: float = 0.0
    """Added to the norms' weights; 1 in Qwen3-Next."""
    mixer_name: str = "self_attn"
    mlp_names: tuple[str, ...] = ("mlp",)
    """The layers' names in a checkpoint, after "model.layers.N."; the first that is there, and the first is written."""

    def init(self, key: PRNGKeyArray, dtype: Any) -> BlockWeights:
        for_mixer, for_mlp = jax.random.split(key)
        norm = jnp.full((self.mixer.d_model,), 1.0 - self.norm_offset, dtype)
        return BlockWeights(norm, self.mixer.init(for_mixer, dtype), norm, self.mlp.init(for_mlp, dtype))

    def apply(
        self, weights: BlockWeights, x: jax.Array, state: Any, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, Any, Routing | None]:
        """x after this block, the mixer's state, and the routing of a mixture of experts."""
        mixer: Any = self.mixer
        mlp: Any = self.mlp
        normed = rms_norm(x, weights.mixer_norm, eps=self.eps, offset=self.norm_offset)
        y, after = mixer.apply(weights.mixer, normed, state, segment_ids=segment_ids)
        x = x + y
        y, routing = mlp.apply(weights.mlp, rms_norm(x, weights.mlp_norm, eps=self.eps, offset=self.norm_offset))
        return x + y, after, routing

    def can_decode(self, weights: BlockWeights, x: jax.Array, state: Any) -> bool:
        """Whether `decode` takes these."""
        mixer, mlp = (self._residual(x, norm) for norm in (weights.mlp_norm, weights.mixer_norm))
        return self.mixer.can_decode(weights.mixer, x, state, mixer) and self.mlp.can_decode(weights.mlp, x, None, mlp)

    def decode(
        self, weights: BlockWeights, x: jax.Array, normed: jax.Array, state: Any, following: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """`apply` for one token per row, with the norms at other places: x is given with its norm, `normed`, and is
        returned with the norm whose weights are `following`.
        """
        x, normed, state = self.mixer.decode(weights.mixer, normed, state, self._residual(x, weights.mlp_norm))
        x, normed, _ = self.mlp.decode(weights.mlp, normed, None, self._residual(x, following))
        return x, normed, state

    def decode_layers_arguments(self, weights: BlockWeights, x: jax.Array, state: Any) -> dict[str, Any] | None:
        """The arguments of `decode_layers` for equal blocks, whose weights and states are stacks; None where there is no
        kernel that computes them.
        """
        mixer = self.mixer.decode_layers_arguments(weights.mixer, state)
        mlp = self.mlp.decode_layers_arguments(weights.mlp, None)
        if mixer is None or mlp is None or (mixer["eps"], mixer["norm_offset"]) != (self.eps, self.norm_offset):
            return None
        norms = {"mixer_norm": weights.mixer_norm, "mlp_norm": weights.mlp_norm}
        lengths = jnp.broadcast_to(state.length[0], x.shape[:1])  # All layers have read the same tokens.
        arguments = {"x": x[:, 0], "lengths": lengths, **norms, **mixer, **mlp}
        return arguments if has_kernel(**arguments) else None

    def _residual(self, x: jax.Array, norm: jax.Array) -> Residual:
        return Residual(x, norm, self.eps, self.norm_offset)


@dataclass(frozen=True)
class Run:
    """A pattern of blocks that comes `count` times in a row."""

    pattern: tuple[Any, ...]
    """`Block`s."""
    count: int
    first: int
    """The number of its first layer."""

    def layer(self, repeat: int, position: int) -> int:
        """The number of a layer."""
        return self.first + repeat * len(self.pattern) + position


def runs_of(blocks: tuple[Any, ...]) -> tuple[Run, ...]:
    """Blocks as runs: at each place the period that covers the most blocks, and the shortest of those."""
    runs, at = [], 0
    while at < len(blocks):
        best = (1, 1)
        for period in range(1, min(_LONGEST_PERIOD, len(blocks) - at) + 1):
            pattern, count = blocks[at : at + period], 1
            while blocks[at + count * period : at + (count + 1) * period] == pattern:
                count += 1
            if count > 1 and period * count > best[0] * best[1]:
                best = (period, count)
        period, count = best
        runs.append(Run(blocks[at : at + period], count, at))
        at += period * count
    return tuple(runs)


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


@functools.partial(jax.jit, static_argnums=0)
def _applied(block: Block, weights: BlockWeights, x: jax.Array, state: Any, segment_ids: jax.Array | None) -> Any:
    """`Block.apply`, traced and lowered once for all blocks of a pattern that are equal."""
    return block.apply(weights, x, state, segment_ids)


@functools.partial(jax.jit, static_argnums=0)
def _decoded(
    block: Block, weights: BlockWeights, x: jax.Array, normed: jax.Array, state: Any, following: jax.Array
) -> Any:
    """`Block.decode`, likewise."""
    return block.decode(weights, x, normed, state, following)


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
    x = embedded(weights.embedding, ids)  # [B, T, D]
    after, routings, last = [], [], None
    for number, run in enumerate(architecture.runs):
        own = weights.runs[number]
        if in_place:
            assert states is not None
            before, last = states[number], None  # `last`: x behind the norm of the head, where the run has computed it.
            if segment_ids is None and (decoded := _decode_in_one_kernel(run, own, x, before)) is not None:
                x, state = decoded
            elif segment_ids is None and any(decodes := _blocks_that_decode(architecture, run, own, x, before)):
                x, last, state = _decode_in_place(run, own, x, before, weights.norm, decodes)
            else:
                x, state = _run_in_place(run, own, x, before, segment_ids)
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
            x, state, routing = _applied(block, own[position], x, state, segment_ids)
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


def _run_in_place(
    run: Run, weights: Any, x: jax.Array, stacks: Any, segment_ids: jax.Array | None
) -> tuple[jax.Array, Any]:
    """x after the blocks of a run, and their states, which are updated in place.

    A scan would write every cache anew. Here the loop's own counter picks the layer: XLA then passes a kernel the part of a
    stack that it reads, and copies it where the index is anything else.
    """

    def body(carry: Any) -> Any:
        index, x, stacks = carry
        stacks = list(stacks)
        for position, block in enumerate(run.pattern):
            own = jax.tree.map(lambda leaf: layer_of(leaf, index), weights[position])
            x, stacks[position] = _apply_in_place(block, own, x, stacks[position], index, segment_ids)
        return index + 1, x, tuple(stacks)

    _, x, stacks = jax.lax.while_loop(lambda carry: carry[0] < run.count, body, (jnp.int32(0), x, stacks))
    return x, stacks


def _apply_in_place(
    block: Block, weights: BlockWeights, x: jax.Array, stack: Any, index: Any, segment_ids: jax.Array | None
) -> tuple[jax.Array, Any]:
    """x after a block, and the stack of its states with this layer's updated."""
    caches = getattr(stack, "caches", ())
    leaves = _given(stack)
    before = {
        name: StackedCache(leaf, index) if name in caches else layer_of(leaf, index) for name, leaf in leaves.items()
    }
    x, state, _ = _applied(block, weights, x, dataclasses.replace(stack, **before), segment_ids)
    after = {
        name: getattr(state, name).stack
        if name in caches
        else jax.lax.dynamic_update_index_in_dim(leaf, getattr(state, name), index, 0, allow_negative_indices=False)
        for name, leaf in leaves.items()
    }
    return x, dataclasses.replace(stack, **after)


def _given(state: Any) -> dict[str, Any]:
    """The arrays of a state that are not None, by name."""
    return {name: leaf for name, leaf in vars(state).items() if leaf is not None}


def _decode_in_one_kernel(run: Run, weights: Any, x: jax.Array, stacks: Any) -> tuple[jax.Array, Any] | None:
    """`_run_in_place` for a token, where a kernel computes all blocks of a run; None where there is none."""
    (block, *others), (stack, *_) = run.pattern, stacks
    if x.shape[1] != 1 or others or getattr(stack, "length", None) is None:
        return None
    arguments = block.decode_layers_arguments(weights[0], x, stack)
    if arguments is None:
        return None
    y, keys, values = decode_layers(**arguments)
    return y[:, None], (dataclasses.replace(stack, keys=keys, values=values, length=stack.length + 1),)


def _blocks_that_decode(
    architecture: Architecture, run: Run, weights: Any, x: jax.Array, stacks: Any
) -> tuple[bool, ...]:
    """For each block of a run, whether it has the kernels of `Block.decode` for a token per row.

    None has them where the norms of a block differ from those of the model: each block computes the norm of the next one.
    """

    def of_block(block: Block, weights: BlockWeights, stack: Any) -> bool:
        if hasattr(stack, "caches") and stack.length is None:
            return False
        # Only shapes are looked at: the first layer's parts are not computed.
        own, state = jax.tree.map(lambda leaf: layer_of(leaf, 0), (weights, stack))
        return block.can_decode(own, x, state)

    norms = {(block.eps, block.norm_offset) for block in run.pattern}
    if x.shape[1] != 1 or norms != {(architecture.eps, architecture.norm_offset)}:
        return (False,) * len(run.pattern)
    return tuple(map(of_block, run.pattern, weights, stacks))


def _decode_in_place(
    run: Run, weights: Any, x: jax.Array, stacks: Any, norm: jax.Array, decodes: tuple[bool, ...]
) -> tuple[jax.Array, jax.Array, Any]:
    """`_run_in_place` for one token per row, in fewer kernels: x, its norm with the weights `norm`, and the states.

    The kernel that ends a block computes the norm that the next block begins with. A block that does not decode so
    (`decodes`) is applied, and `rms_norm` computes the norm behind it. The blocks that do update the caches of their
    states, or all arrays of a state that has no caches. Their lengths are taken from the first layer of a stack, since all
    have read the same tokens, and are counted outside of the loop. A turn of it is several repeats.
    """
    weights = [
        dataclasses.replace(own, mixer=block.mixer.decode_weights(own.mixer)) if is_decoded else own
        for block, own, is_decoded in zip(run.pattern, weights, decodes, strict=True)
    ]
    following = [own.mixer_norm for own in weights[1:]]
    others = weights[0].mixer_norm[1:]
    dtype = jnp.promote_types(others.dtype, norm.dtype)
    following.append(jnp.concatenate([others.astype(dtype), norm[None].astype(dtype)]))
    most = max(1, _MOST_UNROLLED // len(run.pattern))
    repeats = max(n for n in range(1, min(most, run.count) + 1) if run.count % n == 0)  # Of a turn.
    first = run.pattern[0]
    normalised = functools.partial(rms_norm, eps=first.eps, offset=first.norm_offset)

    def updated(stack: Any, is_decoded: bool) -> dict[str, Any]:
        """The arrays of a stack that the loop carries."""
        return {
            name: leaf
            for name, leaf in _given(stack).items()
            if not is_decoded or name in getattr(stack, "caches", (name,))
        }

    def lengths(stack: Any) -> dict[str, Any]:
        """The length of a state that has one, before the token and behind it."""
        if not hasattr(stack, "length"):
            return {}
        length = stack.length[0]
        return {"length": length, **({"next_length": length + 1} if hasattr(stack, "next_length") else {})}

    known = [lengths(stack) if is_decoded else {} for stack, is_decoded in zip(stacks, decodes, strict=True)]

    def turn(carry: Any) -> Any:
        begin, x, normed, every = carry
        every = list(every)
        for n, (position, block) in itertools.product(range(repeats), enumerate(run.pattern)):
            own, behind = jax.tree.map(
                functools.partial(layer_of, layer=begin + n), (weights[position], following[position])
            )
            if decodes[position]:
                parts = {name: StackedCache(stack, begin + n) for name, stack in every[position].items()}
                before = dataclasses.replace(stacks[position], **known[position], **parts)
                x, normed, after = _decoded(block, own, x, normed, before, behind)
                every[position] = {name: getattr(after, name).stack for name in parts}
            else:
                stack = dataclasses.replace(stacks[position], **every[position])
                x, stack = _apply_in_place(block, own, x, stack, begin + n, None)
                normed, every[position] = normalised(x, behind), _given(stack)
        return begin + repeats, x, normed, tuple(every)

    carried = tuple(map(updated, stacks, decodes))
    start = jnp.int32(0), x, normalised(x, weights[0].mixer_norm[0]), carried
    _, x, normed, carried = jax.lax.while_loop(lambda carry: carry[0] < run.count, turn, start)
    states = [
        dataclasses.replace(stack, **({"length": stack.length + 1} if own else {}), **after)
        for stack, own, after in zip(stacks, known, carried, strict=True)
    ]
    return x, normed, tuple(states)


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
