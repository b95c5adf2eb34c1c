"""Kimi Linear: three KDA layers to one of latent attention, a dense first layer, then experts with sigmoid scores."""

from tilewright.layers.kimi_delta_attention import KimiDeltaAttention
from tilewright.layers.layer import Layer
from tilewright.layers.mla import LatentAttention
from tilewright.layers.mlp import MLP
from tilewright.layers.moe import MoE
from tilewright.models.architecture import Architecture
from tilewright.models.block import Block
from tilewright.models.checkpoint import CheckpointError
from tilewright.models.config import Config

_LATENT_EPS = 1e-6  # kv_a_layernorm has its class's default.


def _is_full_attention(config: Config) -> list[bool]:
    """For each layer. Older configs have two lists of layers, counted from 1."""
    count = config.count("num_hidden_layers")
    if (kinds := config.get("layer_types", default=None)) is not None:
        full = [kind == "full_attention" for kind in kinds]
    else:
        given = config.get("linear_attn_config")
        full = [layer + 1 in given["full_attn_layers"] for layer in range(count)]
    if len(full) != count:
        raise CheckpointError(f"{config.path} gives kinds to {len(full)} layers, and has {count}")
    return full


def _is_sparse(config: Config) -> list[bool]:
    count = config.count("num_hidden_layers")
    if (kinds := config.get("mlp_layer_types", default=None)) is not None:
        return [kind == "sparse" for kind in kinds]
    dense, step = config.get("first_k_dense_replace", default=1), config.get("moe_layer_freq", default=1)
    return [layer >= dense and layer % step == 0 for layer in range(count)]


def _kda(config: Config) -> KimiDeltaAttention:
    inner = config.within("linear_attn_config")
    return KimiDeltaAttention(
        d_model=config.count("hidden_size"),
        num_heads=inner.count("linear_num_heads", "num_heads"),
        head_dim=inner.count("linear_head_dim", "head_dim"),
        conv_width=inner.get("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        # Kimi-K3 has the two in linear_attn_config.
        full_rank_gate=inner.get("use_full_rank_gate", default=config.get("use_full_rank_gate", default=False)),
        lower_bound=inner.get("gate_lower_bound", default=config.get("gate_lower_bound", default=None)),
        eps=config.number("rms_norm_eps"),
    )


def _latent_attention(config: Config) -> LatentAttention:
    config.refuse("q_lora_rank")
    config.refuse("mla_use_nope", True)
    return LatentAttention(
        d_model=config.count("hidden_size"),
        num_heads=config.count("num_attention_heads"),
        latent_dim=config.count("kv_lora_rank"),
        key_dim=config.count("qk_nope_head_dim"),
        shared_key_dim=config.count("qk_rope_head_dim"),
        value_dim=config.count("v_head_dim"),
        eps=_LATENT_EPS,
    )


def _experts(config: Config) -> MoE:
    groups, kept = config.get("num_expert_group", default=1), config.get("topk_group", default=1)
    dim = config.count("moe_intermediate_size")
    return MoE(
        d_model=config.count("hidden_size"),
        num_experts=config.count("num_experts"),
        experts_per_token=config.count("num_experts_per_token"),
        expert_dim=dim,
        scoring=config.get("moe_router_activation_func", default="sigmoid"),
        normalize=config.get("moe_renormalize", default=True),
        scale=config.get("routed_scaling_factor", default=1.0),
        groups=(groups, kept) if groups > 1 else None,
        selection_bias=True,
        kimi_names=True,
        shared_dim=config.get("num_shared_experts", default=0) * dim,
    )


def architecture(config: Config) -> Architecture:
    config.refuse("hidden_act", "silu")
    d, eps, sparse = config.count("hidden_size"), config.number("rms_norm_eps"), _is_sparse(config)
    kda, latent, dense = (
        _kda(config),
        _latent_attention(config),
        MLP(d_model=d, hidden_dim=config.count("intermediate_size")),
    )
    experts: Layer = _experts(config) if any(sparse) else dense
    blocks = [
        Block(latent if full else kda, experts if is_sparse else dense, eps, mlp_names=("block_sparse_moe", "mlp"))
        for full, is_sparse in zip(_is_full_attention(config), sparse, strict=True)
    ]
    return Architecture(
        family="kimi_linear",
        vocab_size=config.count("vocab_size"),
        blocks=tuple(blocks),
        eps=eps,
        tied=config.flag("tie_word_embeddings"),
    )
