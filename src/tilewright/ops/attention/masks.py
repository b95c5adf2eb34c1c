"""Masks as values: which queries attend to which keys, without an array of T x S.

A mask is a predicate of a query and a key. `Causal`, `SlidingWindow`, `Prefix`, `Dilated` and `MaskFn` are of positions: a
query's position is its row plus the call's q_offset, a key's is its index. `Dense`, `BlockSparse` and `Segments` are of
the call's own rows and columns. Masks combine with `&`, `|` and `~`; `PerHead` stacks one for each head.

A mask tells of each block of a grid whether it is empty, full or partial (`kinds`). Of compositions that is an interval
analysis: what it calls empty or full is so, and partial may be either. `plan.py` looks at partial blocks one by one,
and at those that must be alike only once: `signature` is equal where the contents of two blocks are.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Grid:
    """T queries by S keys in blocks. The last block of an axis may be cut off by its end."""

    t: int
    s: int
    block_q: int
    block_k: int
    q_offset: int = 0

    @property
    def num_q(self) -> int:
        return -(-self.t // self.block_q)

    @property
    def num_k(self) -> int:
        return -(-self.s // self.block_k)

    def bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """First and last row [num_q, 1], first and last column [1, num_k] of each block."""
        q_first = np.arange(self.num_q, dtype=np.int64)[:, None] * self.block_q
        k_first = np.arange(self.num_k, dtype=np.int64)[None, :] * self.block_k
        return (
            q_first,
            np.minimum(q_first + self.block_q, self.t) - 1,
            k_first,
            np.minimum(k_first + self.block_k, self.s) - 1,
        )


class Mask:
    """A predicate of query and key. True means: attend."""

    num_heads: int | None = None
    """How many heads it is made for; None where it is the same for any."""
    computable: bool = False
    """Whether a kernel can make it from positions alone."""

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        """The predicate for rows and columns that broadcast against each other; numpy, or jax if `computable`."""
        raise NotImplementedError

    def kinds(self, grid: Grid) -> np.ndarray:
        """EMPTY, PARTIAL or FULL for each block: [1 or heads, num_q, num_k]."""
        raise NotImplementedError

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        """Equal for two blocks only if their contents are equal."""
        raise NotImplementedError

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        """Why it does not fit a call with so many heads, queries and keys; None where it does."""
        del heads, t, s
        return None

    def children(self) -> "tuple[Mask, ...]":
        return ()

    def _key(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._key()))

    def __and__(self, other: "Mask") -> "Mask":
        return _Both(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return _Either(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return _Not(self)

    def dense(self, t: int, s: int, q_offset: int = 0) -> np.ndarray:
        """The whole predicate, [1 or heads, T, S]. For small shapes, plots and tests."""
        rows, columns = np.arange(t)[:, None], np.arange(s)[None, :]
        each = [
            np.broadcast_to(self.keep(rows, columns, q_offset, head), (t, s)) for head in range(self.num_heads or 1)
        ]
        return np.stack(each)

    def density(self, t: int, s: int, *, q_offset: int = 0) -> float:
        """The share of the T x S pairs that attend. Blocks that are alike are counted once, so it is quick."""
        from tilewright.ops.attention.plan import block_table

        block_q, block_k = (max(128, -(-length // 256)) for length in (t, s))
        return block_table(self, Grid(t, s, block_q, block_k, q_offset)).density

    def plot(self, t: int, s: int, *, q_offset: int = 0, head: int = 0, ax: Any = None, pixels: int = 512) -> Any:
        """Draw it into a matplotlib axis, queries downwards: dark where a block is full, light where it is partial."""
        from matplotlib import pyplot

        block_q, block_k = max(1, -(-t // pixels)), max(1, -(-s // pixels))
        kinds = self.kinds(Grid(t, s, block_q, block_k, q_offset))
        ax = pyplot.subplots()[1] if ax is None else ax
        ax.imshow(kinds[head % kinds.shape[0]], cmap="Blues", vmin=EMPTY, vmax=FULL, extent=(0, s, t, 0), aspect="auto")
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.set_title(f"{self}, {self.density(t, s, q_offset=q_offset):.1%}")
        return ax


def _of_interval(all_true: np.ndarray, none_true: np.ndarray) -> np.ndarray:
    return np.where(none_true, EMPTY, np.where(all_true, FULL, PARTIAL)).astype(np.int8)[None]


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query attends to keys up to its own position plus `offset`."""

    offset: int = 0
    computable = True

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return columns <= rows + (q_offset + self.offset)

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, q_last, k_first, k_last = grid.bounds()
        shift = grid.q_offset + self.offset
        return _of_interval(k_last <= q_first + shift, k_first > q_last + shift)

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return i * grid.block_q - j * grid.block_k

    def _key(self) -> tuple[Any, ...]:
        return (self.offset,)


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """A query attends to `left` keys before its own position, its own, and `right` after it. None is without end."""

    left: int | None
    right: int | None
    computable = True

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | np.integer) or value < 0):
                raise ValueError(
                    f"{name}={value!r} of SlidingWindow must be a number of tokens, 0 or more; use None for no end"
                )

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        ahead = columns - rows  # Of the row, which is q_offset behind the position.
        inside = []
        if self.left is not None:
            inside.append(ahead >= q_offset - self.left)
        if self.right is not None:
            inside.append(ahead <= q_offset + self.right)
        return functools.reduce(lambda one, other: one & other, inside) if inside else ahead == ahead

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, q_last, k_first, k_last = grid.bounds()
        least, most = k_first - q_last - grid.q_offset, k_last - q_first - grid.q_offset
        low = -np.inf if self.left is None else -self.left
        high = np.inf if self.right is None else self.right
        return _of_interval((least >= low) & (most <= high), (most < low) | (least > high))

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return i * grid.block_q - j * grid.block_k

    def _key(self) -> tuple[Any, ...]:
        return (self.left, self.right)


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query attends to the first `n` keys. `Causal() | Prefix(n)` is a prefix language model's mask."""

    n: int
    computable = True

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return (columns < self.n) & (rows == rows)

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, _, k_first, k_last = grid.bounds()
        return _of_interval((k_last < self.n) & (q_first >= 0), (k_first >= self.n) & (q_first >= 0))

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return min(max(self.n - j * grid.block_k, 0), grid.block_k)

    def _key(self) -> tuple[Any, ...]:
        return (self.n,)


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A query attends to the keys whose distance from its position is a multiple of `rate`."""

    rate: int
    # Not `computable`, though it is of positions: vectors of integers have no remainder on a TPU.

    def __post_init__(self) -> None:
        if not isinstance(self.rate, int | np.integer) or self.rate < 1:
            raise ValueError(f"rate={self.rate!r} of Dilated must be a positive integer; use 2 for every other key")

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return (rows - columns + q_offset) % self.rate == 0

    def kinds(self, grid: Grid) -> np.ndarray:
        kind = FULL if self.rate == 1 else PARTIAL
        return np.full((1, grid.num_q, grid.num_k), kind, np.int8)

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return (i * grid.block_q - j * grid.block_k) % self.rate

    def _key(self) -> tuple[Any, ...]:
        return (self.rate,)


class _OfArray(Mask):
    """A mask that is made of an array; it is hashed by the array's contents."""

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for array in self._arrays():
            digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _arrays(self) -> tuple[np.ndarray, ...]:
        raise NotImplementedError

    def _key(self) -> tuple[Any, ...]:
        return (self._digest,)


@dataclass(frozen=True, eq=False)
class Dense(_OfArray):
    """Any mask, as a numpy array of booleans [T, S], or [H, T, S] with one for each head."""

    values: np.ndarray

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray) or self.values.dtype != np.bool_ or self.values.ndim not in (2, 3):
            shown = f"{getattr(self.values, 'dtype', type(self.values).__name__)}{list(np.shape(self.values))}"
            raise ValueError(
                f"values={shown} of Dense must be a numpy array of bool, [T, S] or [H, T, S]; pass np.asarray(x, bool), "
                f"or give a jax array as mask= itself if its contents change"
            )

    def __repr__(self) -> str:
        return f"Dense({list(self.values.shape)})"

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.values.shape[0] if self.values.ndim == 3 else None

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (self.values,)

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        if self.values.shape[-2:] != (t, s):
            return f"{self} is not [T, S] = [{t}, {s}]; its rows are the call's queries and its columns the keys"
        return _heads_misfit(self, heads)

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        values = self.values if self.values.ndim == 2 else self.values[head]
        t, s = values.shape
        return values[np.minimum(rows, t - 1), np.minimum(columns, s - 1)]

    def kinds(self, grid: Grid) -> np.ndarray:
        values = self.values if self.values.ndim == 3 else self.values[None]
        found = np.empty((values.shape[0], grid.num_q, grid.num_k), np.int8)
        starts = np.arange(grid.num_k) * grid.block_k
        for i in range(grid.num_q):
            rows = values[:, i * grid.block_q : (i + 1) * grid.block_q]  # [heads, block_q, S]
            some = np.logical_or.reduceat(rows.any(1), starts, axis=-1)
            every = np.logical_and.reduceat(rows.all(1), starts, axis=-1)
            found[:, i] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
        return found

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return (head if self.values.ndim == 3 else 0, i, j)


@dataclass(frozen=True, eq=False)
class BlockSparse(_OfArray):
    """Whole blocks of `block_shape` (queries, keys) that attend: a numpy array of booleans, one for each block."""

    blocks: np.ndarray
    block_shape: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, np.ndarray) or self.blocks.dtype != np.bool_ or self.blocks.ndim != 2:
            raise ValueError(
                "blocks of BlockSparse must be a numpy array of bool, [blocks of queries, blocks of keys]; "
                "pass np.asarray(blocks, bool)"
            )
        if len(self.block_shape) != 2 or min(self.block_shape) < 1:
            raise ValueError(
                f"block_shape={self.block_shape!r} of BlockSparse must be two positive numbers; use (128, 128)"
            )

    def __repr__(self) -> str:
        return f"BlockSparse({list(self.blocks.shape)}, {tuple(self.block_shape)})"

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (self.blocks, np.asarray(self.block_shape))

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        del heads
        wanted = (-(-t // self.block_shape[0]), -(-s // self.block_shape[1]))
        if self.blocks.shape != wanted:
            return (
                f"{self} must have {list(wanted)} blocks for T={t} queries and S={s} keys; "
                f"pass np.asarray(blocks, bool) of that shape"
            )
        return None

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        (block_q, block_k), (num_q, num_k) = self.block_shape, self.blocks.shape
        return self.blocks[np.minimum(rows // block_q, num_q - 1), np.minimum(columns // block_k, num_k - 1)]

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, q_last, k_first, k_last = grid.bounds()
        (block_q, block_k) = self.block_shape
        top, bottom = q_first // block_q, q_last // block_q + 1
        left, right = k_first // block_k, k_last // block_k + 1
        area = np.zeros((self.blocks.shape[0] + 1, self.blocks.shape[1] + 1), np.int64)
        area[1:, 1:] = self.blocks.cumsum(0).cumsum(1)
        count = area[bottom, right] - area[top, right] - area[bottom, left] + area[top, left]
        return _of_interval(count == (bottom - top) * (right - left), count == 0)

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        (block_q, block_k) = self.block_shape
        row, column = i * grid.block_q, j * grid.block_k
        part = self.blocks[
            row // block_q : (row + grid.block_q - 1) // block_q + 1,
            column // block_k : (column + grid.block_k - 1) // block_k + 1,
        ]
        return (row % block_q, column % block_k, part.shape, part.tobytes())


@dataclass(frozen=True, eq=False)
class Segments(_OfArray):
    """A query attends to keys of its own segment: ids [T], and [S] where the keys' differ. Known when traced.

    Ids that change from call to call are `segment_ids=` of the op.
    """

    q_ids: np.ndarray
    kv_ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, ids in (("q_ids", self.q_ids), ("kv_ids", self._keys())):
            if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(
                    f"{name} of Segments must be a numpy array of integers with one axis; "
                    f"give ids that change as segment_ids= of the op"
                )

    def _keys(self) -> np.ndarray:
        return self.q_ids if self.kv_ids is None else self.kv_ids

    def __repr__(self) -> str:
        return f"Segments([{len(self.q_ids)}], [{len(self._keys())}])"

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (self.q_ids, self._keys())

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        del heads
        if len(self.q_ids) != t or len(self._keys()) != s:
            return f"{self} must have an id for each of T={t} queries and S={s} keys"
        return None

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        keys = self._keys()
        return self.q_ids[np.minimum(rows, len(self.q_ids) - 1)] == keys[np.minimum(columns, len(keys) - 1)]

    def kinds(self, grid: Grid) -> np.ndarray:
        q_starts, k_starts = np.arange(grid.num_q) * grid.block_q, np.arange(grid.num_k) * grid.block_k
        keys = self._keys()
        q_least, q_most = (f.reduceat(self.q_ids, q_starts)[:, None] for f in (np.minimum, np.maximum))
        k_least, k_most = (f.reduceat(keys, k_starts)[None, :] for f in (np.minimum, np.maximum))
        one = (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
        return _of_interval(one, (q_most < k_least) | (k_most < q_least))

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return (i, j)


@dataclass(frozen=True, eq=False)
class MaskFn(Mask):
    """Any predicate: `MaskFn(lambda q_idx, kv_idx: ...)`, of numpy arrays of positions that broadcast.

    Nothing is known of it but its values, so all T x S of them are computed when traced, a row of blocks at a time.
    """

    function: Callable[[Any, Any], Any]

    def __repr__(self) -> str:
        return f"MaskFn({getattr(self.function, '__name__', 'function')})"

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        values = np.asarray(self.function(rows + q_offset, columns))
        shape = np.broadcast_shapes(np.shape(rows), np.shape(columns))
        if values.dtype != np.bool_ or np.broadcast_shapes(values.shape, shape) != shape:
            raise ValueError(
                f"{self} returned {values.dtype}{list(values.shape)} for indices of shape {list(shape)}; it must return "
                f"booleans of that shape: compare with ==, <, and join with &, | and ~"
            )
        return values

    def kinds(self, grid: Grid) -> np.ndarray:
        found = np.empty((1, grid.num_q, grid.num_k), np.int8)
        columns = np.arange(grid.s)[None, :]
        starts = np.arange(grid.num_k) * grid.block_k
        for i in range(grid.num_q):
            rows = np.arange(i * grid.block_q, min((i + 1) * grid.block_q, grid.t))[:, None]
            values = np.broadcast_to(self.keep(rows, columns, grid.q_offset), (rows.shape[0], grid.s))
            some = np.logical_or.reduceat(values.any(0), starts)
            every = np.logical_and.reduceat(values.all(0), starts)
            found[0, i] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
        return found

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return (i, j)

    def _key(self) -> tuple[Any, ...]:
        return (self.function,)


class _Composed(Mask):
    def children(self) -> tuple[Mask, ...]:
        raise NotImplementedError

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return next((mask.num_heads for mask in self.children() if mask.num_heads is not None), None)

    @property
    def computable(self) -> bool:  # type: ignore[override]
        return all(mask.computable for mask in self.children())

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        return next(filter(None, (mask.misfit(heads, t, s) for mask in self.children())), None)

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return tuple(mask.signature(grid, head, i, j) for mask in self.children())

    def _key(self) -> tuple[Any, ...]:
        return self.children()


@dataclass(frozen=True, eq=False, repr=False)
class _Both(_Composed):
    left: Mask
    right: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.left, self.right)

    def __repr__(self) -> str:
        return f"({self.left} & {self.right})"

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return self.left.keep(rows, columns, q_offset, head) & self.right.keep(rows, columns, q_offset, head)

    def kinds(self, grid: Grid) -> np.ndarray:
        return np.minimum(self.left.kinds(grid), self.right.kinds(grid))


@dataclass(frozen=True, eq=False, repr=False)
class _Either(_Composed):
    left: Mask
    right: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.left, self.right)

    def __repr__(self) -> str:
        return f"({self.left} | {self.right})"

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return self.left.keep(rows, columns, q_offset, head) | self.right.keep(rows, columns, q_offset, head)

    def kinds(self, grid: Grid) -> np.ndarray:
        return np.maximum(self.left.kinds(grid), self.right.kinds(grid))


@dataclass(frozen=True, eq=False, repr=False)
class _Not(_Composed):
    mask: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def __repr__(self) -> str:
        return f"~{self.mask}"

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return ~self.mask.keep(rows, columns, q_offset, head)

    def kinds(self, grid: Grid) -> np.ndarray:
        return (FULL - self.mask.kinds(grid)).astype(np.int8)


@dataclass(frozen=True, eq=False)
class PerHead(_Composed):
    """One mask for each head."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        if not self.masks or any(not isinstance(mask, Mask) or mask.num_heads is not None for mask in self.masks):
            raise ValueError(
                f"masks={self.masks!r} of PerHead must be masks without heads of their own, one for each head"
            )

    def children(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return len(self.masks)

    @property
    def computable(self) -> bool:  # type: ignore[override]
        return False  # Which predicate it is depends on the head.

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        return _heads_misfit(self, heads) or super().misfit(heads, t, s)

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return self.masks[head].keep(rows, columns, q_offset)

    def kinds(self, grid: Grid) -> np.ndarray:
        return np.concatenate([mask.kinds(grid) for mask in self.masks])

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        # Heads with equal masks share their blocks.
        return (self.masks.index(self.masks[head]), self.masks[head].signature(grid, 0, i, j))


def _heads_misfit(mask: Mask, heads: int) -> str | None:
    if mask.num_heads is not None and mask.num_heads != heads:
        return f"{mask} is made for {mask.num_heads} heads and q has H={heads}; stack one mask for each head of q"
    return None


def contains(mask: Mask, kind: type[Mask]) -> Mask | None:
    """The first mask of a type inside of a composition, if there is one."""
    if isinstance(mask, kind):
        return mask
    return next(filter(None, (contains(child, kind) for child in mask.children())), None)
