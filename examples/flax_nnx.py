"""Tilewright's ops in Flax NNX: modules, `nnx.jit`, `nnx.value_and_grad`, an optax optimizer, and a mesh.

    pip install flax optax
    python examples/flax_nnx.py

The model and the text are those of plain_jax.py: bytes, one layer of a gated delta rule, one of attention. The batch is cut
over all devices there are; JAX_NUM_CPU_DEVICES=4 makes four out of a CPU.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright

VOCAB, D, H, K = 256, 64, 2, 32  # bytes, channels, heads, channels of a head
BATCH, T = 8, 64


class RmsNorm(nnx.Module):
    """An op with a weight is a module of one parameter."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(D))

    def __call__(self, x: jax.Array) -> jax.Array:
        return tilewright.rms_norm(x, self.scale[...])


class Heads(nnx.Module):
    """A norm and a projection to q, k and v, each [B, T, H, K]."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = RmsNorm()
        self.qkv = nnx.Linear(D, 3 * H * K, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        h = self.norm(x)
        return h, [each.reshape(*x.shape[:2], H, K) for each in jnp.split(self.qkv(h), 3, axis=-1)]


class DeltaLayer(nnx.Module):
    """Gated DeltaNet without its convolutions."""

    def __init__(self, rngs: nnx.Rngs):
        self.heads = Heads(rngs)
        self.gates = nnx.Linear(D, 2 * H, rngs=rngs)
        self.out = nnx.Linear(H * K, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h, (q, k, v) = self.heads(x)
        g, beta = jnp.split(self.gates(h), 2, axis=-1)  # [B, T, H]
        o, _ = tilewright.gated_delta_rule(q, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta), normalize_qk=True)
        return x + self.out(o.reshape(*x.shape[:2], H * K))


class AttentionLayer(nnx.Module):
    """Causal softmax attention."""

    def __init__(self, rngs: nnx.Rngs):
        self.heads = Heads(rngs)
        self.out = nnx.Linear(H * K, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        _, (q, k, v) = self.heads(x)
        return x + self.out(tilewright.flash_attention(q, k, v, causal=True).reshape(*x.shape[:2], H * K))


class Model(nnx.Module):
    """Bytes to the mean cross entropy of the next byte."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB, D, rngs=rngs)
        self.layers = nnx.List([DeltaLayer(rngs), AttentionLayer(rngs)])
        self.norm = RmsNorm()
        self.head = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (D, VOCAB)))

    def loss(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids[:, :-1])  # [B, T, D]
        for layer in self.layers:
            x = layer(x)
        return tilewright.linear_cross_entropy(self.norm(x), self.head[...], ids[:, 1:], reduction="mean")


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, ids: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(Model.loss)(model, ids)
    optimizer.update(model, gradients)
    return loss


def batches(steps: int) -> list[np.ndarray]:
    """Rows of T + 1 bytes of this file, [BATCH, T + 1] per step."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - T, (steps, BATCH))
    return [np.stack([text[start : start + T + 1] for start in row]) for row in starts]


def main(steps: int = 30) -> list[float]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for module in (model, optimizer):  # On every device of the mesh.
        nnx.update(module, jax.device_put(nnx.state(module), whole))
    losses = [float(train_step(model, optimizer, jax.device_put(ids, rows))) for ids in batches(steps)]
    print(f"Flax NNX on {jax.device_count()} devices: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main()
