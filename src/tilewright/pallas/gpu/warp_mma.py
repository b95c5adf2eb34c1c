"""Products of 16 by 16 tiles, each warp by itself (mma), between values in registers.

A wgmma instruction has 64 rows, and every row the same right operand. Where a tile of 64 rows is four blocks of 16 that
have right operands of their own, as in the inverse of a block-diagonal matrix, most of it would be zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.registers import inline_mosaic

_BLOCK = 16
_HALVES = 2  # Of a block's rows, and of its columns: matrix instructions have tiles of 8 by 8.


def add_block_products(sums: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds a y to `sums`, for each block of 16 rows by itself: [64, 16] float32, and bfloat16 `a` and `b`.

    Rows 16 w to 16 w + 15 of a wgmma tile are those of warp w.
    """
    if interpreted():
        blocks = (x.astype(jnp.float32).reshape(-1, _BLOCK, _BLOCK) for x in (a, b))
        return sums + jnp.matmul(*blocks, precision=jax.lax.Precision.HIGHEST).reshape(sums.shape)

    def body(sums: Any, a: Any, b: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def assembly(out: Any, operands: list[Any], text: str, constraints: str) -> Any:
            return llvm.inline_asm(out, operands, text, constraints, has_side_effects=False)

        def word(pair: Any) -> Any:
            bits = vector.bitcast(ir.VectorType.get((1,), i32), pair)
            return vector.extract(bits, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))

        # By column half, then by row half: as the instruction takes the left operand.
        left = [word(pair) for pair in a.registers.flat]
        right = [
            assembly(i32, [word(pair)], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")
            for pair in b.registers.flat
        ]
        results = []
        for column in range(_HALVES):
            here = slice(_HALVES * column, _HALVES * (column + 1))
            before = [
                vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([at]))
                for pair in list(sums.registers.flat)[here]
                for at in range(2)
            ]
            after = assembly(
                llvm.StructType.get_literal([f32] * 4),
                [*left, *right[here], *before],
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
            )
            values = [llvm.extractvalue(f32, after, [at]) for at in range(4)]
            results += [vector.from_elements(ir.VectorType.get((2,), f32), values[at : at + 2]) for at in (0, 2)]
        registers = np.array(results, dtype=object).reshape(sums.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return inline_mosaic(body, sums, a, b, out=jax.ShapeDtypeStruct(sums.shape, jnp.float32))
