"""The published equations of the layers, token by token in NumPy and float64, to compare with the papers."""

from typing import Any

import numpy as np


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float, offset: float = 0.0) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (w + offset)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def convolution(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [B, T, D] convolved with w [W, D]; the last tap is that of the token itself."""
    y = np.zeros_like(x)
    for tap, back in enumerate(range(len(w) - 1, -1, -1)):
        y[:, back:] += w[tap] * x[:, : x.shape[1] - back]
    return y


def delta_rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """q, k, decay [B, T, HV, K], v [B, T, HV, V], beta [B, T, HV]."""
    b, t, heads, depth = k.shape
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    out = np.zeros_like(v)
    for row in range(b):
        for head in range(heads):
            state = np.zeros((depth, v.shape[-1]))
            for i in range(t):
                state = decay[row, i, head][:, None] * state
                wrong = v[row, i, head] - state.T @ k[row, i, head]
                state = state + beta[row, i, head] * np.outer(k[row, i, head], wrong)
                out[row, i, head] = depth**-0.5 * state.T @ q[row, i, head]
    return out


def _qkv(w: Any, x: np.ndarray, heads: Any) -> list[np.ndarray]:
    """Queries, keys and values by value head."""
    served = heads.value_heads // heads.key_heads
    results = []
    for name, count in (("q", heads.key_heads), ("k", heads.key_heads), ("v", heads.value_heads)):
        y = silu(convolution(x @ getattr(w, f"{name}_proj"), getattr(w, f"{name}_conv")))
        y = y.reshape(*x.shape[:2], count, -1)
        results.append(y if name == "v" else np.repeat(y, served, axis=2))
    return results


def kimi_delta_attention(layer: Any, w: Any, x: np.ndarray) -> np.ndarray:
    q, k, v = _qkv(w, x, layer.heads)
    raw = (x @ w.decay_down @ w.decay_up).reshape(k.shape)
    decay = np.exp(-np.exp(w.A_log)[:, None] * softplus(raw + w.dt_bias))
    o = delta_rule(q, k, v, decay, sigmoid(x @ w.beta_proj))
    o = rms_norm(o, w.norm, layer.eps) * sigmoid((x @ w.gate_down @ w.gate_up).reshape(o.shape))
    return o.reshape(*x.shape[:2], -1) @ w.o_proj


def gated_delta_net(layer: Any, w: Any, x: np.ndarray) -> np.ndarray:
    q, k, v = _qkv(w, x, layer.heads)
    decay = np.exp(-np.exp(w.A_log) * softplus(x @ w.decay_proj + w.dt_bias))
    decay = np.broadcast_to(decay[..., None], k.shape)
    o = delta_rule(q, k, v, decay, sigmoid(x @ w.beta_proj))
    o = rms_norm(o, w.norm, layer.eps) * silu((x @ w.gate_proj).reshape(o.shape))
    return o.reshape(*x.shape[:2], -1) @ w.o_proj


def delta_net(layer: Any, w: Any, x: np.ndarray) -> np.ndarray:
    q, k, v = _qkv(w, x, layer.heads)
    most = 2 if layer.negative_eigenvalues else 1
    o = delta_rule(q, k, v, np.ones_like(k), most * sigmoid(x @ w.beta_proj))
    return rms_norm(o, w.norm, layer.eps).reshape(*x.shape[:2], -1) @ w.o_proj


def attention(layer: Any, w: Any, x: np.ndarray) -> np.ndarray:
    b, t, _ = x.shape

    def heads(projection: np.ndarray, norm: np.ndarray) -> np.ndarray:
        y = rms_norm((x @ projection).reshape(b, t, -1, layer.head_dim), norm, layer.eps, layer.norm_offset)
        half = int(layer.head_dim * layer.rope_fraction) // 2
        angle = np.arange(t)[:, None] * layer.rope_theta ** (-np.arange(half) / half)  # [T, half]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        one, other, rest = np.split(y, [half, 2 * half], axis=-1)
        return np.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)

    q, k = heads(w.q_proj, w.q_norm), heads(w.k_proj, w.k_norm)
    v = (x @ w.v_proj).reshape(k.shape)
    served = layer.num_heads // layer.num_kv_heads
    k, v = np.repeat(k, served, axis=2), np.repeat(v, served, axis=2)
    logits = np.einsum("bthd,bshd->bhts", q, k) * layer.head_dim**-0.5
    logits = np.where(np.tri(t, dtype=bool), logits, -np.inf)
    o = np.einsum("bhts,bshd->bthd", softmax(logits), v).reshape(b, t, -1)
    return (o * sigmoid(x @ w.gate_proj) if layer.gated else o) @ w.o_proj


BY_LAYER = {"kda": kimi_delta_attention, "gdn": gated_delta_net, "deltanet": delta_net, "softmax": attention}
