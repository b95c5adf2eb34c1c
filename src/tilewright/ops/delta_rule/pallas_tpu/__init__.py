"""The delta rule and its relatives as Mosaic TPU kernels: one for the forward (fwd.py, intra_chunk.py) and one for the
backward (bwd.py, gradients.py).

The algebra of a chunk is that of wy_transform.py in another form, which intra_chunk.py and gradients.py describe. One
kernel serves the three ops. Only the op that has a gate pays for it: without a gate the decays of a head are a mask, and
only one gate per channel (KDA) scales operands. A reset is a gate of -16384, which forgets everything: resets take no
code of their own, and give `delta_rule` a gate.

Floor: q, k, v, g and beta read once, o written once: 8 D bytes per token and head in bfloat16 for K = V = D (KDA: 4 D
more). The forward: that, and a row of 128 numbers per chunk and two heads, for beta and for one gate per head each. The
backward has the same rows; bwd.py has its floor.
FLOPs per token and head: 2 C (2 K + 2 V) inside a chunk of C = 64 tokens, 6 K V for the state, and the inverse.

Blocking: grid (B, HV / heads, num_t), the first two in parallel, time in order. A block is 8 chunks of up to 8 heads, or
of up to 4 for KDA: the loops that carry a state have only the heads of a block to hide the latency of their products.
The states [heads, K, V] stay in VMEM scratch for the whole sequence.

The forward has two loops over the chunks of a block. The first computes what does not depend on the state, and leaves it
in VMEM: the scores, the inverse T, and W = [M; (onward k)^T] b T. Four chunks of four heads, or two of eight, go through
it in lock step, stage by stage, written as generators that are run in turns: the compiler keeps close to the order of the
program, and phases that would follow each other (exponentials, transposes, chains of small products) overlap. The second
takes the states through the chunks, in two products each: [q; k] S, and W R. Between them are loops for KDA's strong
gates, below.

What a product costs on a v6e is its rows and those of its weights, 16 of which take about 2 bundles, whatever their
width. So operands lie such that MXUs of 256 x 256 are full: hi and lo side by side along the contracted axis, hi and lo
of the weights side by side in the width, two heads in block diagonals.

KDA's gates are mild in a chunk if those of each channel add up to at most 72 by magnitude. Then q exp(a), k exp(a) and
k exp(-a), with a the sums from the start of the chunk, serve all products: scores are one product, and q exp(a) reads
the state. That is computed for every chunk. A flag in SMEM says where gates are stronger; there W is computed again and
overwritten, with scores from a product for each halving of the chunk down to blocks of 8 tokens (wy_transform.py), and
one product for the diagonal blocks, scaled by sums from the start of a block. If gates add up to more than 72 within 8
tokens, a third time, with halvings down to single tokens. Rows up to which the gates are mild keep their scores to the
bit: no output depends on a later gate. float32 inputs take all halvings always.

Numerics: states, decays, inverses and accumulators in float32. float32 inputs are multiplied in float32 (six passes).
With bfloat16 inputs a product of float32 operands is a bf16x3 product, hi*hi + lo*hi + hi*lo.

Limits: K and V are padded to multiples of 128. VMEM bounds the heads and chunks of a block. A block of heads that is not
a multiple of 4 computes inverses of zeros, unless several chunks are interleaved.

The backward has four loops over the chunks of a block. The first two are the forward's, with T kept and U in place of
outputs. The third takes the gradient of the state back, transposed, and has only the products that the next chunk waits
for. The fourth has all other products with a state or its gradient, and computes the gradients of q, k, beta and the gates.
The first and the fourth are repeated where gates are strong.

What bounds them, by libtpu 0.0.50.1's schedule for a v6e (K = V = 128, bfloat16): KDA's forward takes 411 bundles per
chunk and head with mild gates, 3.8 times what its bytes take; 154 of them are the state passage. One gate per head takes
287, 3.9 times what its bytes take. The MXUs are busy for 41 to 53 % of them, and the VALUs for 45 to 49 %. The backward
takes 861 for KDA and 572 for one gate per head: with the forward 4.2 and 4.4 times what the bytes of both take. A matrix
product of 16 rows takes 4 bundles with both MXUs fed, and pushing 16 rows of weights 1.6, beside it if other products
are at hand; one product after the other takes their sum and the latency. docs/measurements has the other figures.

Tried, in bundles per chunk and head by the same schedule (one gate per head, in the forward that this one replaced, which
took 582 at last):
- the inverse by products alone, from single tokens up: 774. Ten products follow each other, and the masks of each level
  were made from iotas each time. Blocks of 8 by one substitution for all heads, and masks read from VMEM: 594;
- all loads of a step before all its stores, so that heads may overlap: 562;
- eight heads per block, four side by side: 501, and twice the code, which doubles the time to compile it;
- a Neumann series for the inverse: shorter, and wrong for similar keys (wy_transform.py).
Prototypes of this design (KDA, which took 1,317 before):
- one bfloat16 term for every operand: 239, with more than twice the error of a rounded output;
- T [v | k], and U = T v - (T k) S for the state passage, instead of W: as many products in the second loop, one more in
  the first;
- the state passage beside the first loop of the next chunks, through buffers whose slots are data: 355, where one after
  the other was 300;
- the two loops as two kernels: moves 177 KB more per chunk and head, where all else moves 98.
The backward, in bundles per chunk and head:
- `jax.vjp` of wy_transform.py's algebra, traced in the kernel, two heads side by side: 3,850 for KDA, 1,358 for one gate
  per head;
- four chunks interleaved in the first loop instead of two: 734 instead of 790 for one gate per head, and it compiles for
  longer;
- the products with the states and their gradients in the loop that takes the gradient of the state back, instead of beside
  those of the next loop: 339 in both loops instead of 302 (eight heads, one gate per head);
- operands in VMEM as bfloat16, whose tiles have 8 rows where registers have 16, instead of words of two rows, and q and k
  pushed once for hi and once for lo of what they are multiplied with: 584 instead of 566 (one gate per head);
- the sums of one gate per head in a product for each pair of heads, whose constant weights are pushed each time: 173
  instead of 169 for the first loop;
- two chunks of four pairs of heads interleaved in the last loop instead of one: 163 instead of 169, and 1,300 bundles more
  of code;
- eight heads per block for KDA: 370 forward and 693 backward instead of 411 and 861 with mild gates, and the compiler takes
  1.6 times as long;
- the scores of strong gates unrolled, as the forward has them, instead of a loop over the halvings: 703 instead of 787, and
  1,400 bundles more of code;
- the gradient of KDA's gates with the pairs of a token with itself, which cancel: the error is 5.1e-5 instead of 2.1e-5
  where gates are just mild.
"""

from tilewright.core.implementation import Implementation
from tilewright.ops.delta_rule.pallas_tpu.bwd import BACKWARD
from tilewright.ops.delta_rule.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
