"""Every config that an op's `config=` takes, in one place.

    import tilewright
    tilewright.rms_norm(x, w, config=tilewright.configs.NormTpuForward(block_n=256, tile_n=64))

A name is family, backend (`Xla`, `Tpu`, or a GPU architecture such as `Sm90`) and direction. `config=` takes one config
or a tuple of them, one per direction; a direction without one takes the heuristic's. `tilewright.explain` shows the
configs of a call as expressions that can be pasted back.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tilewright.core.config import Config as Config
from tilewright.core.nearest import did_you_mean
from tilewright.ops.attention.config import AttentionSm90Backward as AttentionSm90Backward
from tilewright.ops.attention.config import AttentionSm90Forward as AttentionSm90Forward
from tilewright.ops.attention.config import AttentionTpuBackward as AttentionTpuBackward
from tilewright.ops.attention.config import AttentionTpuForward as AttentionTpuForward
from tilewright.ops.attention.config import AttentionXlaBackward as AttentionXlaBackward
from tilewright.ops.attention.config import AttentionXlaForward as AttentionXlaForward
from tilewright.ops.attention.decode.config import DecodeSm90Forward as DecodeSm90Forward
from tilewright.ops.attention.decode.config import DecodeTpuForward as DecodeTpuForward
from tilewright.ops.attention.decode_latent.config import DecodeLatentSm90Forward as DecodeLatentSm90Forward
from tilewright.ops.attention.decode_qkv.config import DecodeQkvSm90Forward as DecodeQkvSm90Forward
from tilewright.ops.delta_rule.config import DeltaRuleSm90Backward as DeltaRuleSm90Backward
from tilewright.ops.delta_rule.config import DeltaRuleSm90Forward as DeltaRuleSm90Forward
from tilewright.ops.delta_rule.config import DeltaRuleTpuBackward as DeltaRuleTpuBackward
from tilewright.ops.delta_rule.config import DeltaRuleTpuForward as DeltaRuleTpuForward
from tilewright.ops.delta_rule.config import DeltaRuleXlaForward as DeltaRuleXlaForward
from tilewright.ops.delta_rule.decode_kda.config import DecodeKdaSm90Forward as DecodeKdaSm90Forward
from tilewright.ops.delta_rule.gate.config import KdaGateSm90Backward as KdaGateSm90Backward
from tilewright.ops.delta_rule.gate_of_product.config import GateOfProductSm90Forward as GateOfProductSm90Forward
from tilewright.ops.delta_rule.step.config import DeltaRuleStepSm90Forward as DeltaRuleStepSm90Forward
from tilewright.ops.grouped_matmul.config import GroupedMatmulSm90Backward as GroupedMatmulSm90Backward
from tilewright.ops.grouped_matmul.config import GroupedMatmulSm90Forward as GroupedMatmulSm90Forward
from tilewright.ops.grouped_matmul.config import GroupedMatmulTpuBackward as GroupedMatmulTpuBackward
from tilewright.ops.grouped_matmul.config import GroupedMatmulTpuForward as GroupedMatmulTpuForward
from tilewright.ops.grouped_matmul.config import GroupedMatmulXlaBackward as GroupedMatmulXlaBackward
from tilewright.ops.grouped_matmul.config import GroupedMatmulXlaForward as GroupedMatmulXlaForward
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropySm90Backward as LinearCrossEntropySm90Backward
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropySm90Forward as LinearCrossEntropySm90Forward
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyTpuBackward as LinearCrossEntropyTpuBackward
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyTpuForward as LinearCrossEntropyTpuForward
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyXlaBackward as LinearCrossEntropyXlaBackward
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyXlaForward as LinearCrossEntropyXlaForward
from tilewright.ops.matmul.config import MatmulSm90Backward as MatmulSm90Backward
from tilewright.ops.matmul.config import MatmulSm90Forward as MatmulSm90Forward
from tilewright.ops.matmul.config import MatmulTpuBackward as MatmulTpuBackward
from tilewright.ops.matmul.config import MatmulTpuForward as MatmulTpuForward
from tilewright.ops.matmul.sum.config import MatmulSumSm90Forward as MatmulSumSm90Forward
from tilewright.ops.norm.config import NormSm90Backward as NormSm90Backward
from tilewright.ops.norm.config import NormSm90Forward as NormSm90Forward
from tilewright.ops.norm.config import NormTpuBackward as NormTpuBackward
from tilewright.ops.norm.config import NormTpuForward as NormTpuForward
from tilewright.ops.norm.of_product.config import NormOfProductSm90Forward as NormOfProductSm90Forward
from tilewright.ops.short_conv.config import ShortConvSm90Backward as ShortConvSm90Backward
from tilewright.ops.short_conv.config import ShortConvSm90Forward as ShortConvSm90Forward
from tilewright.ops.short_conv.config import ShortConvTpuBackward as ShortConvTpuBackward
from tilewright.ops.short_conv.config import ShortConvTpuForward as ShortConvTpuForward


def to_json(config: Config) -> str:
    """A config as JSON text."""
    return json.dumps(config.to_json())


def from_json(source: str | Mapping[str, Any]) -> Config:
    """The config of JSON text, or of the object that it holds, as a record has it. What is no config is a ValueError."""
    fields = json.loads(source) if isinstance(source, str) else source
    if not isinstance(fields, Mapping):
        raise ValueError(f"{source!r} is not a config; a config is an object with its class and fields")
    name, fields = fields.get("config"), {key: value for key, value in fields.items() if key != "config"}
    kind = globals().get(name) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Config) and kind is not Config):
        every = [each for each, value in globals().items() if isinstance(value, type) and issubclass(value, Config)]
        hint = did_you_mean(name, every)
        raise ValueError(f"config={name!r} is not a config of tilewright; see tilewright.configs{hint}")
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(
            f"{name} has no field {unknown[0]!r}; its fields are {', '.join(known)}{did_you_mean(unknown[0], known)}"
        )
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
