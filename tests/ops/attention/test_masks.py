"""Masks as values: their predicates, the blocks they leave to visit, and the block list made from those."""

import time
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import masks
from tilewright.masks.algebra import Mask
from tilewright.masks.block_list import (
    CONTENT_SHIFT,
    EMPTY,
    FIRST,
    FULL,
    KIND_SHIFT,
    LAST,
    PARTIAL,
    Grid,
    block_list,
    block_table,
)
from tilewright.masks.library import Causal, SlidingWindow

T, S = 45, 61
RANDOM = np.random.default_rng(0)

leaves = st.one_of(
    st.builds(masks.Causal, st.integers(-20, 20)),
    st.builds(masks.SlidingWindow, st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
    st.builds(masks.Prefix, st.integers(0, 70)),
    st.builds(masks.Dilated, st.integers(1, 9)),
    st.just(masks.Dense(RANDOM.random((T, S)) > 0.5)),
    st.just(masks.BlockSparse(RANDOM.random((4, 6)) > 0.5, (12, 11))),
    st.just(masks.Segments(np.arange(T) // 17, np.arange(S) // 20)),
    st.just(masks.MaskFn(lambda q, k: (q * k) % 5 < 2)),
)
any_mask = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(mask=any_mask, block_q=st.integers(3, 50), block_k=st.integers(3, 70), q_offset=st.integers(-5, 40))
def test_blocks_are_the_mask(mask: Mask, block_q: int, block_k: int, q_offset: int) -> None:
    """Empty, full and partial blocks together are the predicate itself, and no block is called partial without need."""
    grid = Grid(T, S, block_q, block_k, q_offset)
    table = block_table(mask, grid)
    whole = mask.dense(T, S, q_offset)
    for head, i, j in np.ndindex(table.kinds.shape):
        rows, columns = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
        block = whole[head, rows, columns]
        kind = FULL if block.all() else PARTIAL if block.any() else EMPTY
        assert table.kinds[head, i, j] == kind
        if kind == PARTIAL:
            held = table.contents[table.content[head, i, j]]
            np.testing.assert_array_equal(held[: block.shape[0], : block.shape[1]], block)
    assert table.density == pytest.approx(whole.mean())
    assert mask.density(T, S, q_offset=q_offset) == pytest.approx(whole.mean())


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kinds=st.integers(1, 3).flatmap(
        lambda lists: st.lists(st.integers(0, 2), min_size=lists * 20, max_size=lists * 20).map(
            lambda flat: np.array(flat, np.int8).reshape(lists, 4, 5)
        )
    ),
    stationary=st.sampled_from(["q", "k"]),
)
def test_a_block_list_visits_each_block_once_in_order(kinds: np.ndarray, stationary: str) -> None:
    content = np.arange(kinds.size, dtype=np.int32).reshape(kinds.shape)
    nothing = np.zeros_like(content)
    made = block_list(kinds, content, nothing, nothing + 1, stationary=stationary)
    at_run_time = block_list(
        jnp.asarray(kinds, jnp.int32),
        jnp.asarray(content),
        jnp.asarray(nothing),
        jnp.asarray(nothing + 1),
        stationary=stationary,
        most=20,
    )
    for number in range(kinds.shape[0]):
        coordinates, flags = (a.reshape(-1, made.steps)[number] for a in (made.coordinates, made.flags))
        ordered = kinds[number] if stationary == "q" else kinds[number].T
        expected = []
        for stay, row in enumerate(ordered):
            visited = [stream for stream in range(len(row)) if row[stream]] or [0]
            expected += [(stay, stream, stream == visited[0], stream == visited[-1]) for stream in visited]
        for step, (stay, stream, first, last) in enumerate(expected):
            i, j = (stay, stream) if stationary == "q" else (stream, stay)
            assert (coordinates[step] >> 16, coordinates[step] & 0xFFFF) == (i, j)
            assert (bool(flags[step] & FIRST), bool(flags[step] & LAST)) == (first, last)
            assert (flags[step] >> KIND_SHIFT) & 3 == kinds[number, i, j]
            if kinds[number, i, j] == PARTIAL:
                assert flags[step] >> CONTENT_SHIFT == content[number, i, j]
        assert not np.any(flags[len(expected) :] & (FIRST | LAST | 3 << KIND_SHIFT))
        # The same list, made inside a program that knows only how long it may be.
        np.testing.assert_array_equal(at_run_time.coordinates.reshape(-1, 20)[number, : made.steps], coordinates)
        np.testing.assert_array_equal(
            at_run_time.flags.reshape(-1, 20)[number, : len(expected)], flags[: len(expected)]
        )


def test_a_long_causal_window_is_planned_in_no_time_and_little_memory() -> None:
    length = 131_072
    block_table.cache_clear()
    tracemalloc.start()
    began = time.perf_counter()
    table = block_table(Causal() & SlidingWindow(1023, None), Grid(length, length, 1024, 1024))
    made = block_list(table.kinds, table.content, *table.tiles("k", 512), stationary="q")
    seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1
    assert peak < 6 * 2**20
    assert made.steps == 2 * 128 - 1  # Its own block and the one before.
    assert len(table.contents) == 2


def test_work_grows_with_the_window_not_with_the_square_of_the_length() -> None:
    visited = {}
    for length in (32_768, 65_536, 131_072):
        for mask in (Causal(), Causal() & SlidingWindow(1023, None)):
            visited[length, mask] = block_table(mask, Grid(length, length, 512, 512)).visited
    window = Causal() & SlidingWindow(1023, None)
    assert visited[131_072, window] == 3 * 256 - 3
    assert visited[131_072, window] + 3 == 2 * (visited[65_536, window] + 3) == 4 * (visited[32_768, window] + 3)
    assert visited[131_072, Causal()] == 256 * 257 // 2


def test_heads_may_have_masks_of_their_own() -> None:
    mask = masks.PerHead((Causal(), SlidingWindow(3, 3), Causal())) & masks.Prefix(30)
    assert mask.num_heads == 3
    table = block_table(mask, Grid(T, T, 8, 8))
    whole = mask.dense(T, T)
    assert table.density == pytest.approx(whole.mean())
    np.testing.assert_array_equal(whole[0], whole[2])
    np.testing.assert_array_equal(table.content[0], table.content[2])


def test_masks_are_values() -> None:
    dense = np.eye(4, dtype=bool)
    assert Causal() & masks.Prefix(3) == Causal() & masks.Prefix(3)
    assert hash(masks.Dense(dense)) == hash(masks.Dense(dense.copy()))
    assert masks.Dense(dense) != masks.Dense(~dense)
    assert Causal() != Causal(1)


def test_a_mask_is_drawn(tmp_path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    ax = (Causal() & SlidingWindow(30, None)).plot(200, 200)
    assert "SlidingWindow" in ax.get_title()
    assert "%" in ax.get_title()
    ax.figure.savefig(tmp_path / "mask.png")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SlidingWindow(-1, 0), r"left=-1 of SlidingWindow must be a number of tokens, 0 or more"),
        (lambda: masks.Dilated(0), r"rate=0 of Dilated must be a positive integer"),
        (lambda: masks.Dense(np.zeros((3, 3))), r"values=float64\[3, 3\] of Dense must be a numpy array of bool"),
        (lambda: masks.BlockSparse(np.zeros((3, 3)), (8, 8)), r"blocks of BlockSparse must be a numpy array of bool"),
        (lambda: masks.BlockSparse(np.zeros((3, 3), bool), (8, 0)), r"block_shape=\(8, 0\) of BlockSparse must be"),
        (lambda: masks.Segments(np.zeros((3,))), r"q_ids of Segments must be a numpy array of integers"),
        (lambda: masks.PerHead(()), r"masks=\(\) of PerHead must be masks without heads of their own"),
        (lambda: masks.MaskFn(lambda q, k: q + k).dense(3, 3), r"MaskFn\(<lambda>\) returned int64.*return booleans"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_function_of_jax_numpy_and_large_products_of_positions() -> None:
    """Under jit, where jax.numpy would trace; and past int32, which blocks of positions were once of."""
    mask = masks.MaskFn(lambda q, k: jnp.abs(q - k) < 3)
    found = jax.jit(lambda: jnp.asarray(mask.dense(6, 6)[0]))()
    np.testing.assert_array_equal(found, masks.SlidingWindow(2, 2).dense(6, 6)[0])
    large = masks.MaskFn(lambda q, k: (q * 60_000) * (k + 1) >= 0)
    table = block_table(large, Grid(70_000, 4, 35_000, 4))
    assert np.all(table.kinds == FULL)


def unchecked(kind: type[Mask], **fields: Any) -> None:
    """A mask's own check, without that of types which tests run under."""
    mask = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(mask, name, value)
    mask.__post_init__()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: unchecked(masks.Causal, offset=1.5), r"offset=1.5 of Causal must be an integer; use 0"),
        (
            lambda: unchecked(masks.Prefix, n=jnp.int32(3)),
            r"n=.* of Prefix must be a number of keys, 0 or more; .*as a mask array",
        ),
        (lambda: masks.Prefix(-1), r"n=-1 of Prefix must be a number of keys, 0 or more"),
        (
            lambda: unchecked(masks.SlidingWindow, left=2.0, right=0),
            r"left=2.0 of SlidingWindow must be a number of tokens, 0 or more; use None",
        ),
        (
            lambda: unchecked(masks.BlockSparse, blocks=np.ones((1, 1), bool), block_shape=8),
            r"block_shape=8 of BlockSparse must be two positive integers; use \(128, 128\)",
        ),
        (
            lambda: unchecked(masks.MaskFn, function=3),
            r"function=3 of MaskFn must be a function of positions; use MaskFn\(lambda",
        ),
        (
            lambda: masks.MaskFn(lambda q, k: q > k and k > 2).dense(4, 4),
            r"MaskFn\(<lambda>\) .*join with &, \| and ~",
        ),
        (
            lambda: unchecked(masks.PerHead, masks=masks.Causal()),
            r"of PerHead must be masks .*PerHead\(\(Causal\(\), Prefix\(8\)\)\)",
        ),
        (lambda: masks.Dense(np.ones((8, 8), bool)).density(16, 16), r"T=16 and S=16 do not fit the mask: Dense"),
    ],
)
def test_a_mask_that_makes_no_sense_says_so(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("other", [np.ones((4, 4), bool), jnp.ones((4, 4), bool), True])
def test_a_mask_combines_with_masks_only(other) -> None:
    for combine in (lambda: masks.Causal() & other, lambda: other | masks.Causal()):
        with pytest.raises(TypeError, match=r"is no mask, and a mask combines with masks only; wrap .* Dense\(array\)"):
            combine()
    assert masks.Causal().density(0, 8) == 0
