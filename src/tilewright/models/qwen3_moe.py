"""Qwen3-MoE: Qwen3 whose feed-forward layers are mixtures of experts."""

from tilewright.layers.layer import Layer
from tilewright.layers.mlp import MLP
from tilewright.layers.moe import MoE
from tilewright.models import qwen3
from tilewright.models.architecture import Architecture
from tilewright.models.block import Block
from tilewright.models.config import Config


def is_sparse(config: Config, layer: int) -> bool:
    """Whether a layer has experts: `mlp_only_layers` and `decoder_sparse_step` say so."""
    if config.get("num_experts", "num_local_experts", default=0) == 0:
        return False
    step = config.get("decoder_sparse_step", default=1)
    return layer not in config.get("mlp_only_layers", default=[]) and (layer + 1) % step == 0


def mixture(config: Config, *, normalize: bool) -> MoE:
    shared = config.get("shared_expert_intermediate_size", default=0)
    return MoE(
        d_model=config.count("hidden_size"),
        num_experts=config.count("num_experts", "num_local_experts"),
        experts_per_token=config.count("num_experts_per_tok"),
        expert_dim=config.count("moe_intermediate_size"),
        normalize=normalize,
        shared_dim=shared,
        shared_gate=shared > 0,
    )


def architecture(config: Config) -> Architecture:
    config.refuse("hidden_act", "silu")
    qwen3.check_layer_types(config)
    d, eps = config.count("hidden_size"), config.number("rms_norm_eps")
    mixer = qwen3.attention(config)
    sparse = mixture(config, normalize=config.get("norm_topk_prob", default=False))

    def mlp(layer: int) -> Layer:
        return sparse if is_sparse(config, layer) else MLP(d_model=d, hidden_dim=config.count("intermediate_size"))

    return Architecture(
        family="qwen3_moe",
        vocab_size=config.count("vocab_size"),
        blocks=tuple(Block(mixer, mlp(layer), eps) for layer in range(config.count("num_hidden_layers"))),
        eps=eps,
        tied=config.flag("tie_word_embeddings"),
    )
