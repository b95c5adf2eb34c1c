"""The kernel of rows times their groups' matrices on TPU: y_m = activation(x_m w_g), and dx_m = dz_m w_g^T.

Floor: 2 M K P N FLOPs; x and the matrices of groups with rows read once, y written once. Here: grid (num_n, visits,
num_k). A visit (visits.py) is a block of rows and one of the groups that have rows in it. Where K is one block, the
columns of a group's matrix are fetched once, at the group's first visit, and x num_n times; where it is not, both are
fetched at each visit. Blocks are chosen by that traffic, so that K is one block wherever it fits. Matrices of empty
groups are not read.

Blocking: a loop over tiles of tile_m rows takes those that have rows of the group, so that a visit costs little more
than its rows: groups of s rows have about s + tile_m computed. The accumulator [P, block_m, block_n] is in VMEM; there
is none where K is one block and there is no epilogue. The block of y stays in VMEM over the visits of its rows, and each
of them replaces its group's rows.

Edges: rows of other groups, and what blocks hold past M, are computed in a tile and never stored (rows are independent
here, so a NaN stays in its row). Along a ragged K both operands are masked. Blocks past the last group have one visit,
without rows, which writes zeros; and NaN where the sizes are wrong (`poison`).

Quantised operands and numerics: as in ops/matmul/pallas_tpu/fwd.py, with scales per group.

Only columns are a parallel axis: on v4 and v5p, whose two TensorCores are one device, the estimate prefers two blocks of
columns to one.

Schedule (libtpu, v6e, estimates): a tile of 256 x 2048 x 768 takes 1,769 bundles, of 128 rows 1,029, for 1,536 and 768
cycles of the MXU. Tiles of 128 are taken at a mean of 512 rows per group: they compute a quarter more rows than there
are, and those of 256 half more.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.core.products import saved_dtype
from tilewright.ops.grouped_matmul.call import GroupedMatmulCall, group_starts, poison
from tilewright.ops.grouped_matmul.config import GroupedMatmulTpuForward
from tilewright.ops.grouped_matmul.pallas_tpu.visits import NAMES, num_visits, visits_of_rows
from tilewright.pallas.tpu.gemm import (
    Factors,
    GroupedWork,
    block_reason,
    column_parts,
    dequantized_note,
    epilogue_rows,
    float_passes,
    quotient,
    ranked_grouped_blocks,
)
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, block_pass


@dataclass(frozen=True)
class GroupedProduct:
    """What the kernel computes: static."""

    groups: int
    m: int
    n: int
    factors: Factors
    out_dtype: Any
    name: str = "grouped_matmul_forward"
    activation: str | None = None
    parts: int = 1
    saved_dtype: Any = None
    """Of z, where it is saved; else None."""

    @property
    def work(self) -> GroupedWork:
        saved = 0 if self.saved_dtype is None else self.parts * jnp.dtype(self.saved_dtype).itemsize
        return GroupedWork(
            groups=self.groups,
            m=self.m,
            n=self.n,
            k=self.factors.k,
            parts=self.parts,
            x_itemsize=jnp.dtype(self.factors.x_dtype).itemsize,
            w_itemsize=self.factors.w_itemsize,
            y_itemsize=jnp.dtype(self.out_dtype).itemsize + saved,
            passes=float_passes(self.factors.multiplied),
        )


def rows_inside(shape: tuple[int, ...], begin: Any, first: Any, end: Any) -> jax.Array:
    """Whether row begin + i lies in [first, end), for every element of an array of this shape."""
    row = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= first) & (row < end)


def for_group_tiles(first: Any, end: Any, tile: int, body: Any) -> None:
    """Calls `body(begin, rows)` for each tile of rows that has some of [first, end)."""

    def step(index: jax.Array, _: None) -> None:
        begin = pl.multiple_of(index * tile, tile)
        body(begin, pl.ds(begin, tile))

    jax.lax.fori_loop(quotient(first, tile), quotient(end + tile - 1, tile), step, None)


def _grouped_kernel(
    *,
    # prefetched: see visits.py
    group_ref,
    block_ref,
    source_ref,
    first_ref,
    end_ref,
    opens_ref,
    closes_ref,
    poison_ref,  # [1] float32
    # inputs
    x_ref,  # [block_m, block_k]
    w0_ref,  # [block_k, block_n]; [block_n, block_k] where w is transposed; int4: [block_k / 2, block_n]
    w1_ref,  # the same columns of the second part, or None
    x_scales_ref,  # [block_m, KX] or None
    w_scales_ref,  # [P, KS, block_n] or None
    # outputs
    y_ref,  # [block_m, block_n]
    z_ref,  # [P, block_m, block_n] or None
    # scratch
    z_scratch,  # [P, block_m, block_n] float32 or int32; None where K is one block and there is no epilogue
    # static
    product: GroupedProduct,
    tile_m: int,
):
    visit, step, factors = pl.program_id(1), pl.program_id(2), product.factors
    (block_m, block_k), block_n = x_ref.shape, y_ref.shape[1]
    weights = (w0_ref, w1_ref)[: product.parts]
    first, end, one_block = first_ref[visit], end_ref[visit], block_k >= factors.k

    @pl.when((step == 0) & (opens_ref[visit] == 1))
    def _open():
        y_ref[...] = jnp.full(y_ref.shape, poison_ref[0], jnp.float32).astype(y_ref.dtype)
        if z_ref is not None:
            z_ref[...] = jnp.zeros_like(z_ref)

    def scales_of(part: int) -> Any:
        return None if w_scales_ref is None else w_scales_ref.at[part]

    def row_scales(rows: Any) -> Any:
        return None if x_scales_ref is None else x_scales_ref[rows, :]  # [rows, KX]

    def store(ref: Any, begin: Any, rows: Any, values: jax.Array) -> None:
        """Replaces the group's rows."""
        inside = rows_inside(values.shape, begin, first, end)
        ref[rows, :] = jnp.where(inside, values, ref[rows, :].astype(jnp.float32)).astype(ref.dtype)

    def multiply(begin: Any, rows: Any) -> None:
        x = x_ref[rows, :]  # [tile_m, block_k]
        for part, w_ref in enumerate(weights):
            z = factors.product(x, w_ref, block_k, step, row_scales(rows), scales_of(part))  # [tile_m, block_n]
            if z_scratch is None:
                store(y_ref, begin, rows, z + poison_ref[0])
            elif one_block:
                z_scratch[part, rows, :] = z
            else:
                before = z_scratch[part, rows, :]
                z_scratch[part, rows, :] = z + jnp.where(step == 0, jnp.zeros_like(before), before)

    for_group_tiles(first, end, tile_m, multiply)

    def finish(begin: Any, rows: Any) -> None:
        parts = []
        for part in range(product.parts):
            z = factors.scaled(z_scratch[part, rows, :], row_scales(rows), scales_of(part))  # [rows, block_n]
            if z_ref is not None:
                store(z_ref.at[part], begin, rows, z)
            parts.append(z)
        store(y_ref, begin, rows, activate(product.activation, tuple(parts)) + poison_ref[0])

    if z_scratch is not None:
        tile = min(tile_m, epilogue_rows(block_m, product.parts * block_n))
        pl.when(step == pl.num_programs(2) - 1)(lambda: for_group_tiles(first, end, tile, finish))


def declaration(product: GroupedProduct, config: GroupedMatmulTpuForward, offsets: tuple[int, ...] = (0, 0)) -> Kernel:
    """The kernel. `offsets`: the first block of columns of each part of w."""
    factors, parts = product.factors, product.parts
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k

    def weights(part: int) -> Block | None:
        if part >= parts:
            return None
        offset = offsets[part]
        return Block(
            (None, *factors.w_block(block_k, block_n)),
            factors.w_stored,
            lambda j, visit, k, group, *_: (group[visit], *factors.w_index(k, offset + j)),
        )

    plain = product.activation is None and not factors.w_scales
    result = Block((block_m, block_n), product.out_dtype, lambda j, visit, k, group, block, *_: (block[visit], j))
    every_part = Block(
        (parts, block_m, block_n), product.saved_dtype, lambda j, visit, k, group, block, *_: (0, block[visit], j)
    )
    return Kernel(
        name=product.name,
        grid={
            "column": Axis(pl.cdiv(product.n, block_n), "parallel"),
            "visit": Axis(num_visits(product.m, product.groups, block_m)),
            "k": Axis(pl.cdiv(factors.k, block_k)),
        },
        prefetched=(*NAMES, "poison"),
        inputs={
            "x": Block(
                (block_m, block_k),
                factors.x_dtype,
                lambda j, visit, k, group, block, source, *_: (source[visit], k),
            ),
            "w0": weights(0),
            "w1": weights(1),
            "x_scales": None
            if not factors.x_scales
            else Block(
                (block_m, factors.x_scales),
                jnp.float32,
                lambda j, visit, k, group, block, source, *_: (source[visit], 0),
            ),
            "w_scales": None
            if not factors.w_scales
            else Block(
                (None, parts, factors.w_scales, block_n),
                jnp.float32,
                lambda j, visit, k, group, *_: (group[visit], 0, 0, j),
            ),
        },
        outputs={
            "y": Output((product.m, product.n), result),
            "z": None if product.saved_dtype is None else Output((parts, product.m, product.n), every_part),
        },
        scratch={
            "z_scratch": None
            if plain and block_k >= factors.k
            else pltpu.VMEM((parts, block_m, block_n), factors.accumulator),
        },
    )


def temporaries(product: GroupedProduct, config: GroupedMatmulTpuForward) -> int:
    return product.factors.temporaries(min(config.tile_m, config.block_m), config.block_n, config.block_k)


def multiply_groups(
    product: GroupedProduct,
    arrays: dict[str, Any],
    group_sizes: jax.Array,
    wrong: jax.Array,
    config: GroupedMatmulTpuForward,
    chip: Chip,
) -> dict[str, Any]:
    """Runs the kernel. `arrays["w"]` is [G, K, P N], or [G, P N, K] where it is transposed; `wrong` is added to y."""
    factors = product.factors
    w, offsets = column_parts(arrays["w"], 1 if factors.w_transposed else 2, product.parts, config.block_n)
    visits = visits_of_rows(group_starts(group_sizes, product.m), product.m, config.block_m)
    blocks = (config.block_m, config.block_n, config.block_k)
    given = {**arrays, **visits, **{f"w{part}": each for part, each in enumerate(w)}, "poison": wrong.reshape(1)}
    return declaration(product, config, tuple(offsets)).run(
        functools.partial(_grouped_kernel, product=product, tile_m=min(config.tile_m, config.block_m)),
        given,
        chip=chip,
        cost=pl.CostEstimate(
            flops=2 * product.m * factors.k * product.parts * product.n,
            transcendentals=0 if product.activation in (None, "relu") else product.m * product.n,
            bytes_accessed=int(product.work.bytes(blocks)),
        ),
    )


def _grouped_product(call: GroupedMatmulCall, chip: Chip, *, save: bool) -> GroupedProduct:
    groups, m, _, n = call.sizes
    return GroupedProduct(
        groups=groups,
        m=m,
        n=n,
        factors=Factors.of(call, chip),
        out_dtype=call.out_dtype,
        activation=call.activation,
        parts=call.parts,
        saved_dtype=saved_dtype(call) if save and call.activation else None,
    )


def _forward(call: GroupedMatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    product = _grouped_product(call, launch.chip, save=save)
    w, scales = product.factors.operands(call)
    arrays = {"x": call.x, "w": w, "x_scales": call.x_scales, "w_scales": scales}
    wrong = poison(call.group_sizes, call.x.shape[0])
    outputs = multiply_groups(product, arrays, call.group_sizes, wrong, launch.config, launch.chip)
    z = outputs["z"]
    return outputs["y"], None if z is None else jnp.moveaxis(z, 0, 1)


def row_candidates(chip: Chip, product: GroupedProduct) -> Iterator[GroupedMatmulTpuForward]:
    for block_m, block_n, block_k in ranked_grouped_blocks(chip, product.work, product.factors):
        yield GroupedMatmulTpuForward(block_m, block_n, block_k, product.work.tile(block_m))


def _unsupported_reason(call: GroupedMatmulCall, launch: Launch) -> str | None:
    factors = _grouped_product(call, launch.chip, save=True).factors
    return block_reason(call.x, factors, launch.config.block_k, launch.chip)


FORWARD = block_pass(
    _forward,
    GroupedMatmulTpuForward,
    "forward",
    lambda call, launch: declaration(_grouped_product(call, launch.chip, save=True), launch.config),
    lambda config, chip, call: row_candidates(chip, _grouped_product(call, chip, save=True)),
    temporaries=lambda call, launch: temporaries(_grouped_product(call, launch.chip, save=True), launch.config),
    unsupported_reason=_unsupported_reason,
    memory_fields="a smaller block_m, block_n or block_k",
    saved="M . N",
    note=dequantized_note,
)
