"""Generation: prompts are read in pieces, then all rows of a batch take a token per step.

Every layer keeps a state: keys and values or latents of the tokens so far, or a delta rule's memory and the last inputs of
its convolutions. A prompt is read in pieces whose sizes are powers of two, so that prompts of any length need a handful of
compiled programs and no padding, which a recurrent state could not tell from tokens. The first piece has up to
`FIRST_PIECE` tokens and attends to itself alone; the others have up to `PIECE` and attend to the cache, too. Rows have
lengths of their own, so a batch may hold prompts of different lengths, and rows may come and go (`Batch`). What a model
knows after a prefix is a value (`Prefix`) that can be kept, saved, and continued from any number of times.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from tilewright.core.arguments import SEEDS, is_integer, shown
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.models.architecture import Architecture, ModelWeights, hidden_states, initial_states, logits_of, room
from tilewright.models.prefix import Prefix, fingerprint

DATA = "data"
FIRST_PIECE = 8192
PIECE = 512


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r} must be 0 (the most probable token) or more")
        if self.top_k is not None and (not isinstance(self.top_k, int | np.integer) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a positive integer, or None")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be in (0, 1], or None")

    def choose(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """A token per row of logits [B, V], each drawn with its own key. Where V is cut over a mesh axis it is gathered."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = placed(logits, [explicit_axes(logits)[0], ()]) / self.temperature
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]  # [B, V], falling
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = ordered[:, self.top_k - 1, None]
            logits, ordered = (jnp.where(each >= least, each, -jnp.inf) for each in (logits, ordered))
        if self.top_p is not None:  # Of what top_k kept.
            probabilities = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            kept = jnp.sum(before < self.top_p, axis=-1)  # The most probable one always.
            logits = jnp.where(logits >= jnp.take_along_axis(ordered, kept[:, None] - 1, axis=-1), logits, -jnp.inf)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def next_logits(
    architecture: Architecture, weights: ModelWeights, ids: jax.Array, states: Any = None, capacity: int | None = None
) -> tuple[jax.Array, Any]:
    """The logits [B, V] after ids [B, T], and the states.

    `states` are those before `ids`; without them ids are the first tokens, and the new states have room for `capacity`.
    """
    x, states, _ = hidden_states(architecture, weights, ids, states, capacity=capacity)
    return logits_of(weights, x[:, -1]), states


_begin = functools.partial(jax.jit, static_argnums=(0, 3))(
    lambda architecture, weights, ids, capacity: next_logits(architecture, weights, ids, capacity=capacity)
)
_read = functools.partial(jax.jit, static_argnums=0, donate_argnums=3)(
    lambda architecture, weights, ids, states: next_logits(architecture, weights, ids, states)
)


def pieces(length: int, first: int = PIECE) -> Iterator[int]:
    """The sizes of the pieces that a prompt is read in. The first one has at most `first` tokens."""
    if first > PIECE and length > PIECE:
        size = 1 << (min(length, first).bit_length() - 1)
        yield size
        length -= size
    while length >= PIECE:
        yield PIECE
        length -= PIECE
    for bit in reversed(range(PIECE.bit_length())):
        if length >> bit & 1:
            yield 1 << bit


def read_prompt(model: Any, ids: jax.Array, capacity: int, states: Any = None) -> tuple[jax.Array, Any]:
    """The logits after the last token of ids [B, T], and the states after it, with caches for `capacity` tokens.

    `states` are those before the first token; None where it is the first of all.
    """
    logits, at = None, 0
    for size in pieces(ids.shape[1], FIRST_PIECE if states is None else PIECE):
        piece = ids[:, at : at + size]
        if states is None:
            logits, states = _begin(model.architecture, model.weights, piece, capacity)
        else:
            logits, states = _read(model.architecture, model.weights, piece, states)
        at += size
    assert logits is not None
    return logits, states


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6), donate_argnums=3)
def continued(
    architecture: Architecture,
    weights: ModelWeights,
    start: tuple[jax.Array, jax.Array],
    states: Any,
    steps: int,
    sampling: Sampling,
    stop_tokens: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, Any]:
    """Up to `steps` tokens per row [B, steps], how many of them each row has, and the states.

    `start` are logits [B, V] and the keys of the rows. The states are those before the last of the tokens. On a mesh that
    the rows are cut over, each device decodes its own rows, and every device gets all tokens.
    """
    logits, keys = start
    batch, over = logits.shape[0], explicit_axes(logits)[0]
    keys = placed(keys, [over])
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def take(step: Any, rows: Any, logits: Any) -> Any:
        """Chooses the token of each row, and writes it to its place. Rows that are done do not count it."""
        done, counts, tokens = rows
        chosen = sampling.choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, step))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, chosen[:, None], step, axis=1)
        counts = counts + (~done).astype(jnp.int32)
        done = done | jnp.any(chosen[:, None] == stops[None], axis=1) if stop_tokens else done
        return (done, counts, tokens), chosen

    def going(carry: Any) -> jax.Array:
        step, (done, *_) = carry[:2]
        # Without stop tokens the number of turns is a constant, and the host does not ask a GPU whether to go on.
        return (step < steps - 1) & ~jnp.all(done) if stop_tokens else step < steps - 1

    def body(carry: Any) -> Any:
        step, rows, logits, states = carry
        rows, chosen = take(step, rows, logits)
        logits, states = next_logits(architecture, weights, chosen[:, None], states)
        return step + 1, rows, logits, states

    zeros = placed(jnp.zeros((batch,), jnp.int32), [over])
    rows = zeros > 0, zeros, placed(jnp.zeros((batch, steps), jnp.int32), [over, ()])
    step, rows, logits, states = jax.lax.while_loop(going, body, (jnp.int32(0), rows, logits, states))
    (_, counts, tokens), _ = take(step, rows, logits)
    return placed(tokens, [(), ()]), placed(counts, [()]), states


def read_prefix(model: Any, ids: Sequence[int], capacity: int, prefix: Prefix | None = None) -> Prefix:
    """What the model knows after `ids`, or after a prefix and `ids`, with caches for `capacity` tokens."""
    of = fingerprint(model)
    if prefix is not None:
        prefix = _own(model, prefix, of)
    return dataclasses.replace(_read_after(model, ids, capacity, prefix), model=of)


def _own(model: Any, prefix: Any, of: str | None) -> Prefix:
    """The prefix, on the model's mesh. Raises where it is another model's; `of` is the fingerprint of this one."""
    if not isinstance(prefix, Prefix):
        raise ValueError(f"prefix={prefix!r} must be a Prefix, which model.read_prefix and Prefix.load return")
    if None not in (of, prefix.model) and prefix.model != of:
        raise ValueError(
            "prefix is of a model with other weights, or in another dtype; use one that this model's read_prefix made"
        )
    mesh = explicit_mesh(model)
    if mesh is None or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(prefix)):
        return prefix
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    read = functools.partial(next_logits, model.architecture, capacity=prefix.capacity or 1)
    _, like = jax.eval_shape(read, model.weights, ids)
    states = jax.tree.map(
        lambda leaf, own: jax.device_put(leaf, NamedSharding(mesh, own.sharding.spec)), prefix.states, like
    )
    return dataclasses.replace(prefix, states=states)


def _read_after(model: Any, ids: Sequence[int], capacity: int, prefix: Prefix | None) -> Prefix:
    """See `read_prefix`, without a word about whose prefix it is."""
    tokens = np.asarray(ids)
    before = 0 if prefix is None else len(prefix.ids)
    if prefix is not None and prefix.capacity not in (None, room(capacity)):
        raise ValueError(f"prefix has room for {prefix.capacity} tokens and capacity={capacity}; they must be equal")
    if not tokens.size:
        if prefix is None:
            raise ValueError("a prompt is empty; give it at least one token, such as the model's bos_token_id")
        return prefix
    if tokens.ndim != 1:
        raise ValueError(f"a prompt has shape {list(tokens.shape)}; it must be one list of ids")
    checked_ids(tokens[None], model.architecture.vocab_size)
    tokens = tokens.astype(np.int32)
    if before + tokens.size > capacity:
        raise ValueError(
            f"a prompt of {before + tokens.size} tokens does not fit a cache for {capacity}; use capacity="
            f"{before + tokens.size} or more"
        )
    # Reading gives the buffers of a state away.
    states = None if prefix is None else jax.tree.map(jnp.copy, prefix.states)
    logits, states = read_prompt(model, jnp.asarray(tokens[None]), capacity, states)
    return Prefix((*(() if prefix is None else prefix.ids), *tokens.tolist()), logits, states)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(rows: Any, row: Any, at: jax.Array) -> Any:
    return jax.tree.map(lambda whole, own: jax.lax.dynamic_update_index_in_dim(whole, own[:, 0], at, 1), rows, row)


class Batch:
    """Rows that are decoded together, and that may join and leave at any step.

    batch = Batch(model, rows=8, capacity=4096)
    row = batch.join(prompt)
    batch.step()          # {row: token} for every row that is there
    ids = batch.leave(row)
    """

    def __init__(self, model: Any, rows: int, capacity: int, sampling: Sampling = Sampling()):  # noqa: B008, frozen
        for name, value in (("rows", rows), ("capacity", capacity)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling={sampling!r} must be a Sampling, such as Sampling(temperature=0.7)")
        self._model, self._capacity, self._sampling = model, capacity, sampling
        with model.on_mesh():
            self._states = initial_states(model.architecture, rows, capacity, model.dtype)
        self._logits = jnp.zeros((rows, model.architecture.vocab_size), jnp.float32)
        self._keys = jax.random.split(jax.random.key(0), rows)
        self._ids: dict[int, list[int]] = {}
        self._steps = np.zeros(rows, np.int32)

    @functools.cached_property
    def _fingerprint(self) -> str | None:
        return fingerprint(self._model)

    @property
    def free(self) -> list[int]:
        """The rows that nobody has."""
        return [row for row in range(len(self._steps)) if row not in self._ids]

    def join(self, prompt: Sequence[int], *, seed: int = 0, prefix: Prefix | None = None) -> int:
        """Reads a prompt, or what follows a prefix, into a free row and returns the row."""
        if not self.free:
            raise ValueError(f"all {len(self._steps)} rows are taken; let one leave, or make the batch with more rows")
        check_seed(seed)
        row = self.free[0]
        with self._model.on_mesh():
            return self._join(row, prompt, seed, prefix)

    def _join(self, row: int, prompt: Sequence[int], seed: int, prefix: Prefix | None) -> int:
        if prefix is not None:
            prefix = _own(self._model, prefix, self._fingerprint)
        own = _read_after(self._model, prompt, self._capacity, prefix)
        if len(own.ids) >= self._capacity:
            raise ValueError(
                f"the prompt has {len(own.ids)} tokens, and capacity={self._capacity} has no room for one more; make the "
                f"batch with a larger capacity"
            )
        # On Explicit mesh axes the heads of all rows are where those of this one are.
        states = jax.tree.map(lambda whole, own: placed(whole, explicit_axes(own)), self._states, own.states)
        self._states = _insert(states, own.states, jnp.int32(row))
        self._logits = self._logits.at[row].set(placed(own.logits[0], [()]))
        self._keys = self._keys.at[row].set(_key(seed))
        self._ids[row], self._steps[row] = list(own.ids), 0
        return row

    def step(self) -> dict[int, int]:
        """The next token of every row."""
        for row, ids in self._ids.items():
            if len(ids) >= self._capacity:
                raise ValueError(f"row {row} has {len(ids)} tokens, all that its cache has room for; let it leave")
        model = self._model
        with model.on_mesh():
            keys = jax.vmap(jax.random.fold_in)(self._keys, jnp.asarray(self._steps))
            chosen = self._sampling.choose(self._logits, keys)
            self._logits, self._states = _read(model.architecture, model.weights, chosen[:, None], self._states)
        # A new array: on a CPU jax may still read the old one, whose memory even `jnp.array` shares.
        self._steps = self._steps + 1
        tokens = np.asarray(chosen)
        for row, ids in self._ids.items():
            ids.append(int(tokens[row]))
        return {row: ids[-1] for row, ids in self._ids.items()}

    def leave(self, row: int) -> np.ndarray:
        """Frees a row and returns its prompt and tokens."""
        if row not in self._ids:
            raise ValueError(f"row {row} is free; those that are taken are {sorted(self._ids)}")
        return np.asarray(self._ids.pop(row))


def generate(
    model: Any,
    input_ids: Any,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_tokens: Any = (),
    seed: int = 0,
    capacity: int | None = None,
) -> Any:
    """See `Model.generate`."""
    if not is_integer(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer, 0 or more")
    check_seed(seed)
    if not isinstance(stop_tokens, tuple | list) or not all(map(is_integer, stop_tokens)):
        raise ValueError(f"stop_tokens={stop_tokens!r} must be a list of ids, such as [2]")
    stop_tokens = tuple(map(int, stop_tokens))
    max_new_tokens = int(max_new_tokens)
    if not len(input_ids):
        raise ValueError("input_ids is empty; give at least one prompt of at least one token")
    rectangular = not isinstance(input_ids, list | tuple) or len({np.size(row) for row in input_ids}) == 1
    prompts = (
        [np.atleast_1d(np.asarray(row)) for row in np.atleast_2d(input_ids)]
        if rectangular
        else [np.atleast_1d(np.asarray(row)) for row in input_ids]
    )
    vocabulary = model.architecture.vocab_size
    for row in prompts:
        if not row.size:
            raise ValueError("a prompt is empty; give it at least one token, such as the model's bos_token_id")
        checked_ids(row[None], vocabulary)
    longest = max(row.size for row in prompts)
    most = longest + max_new_tokens if capacity is None else capacity
    if most < longest + max_new_tokens:
        raise ValueError(
            f"capacity={most} is too small for a prompt of {longest} tokens and max_new_tokens={max_new_tokens}; use at "
            f"least {longest + max_new_tokens}"
        )
    if max_new_tokens == 0:
        return np.stack(prompts) if rectangular else prompts
    logits, states = _read_prompts(model, prompts, most)
    keys = jnp.stack([_key(seed + row) for row in range(len(prompts))])
    tokens, counts, _ = continued(
        model.architecture, model.weights, (logits, keys), states, max_new_tokens, sampling, stop_tokens
    )
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    rows = [np.concatenate([row, tokens[n, : counts[n]]]) for n, row in enumerate(prompts)]
    return np.stack(rows) if rectangular and not stop_tokens else rows


def check_seed(seed: Any) -> None:
    """Raises unless random numbers can be drawn with it: more bits would be cut off."""
    if not is_integer(seed) or not 0 <= seed < SEEDS:
        raise ValueError(f"seed={seed!r} must be an integer from 0 to {SEEDS - 1}")


def _key(seed: int) -> jax.Array:
    return jax.random.key(np.uint32(int(seed) % SEEDS))


def checked_segments(segment_ids: Any, ids: jax.Array) -> jax.Array | None:
    """The segments of ids [B, T] as an array; raises where they are not integers of that shape."""
    if segment_ids is None:
        return None
    segments = segment_ids if isinstance(segment_ids, jax.Array) else np.asarray(segment_ids)
    if segments.shape != ids.shape or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids is {shown(segments)}; it must be integers [B, T] = {list(ids.shape)}, as input_ids"
        )
    return jnp.asarray(segments)


def checked_ids(input_ids: Any, vocab_size: int) -> jax.Array:
    """The ids as an array [B, T]; raises where they are not ids of the vocabulary."""
    ids = input_ids if isinstance(input_ids, jax.Array) else np.asarray(input_ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids is {shown(ids)}; it must be [B, T] integers: pass input_ids[None] for one sequence"
        )
    if not isinstance(ids, Tracer):
        known = np.asarray(ids)
        outside = (known < 0) | (known >= vocab_size)
        if outside.any():
            raise ValueError(
                f"input_ids has {int(known[outside][0])}, and the vocabulary has {vocab_size} tokens, 0 to {vocab_size - 1}"
            )
    return jnp.asarray(ids)


def _read_prompts(model: Any, prompts: Sequence[np.ndarray], capacity: int) -> tuple[jax.Array, Any]:
    """Logits [B, V] and states of prompts: together where they are equally long, and otherwise one by one."""
    over = rows_over(model, len(prompts))
    if len({row.size for row in prompts}) == 1:
        return read_prompt(model, placed(jnp.asarray(np.stack(prompts), jnp.int32), [over, ()]), capacity)
    each = [read_prompt(model, jnp.asarray(row[None], jnp.int32), capacity) for row in prompts]
    logits = jnp.concatenate([logits for logits, _ in each])
    # The axes of a state are repeats of the layer, then rows.
    states = jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=1), *(states for _, states in each))
    logits, states = _with_rows(logits, over, 0), jax.tree.map(lambda leaf: _with_rows(leaf, over, 1), states)
    return logits, states


def explicit_mesh(model: Any) -> Mesh | None:
    """The mesh that the weights are sharded over, where its axes are Explicit."""
    mesh = getattr(getattr(model.weights.embedding, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) and AxisType.Explicit in mesh.axis_types else None


def rows_over(model: Any, rows: int) -> tuple[str, ...]:
    """The mesh axes that so many rows are cut over when they are decoded: "data", where it divides them.

    Rows are not cut over "fsdp" and "expert": every token would gather all weights there.
    """
    mesh = jax.typeof(model.weights.embedding).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_cut = kinds.get(DATA) == AxisType.Explicit and mesh.shape[DATA] > 1 and rows % mesh.shape[DATA] == 0
    return (DATA,) if is_cut else ()


def _with_rows(x: jax.Array, over: tuple[str, ...], axis: int) -> jax.Array:
    """An array with its rows, which are along `axis`, cut over mesh axes."""
    axes = explicit_axes(x)
    return placed(x, [*axes[:axis], over, *axes[axis + 1 :]])
