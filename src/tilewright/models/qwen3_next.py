"""Qwen3-Next: three Gated DeltaNet layers to one of gated attention, with experts, and norms that multiply by 1 + w."""

import dataclasses

from tilewright.layers.layer import Layer
from tilewright.layers.mlp import MLP
from tilewright.layers.qwen3_next_gated_delta_net import Qwen3NextGatedDeltaNet
from tilewright.models import qwen3, qwen3_moe
from tilewright.models.architecture import Architecture
from tilewright.models.block import Block
from tilewright.models.checkpoint import CheckpointError
from tilewright.models.config import Config

_KINDS = ("linear_attention", "full_attention")


def layer_types(config: Config) -> list[str]:
    """The kind of each layer: `layer_types`, or every `full_attention_interval`-th is attention."""
    count, interval = config.count("num_hidden_layers"), config.get("full_attention_interval", default=4)
    by_interval = [_KINDS[(layer + 1) % interval == 0] for layer in range(count)]
    kinds = config.get("layer_types", default=by_interval)
    unknown = sorted(set(kinds) - set(_KINDS))
    if unknown or len(kinds) != count:
        raise CheckpointError(f"{config.path}: layer_types must be {count} of {' and '.join(_KINDS)}, and is {kinds}")
    return kinds


def delta_net(config: Config, *, separate: bool = False) -> Qwen3NextGatedDeltaNet:
    return Qwen3NextGatedDeltaNet(
        d_model=config.count("hidden_size"),
        num_key_heads=config.count("linear_num_key_heads"),
        num_value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        conv_width=config.count("linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
        separate=separate,
    )


def blocks(config: Config, mlp_of: list[Layer], *, separate: bool = False) -> tuple[Block, ...]:
    attention = dataclasses.replace(qwen3.attention(config), gated=True, norm_offset=1.0)
    mixers: dict[str, tuple[Layer, str]] = {
        "linear_attention": (delta_net(config, separate=separate), "linear_attn"),
        "full_attention": (attention, "self_attn"),
    }
    eps, made = config.number("rms_norm_eps"), []
    for kind, mlp in zip(layer_types(config), mlp_of, strict=True):
        mixer, name = mixers[kind]
        made.append(Block(mixer, mlp, eps, norm_offset=1.0, mixer_name=name))
    return tuple(made)


def architecture(config: Config) -> Architecture:
    config.refuse("hidden_act", "silu")
    d, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    sparse = [qwen3_moe.is_sparse(config, layer) for layer in range(layers)]
    experts = qwen3_moe.mixture(config, normalize=config.get("norm_topk_prob", default=True)) if any(sparse) else None
    dense = MLP(d_model=d, hidden_dim=config.count("intermediate_size")) if not all(sparse) else None
    mlps: list[Layer] = [experts if is_sparse else dense for is_sparse in sparse]  # type: ignore[misc]
    return Architecture(
        family="qwen3_next",
        vocab_size=config.count("vocab_size"),
        blocks=blocks(config, mlps),
        eps=config.number("rms_norm_eps"),
        norm_offset=1.0,
        tied=config.flag("tie_word_embeddings"),
        skipped=("mtp.",),
    )
