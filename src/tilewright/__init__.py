"""Tilewright: JAX kernels for TPU and GPU, and the bench they are made on."""

from tilewright import configs as configs
from tilewright import masks as masks
from tilewright.core.dispatch import Unsupported as Unsupported
from tilewright.core.dispatch import explain as explain
from tilewright.core.quantized import QuantizedArray as QuantizedArray
from tilewright.core.quantized import dequantize as dequantize
from tilewright.core.quantized import quantize as quantize
from tilewright.core.target import interpret as interpret
from tilewright.core.target import target as target
from tilewright.core.version import __version__ as __version__

# Every public op, a line each. This is also what registers an op with the workbench.
from tilewright.ops.attention.api import flash_attention as flash_attention
from tilewright.ops.attention.decode.api import decode_attention as decode_attention
from tilewright.ops.attention.decode.api import paged_attention as paged_attention
from tilewright.ops.attention.decode_layers.api import decode_layers as decode_layers
from tilewright.ops.attention.decode_qkv.api import decode_qkv as decode_qkv
from tilewright.ops.attention.decode_residual.api import decode_residual as decode_residual
from tilewright.ops.delta_rule.api import delta_rule as delta_rule
from tilewright.ops.delta_rule.api import gated_delta_rule as gated_delta_rule
from tilewright.ops.delta_rule.api import gdn_gate as gdn_gate
from tilewright.ops.delta_rule.api import kda as kda
from tilewright.ops.delta_rule.api import kda_gate as kda_gate
from tilewright.ops.delta_rule.decode_kda.api import decode_kda as decode_kda
from tilewright.ops.delta_rule.gate_of_product.api import kda_gate_of_product as kda_gate_of_product
from tilewright.ops.delta_rule.step.api import delta_rule_step as delta_rule_step
from tilewright.ops.delta_rule.step.api import gated_delta_rule_step as gated_delta_rule_step
from tilewright.ops.delta_rule.step.api import kda_step as kda_step
from tilewright.ops.grouped_matmul.api import grouped_matmul as grouped_matmul
from tilewright.ops.linear_cross_entropy.api import linear_cross_entropy as linear_cross_entropy
from tilewright.ops.matmul.api import matmul as matmul
from tilewright.ops.matmul.fp8 import fp8_matmul as fp8_matmul
from tilewright.ops.moe.api import moe_combine as moe_combine
from tilewright.ops.moe.api import moe_dispatch as moe_dispatch
from tilewright.ops.moe.api import moe_load_balance_loss as moe_load_balance_loss
from tilewright.ops.moe.api import moe_route as moe_route
from tilewright.ops.moe.api import moe_sort as moe_sort
from tilewright.ops.moe.api import moe_z_loss as moe_z_loss
from tilewright.ops.norm.api import gated_rms_norm as gated_rms_norm
from tilewright.ops.norm.api import layer_norm as layer_norm
from tilewright.ops.norm.api import rms_norm as rms_norm
from tilewright.ops.norm.of_product.api import gated_rms_norm_of_product as gated_rms_norm_of_product
from tilewright.ops.rope.api import apply_rope as apply_rope
from tilewright.ops.rope.api import rope_tables as rope_tables
from tilewright.ops.short_conv.api import short_conv as short_conv
from tilewright.ops.short_conv.api import short_conv_step as short_conv_step
