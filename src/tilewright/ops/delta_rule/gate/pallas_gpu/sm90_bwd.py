"""The gradient of `kda_gate` as a Mosaic GPU kernel for Hopper: each thread walks along a run of tokens.

For each channel, with z = x + dt_bias and the head's rate r = exp(A_log), of g = -r softplus(z)

    dx = -r dg sigmoid(z)        ddt_bias = sum_t dx        dA_log = sum_t,k dg g

and with a lower bound, of g = lower_bound s for s = sigmoid(r z),

    dx = lower_bound r dg s (1 - s)        ddt_bias = sum_t dx        dA_log = sum_t,k dx z

Floor: x and dg are read and dx is written once, 8 bytes per element. For Kimi Linear, [16384, 4096], that is 537 MB, 125 us
at the 4.3 TB/s that an H200 reaches. Its instructions, 29 per element and 21 with a lower bound, take half of that. XLA's
gradient is two kernels, each of which reads x and dg: 272 us with what adds up the sums, where this one and that take 138
us, 132 of them in the kernel, 4.07 TB/s (jax 0.11.2; 260 and 137 us with a lower bound).

Blocking: a thread block of one warpgroup takes `block_d` channels, and each thread block_d / 128 neighbouring ones: 8 for
1,024, which are one access of 16 bytes to x and two to dg. The grid is what runs at a time. Each thread block walks along a
run of tokens of one length, `unroll` of them at a time, and loads the next ones before it computes these. Neighbouring
thread blocks take neighbouring channels. Neither shared memory nor barriers are used.

The sums of a run stay in registers: one for dt_bias and one for A_log per channel. Each thread block writes its own, 8
bytes per channel and run, and XLA adds them up in the order of the runs: the same bits in every run of the kernel.

Numerics: float32 throughout; dx is rounded once, the sums once after their last addition. sigmoid and softplus: see
pallas/gpu/elementwise.py.

Measured beside the default, without and with a lower bound, us with what adds up the sums: (1024, unroll 1, 4 blocks) 145
and 144, (1024, 4, 2) 140 and 142, (512, 4, 3) 142 and 154, (512, 4, 4) 174 and 185, (512, 2, 5) 180 and 143, (256, 8, 4)
185 and 169.

Limits: Hopper only, though only its block sizes are specific to Hopper. bfloat16 x. HV K is a multiple of 256.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass, gradient_of
from tilewright.ops.delta_rule.gate import reference
from tilewright.ops.delta_rule.gate.call import KdaGateCall
from tilewright.ops.delta_rule.gate.config import SM90_BLOCKS_D, KdaGateSm90Backward
from tilewright.pallas.gpu.elementwise import THREADS, exact_sigmoid, for_tokens, load, sigmoid_slope, softplus, store
from tilewright.pallas.gpu.kernel import processors, run_kernel
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

_CHANNELS = 16  # That a thread loads ahead, of one token or of several.


def unsupported_reason(call: KdaGateCall, launch: Launch) -> str | None:
    dtype, (n, d), least = call.x.dtype.name, call.sizes, SM90_BLOCKS_D[0]
    if dtype != "bfloat16":
        return f"x is {dtype}, and the kernel takes bfloat16 only; use implementation='reference'"
    if n == 0 or d == 0:
        return f"x is {list(call.x.shape)}, and it takes no empty arrays; use implementation='reference'"
    if d % least:
        return (
            f"HV K = {d} must be a multiple of {least} (two channels for each of {THREADS} threads); use "
            f"implementation='reference'"
        )
    return None


def _config_refused(call: KdaGateCall, launch: Launch) -> str | None:
    reason, block_d = unsupported_reason(call, launch), launch.config.block_d
    if reason is None and call.sizes[1] % block_d:
        return f"HV K = {call.sizes[1]} must be a multiple of block_d={block_d}; use block_d={SM90_BLOCKS_D[0]}"
    return reason


def _heuristic(chip: Chip, call: KdaGateCall) -> KdaGateSm90Backward:
    """The widest accesses, and 96 bytes that each thread waits for at a time: 36 KiB per multiprocessor.

    ptxas takes up to 168 registers for that, the most with which three thread blocks run on a multiprocessor at a time.
    """
    block_d = max((size for size in SM90_BLOCKS_D if call.sizes[1] % size == 0), default=SM90_BLOCKS_D[0])
    return KdaGateSm90Backward(block_d, unroll=_CHANNELS * THREADS // block_d)


def _level_and_slope(
    z: jax.Array, rate: jax.Array, lower_bound: float | None, layout: Any
) -> tuple[jax.Array, jax.Array]:
    """The derivatives of g with respect to A_log and to z, without the factor that both have: -r, or r lower_bound."""
    if lower_bound is None:
        return softplus(z, layout), exact_sigmoid(z, layout)
    slope = sigmoid_slope(rate * z, layout)
    return z * slope, slope


def _kernel(
    *,
    # inputs
    x_ref,  # [N, D]
    weights_ref,  # [2, D] float32: rates, dt_bias
    dg_ref,  # [N, D] float32
    # outputs
    dx_ref,  # [N, D]
    sums_ref,  # [runs, 2, D] float32: of A_log, of dt_bias
    # static
    lower_bound: float | None,
    block_n: int,
    config: KdaGateSm90Backward,
):
    n, d = x_ref.shape
    run, channel = divmod_nonnegative(lax.axis_index("work"), d // config.block_d)
    columns = pl.ds(channel * config.block_d, config.block_d)
    start = run * block_n
    end = jnp.minimum(start + block_n, n)
    layout = plgpu.Layout.WG_STRIDED((config.block_d,), vec_size=config.block_d // THREADS)
    rate, bias = (load(weights_ref.at[of, columns], layout) for of in (0, 1))  # [block_d] each
    factor = rate * (-1.0 if lower_bound is None else lower_bound)

    def inputs(done: Any, count: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """x and dg of tokens, [block_d] each; behind the run those of its last token, which the L1 cache has."""
        rows = [jnp.minimum(start + done + ahead, end - 1) for ahead in range(count)]
        return tuple((load(x_ref.at[row, columns], layout), load(dg_ref.at[row, columns], layout)) for row in rows)

    def tokens(done: Any, loaded: tuple[tuple[jax.Array, jax.Array], ...], sums: tuple[jax.Array, jax.Array]) -> Any:
        of_rate, of_bias = sums
        for ahead, (x, dg) in enumerate(loaded):
            level, slope = _level_and_slope(x.astype(jnp.float32) + bias, rate, lower_bound, layout)
            scaled = factor * dg
            dx = scaled * slope
            store(dx_ref.at[start + done + ahead, columns], dx.astype(dx_ref.dtype), layout)
            of_rate, of_bias = of_rate + scaled * level, of_bias + dx
        return of_rate, of_bias

    zeros = plgpu.layout_cast(jnp.zeros((config.block_d,), jnp.float32), layout)
    ragged = n % block_n > 0 or block_n % config.unroll > 0
    sums = for_tokens(end - start, config.unroll, inputs, tokens, (zeros, zeros), ragged=ragged)
    for of, total in enumerate(sums):
        store(sums_ref.at[run, of, columns], total, layout)


def _backward(call: KdaGateCall, saved: None, dg: jax.Array, launch: Launch) -> KdaGateCall:
    config: KdaGateSm90Backward = launch.config
    (n, d), (hv, k) = call.sizes, call.dt_bias.shape
    across = d // config.block_d
    at_a_time = max(processors(launch.chip) * config.blocks // across, 1)
    block_n = pl.cdiv(n, min(at_a_time, n))
    runs = pl.cdiv(n, block_n)
    rates = jnp.broadcast_to(jnp.exp(call.A_log.astype(jnp.float32))[:, None], (hv, k))
    outputs = run_kernel(
        functools.partial(_kernel, lower_bound=call.lower_bound, block_n=block_n, config=config),
        name="kda_gate_backward",
        inputs={
            "x": call.x.reshape(n, d),
            "weights": jnp.stack([rates, call.dt_bias.astype(jnp.float32)]).reshape(2, d),
            "dg": dg.reshape(n, d),
        },
        outputs={
            "dx": jax.ShapeDtypeStruct((n, d), call.x.dtype),
            "sums": jax.ShapeDtypeStruct((runs, 2, d), jnp.float32),
        },
        scratch={},
        grid={"work": runs * across},
    )
    of_rate, of_bias = jnp.sum(outputs["sums"], axis=0).reshape(2, hv, k)
    return call.gradients(x=outputs["dx"].reshape(call.x.shape), A_log=jnp.sum(of_rate, axis=1), dt_bias=of_bias)


BACKWARD = Pass(
    _backward,
    config=KdaGateSm90Backward,
    heuristic=_heuristic,
    unsupported_reason=_config_refused,
    differentiated_as=gradient_of("reference", reference.IMPLEMENTATION.forward),
)
