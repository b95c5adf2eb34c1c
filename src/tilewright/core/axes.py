"""The letters that every shape in this code base is spelled from, and the jaxtyping aliases made of them.

| letter | axis                                                                        |
|--------|-----------------------------------------------------------------------------|
| B      | batch                                                                       |
| T      | tokens of a sequence (queries, where queries and keys differ)               |
| S      | keys and values of a sequence, where they differ from the queries           |
| N      | rows: every leading axis flattened into one                                 |
| H      | heads; in linear_cross_entropy the hidden width                             |
| HV     | value heads, where each query and key head serves several of them           |
| K      | the key half of a head: the channels of its queries and keys                |
| V      | the value half of a head; in linear_cross_entropy the vocabulary            |
| KV     | key and value heads of attention; each serves H / KV query heads            |
| D, Dv  | the width of a head of attention: of queries and keys, of values            |
| R      | pairs of features that a rotary embedding turns                             |
| P      | pages of a paged cache                                                      |
| W      | taps of a short convolution; there and in a norm D is the columns of x      |

A block of an axis is `block_<letter>`, a count of blocks `num_<letter>`. A shape comment stands behind each load, dot
and reshape: `# [block_n, block_v]`. `tokens` stands for any number of leading axes, none included.
"""

from jaxtyping import Array, Bool, Float, Int

Hidden = Float[Array, "*tokens H"]
"""One vector of the model's width a token."""

Unembedding = Float[Array, "H V"]
"""The matrix that turns a hidden vector into logits over the vocabulary."""

Labels = Int[Array, "*tokens"]
"""One class a token."""

PerToken = Float[Array, "*tokens"]
"""One number a token."""

Rows = Float[Array, "N H"]
RowLabels = Int[Array, " N"]
PerRow = Float[Array, " N"]

Scalar = Float[Array, ""]

Keys = Float[Array, "B T H K"]
"""Queries or keys."""

Values = Float[Array, "B T HV V"]

PerHead = Float[Array, "B T HV"]
"""One number a token and value head: beta, or the log-decay of the gated delta rule."""

Gate = Float[Array, "B T HV"] | Float[Array, "B T HV K"]
"""Log-decays, one a value head or one a key channel."""

State = Float[Array, "B HV K V"]
"""What a recurrence carries from token to token."""

Starts = Bool[Array, "B T"]
"""Where a recurrence starts again from zeros."""
