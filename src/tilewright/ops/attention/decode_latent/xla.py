"""Attention over a cache of latents in plain JAX: `decode_attention`'s `xla`, with the values as an array of their own.

It reads the whole room of the cache, whatever the lengths, and more than once: what lies past a length is replaced by zeros
first, in the keys and in the values.
"""

import jax

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.ops.attention.decode import xla
from tilewright.ops.attention.decode_latent.call import DecodeLatentCall


def _attend(call: DecodeLatentCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    (out, _), _ = xla.IMPLEMENTATION.forward.run(call.with_values(), launch, save=save)
    return out[:, 0], None


IMPLEMENTATION = Implementation(forward=Pass(_attend))
