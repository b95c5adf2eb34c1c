"""A training step of a small hybrid, and the slices of TPUs that it was compiled for."""

import json

from tilewright.plan.step import Step, ordered

HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 256,
    "rms_norm_eps": 1e-06,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": [0, 1],
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
STEP = Step(json.dumps(HYBRID), batch=8, tokens=64, mesh=ordered({"fsdp": 4, "tensor": 2}))
SLICES = (("v6e", "2x4"), ("v5p", "2x2x2"))
