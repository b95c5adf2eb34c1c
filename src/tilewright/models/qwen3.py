"""Qwen3: grouped-query attention with query and key norms, RoPE over the whole head, swiglu."""

from tilewright.layers.attention import Attention
from tilewright.layers.mlp import MLP
from tilewright.models.architecture import Architecture
from tilewright.models.block import Block
from tilewright.models.checkpoint import CheckpointError
from tilewright.models.config import Config


def attention(config: Config) -> Attention:
    config.refuse("attention_bias", False)
    config.refuse("use_sliding_window", False)
    heads, d = config.count("num_attention_heads"), config.count("hidden_size")
    return Attention(
        d_model=d,
        num_heads=heads,
        num_kv_heads=config.count("num_key_value_heads"),
        head_dim=config.get("head_dim", default=d // heads),
        eps=config.number("rms_norm_eps"),
        **config.rope(),
    )


def check_layer_types(config: Config) -> None:
    """Raises where a layer is of another kind than attention to all tokens, such as that to a window."""
    count = config.count("num_hidden_layers")
    kinds = config.get("layer_types", default=["full_attention"] * count)
    if len(kinds) != count:
        raise CheckpointError(f"{config.path}: layer_types has {len(kinds)} layers, and num_hidden_layers={count}")
    for kind in kinds:
        if kind != "full_attention":
            raise CheckpointError(f"{config.path}: layer_types has {kind!r}; only 'full_attention' is supported")


def architecture(config: Config) -> Architecture:
    config.refuse("hidden_act", "silu")
    check_layer_types(config)
    d, eps = config.count("hidden_size"), config.number("rms_norm_eps")
    block = Block(attention(config), MLP(d_model=d, hidden_dim=config.count("intermediate_size")), eps)
    return Architecture(
        family="qwen3",
        vocab_size=config.count("vocab_size"),
        blocks=(block,) * config.count("num_hidden_layers"),
        eps=eps,
        tied=config.flag("tie_word_embeddings"),
    )
