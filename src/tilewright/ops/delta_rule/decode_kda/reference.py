"""`decode_kda` in plain JAX: the products, and the steps that a KDA layer makes with them. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.delta_rule.decode_kda.call import DecodeKdaCall
from tilewright.ops.delta_rule.gate.reference import log_decays
from tilewright.ops.delta_rule.reference import step
from tilewright.ops.short_conv.api import short_conv_step


def _forward(call: DecodeKdaCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, ...], None]:
    dtype, exact = call.x.dtype, accumulator(call.x.dtype)
    (b, _), (_, heads, channels) = call.x.shape, call.q_proj.shape
    layer = jnp.int32(0) if call.layer is None else call.layer

    def project(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.einsum("bd,d...->b...", x.astype(exact), w.astype(exact), precision=jax.lax.Precision.HIGHEST)
        return round_gradient(y, dtype)

    def split(stack: jax.Array) -> jax.Array:
        """[the calls that were joined, L, N, ...]."""
        return stack.reshape(call.joined, call.layers, *stack.shape[1:])

    def of_layer(stack: jax.Array) -> jax.Array:
        """The nearest layer's part, [B, ...]."""
        own = jnp.take(split(stack), layer, axis=1, mode="clip")
        return own.reshape(b, *stack.shape[2:]).astype(exact)

    def with_layer(stack: jax.Array, own: jax.Array) -> jax.Array:
        """The stack with another part of the layer; a layer that is not there is not written."""
        at = jnp.where(layer < 0, call.layers, layer)
        own = own.astype(stack.dtype).reshape(call.joined, *stack.shape[1:])
        return split(stack).at[:, at].set(own, mode="drop").reshape(stack.shape)

    def convolved(w: jax.Array, filters: jax.Array, stack: jax.Array, normalize: int | None) -> tuple[jax.Array, ...]:
        """The convolution's output [B, H, K], and the stack of its states."""
        before, y = of_layer(stack), project(call.x, w)  # [B, W-1, H, K], [B, H, K]
        flat = (each.astype(exact).reshape(*each.shape[:-2], heads * channels) for each in (before, y, filters))
        out, after = short_conv_step(*flat, activation="silu", normalize=normalize)
        return out.reshape(y.shape), with_layer(stack, after.reshape(before.shape))

    q, q_state = convolved(call.q_proj, call.q_conv, call.q_state, channels)
    k, k_state = convolved(call.k_proj, call.k_conv, call.k_state, channels)
    v, v_state = convolved(call.v_proj, call.v_conv, call.v_state, None)
    raw = project(project(call.x, call.decay_down), call.decay_up)  # [B, H, K]
    # `log_decays` has one rate per head: here each channel is a head of its own.
    rates = jnp.broadcast_to(call.A_log.reshape(heads, -1), (heads, channels)).reshape(-1)
    decays = log_decays(raw.reshape(b, heads * channels, 1), rates, call.dt_bias.reshape(-1, 1), call.lower_bound)
    beta = jax.nn.sigmoid(project(call.x, call.beta_proj))  # [B, H]
    memory, o = step(
        of_layer(call.memory), q, k, v, decays.reshape(raw.shape), beta, None, scale=channels**-0.5
    )  # o: [B, H, K]
    gate = project(project(call.x, call.gate_down), call.gate_up)
    y = o * jax.lax.rsqrt(jnp.mean(jnp.square(o), axis=-1, keepdims=True) + call.eps)
    y = y * jnp.broadcast_to(call.norm.astype(exact), y.shape) * jax.nn.sigmoid(gate)
    return (y.astype(dtype), q_state, k_state, v_state, with_layer(call.memory, memory)), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
