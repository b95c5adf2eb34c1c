"""Generation: prompts are read in pieces, then all rows of a batch take a token per step.

Every layer keeps a state: keys and values or latents of the tokens so far, or a delta rule's memory and the last inputs of
its convolutions. A prompt is read in pieces whose sizes are powers of two, so that prompts of any length need a handful of
compiled programs and no padding, which a recurrent state could not tell from tokens. The first piece has up to
`FIRST_PIECE` tokens and attends to itself alone; the others have up to `PIECE` and attend to the cache, too. Rows have
lengths of their own, so a batch may hold prompts of different lengths, and rows may come and go (`Batch`). What a model
knows after a prefix is a value (`Prefix`) that can be kept, saved, and continued from any number of times.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from tilewright.core.arguments import is_integer, shown
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.models import checkpoint
from tilewright.models.architecture import Architecture, ModelWeights, hidden_states, initial_states, logits_of, room

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


@functools.partial(jax.tree_util.register_dataclass, data_fields=("logits", "states"), meta_fields=("ids",))
@dataclass(frozen=True)
class Prefix:
    """A model's states after some tokens, and the logits of the token that follows: for one row."""

    ids: tuple[int, ...]
    logits: Any  # [1, V]
    states: Any

    @property
    def capacity(self) -> int | None:
        """The tokens that its caches have room for; None where no layer has a cache that ends."""
        sizes = {leaf.shape[2] for path, leaf in state_leaves(self.states) if path.endswith(CACHES)}
        return min(sizes, default=None)

    def save(self, path: str | Path) -> None:
        """Writes it as one safetensors file."""
        tensors = {"ids": np.asarray(self.ids, np.int32), "logits": self.logits} | dict(state_leaves(self.states))
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        checkpoint.write(Path(path), shapes, tensors.items())

    @staticmethod
    def load(path: str | Path, model: Any) -> "Prefix":
        """The prefix that `save` wrote, for the same model."""
        if not Path(path).is_file():
            raise checkpoint.CheckpointError(f"{path} is not a file; pass one that Prefix.save wrote")
        file = checkpoint.SafetensorsFile(Path(path))
        if not {"ids", "logits"} <= set(file.tensors):
            raise checkpoint.CheckpointError(f"{path} is not a prefix that Prefix.save wrote")
        logits = jnp.asarray(file.read("logits"))
        sizes = {shape[2] for name, (_, shape, _) in file.tensors.items() if name.endswith(CACHES)}
        states = jax.eval_shape(lambda: initial_states(model.architecture, 1, min(sizes, default=1), model.dtype))
        wanted = dict(state_leaves(states))
        for name, leaf in wanted.items():
            if name not in file.tensors or file.tensors[name][1] != leaf.shape:
                raise checkpoint.CheckpointError(
                    f"{path} has no {name} of {list(leaf.shape)}: it is another model's prefix"
                )
        read = [jnp.asarray(file.read(name)).astype(leaf.dtype) for name, leaf in wanted.items()]
        ids = tuple(int(token) for token in file.read("ids"))
        return Prefix(ids, logits, jax.tree.unflatten(jax.tree.structure(states), read))


CACHES = (".keys", ".values", ".latents")
"""How the names of leaves end that have an axis of tokens."""


def state_leaves(states: Any) -> list[tuple[str, Any]]:
    """The leaves of states by their names."""
    return [(f"states{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(states)]


def read_prefix(model: Any, ids: Sequence[int], capacity: int, prefix: Prefix | None = None) -> Prefix:
    """What the model knows after `ids`, or after a prefix and `ids`, with caches for `capacity` tokens."""
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
        self._model, self._capacity, self._sampling = model, capacity, sampling
        with model.on_mesh():
            self._states = initial_states(model.architecture, rows, capacity, model.dtype)
        self._logits = jnp.zeros((rows, model.architecture.vocab_size), jnp.float32)
        self._keys = jax.random.split(jax.random.key(0), rows)
        self._ids: dict[int, list[int]] = {}
        self._steps = np.zeros(rows, np.int32)

    @property
    def free(self) -> list[int]:
        """The rows that nobody has."""
        return [row for row in range(len(self._steps)) if row not in self._ids]

    def join(self, prompt: Sequence[int], *, seed: int = 0, prefix: Prefix | None = None) -> int:
        """Reads a prompt, or what follows a prefix, into a free row and returns the row."""
        if not self.free:
            raise ValueError(f"all {len(self._steps)} rows are taken; let one leave, or make the batch with more rows")
        row = self.free[0]
        with self._model.on_mesh():
            return self._join(row, prompt, seed, prefix)

    def _join(self, row: int, prompt: Sequence[int], seed: int, prefix: Prefix | None) -> int:
        own = read_prefix(self._model, prompt, self._capacity, prefix)
        if len(own.ids) >= self._capacity:
            raise ValueError(
                f"the prompt has {len(own.ids)} tokens, and capacity={self._capacity} has no room for one more; make the "
                f"batch with a larger capacity"
            )
        # On Explicit mesh axes the heads of all rows are where those of this one are.
        states = jax.tree.map(lambda whole, own: placed(whole, explicit_axes(own)), self._states, own.states)
        self._states = _insert(states, own.states, jnp.int32(row))
        self._logits = self._logits.at[row].set(placed(own.logits[0], [()]))
        self._keys = self._keys.at[row].set(jax.random.key(seed))
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
    if not is_integer(seed):
        raise ValueError(f"seed={seed!r} must be an integer")
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
    keys = jnp.stack([jax.random.key(seed + row) for row in range(len(prompts))])
    tokens, counts, _ = continued(
        model.architecture, model.weights, (logits, keys), states, max_new_tokens, sampling, stop_tokens
    )
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    rows = [np.concatenate([row, tokens[n, : counts[n]]]) for n, row in enumerate(prompts)]
    return np.stack(rows) if rectangular and not stop_tokens else rows


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
