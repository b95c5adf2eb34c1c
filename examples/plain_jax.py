"""Tilewright's ops in plain JAX: a two-layer language model of bytes, its gradient, a jitted training step, and a mesh.

    python examples/plain_jax.py

It learns the bytes of this file. Weights are a dictionary, the step is SGD with momentum written out, and the batch is cut
over all devices there are; JAX_NUM_CPU_DEVICES=4 makes four out of a CPU.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright

VOCAB, D, H, K = 256, 64, 2, 32  # bytes, channels, heads, channels of a head
BATCH, T = 8, 64

Weights = dict[str, jax.Array]


def init(key: jax.Array) -> Weights:
    shapes = {
        "embedding": (VOCAB, D), "head": (D, VOCAB),
        "delta_qkv": (D, 3 * H * K), "delta_gates": (D, 2 * H), "delta_out": (H * K, D),
        "attention_qkv": (D, 3 * H * K), "attention_out": (H * K, D),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    drawn = {name: jax.random.normal(k, s) * s[0] ** -0.5 for k, (name, s) in zip(keys, shapes.items(), strict=True)}
    return drawn | {f"{name}_norm": jnp.ones(D) for name in ("delta", "attention", "final")}


def heads(x: jax.Array, w: jax.Array) -> list[jax.Array]:
    """q, k and v, each [B, T, H, K]."""
    b, t, _ = x.shape
    return [each.reshape(b, t, H, K) for each in jnp.split(x @ w, 3, axis=-1)]


def delta_layer(weights: Weights, x: jax.Array) -> jax.Array:
    """Gated DeltaNet without its convolutions. x and the result are [B, T, D]."""
    h = tilewright.rms_norm(x, weights["delta_norm"])
    q, k, v = heads(h, weights["delta_qkv"])
    g, beta = jnp.split(h @ weights["delta_gates"], 2, axis=-1)  # [B, T, H]
    o, _ = tilewright.gated_delta_rule(q, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta), normalize_qk=True)
    return x + o.reshape(*x.shape[:2], H * K) @ weights["delta_out"]


def attention_layer(weights: Weights, x: jax.Array) -> jax.Array:
    """Causal softmax attention. x and the result are [B, T, D]."""
    q, k, v = heads(tilewright.rms_norm(x, weights["attention_norm"]), weights["attention_qkv"])
    o = tilewright.flash_attention(q, k, v, causal=True)
    return x + o.reshape(*x.shape[:2], H * K) @ weights["attention_out"]


def loss_of(weights: Weights, ids: jax.Array) -> jax.Array:
    """The mean cross entropy of the next byte. The logits [B, T, VOCAB] are never in memory."""
    x = weights["embedding"][ids[:, :-1]]  # [B, T, D]
    x = attention_layer(weights, delta_layer(weights, x))
    x = tilewright.rms_norm(x, weights["final_norm"])
    return tilewright.linear_cross_entropy(x, weights["head"], ids[:, 1:], reduction="mean")


@jax.jit
def train_step(weights: Weights, momentum: Weights, ids: jax.Array) -> tuple[Weights, Weights, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(weights, ids)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, loss


def batches(steps: int) -> list[np.ndarray]:
    """Rows of T + 1 bytes of this file, [BATCH, T + 1] per step."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - T, (steps, BATCH))
    return [np.stack([text[start : start + T + 1] for start in row]) for row in starts]


def main(steps: int = 30) -> list[float]:
    # Auto axes: the compiler propagates shardings, and each op runs on the rows that its device has.
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    weights = jax.device_put(init(jax.random.key(0)), whole)
    momentum = jax.tree.map(jnp.zeros_like, weights)
    losses = []
    for ids in batches(steps):
        weights, momentum, loss = train_step(weights, momentum, jax.device_put(ids, rows))
        losses.append(float(loss))
    print(f"plain JAX on {jax.device_count()} devices: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main()
