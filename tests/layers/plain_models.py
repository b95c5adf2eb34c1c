"""Qwen3, Qwen3-Next and Kimi Linear on Tilewright's layers, with everything else in plain NumPy.

A model reads tokens in calls of any length: `Model.read(tokens) -> logits` continues from the previous call.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from tilewright.layers import Attention, KimiDeltaAttention, Qwen3NextGatedDeltaNet

MODELS = Path(__file__).resolve().parent.parent / "golden" / "models"


@functools.cache
def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """config.json, the tensors, and the golden values."""
    folder = MODELS / name
    with np.load(folder / "golden.npz") as golden:
        values = dict(golden)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), values


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float, offset: float = 0.0) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (w + offset)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gated = x @ gate.T
    return (gated * sigmoid(gated) * (x @ up.T)) @ down.T


class Model:
    """One of the golden models, with its states."""

    implementation: str | None = None

    def __init__(self, name: str, layers: list[Any]):
        self.config, self.tensors, self.golden = checkpoint(name)
        self.layers = layers
        self.prefixes = [f"model.layers.{i}.{self.mixer_name(i)}" for i in range(len(layers))]
        self.weights = [
            layer.from_checkpoint(self.tensors, prefix) if layer is not None else None
            for layer, prefix in zip(layers, self.prefixes, strict=True)
        ]
        self.states: list[Any] = [None] * len(layers)

    norm_offset = 0.0

    def mixer_name(self, i: int) -> str:
        return "self_attn"

    def mix(self, i: int, x: np.ndarray) -> np.ndarray:
        y, self.states[i] = _apply(self.layers[i], self.implementation)(self.weights[i], x, self.states[i])
        return np.asarray(y)

    def feed(self, i: int, x: np.ndarray) -> np.ndarray:
        names = ("gate_proj", "up_proj", "down_proj")
        return mlp(x, *(self.tensors[f"model.layers.{i}.mlp.{name}.weight"] for name in names))

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[f"model.{name}.weight"], self.config["rms_norm_eps"], self.norm_offset)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for i in range(len(self.layers)):
            x = x + self.mix(i, self.norm(x, f"layers.{i}.input_layernorm"))
            x = x + self.feed(i, self.norm(x, f"layers.{i}.post_attention_layernorm"))
        return self.norm(x, "norm") @ self.tensors["lm_head.weight"].T

    def reserve(self, capacity: int) -> None:
        """Converts the grown caches to fixed ones, for decoding."""
        for i, state in enumerate(self.states):
            if hasattr(state, "with_capacity"):
                self.states[i] = state.with_capacity(capacity)


@functools.cache
def _apply(layer: Any, implementation: str | None) -> Any:
    return jax.jit(functools.partial(layer.apply, implementation=implementation))


def qwen3_attention(config: dict[str, Any], **changes: Any) -> Attention:
    sizes = {
        "d_model": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "eps": config["rms_norm_eps"],
    }
    return Attention(**sizes, **changes)


class Qwen3(Model):
    def __init__(self) -> None:
        config = checkpoint("qwen3")[0]
        super().__init__("qwen3", [qwen3_attention(config)] * config["num_hidden_layers"])


class Qwen3Next(Model):
    norm_offset = 1.0

    def __init__(self) -> None:
        config = checkpoint("qwen3_next")[0]
        full = qwen3_attention(
            config, gated=True, norm_offset=1.0, rope_fraction=config["rope_parameters"]["partial_rotary_factor"]
        )
        linear = Qwen3NextGatedDeltaNet(
            d_model=config["hidden_size"],
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
            eps=config["rms_norm_eps"],
        )
        kinds = {"linear_attention": linear, "full_attention": full}
        super().__init__("qwen3_next", [kinds[kind] for kind in config["layer_types"]])

    def mixer_name(self, i: int) -> str:
        return {"linear_attention": "linear_attn", "full_attention": "self_attn"}[self.config["layer_types"][i]]

    def feed(self, i: int, x: np.ndarray) -> np.ndarray:
        """The best two of eight experts by softmax, weights renormalised, and a shared expert behind a gate."""

        def tensor(name: str) -> np.ndarray:
            return self.tensors[f"model.layers.{i}.mlp.{name}.weight"]

        def expert(name: str) -> np.ndarray:
            return mlp(x, *(tensor(f"{name}.{part}_proj") for part in ("gate", "up", "down")))

        scores = softmax(x @ tensor("gate").T)
        kept = _best(scores, scores, self.config["num_experts_per_tok"])
        kept = kept / np.sum(kept, axis=-1, keepdims=True)
        y = sum(kept[..., e : e + 1] * expert(f"experts.{e}") for e in range(self.config["num_experts"]))
        return y + sigmoid(x @ tensor("shared_expert_gate").T) * expert("shared_expert")


class KimiLinear(Model):
    def __init__(self) -> None:
        config = checkpoint("kimi_linear")[0]
        linear = KimiDeltaAttention(
            d_model=config["hidden_size"],
            num_heads=config["linear_num_heads"],
            head_dim=config["linear_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
            eps=config["rms_norm_eps"],
        )
        kinds = {"linear_attention": linear, "full_attention": None}
        super().__init__("kimi_linear", [kinds[kind] for kind in config["layer_types"]])

    def mix(self, i: int, x: np.ndarray) -> np.ndarray:
        return super().mix(i, x) if self.layers[i] is not None else self._latent_attention(i, x)

    def _latent_attention(self, i: int, x: np.ndarray) -> np.ndarray:
        """Multi-head latent attention without RoPE; its state is all inputs so far."""
        config = self.config
        heads, nope, shared = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))

        def tensor(name: str) -> np.ndarray:
            return self.tensors[f"{self.prefixes[i]}.{name}.weight"]

        seen = x if self.states[i] is None else np.concatenate([self.states[i], x], axis=1)
        self.states[i] = seen
        b, s, t = seen.shape[0], seen.shape[1], x.shape[1]
        q = (x @ tensor("q_proj").T).reshape(b, t, heads, nope + shared)
        latent, k_shared = np.split(seen @ tensor("kv_a_proj_with_mqa").T, [config["kv_lora_rank"]], axis=-1)
        latent = rms_norm(latent, tensor("kv_a_layernorm"), 1e-6)
        k, v = np.split((latent @ tensor("kv_b_proj").T).reshape(b, s, heads, -1), [nope], axis=-1)
        k = np.concatenate([k, np.broadcast_to(k_shared[:, :, None], (b, s, heads, shared))], axis=-1)
        logits = np.einsum("bthd,bshd->bhts", q, k) * (nope + shared) ** -0.5
        later = np.arange(s)[None, :] > np.arange(s - t, s)[:, None]
        o = np.einsum("bhts,bshd->bthd", softmax(np.where(later, -np.inf, logits)), v)
        return o.reshape(b, t, -1) @ tensor("o_proj").T

    def feed(self, i: int, x: np.ndarray) -> np.ndarray:
        """A dense MLP; or two of eight experts, chosen by sigmoid plus bias and weighted without the bias, and a shared
        expert.
        """
        prefix = f"model.layers.{i}.block_sparse_moe"

        def dense(name: str, parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> np.ndarray:
            return mlp(x, *(self.tensors[f"{name}.{part}.weight"] for part in parts))

        if self.config["mlp_layer_types"][i] == "dense":
            return dense(prefix)
        scores = sigmoid(x @ self.tensors[f"{prefix}.gate.weight"].T)
        biased = scores + self.tensors[f"{prefix}.gate.e_score_correction_bias"]
        kept = _best(biased, scores, self.config["num_experts_per_token"])
        kept = self.config["routed_scaling_factor"] * kept / np.sum(kept, axis=-1, keepdims=True)
        experts = (dense(f"{prefix}.experts.{e}", ("w1", "w3", "w2")) for e in range(self.config["num_experts"]))
        return sum(kept[..., e : e + 1] * y for e, y in enumerate(experts)) + dense(f"{prefix}.shared_experts")


def _best(by: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """`values` where `by` is among its row's `count` largest, 0 elsewhere."""
    least = np.sort(by, axis=-1)[..., -count, None]
    return np.where(by >= least, values, 0.0)
