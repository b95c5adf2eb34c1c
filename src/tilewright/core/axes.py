"""The letters of the axes in every shape of this code base, and the jaxtyping aliases made of them.

| letter | axis                                                                        |
|--------|-----------------------------------------------------------------------------|
| B      | batch                                                                       |
| T      | tokens of a sequence (queries, where queries and keys differ)               |
| S      | keys and values of a sequence, where they differ from the queries           |
| N      | rows: every leading axis flattened into one                                 |
| H      | heads; in linear_cross_entropy the hidden width                             |
| HV     | value heads, where several of them share one query and key head             |
| K      | channels of a head's queries and keys                                       |
| V      | channels of a head's values; in linear_cross_entropy the vocabulary         |
| KV     | key and value heads of attention; H / KV query heads share each             |
| D, Dv  | head width in attention: of queries and keys, of values                     |
| R      | pairs of features that a rotary embedding rotates                           |
| P      | pages of a paged cache                                                      |
| M, G   | rows, and groups of them, in products; there K is the contracted axis, N columns and P parts of them |
| E, F   | experts, and the hidden channels of one                                     |
| W      | taps of a short convolution; there and in a norm D is the columns of x      |

A block of an axis is `block_<letter>`, a number of blocks `num_<letter>`. Each load, dot and reshape has a trailing
shape comment: `# [block_n, block_v]`. `tokens` stands for zero or more leading axes.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

Size = Any
"""The size of an axis: an int, or a symbolic one while `jax.export` traces."""

Hidden = Float[Array, "*tokens H"]
"""One vector of the model's width per token."""

Unembedding = Float[Array, "H V"]
"""The matrix that maps a hidden vector to logits over the vocabulary."""

Labels = Int[Array, "*tokens"]
"""One class per token."""

PerToken = Float[Array, "*tokens"]
"""One number per token."""

Rows = Float[Array, "N H"]
RowLabels = Int[Array, " N"]
PerRow = Float[Array, " N"]

Scalar = Float[Array, ""]

Keys = Float[Array, "B T H K"]
"""Queries or keys."""

Values = Float[Array, "B T HV V"]

PerHead = Float[Array, "B T HV"]
"""One number per token and value head: beta, or the log-decay of the gated delta rule."""

Gate = Float[Array, "B T HV"] | Float[Array, "B T HV K"]
"""Log-decays per token, one per value head or one per key channel."""

State = Float[Array, "B HV K V"]
"""The state of a recurrence."""

Starts = Bool[Array, "B T"]
"""True where a recurrence restarts from zeros."""
