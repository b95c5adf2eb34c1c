"""Numbers that the thread blocks of `decode_layers` pass to each other, without barriers between blocks.

Every number is a 32-bit word at a fixed place of an array in global memory that is zero before the kernel starts. The last
bit of its mantissa is a tag, which alternates from layer to layer: a reader polls the words themselves until they have the
tag of its layer. No fence is needed, since a word says itself whether it is there. A release fence would wait for all
copies of weights that the multiprocessor has under way, 4,000 to 8,000 cycles on an H200.

A word is not written again before all of its readers have read it: what a block publishes in the next layer depends on the
results of the others, which depend on that word.

A number loses its last bit: 2^-23 of it. An infinite one becomes NaN where the tag is 1. A reader that has polled for
about 0.2 s takes NaN for every word that it waits for, and goes on to the next phase: where blocks are not resident
together, results are NaN, and the kernel still ends.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from tilewright.ops.attention.decode_layers.pallas_gpu.plan import CHANNELS, COLUMNS
from tilewright.ops.attention.decode_layers.pallas_gpu.threads import (
    below,
    constant,
    elements,
    i32,
    index,
    inline_code,
    is_equal,
    lane_and_warp,
    load_four_by_four,
    own_thread,
)
from tilewright.pallas.gpu.elementwise import THREADS, element
from tilewright.pallas.gpu.kernel import interpreted

LOWEST = -1e30
"""The logsumexp of no keys."""
_MOST_POLLS = 1 << 18  # About 0.2 s.
_SLEEP_NS = 40  # Between two polls of words of which some are there.
_FIRST_SLEEP_NS = 20  # Between two polls of a warp's first word.
_NAN_BITS = "0x7fffffff"
_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


@dataclass(frozen=True)
class Words:
    """Words that a warpgroup waits for. Each ref gives an array of this shape and layout; with "same", one per word."""

    refs: list[Any]
    layout: Any
    shape: tuple[int, ...]
    spread: Literal["vector", "rows", "same"]
    """How the words of a ref lie over threads: in order, a row of 128 of which each warp has the first ones, or all
    threads have the same."""
    words: int
    """Words of each thread, adjacent: 1, 2 or 4."""

    @property
    def arrays(self) -> int:
        return len(self.refs) * (self.words if self.spread == "same" else 1)

    def first_word(self) -> Any:
        """The place of a thread's first word in a ref."""
        if self.spread == "same":
            return constant(0)
        if self.spread == "vector":
            return arith.muli(own_thread(), constant(self.words))
        lane, warp = lane_and_warp()
        return arith.addi(arith.muli(warp, constant(CHANNELS)), arith.muli(lane, constant(self.words)))

    def before_warp(self) -> Any:
        """The bytes from the first word of a thread's warp to its own."""
        return constant(0) if self.spread == "same" else arith.muli(lane_and_warp()[0], constant(4 * self.words))

    def arrays_of(self, value: Any) -> list[Any]:
        """The arrays of one ref, given what each thread has received of it."""
        layout = self.layout.to_mgpu()
        if self.spread == "same":
            return [mosaic.FragmentedArray.splat(element(value, n), self.shape, layout) for n in range(self.words)]
        registers = np.array([value], dtype=object).reshape(layout.registers_shape(self.shape))
        return [mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)]

    def interpreted(self) -> list[jax.Array]:
        if self.spread == "same":
            return [jnp.broadcast_to(ref[n], self.shape) for ref in self.refs for n in range(self.words)]
        if self.spread == "vector":
            return [ref[...] for ref in self.refs]
        rows, width = self.shape
        return [jnp.stack([ref[pl.ds(n * CHANNELS, width)] for n in range(rows)]) for ref in self.refs]


def received(groups: list[Words], tag: Any) -> list[list[jax.Array]]:
    """Loads words that other blocks publish, once all of them are there: for each group the arrays of its refs."""
    if interpreted():
        return [group.interpreted() for group in groups]
    refs = [ref for group in groups for ref in group.refs]
    per_ref = [group for group in groups for _ in group.refs]

    def body(_: Any, tag: Any, *refs: Any) -> Any:
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        offsets = {id(group): arith.extui(i64, arith.shli(group.first_word(), constant(2))) for group in groups}
        addresses = [
            arith.addi(llvm.ptrtoint(i64, mosaic_utils.memref_ptr(ref)), offsets[id(group)])
            for ref, group in zip(refs, per_ref, strict=True)
        ]
        leader = arith.subi(addresses[0], arith.extui(i64, groups[0].before_warp()))
        sizes = [group.words for group in per_ref]
        struct = llvm.StructType.get_literal([i32()] * sum(sizes))
        constraints = ",".join(["=&r"] * sum(sizes) + ["r"] + ["l"] * (len(addresses) + 1) + ["~{memory}"])
        operands = [elements(tag)[0], *addresses, leader]
        result = llvm.inline_asm(struct, operands, _polling(sizes), constraints, has_side_effects=True)
        words = iter([arith.bitcast(f32, llvm.extractvalue(i32(), result, [n])) for n in range(sum(sizes))])
        out = []
        for group in per_ref:
            own = [next(words) for _ in range(group.words)]
            out += group.arrays_of(vector.from_elements(ir.VectorType.get((group.words,), f32), own))
        return tuple(out)

    structs = tuple(
        plgpu.ShapeDtypeStruct(group.shape, jnp.dtype(jnp.float32), layout=group.layout)
        for group in groups
        for _ in range(group.arrays)
    )
    types = (_PER_THREAD, *[plgpu.RefType() for _ in refs])
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=structs)
    arrays = iter(inline(body)(_spread_tag(tag), *refs))
    return [[next(arrays) for _ in range(group.arrays)] for group in groups]


def _polling(sizes: list[int]) -> str:
    """Code that loads vectors of `sizes` words, until all words have the tag.

    Operands are the words, the tag, an address for each vector, and the address of the warp's first word. Until that one is
    there nothing else is polled, and then only what is missing is loaded again: polls take their turn in the L2 with the
    copies of weights.
    """
    total = sum(sizes)
    tag, first, leader = f"${total}", total + 1, f"${total + 1 + len(sizes)}"
    loads, again, checks, at = [], [], [], 0
    for n, size in enumerate(sizes):
        words = [f"${at + k}" for k in range(size)]
        target = words[0] if size == 1 else "{" + ", ".join(words) + "}"
        kind = "" if size == 1 else f".v{size}"
        load = f"ld.relaxed.gpu.global{kind}.u32 {target}, [${first + n}];"
        differ = "mov.u32 bits, 0; " + " ".join(
            f"xor.b32 other, {word}, {tag}; or.b32 bits, bits, other;" for word in words
        )
        loads.append(load)
        again.append(f"{differ} and.b32 bits, bits, 1; setp.ne.u32 p, bits, 0; @p {load}")
        checks += [f"xor.b32 other, {word}, {tag}; or.b32 bits, bits, other;" for word in words]
        at += size
    return f"""{{
        .reg .pred p;
        .reg .u32 polls, bits, other;
        mov.u32 polls, 0;
        FIRST:
        ld.relaxed.gpu.global.u32 bits, [{leader}];
        xor.b32 bits, bits, {tag};
        and.b32 bits, bits, 1;
        setp.eq.u32 p, bits, 0;
        @p bra LOADS;
        add.u32 polls, polls, 1;
        nanosleep.u32 {_FIRST_SLEEP_NS};
        setp.lt.u32 p, polls, {_MOST_POLLS};
        @p bra FIRST;
        LOADS:
        {" ".join(loads)}
        bra CHECK;
        AGAIN:
        nanosleep.u32 {_SLEEP_NS};
        {" ".join(again)}
        CHECK:
        mov.u32 bits, 0;
        {" ".join(checks)}
        and.b32 bits, bits, 1;
        setp.eq.u32 p, bits, 0;
        @p bra DONE;
        add.u32 polls, polls, 1;
        setp.lt.u32 p, polls, {_MOST_POLLS};
        @p bra AGAIN;
        {" ".join(f"mov.u32 ${n}, {_NAN_BITS};" for n in range(total))}
        DONE:
    }}"""


def _spread_tag(tag: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((THREADS,), tag, jnp.int32), _PER_THREAD)


def _with_tag(body: Any, refs: tuple[Any, ...], tag: Any) -> None:
    """Calls body(tag, *refs), in Mosaic's operations."""

    def inline_body(_: Any, tag: Any, *refs: Any) -> None:
        body(elements(tag)[0], *refs)

    types = (_PER_THREAD, *[plgpu.RefType() for _ in refs])
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=None)
    inline(inline_body)(_spread_tag(tag), *refs)


def _publish(value: Any, tag: Any, target: Any, place: Any) -> None:
    """Stores a number, with the tag as its last bit, as the word `place` of a ref."""
    i64 = ir.IntegerType.get_signless(64)
    bits = arith.ori(arith.andi(arith.bitcast(i32(), value), constant(-2)), tag)
    base = llvm.ptrtoint(i64, mosaic_utils.memref_ptr(target))
    address = arith.addi(base, arith.extui(i64, arith.shli(place, constant(2))))
    inline_code("st.relaxed.gpu.global.u32 [$1], $2; mov.u32 $0, 0;", "l,r", (address, bits))


def _column_sum(ref: Any, column: Any) -> Any:
    """The sum of a column of [rows, COLUMNS] in shared memory, in order."""
    rows = ir.MemRefType(ref.type).shape[0]
    places = [[arith.constant(ir.IndexType.get(), n), index(column)] for n in range(rows)]
    return functools.reduce(arith.addf, [memref.load(ref, place) for place in places])


def publish_column_sums(target: Any, ref: Any, tag: Any) -> None:
    """Adds up [warps, COLUMNS] in shared memory over the warps, in order, and publishes [COLUMNS]."""
    if interpreted():
        target[...] = jnp.sum(ref[...], axis=0)
        return

    def body(tag: Any, target: Any, ref: Any) -> None:
        thread = own_thread()
        with mosaic.when(below(thread, COLUMNS)):
            _publish(_column_sum(ref, thread), tag, target, thread)

    _with_tag(body, (target, ref), tag)


def publish_sum(target: Any, ref: Any, tag: Any) -> None:
    """Publishes the sum of a vector in shared memory, [1]."""
    if interpreted():
        target[...] = jnp.sum(ref[...])[None]
        return

    def body(tag: Any, target: Any, ref: Any) -> None:
        with mosaic.when(is_equal(own_thread(), 0)):
            numbers = [arith.constant(ir.IndexType.get(), n) for n in range(ir.MemRefType(ref.type).shape[0])]
            total = functools.reduce(arith.addf, [memref.load(ref, [n]) for n in numbers])
            _publish(total, tag, target, constant(0))

    _with_tag(body, (target, ref), tag)


def publish_attention(
    target: Any, logsumexp: Any, sums: Any, largest: Any, totals: Any, tag: Any, *, copies: int, stride: int
) -> None:
    """Publishes half of a head over a block's keys: attention [COLUMNS], and the logsumexp (base 2).

    `sums` [warps, COLUMNS], `largest` and `totals` [warps] in shared memory are the parts of all warps. The logsumexp goes
    to the words 0, stride, 2 stride and so on of its ref, as many as there are copies.
    """
    if interpreted():
        total, most = jnp.sum(totals[...]), jnp.max(largest[...])
        target[...] = jnp.sum(sums[...], axis=0) * jnp.where(total > 0, 1 / total, 0.0)
        for n in range(copies):
            logsumexp[n * stride] = jnp.where(total > 0, most + jnp.log2(total), LOWEST)
        return

    def body(tag: Any, target: Any, logsumexp: Any, sums: Any, largest: Any, totals: Any) -> None:
        f32, thread = ir.F32Type.get(), own_thread()
        zero, least = (arith.constant(f32, ir.FloatAttr.get(f32, value)) for value in (0.0, LOWEST))
        with mosaic.when(below(thread, COLUMNS)):
            total = functools.reduce(arith.addf, load_four_by_four(totals))
            most = functools.reduce(arith.maximumf, load_four_by_four(largest))
            value = _column_sum(sums, thread)
            has_keys = arith.cmpf(arith.CmpFPredicate.OGT, total, zero)
            inverse = llvm.inline_asm(f32, [total], "rcp.approx.ftz.f32 $0, $1;", "=f,f")
            log = llvm.inline_asm(f32, [total], "lg2.approx.ftz.f32 $0, $1;", "=f,f")
            _publish(arith.select(has_keys, arith.mulf(value, inverse), value), tag, target, thread)
            with mosaic.when(below(thread, copies)):
                place = arith.muli(thread, constant(stride))
                _publish(arith.select(has_keys, arith.addf(most, log), least), tag, logsumexp, place)

    _with_tag(body, (target, logsumexp, sums, largest, totals), tag)
