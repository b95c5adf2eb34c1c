"""Qwen3.5, its text model: the layers of Qwen3-Next with separate projections, dense or with experts.

A multimodal checkpoint nests the text model's config in `text_config` and its tensors under "model.language_model."; the
vision tower is not read.
"""

from tilewright.layers.layer import Layer
from tilewright.layers.mlp import MLP
from tilewright.models import qwen3_moe, qwen3_next
from tilewright.models.architecture import Architecture
from tilewright.models.config import Config


def architecture(config: Config) -> Architecture:
    nested = "text_config" in config.values
    config = config.within("text_config")
    config.refuse("hidden_act", "silu")
    d, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    mlp: Layer
    if config.get("num_experts", "num_local_experts", default=0):
        mlp = qwen3_moe.mixture(config, normalize=True)
    else:
        mlp = MLP(d_model=d, hidden_dim=config.count("intermediate_size"))
    return Architecture(
        family="qwen3_5",
        vocab_size=config.count("vocab_size"),
        blocks=qwen3_next.blocks(config, [mlp] * layers, separate=True),
        eps=config.number("rms_norm_eps"),
        norm_offset=1.0,
        tied=config.flag("tie_word_embeddings"),
        prefix="model.language_model." if nested else "model.",
        skipped=("mtp.", "model.visual.", "visual."),
    )
