"""The delta rule and its relatives as Mosaic TPU kernels: one for the forward (fwd.py) and one for the backward
(bwd.py).

The algebra of a chunk is that of wy_transform.py, which `xla` runs too; one kernel serves the three ops. Only the op
that has a gate pays for it: without a gate the decays of a head are a mask, and only one gate per channel (KDA) scales
operands.

Floor: q, k, v, g and beta read once, o written once: 8 D bytes per token and head in bfloat16 for K = V = D (KDA: 4 D
more). Here: that, and the gates once more, as rows and as columns (512 bytes per token for the columns of the heads of
a block:
they are padded to whole lanes). FLOPs per token and head: 2 C (2 K + 2 V) inside a chunk of C, 6 K V for the state, and
the inverse.

Blocking: grid (B, HV / heads, num_t), the first two in parallel, time in order. A block is 8 chunks of 64 tokens of up
to 4 heads. The states [heads, K, V] stay in VMEM scratch for the whole sequence. Heads lie side by side in the lanes,
so that the [64, 64] matrices of two of them fill a register; products of such are with block-diagonal matrices.

Numerics: states, decays, inverses and accumulators in float32. float32 inputs are multiplied in float32 (six passes).
With bfloat16 inputs a product of float32 operands is a bf16x3 product, hi*hi + lo*hi + hi*lo, concatenated along the
contracted axis; a v6e, 256 deep, does two terms of depth 128 at once.

Limits: K and V are padded to multiples of 128. VMEM bounds the heads and chunks of a block.

What bounds it, by libtpu 0.0.50.1's schedule for a v6e (K = V = 128, H16, T8192, bfloat16): not one unit, but phases
that follow each other: broadcasts over lanes for the gates and transposes of keys (both XLUs full), the decays and
scores (VALUs full), the chain of six products of the inverse (everything waits). MXUs are a quarter busy and VALUs 29
%. What is left to do is to overlap the inverse of the next chunk with the state passage of this one; keys are
transposed twice, too.

Tried, in bundles per chunk and head by the same schedule:
- the inverse by products alone, from single tokens up: 774. Ten products follow each other, and the masks of each level
  were made from iotas each time. Blocks of 8 by one substitution for all heads, and masks read from VMEM: 594;
- all loads of a step before all its stores, so that heads may overlap: 562;
- eight heads per block, four side by side: 501, and twice the code, which doubles the time to compile it;
- a Neumann series for the inverse: shorter, and wrong for similar keys (wy_transform.py).
"""

from tilewright.core.implementation import Implementation
from tilewright.ops.delta_rule.pallas_tpu.bwd import BACKWARD
from tilewright.ops.delta_rule.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
