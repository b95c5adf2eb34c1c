"""Ours against JAX's own TPU attention, as libtpu schedules them: `python -m tests.ops.attention.compare_with_jax`.

B = 1, H = 8, T = 8,192, D = 128, bfloat16, causal and with a window of 1,024 tokens. Nothing runs on a TPU: the figures
are bundles of the final schedule. For each kernel, the whole pass over a step's logits is counted once, and divided by
the logits that the pass covers. Where a kernel's pass is under a condition (`pl.when`), as in splash, `occasional` has
it, so both are added; the code of a first and last step is in that sum too, in all the kernels alike.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

import tilewright
from tilewright import aot, flash_attention, masks
from tilewright.core.chip import Chip
from tilewright.masks.block_list import FULL, PARTIAL, Grid, block_table

B, H, T, D = 1, 8, 8192, 128
WINDOW = 1024
OURS = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)
THEIRS = jax.ShapeDtypeStruct((B, H, T, D), jnp.bfloat16)
UNIT = 2**20


@dataclass(frozen=True)
class Entry:
    """A function, and the logits that one pass of each of its kernels covers."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    logits: tuple[int, ...]
    """The logits of a pass of each kernel, in order."""


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: jnp.sum(function(*arrays).astype(jnp.float32)), (0, 1, 2))


def ours(**options: Any) -> Callable[..., Any]:
    return functools.partial(flash_attention, implementation="pallas_tpu", **options)


def jax_flash(block: int = 512, **options: Any) -> Callable[..., Any]:
    sizes = flash.BlockSizes(
        block_q=block,
        block_k_major=2 * block,
        block_k=block,
        block_b=1,
        block_q_major_dkv=block,
        block_k_major_dkv=block,
        block_k_dkv=block,
        block_q_dkv=block,
        block_k_major_dq=block,
        block_k_dq=block,
        block_q_dq=block,
    )
    return functools.partial(flash.flash_attention, sm_scale=D**-0.5, block_sizes=sizes, **options)


def jax_splash(mask: Any, block: int = 1024, compute: int = 512) -> Callable[..., Any]:
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash.make_splash_mha_single_device(
        splash_masks.MultiHeadMask([mask] * H), block_sizes=sizes, save_residuals=False
    )
    return jax.vmap(kernel)


def chosen_configs(chip: Chip, **options: Any) -> tuple[Any, Any]:
    """The forward and the backward config that a call of ours takes."""
    with tilewright.target(chip):
        (decision,) = tilewright.explain(ours(**options), OURS, OURS, OURS).decisions
    return decision.forward.config, decision.backward.config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--limit", type=float, default=1800.0)
    parser.add_argument("--only", default="ours,flash,splash")
    arguments = parser.parse_args()
    chip = Chip.named(arguments.chip)
    forward, backward = chosen_configs(chip)
    whole, whole_bwd = forward.block_q * forward.block_k, backward.block_q * backward.block_k
    square = 1024 * 1024
    entries = [
        Entry("ours, full blocks", with_gradients(ours()), (OURS,) * 3, (whole, whole_bwd)),
        Entry("ours, causal", with_gradients(ours(causal=True)), (OURS,) * 3, (whole, whole_bwd)),
        Entry(
            "ours, window",
            with_gradients(ours(causal=True, window=(WINDOW - 1, 0))),
            (OURS,) * 3,
            (WINDOW**2 // 4, whole_bwd),
        ),
        Entry(
            "flash, causal",
            with_gradients(jax_flash(causal=True)),
            (THEIRS,) * 3,
            (512 * 1024, 512 * 512, 512 * 512),
        ),
        Entry(
            "splash, causal",
            with_gradients(jax_splash(splash_masks.CausalMask((T, T)))),
            (THEIRS,) * 3,
            (square,) * 3,
        ),
        Entry(
            "splash, window",
            with_gradients(jax_splash(splash_masks.LocalMask((T, T), (WINDOW - 1, 0), 0))),
            (THEIRS,) * 3,
            (square,) * 3,
        ),
    ]
    print(f"{chip.name}, B {B} H {H} T {T} D {D} bfloat16; ours with {forward} and {backward}")
    for name, mask in (("causal", masks.Causal()), ("window", masks.Causal() & masks.SlidingWindow(WINDOW - 1, None))):
        config, _ = chosen_configs(chip, mask=mask)
        table = block_table(mask, Grid(T, T, config.block_q, config.block_k))
        full, partial = ((table.kinds == kind).sum() for kind in (FULL, PARTIAL))
        first, end = table.tiles("k", config.tile_k)
        tiles = (end - first)[table.kinds == PARTIAL].sum()
        print(
            f"ours, {name}, forward: blocks of {config.block_q} x {config.block_k}, {full} full ones per head, "
            f"{partial} partial ones with {tiles} tiles of {config.tile_k} keys"
        )
    header = (
        "kernel",
        "grid",
        "bundles per pass",
        f"per {UNIT:,} logits",
        "MXU cycles per pass",
        "spilled stores",
        "VMEM MiB",
    )
    print(" | ".join(header))
    for entry in entries:
        if entry.name.split(",")[0] not in arguments.only.split(","):
            continue
        report = aot.compile(entry.function, *entry.arguments, chip=chip, limit_s=arguments.limit)
        if not report.ok:
            print(f"{entry.name} | {report.cause} | {report.remedy}", flush=True)
            continue
        for kernel, logits in zip(report.kernels, entry.logits, strict=False):
            schedule = kernel.schedule
            if schedule is None:
                print(f"{entry.name} {kernel.name} | {kernel.note}", flush=True)
                continue
            bundles = schedule.bundles + schedule.occasional
            cells = (
                f"{entry.name}: {kernel.name}",
                str(kernel.grid),
                f"{bundles:,} ({schedule.occasional:,} conditional)",
                f"{bundles * UNIT / logits:,.0f}",
                f"{schedule.mxu_cycles:,.0f}",
                f"{schedule.spill_stores / max(1, schedule.stores):.0%}",
                f"{schedule.vmem_bytes / 2**20:.1f}",
            )
            print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
