"""The masks. Each is a predicate of a query and a key.

`Causal`, `SlidingWindow`, `Prefix`, `Dilated` and `MaskFn` are predicates of positions: the position of a query is its
row plus the call's q_offset, that of a key is its index. `Dense`, `BlockSparse` and `Segments` are predicates of the
call's rows and columns. Masks combine with `&`, `|` and `~`; `PerHead` stacks one mask per head.

A mask says for each block of a grid whether it is empty, full or partial (`kinds`). For compositions that is an
interval analysis: a block that it calls empty or full is so, and one that it calls partial may be any of the three.
`block_list.block_table` evaluates partial blocks one by one, and blocks with equal `signature` once: equal signatures
mean equal contents.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tilewright.core.arguments import is_integer
from tilewright.masks.algebra import Composed, Mask
from tilewright.masks.block_list import EMPTY, FULL, PARTIAL, Grid

# There are fewer rows and keys than this, so a larger distance is unlimited; and sums of two distances fit int32.
_FARTHEST = 2**30


def _check_integer(mask: Mask, name: str, least: int | None, rule: str) -> None:
    value = getattr(mask, name)
    if not is_integer(value) or (least is not None and value < least):
        raise ValueError(f"{name}={value!r} of {type(mask).__name__} must be {rule}")


def _near(distance: int) -> int:
    return max(-_FARTHEST, min(_FARTHEST, int(distance)))


def _of_interval(all_true: np.ndarray, none_true: np.ndarray) -> np.ndarray:
    return np.where(none_true, EMPTY, np.where(all_true, FULL, PARTIAL)).astype(np.int8)[None]


def _kinds_of_rows(grid: Grid, heads: int, values_of: Callable[[slice], np.ndarray]) -> np.ndarray:
    """The kinds of a mask from its values, [heads, rows, S] for a slice of the rows: a row of blocks at a time."""
    found = np.empty((heads, grid.num_q, grid.num_k), np.int8)
    starts = np.arange(grid.num_k) * grid.block_k
    for i in range(grid.num_q):
        values = values_of(slice(i * grid.block_q, min((i + 1) * grid.block_q, grid.t)))
        some = np.logical_or.reduceat(values.any(1), starts, axis=-1)
        every = np.logical_and.reduceat(values.all(1), starts, axis=-1)
        found[:, i] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
    return found


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query attends to keys up to its own position plus `offset`."""

    offset: int = 0
    computable = True

    def __post_init__(self) -> None:
        _check_integer(self, "offset", None, "an integer; use 0 for keys up to the query's own position")

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return columns <= rows + _near(q_offset + self.offset)

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, q_last, k_first, k_last = grid.bounds()
        shift = grid.q_offset + self.offset
        return _of_interval(k_last <= q_first + shift, k_first > q_last + shift)

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return i * grid.block_q - j * grid.block_k


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """A query attends to `left` keys before its own position, its own, and `right` after it. None is unlimited."""

    left: int | None
    right: int | None
    computable = True

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _check_integer(self, name, 0, "a number of tokens, 0 or more; use None for no end")

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        ahead = columns - rows  # Counted from the row, which is the position less q_offset.
        inside = []
        if self.left is not None:
            inside.append(ahead >= _near(q_offset - self.left))
        if self.right is not None:
            inside.append(ahead <= _near(q_offset + self.right))
        return functools.reduce(lambda one, other: one & other, inside) if inside else ahead == ahead

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, q_last, k_first, k_last = grid.bounds()
        least, most = k_first - q_last - grid.q_offset, k_last - q_first - grid.q_offset
        low = -np.inf if self.left is None else -self.left
        high = np.inf if self.right is None else self.right
        return _of_interval((least >= low) & (most <= high), (most < low) | (least > high))

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return i * grid.block_q - j * grid.block_k


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query attends to the first `n` keys. `Causal() | Prefix(n)` is a prefix language model's mask."""

    n: int
    computable = True

    def __post_init__(self) -> None:
        _check_integer(self, "n", 0, "a number of keys, 0 or more; give one that changes as a mask array")

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return (columns < _near(self.n)) & (rows == rows)

    def kinds(self, grid: Grid) -> np.ndarray:
        q_first, _, k_first, k_last = grid.bounds()
        return _of_interval((k_last < self.n) & (q_first >= 0), (k_first >= self.n) & (q_first >= 0))

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return min(max(self.n - j * grid.block_k, 0), grid.block_k)


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A query attends to the keys whose distance from its position is a multiple of `rate`."""

    rate: int
    # Not `computable`, although it depends on positions alone: TPUs have no remainder of integer vectors.

    def __post_init__(self) -> None:
        _check_integer(self, "rate", 1, "a positive integer; use 2 for every other key")

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return (rows - columns + q_offset) % self.rate == 0

    def kinds(self, grid: Grid) -> np.ndarray:
        kind = FULL if self.rate == 1 else PARTIAL
        return np.full((1, grid.num_q, grid.num_k), kind, np.int8)

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        return (i * grid.block_q - j * grid.block_k) % self.rate


class _OfArray(Mask):
    """A mask that is made from arrays, and hashed by their contents."""

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for array in self._arrays():
            digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(map(np.asarray, super()._key()))

    def _key(self) -> tuple[Any, ...]:
        return (self._digest,)


@dataclass(frozen=True, eq=False)
class Dense(_OfArray):
    """Any mask, as a numpy array of booleans [T, S], or [H, T, S] with one mask per head."""

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
        return _kinds_of_rows(grid, values.shape[0], lambda rows: values[:, rows])


@dataclass(frozen=True, eq=False)
class BlockSparse(_OfArray):
    """Whole blocks of `block_shape` (queries, keys) that attend: a numpy array of booleans, one per block."""

    blocks: np.ndarray
    block_shape: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, np.ndarray) or self.blocks.dtype != np.bool_ or self.blocks.ndim != 2:
            raise ValueError(
                "blocks of BlockSparse must be a numpy array of bool, [blocks of queries, blocks of keys]; "
                "pass np.asarray(blocks, bool)"
            )
        sizes = self.block_shape if isinstance(self.block_shape, tuple | list) else ()
        if len(sizes) != 2 or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
            raise ValueError(
                f"block_shape={self.block_shape!r} of BlockSparse must be two positive integers; use (128, 128)"
            )

    def __repr__(self) -> str:
        return f"BlockSparse({list(self.blocks.shape)}, {tuple(self.block_shape)})"

    def misfit(self, heads: int, t: int, s: int) -> str | None:
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
    """A query attends to keys of its own segment: ids [T], and [S] where those of the keys differ. Known when traced.

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


@dataclass(frozen=True, eq=False)
class MaskFn(Mask):
    """Any predicate: `MaskFn(lambda q_idx, kv_idx: ...)`, a function of numpy arrays of positions that broadcast.

    Nothing is known about it but its values, so all T x S of them are computed when traced, a row of blocks at a time.
    """

    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"function={self.function!r} of MaskFn must be a function of positions; "
                f"use MaskFn(lambda q_idx, kv_idx: kv_idx <= q_idx)"
            )

    def __repr__(self) -> str:
        return f"MaskFn({getattr(self.function, '__name__', 'function')})"

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        q_idx, kv_idx = np.asarray(rows, np.int64) + q_offset, np.asarray(columns, np.int64)
        try:
            # Functions of jax.numpy are evaluated as well, although a call is being traced.
            with jax.ensure_compile_time_eval():
                values = np.asarray(self.function(q_idx, kv_idx))
        except ValueError as error:
            raise ValueError(
                f"{self} does not take numpy arrays of positions ({error}); it must be elementwise: join with &, | and ~"
            ) from error
        shape = np.broadcast_shapes(np.shape(rows), np.shape(columns))
        if values.dtype != np.bool_ or np.broadcast_shapes(values.shape, shape) != shape:
            raise ValueError(
                f"{self} returned {values.dtype}{list(values.shape)} for indices of shape {list(shape)}; it must return "
                f"booleans of that shape: compare with ==, <, and join with &, | and ~"
            )
        return values

    def kinds(self, grid: Grid) -> np.ndarray:
        columns = np.arange(grid.s)[None, :]

        def values(rows: slice) -> np.ndarray:
            kept = self.keep(np.arange(rows.start, rows.stop)[:, None], columns, grid.q_offset)
            return np.broadcast_to(kept, (1, rows.stop - rows.start, grid.s))

        return _kinds_of_rows(grid, 1, values)


@dataclass(frozen=True, eq=False)
class PerHead(Composed):
    """One mask per head."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", () if isinstance(self.masks, Mask) else tuple(self.masks))
        if not self.masks or any(not isinstance(mask, Mask) or mask.num_heads is not None for mask in self.masks):
            raise ValueError(
                f"masks={self.masks!r} of PerHead must be masks without heads of their own, one for each head: "
                f"PerHead((Causal(), Prefix(8)))"
            )

    def children(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return len(self.masks)

    @property
    def computable(self) -> bool:  # type: ignore[override]
        return False  # The predicate depends on the head.

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
