"""Layers: hyperparameters in a frozen dataclass, weights and states as pytrees, pure functions on the ops.

Each layer has `init(key) -> weights`, `apply(weights, x, state=None) -> (y, state)`, `initial_state(batch) -> state`
and `from_checkpoint(tensors, prefix) -> weights`. `apply` takes whole sequences, chunks of sequences and single tokens.
`MoE` has no state: its `apply` returns the routing in that place.
"""

from tilewright.layers.attention import Attention as Attention
from tilewright.layers.delta_net import DeltaNet as DeltaNet
from tilewright.layers.kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
from tilewright.layers.mla import LatentAttention as LatentAttention
from tilewright.layers.mlp import MLP as MLP
from tilewright.layers.moe import MoE as MoE
from tilewright.layers.qwen3_next_gated_delta_net import Qwen3NextGatedDeltaNet as Qwen3NextGatedDeltaNet
