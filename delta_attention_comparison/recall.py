"""Multi-query associative recall: a small model of each layer learns to look up values by their keys.

The task is that of the Zoology paper (Arora et al., 2023): a sequence lists pairs of a key and a value, and then asks for
the values of all its keys in another order. The more pairs, the more a layer has to remember.

    k3 v7 k1 v2 ... blank ... k1 k3      -> at k1: v2, at k3: v7

Each row has randomly drawn pairs of its own, so there is nothing to memorise. The model is an embedding, blocks of
[norm, layer, norm, MLP], and an unembedding; rows with different numbers of pairs are trained together. Every layer has
the same data, steps, optimizer and width, and the MLP is as wide as the number of parameters allows.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tilewright

BLANK = 0
UNASKED = -100
_OPTIMISE = "xla_backend_optimization_level"


@dataclass(frozen=True)
class Task:
    """The numbers of pairs, and the vocabulary: keys and values have separate words, and 0 is the blank."""

    pairs: tuple[int, ...] = (2, 4, 8)
    keys: int = 32
    values: int = 32

    def __post_init__(self) -> None:
        if not self.pairs or min(self.pairs) < 1 or max(self.pairs) > self.keys:
            raise ValueError(
                f"pairs={self.pairs} must be from 1 to keys={self.keys}, since a row's keys are all different"
            )

    @property
    def vocabulary(self) -> int:
        return 1 + self.keys + self.values

    @property
    def length(self) -> int:
        """Tokens per row: the largest number of pairs, and a query for each."""
        return 3 * max(self.pairs)

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the values."""
        return 1 / self.values


def draw_rows(task: Task, rng: np.random.Generator, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows with the given numbers of pairs: tokens [rows, T], and the answers, UNASKED where there is no query."""
    tokens = np.full((len(pairs), task.length), BLANK, np.int32)
    answers = np.full_like(tokens, UNASKED)
    for row, count in enumerate(pairs):
        keys = 1 + rng.permutation(task.keys)[:count]
        values = 1 + task.keys + rng.integers(0, task.values, count)
        tokens[row, 0 : 2 * count : 2] = keys
        tokens[row, 1 : 2 * count : 2] = values
        order = rng.permutation(count)
        tokens[row, task.length - count :] = keys[order]
        answers[row, task.length - count :] = values[order]
    return tokens, answers


@dataclass(frozen=True)
class Budget:
    """The training that every layer gets, and the size of its model."""

    steps: int = 300
    rows: int = 32
    d_model: int = 64
    num_heads: int = 2
    head_dim: int = 16
    blocks: int = 2
    parameters: int = 60_000
    """Of all blocks, approximately: the MLP is made as wide as the layer leaves room for."""
    learning_rate: float = 5e-3
    test_rows: int = 128
    """Per number of pairs."""


@dataclass(frozen=True)
class Learned:
    """What one layer achieved."""

    accuracy: dict[int, float]
    """By the number of pairs, on rows that it was not trained on."""
    losses: tuple[float, ...]
    parameters: int
    seconds: float
    """Compiling, training and testing; other layers may have been training at the same time."""


def count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def mlp_width(layer: Any, budget: Budget) -> int:
    """The width of the MLP, so that a block has its share of the parameters."""
    own = count(jax.eval_shape(layer.init, jax.random.key(0)))
    return max(8, (budget.parameters // budget.blocks - own) // (2 * budget.d_model))


def init(layer: Any, task: Task, budget: Budget, key: jax.Array) -> dict[str, Any]:
    d, width = budget.d_model, mlp_width(layer, budget)

    def block(key: jax.Array) -> dict[str, Any]:
        mixer, up, down = jax.random.split(key, 3)
        return {
            "mixer": layer.init(mixer),
            "mixer_norm": jnp.ones((d,)),
            "mlp_norm": jnp.ones((d,)),
            "up": d**-0.5 * jax.random.normal(up, (d, width)),
            "down": width**-0.5 * jax.random.normal(down, (width, d)),
        }

    embedding, unembedding, blocks = jax.random.split(key, 3)
    return {
        "embedding": jax.random.normal(embedding, (task.vocabulary, d)),
        "blocks": jax.vmap(block)(jax.random.split(blocks, budget.blocks)),
        "norm": jnp.ones((d,)),
        "unembedding": d**-0.5 * jax.random.normal(unembedding, (d, task.vocabulary)),
    }


def hidden_states(layer: Any, weights: dict[str, Any], tokens: jax.Array, implementation: str | None) -> jax.Array:
    """The model without its unembedding."""

    def block(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
        y, _ = layer.apply(w["mixer"], tilewright.rms_norm(x, w["mixer_norm"]), implementation=implementation)
        x = x + y
        inner = jax.nn.silu(tilewright.rms_norm(x, w["mlp_norm"]) @ w["up"])
        return x + inner @ w["down"], None

    x = weights["embedding"][tokens]
    x, _ = jax.lax.scan(block, x, weights["blocks"])
    return tilewright.rms_norm(x, weights["norm"])


def train(
    layer: Any,
    task: Task,
    budget: Budget,
    *,
    seed: int = 0,
    implementation: str | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Learned:
    """Trains a model of `layer`, and measures its accuracy. `progress` is called with the number of steps just done."""
    rng = np.random.default_rng(seed)
    # This kind of key compiles in a tenth of the time of the default one. On a CPU a model this small spends more time in
    # the compiler than in training, so the compiler optimises less there: a step of GDN takes 41 ms instead of 47.
    on_cpu = jax.default_backend() == "cpu"
    quickly: Any = functools.partial(jax.jit, compiler_options={_OPTIMISE: 1} if on_cpu else None)
    draw: Any = functools.partial(jax.jit, compiler_options={_OPTIMISE: 0} if on_cpu else None)
    weights = draw(lambda key: init(layer, task, budget, key))(jax.random.key(seed, impl="unsafe_rbg"))
    schedule = optax.warmup_cosine_decay_schedule(0.0, budget.learning_rate, budget.steps // 10, budget.steps)
    # Flat: one update of all parameters compiles in less time than an update per array.
    optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)))

    def loss_and_hits(weights: dict[str, Any], tokens: jax.Array, answers: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = hidden_states(layer, weights, tokens, implementation)
        logits = x @ weights["unembedding"]
        asked = answers != UNASKED
        log_p = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_p, jnp.where(asked, answers, 0)[..., None], axis=-1)[..., 0]
        hits = jnp.sum((jnp.argmax(logits, axis=-1) == answers) & asked, axis=1)
        return -jnp.sum(jnp.where(asked, chosen, 0.0)) / jnp.sum(asked), hits

    @quickly
    def step(weights: Any, memory: Any, tokens: jax.Array, answers: jax.Array) -> Any:
        (loss, hits), gradient = jax.value_and_grad(loss_and_hits, has_aux=True)(weights, tokens, answers)
        updates, memory = optimizer.update(gradient, memory, weights)
        return optax.apply_updates(weights, updates), memory, loss, hits

    def rows(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return draw_rows(task, rng, pairs)

    began = time.perf_counter()
    memory, losses = quickly(optimizer.init)(weights), []
    for _ in range(budget.steps):
        weights, memory, loss, _ = step(weights, memory, *rows(rng.choice(task.pairs, budget.rows)))
        losses.append(float(loss))
        progress(1)

    accuracy = {}
    for pairs in task.pairs:
        hits = asked = 0
        for _ in range(-(-budget.test_rows // budget.rows)):
            # The compiled training step also gives the answers; its update from the test rows is discarded.
            tokens, answers = rows(np.full(budget.rows, pairs))
            hits += int(np.sum(step(weights, memory, tokens, answers)[3]))
            asked += int(np.sum(answers != UNASKED))
        accuracy[pairs] = hits / asked
    return Learned(accuracy, tuple(losses), count(weights), time.perf_counter() - began)
