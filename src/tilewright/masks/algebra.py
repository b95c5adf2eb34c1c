"""What every mask is, and how masks combine: `&`, `|` and `~`. The masks themselves are in library.py."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.masks.block_list import EMPTY, FULL, Grid, block_table


class Mask:
    """A predicate of query and key. True means: attend."""

    num_heads: int | None = None
    """The number of heads it is made for; None where all heads share it."""
    computable: bool = False
    """Whether a kernel can compute it from positions alone."""

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        """The predicate for rows and columns that broadcast against each other; numpy, or jax if `computable`."""
        raise NotImplementedError

    def kinds(self, grid: Grid) -> np.ndarray:
        """EMPTY, PARTIAL or FULL for each block: [1 or heads, num_q, num_k]."""
        raise NotImplementedError

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any:
        """Equal for two blocks only if their contents are equal. This one is of its own for every block."""
        return (head if self.num_heads else 0, i, j)

    def misfit(self, heads: int, t: int, s: int) -> str | None:
        """Why it does not fit a call with `heads` heads, T queries and S keys; None where it does."""
        return None

    def _check_fit(self, t: int, s: int) -> None:
        if (misfit := self.misfit(self.num_heads or 1, t, s)) is not None:
            raise ValueError(f"T={t} and S={s} do not fit the mask: {misfit}")

    def children(self) -> "tuple[Mask, ...]":
        return ()

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._key()))

    __array_ufunc__ = None  # numpy then leaves `array & mask` to the mask.

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, self._other(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, self._other(other))

    __rand__, __ror__ = __and__, __or__

    @staticmethod
    def _other(other: Any) -> "Mask":
        if isinstance(other, Mask):
            return other
        shown = f"{other.dtype}{list(other.shape)}" if hasattr(other, "dtype") else repr(other)
        raise TypeError(
            f"{shown} is no mask, and a mask combines with masks only; wrap a numpy array as Dense(array), or give a jax "
            f"array as mask= itself, with causal= and window= beside it"
        )

    def __invert__(self) -> "Mask":
        return Not(self)

    def dense(self, t: int, s: int, q_offset: int = 0) -> np.ndarray:
        """The whole predicate, [1 or heads, T, S]. For small shapes, plots and tests."""
        rows, columns = np.arange(t)[:, None], np.arange(s)[None, :]
        each = [
            np.broadcast_to(self.keep(rows, columns, q_offset, head), (t, s)) for head in range(self.num_heads or 1)
        ]
        return np.stack(each)

    def density(self, t: int, s: int, *, q_offset: int = 0) -> float:
        """The share of the T x S pairs that attend. Blocks with equal contents are evaluated once, so it is fast."""
        self._check_fit(t, s)
        if not t * s:
            return 0.0
        block_q, block_k = (max(128, -(-length // 256)) for length in (t, s))
        return block_table(self, Grid(t, s, block_q, block_k, q_offset)).density

    def plot(self, t: int, s: int, *, q_offset: int = 0, head: int = 0, ax: Any = None, pixels: int = 512) -> Any:
        """Draws it into a matplotlib axis, queries downwards: dark where a block is full, light where it is partial."""
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError("drawing a mask needs matplotlib: pip install 'tilewright[bench]'") from error

        self._check_fit(t, s)
        block_q, block_k = max(1, -(-t // pixels)), max(1, -(-s // pixels))
        kinds = self.kinds(Grid(t, s, block_q, block_k, q_offset))
        ax = pyplot.subplots()[1] if ax is None else ax
        ax.imshow(kinds[head % kinds.shape[0]], cmap="Blues", vmin=EMPTY, vmax=FULL, extent=(0, s, t, 0), aspect="auto")
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.set_title(f"{self}, {self.density(t, s, q_offset=q_offset):.1%}")
        return ax


class Composed(Mask):
    """A mask made of others, its children."""

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


@dataclass(frozen=True, eq=False, repr=False)
class _OfTwo(Composed):
    left: Mask
    right: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.left, self.right)

    def __repr__(self) -> str:
        return f"({self.left} {'&' if isinstance(self, Both) else '|'} {self.right})"


class Both(_OfTwo):
    """`left & right`."""

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return self.left.keep(rows, columns, q_offset, head) & self.right.keep(rows, columns, q_offset, head)

    def kinds(self, grid: Grid) -> np.ndarray:
        return np.minimum(self.left.kinds(grid), self.right.kinds(grid))


class Either(_OfTwo):
    """`left | right`."""

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return self.left.keep(rows, columns, q_offset, head) | self.right.keep(rows, columns, q_offset, head)

    def kinds(self, grid: Grid) -> np.ndarray:
        return np.maximum(self.left.kinds(grid), self.right.kinds(grid))


@dataclass(frozen=True, eq=False, repr=False)
class Not(Composed):
    mask: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def __repr__(self) -> str:
        return f"~{self.mask}"

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any:
        return ~self.mask.keep(rows, columns, q_offset, head)

    def kinds(self, grid: Grid) -> np.ndarray:
        return (FULL - self.mask.kinds(grid)).astype(np.int8)


def contains(mask: Mask, kind: type[Mask]) -> Mask | None:
    """The first mask of a type inside a composition, or None."""
    if isinstance(mask, kind):
        return mask
    return next(filter(None, (contains(child, kind) for child in mask.children())), None)
