"""The named shapes of linear cross entropy."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Draw, Input, Work, normal
from tilewright.ops.linear_cross_entropy.api import IGNORED_LABEL


def _labels(vocabulary: int, ignored: float) -> Draw:
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        choose, skip = jax.random.split(key)
        labels = jax.random.randint(choose, shape, 0, vocabulary, jnp.int32)
        return jnp.where(jax.random.bernoulli(skip, ignored, shape), IGNORED_LABEL, labels)

    return draw


def _positive(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, 0.5, 1.5)


def _case(
    name: str,
    tokens: int | tuple[int, ...],
    h: int,
    v: int,
    *,
    ignored: float = 0.0,
    weights: bool = False,
    logit_scale: float = 2.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case with logits of about `logit_scale`. FLOPs are of the products: 2 N H V, and thrice that with gradients."""
    leading = (tokens,) if isinstance(tokens, int) else tokens
    n = math.prod(leading)
    inputs = {
        "x": Input((*leading, h)),
        "w": Input((h, v), normal(logit_scale / h**0.5)),
        "labels": Input(leading, _labels(v, ignored), dtype="int32", differentiable=False),
    }
    if weights:
        inputs["weights"] = Input(leading, _positive, dtype="float32")
    per_row = 4 * n * (3 + weights)  # Labels, loss, logsumexp and weights.
    operands = n * h + h * v
    return Case(
        op="linear_cross_entropy",
        name=name,
        inputs=inputs,
        outputs=("loss", "logsumexp"),
        work=lambda itemsize: Work(flops=2.0 * n * h * v, bytes=float(operands * itemsize + per_row)),
        work_grad=lambda itemsize: Work(flops=6.0 * n * h * v, bytes=float(3 * operands * itemsize + 2 * per_row)),
        options={"return_logsumexp": True, **options},
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("odd", 5, 7, 11, small=True),
    _case("batched", (3, 37), 64, 300, ignored=0.2, weights=True, z_loss=1e-2, small=True),
    _case("soft_cap", 130, 96, 517, soft_cap=5.0, small=True),
    _case("large_logits", 40, 128, 257, logit_scale=300.0, small=True),
    _case("many_blocks", 1040, 48, 1300, ignored=0.1, small=True),
    _case("cpu_bench", 512, 256, 8192, small=True),
    _case("gpt2", 8192, 768, 50257),
    _case("qwen3", 8192, 2048, 151936),
    _case("llama3", 8192, 4096, 128256),
)
