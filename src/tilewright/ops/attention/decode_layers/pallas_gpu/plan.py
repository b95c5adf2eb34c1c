"""How the thread blocks of `decode_layers` divide a layer between them.

There are KV * key_splits thread blocks, and each has a fixed part of every phase: of each product some columns and some
rows (a split of the contracted axis), and of attention the keys of one KV head that belong to one key split. What blocks
pass to each other lies at fixed places of one array of 32-bit words, the mail.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright.pallas.gpu.elementwise import LANES, THREADS

PHASES = ("qkv", "attend", "o", "gate_up", "down")
CONSUMERS = 4  # Warpgroups.
WARPS = 4  # Of a warpgroup.
CHANNELS = 128  # Of a head.
HEADS = 2  # Query heads per KV head.
DEPTH, COLUMNS = 128, 64
"""The rows and columns of a tile of a weight: one stage of the pipeline."""
KEYS = 32
"""Keys of a stage, with their values. Also the rows of one copy of a weight."""
_MOST_SPLITS = 4  # Of a product with normed inputs: the sums of squares of all of them are one vector load.
_BEST_SPLITS = 4
_MOST_WORDS = 32  # That a thread waits for at a time: it holds them in registers.
_KEY_SPLITS = (16, 8, 4)  # Multiples of 4: the logsumexps of four splits are one vector load.
_FEWEST_KEY_SPLITS = (4,)


@dataclass(frozen=True)
class Product:
    """How a product [1, rows] x [rows, columns] is divided: a block has `pieces` of 64 columns, and 1 / splits of the rows.

    Block b has the columns of group b % groups, and split b // groups.
    """

    rows: int
    columns: int
    pieces: int
    splits: int

    @property
    def groups(self) -> int:
        """Parts by columns. The blocks of one split read a row of the weight from end to end together."""
        return self.columns // (self.pieces * COLUMNS)

    @property
    def own_rows(self) -> int:
        return self.rows // self.splits

    @property
    def tiles(self) -> int:
        """Tiles of a piece."""
        return self.own_rows // DEPTH

    @property
    def stages(self) -> int:
        return self.pieces * self.tiles


@dataclass(frozen=True)
class Plan:
    """The sizes of a call, and how its products are divided."""

    layers: int
    d: int
    kv: int
    hidden: int
    capacity: int
    eps: float
    norm_offset: float
    key_splits: int
    qkv: Product
    o: Product
    gate_up: Product
    down: Product

    @property
    def blocks(self) -> int:
        return self.kv * self.key_splits

    @property
    def heads(self) -> int:
        return HEADS * self.kv

    def product(self, phase: str) -> Product:
        return getattr(self, phase)

    @property
    def holders(self) -> int:
        """Consumer warpgroups that divide a block's part of x, its rows of `gate_up`. The others repeat what these do."""
        return math.gcd(self.gate_up.own_rows // THREADS, CONSUMERS)

    @property
    def segment(self) -> int:
        """Elements of x that each of them has."""
        return self.gate_up.own_rows // self.holders

    @property
    def most_inputs(self) -> int:
        """The largest left operand of a block's part of a product."""
        return max(self.gate_up.own_rows, self.o.own_rows, self.down.own_rows)

    @property
    def mail(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """What blocks pass to each other: the first word of each kind, and its shape.

        Words that many blocks read have a copy for each group of readers: a line that 128 blocks poll answers slowly.
        """
        shapes = {
            "qkv": (self.qkv.splits, self.kv, HEADS + 2, CHANNELS),  # Per KV head: its queries, the key and the value.
            "attend": (self.kv, self.key_splits, HEADS, CHANNELS),
            "o": (self.o.splits, self.d),
            "gate_up": (self.gate_up.splits, 2 * self.hidden),
            "down": (self.down.splits, self.d),
            "logsumexp": (self.kv, HEADS, self.o.groups, self.key_splits),
            "qkv_squares": (self.qkv.groups, self.qkv.splits),
            "gate_up_squares": (self.gate_up.groups, self.gate_up.splits),
        }
        sizes = [-(-math.prod(shape) // LANES) * LANES for shape in shapes.values()]
        firsts = [0, *itertools.accumulate(sizes)]
        return {name: (first, shape) for first, (name, shape) in zip(firsts, shapes.items(), strict=False)}

    @property
    def words(self) -> int:
        first, shape = list(self.mail.values())[-1]
        return first + math.prod(shape)

    @property
    def is_possible(self) -> bool:
        """Whether the kernel's registers and vector loads allow it, and the rows of `qkv` lie within those of `gate_up`.

        A block holds one part of x, which it normalises for both products.
        """
        per_thread = self.segment // THREADS
        chunks = -(-self.down.tiles // CONSUMERS)
        words = (
            per_thread * max(self.o.splits, self.down.splits),
            self.qkv.splits * (2 * COLUMNS // LANES + 1),
            self.gate_up.splits * (2 * chunks + 1),
        )
        return (
            self.qkv.splits % self.gate_up.splits == 0
            and self.qkv.own_rows % self.segment == 0
            and per_thread in (1, 2, 4)
            and self.o.tiles <= CONSUMERS  # One head each.
            and self.o.groups % 2 == 0  # As many copies of a logsumexp, stored by two consumers,
            and self.o.groups <= 2 * COLUMNS  # each by one thread.
            and max(words) <= _MOST_WORDS
        )


def _divisions(rows: int, columns: int, blocks: int, most_splits: int) -> Iterator[Product]:
    """The ways to divide a product between all blocks, the best first.

    More splits are more words to add up for every reader. Fewer leave each block more rows of fewer columns.
    """
    found = []
    for pieces in range(1, CONSUMERS + 1):  # One consumer publishes each.
        groups, rest = divmod(columns, pieces * COLUMNS)
        if rest or not groups or blocks % groups:
            continue
        splits = blocks // groups
        if rows % (splits * DEPTH) == 0 and splits <= most_splits and splits & (splits - 1) == 0:
            found.append(Product(rows, columns, pieces, splits))
    yield from sorted(found, key=lambda product: abs(product.splits - _BEST_SPLITS))


def plan_for(
    *,
    layers: int,
    d: int,
    kv: int,
    hidden: int,
    capacity: int,
    eps: float,
    norm_offset: float,
    multiprocessors: int | None,
) -> Plan | None:
    """The division of a call over a chip, all of whose blocks are resident at once; None where there is none.

    `multiprocessors` is None in the interpreter, which runs blocks one after another: it gets the fewest.
    """
    sizes: dict[str, Any] = {"layers": layers, "d": d, "kv": kv, "hidden": hidden, "capacity": capacity}
    sizes |= {"eps": eps, "norm_offset": norm_offset}
    for key_splits in _FEWEST_KEY_SPLITS if multiprocessors is None else _KEY_SPLITS:
        blocks = kv * key_splits
        if multiprocessors is not None and blocks > multiprocessors:
            continue
        ways = itertools.product(
            _divisions(d, (HEADS + 2) * kv * CHANNELS, blocks, _MOST_SPLITS),
            _divisions(HEADS * kv * CHANNELS, d, blocks, blocks),
            _divisions(d, 2 * hidden, blocks, _MOST_SPLITS),
            _divisions(hidden, d, blocks, blocks),
        )
        plans = (Plan(**sizes, key_splits=key_splits, qkv=a, o=b, gate_up=c, down=e) for a, b, c, e in ways)
        if (plan := next((plan for plan in plans if plan.is_possible), None)) is not None:
            return plan
    return None
