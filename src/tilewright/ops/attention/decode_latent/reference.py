"""Attention over a cache of latents, plainly: `decode_attention`'s oracle, with the values as an array of their own."""

import jax

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.ops.attention.decode import reference
from tilewright.ops.attention.decode_latent.call import DecodeLatentCall


def _attend(call: DecodeLatentCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    (out, _), _ = reference.IMPLEMENTATION.forward.run(call.with_values(), launch, save=save)
    return out[:, 0], None


IMPLEMENTATION = Implementation(forward=Pass(_attend))
