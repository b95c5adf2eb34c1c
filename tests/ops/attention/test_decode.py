"""decode_attention and paged_attention: the contract of each, and what is their own: lengths, pages, windows, errors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import OpContract, able_to_run, implementations
from tilewright import decode_attention, flash_attention, paged_attention
from tilewright.configs import DecodeTpuForward
from tilewright.core.case import Case
from tilewright.ops.attention.decode.call import DecodeCall
from tilewright.ops.attention.decode.cases import _case

IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")
every_implementation = implementations(*IMPLEMENTATIONS)


class DecodeContract(OpContract):
    """What both ops share. What lies beyond the lengths is what comes later."""

    shared = ("k_pages", "v_pages", "sinks")
    call_type = DecodeCall
    plainly_differentiable = ("xla",)
    whole_letter = "D"
    page: int | None = None

    @classmethod
    def on_properties(cls) -> Case:
        options = {"window": 90, "sinks": True, "soft_cap": 5.0}
        return _case("properties", 2, 3, 200, (4, 2), 64, 32, page=cls.page, **options)

    def extreme(self, arrays: dict) -> dict:
        return arrays | {"q": arrays["q"] * 1e4}

    def chained(self, run: Callable, arrays: dict) -> tuple:
        """Token by token: the caches end at each of them in turn."""
        t, lengths = arrays["q"].shape[1], arrays["lengths"]
        tokens = [
            run({**arrays, "q": arrays["q"][:, i : i + 1], "lengths": jnp.maximum(lengths - (t - 1 - i), 0)})
            for i in range(t)
        ]
        return tuple(jnp.concatenate(values, axis=1) for values in zip(*tokens, strict=True))

    def earlier(self, name: str, values: Any, t: int) -> Any:
        return values


class TestDecode(DecodeContract):
    op_name = "decode_attention"

    def replace_later(self, arrays: dict, other: dict, t: int) -> dict:
        beyond = jnp.arange(arrays["k"].shape[1])[None, :] >= arrays["lengths"][:, None]
        later = {name: jnp.where(beyond[..., None, None], 100 * other[name], arrays[name]) for name in ("k", "v")}
        return {**arrays, **later}


class TestPaged(DecodeContract):
    op_name = "paged_attention"
    shares_code_with = "decode_attention"
    interpreted_slowly = frozenset({"pallas_gpu", "pallas_tpu"})
    page = 32

    def replace_later(self, arrays: dict, other: dict, t: int) -> dict:
        """Pages that no token is in may be any."""
        table = arrays["page_table"]
        beyond = self.page * jnp.arange(table.shape[1])[None, :] >= arrays["lengths"][:, None]
        return {**arrays, "page_table": jnp.where(beyond, arrays["k_pages"].shape[0] - 1 - table, table)}


def draw(b=3, t=2, s=40, h=4, kv=2, d=16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((b, t, h, d), (b, s, kv, d), (b, s, kv, d))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


@pytest.mark.slow
@every_implementation
def test_it_is_causal_attention_at_the_end_of_each_sequence(implementation: str) -> None:
    """Each sequence by itself, cut to its length, with flash_attention; what the cache holds beyond is never used."""
    q, k, v = draw()
    lengths = jnp.array([40, 17, 2])
    beyond = (jnp.arange(40)[None, :] >= lengths[:, None])[:, :, None, None]
    k_dirty, v_dirty = (jnp.where(beyond, jnp.nan, cache) for cache in (k, v))
    with able_to_run(implementation):
        got = decode_attention(q, k_dirty, v_dirty, lengths, window=9, implementation=implementation)
    for row, length in enumerate([40, 17, 2]):
        expected = flash_attention(
            q[row],
            k[row, :length],
            v[row, :length],
            causal=True,
            window=(9, 0),
            q_offset=length - 2,
            implementation="reference",
        )
        np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@every_implementation
def test_pages_in_any_order_are_the_cache_in_one_piece(implementation: str) -> None:
    q, k, v = draw(b=2, s=48)
    lengths = jnp.array([35, 16])
    table = np.array([[5, 0, 3], [1, 4, 2]])
    pools = [np.zeros((6, 16, 2, 16), np.float32) for _ in range(2)]
    for pool, cache in zip(pools, (k, v), strict=True):
        for row in range(2):
            pool[table[row]] = np.asarray(cache[row]).reshape(3, 16, 2, 16)
    # Past the length of the second sequence, which fills one page, the table may hold anything.
    dirty = jnp.asarray(table).at[1, 1:].set(jnp.array([-7, 10_000]))
    with able_to_run(implementation):
        got = paged_attention(
            q, pools[0], pools[1], dirty, lengths, implementation=implementation, return_logsumexp=True
        )
    expected = decode_attention(q, k, v, lengths, implementation="reference", return_logsumexp=True)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_lengths_at_their_ends(implementation: str) -> None:
    """No tokens give zeros; fewer tokens than queries leave the first ones without keys; out of range gives NaN."""
    q, k, v = draw(b=4)
    lengths = jnp.array([0, 1, 41, -1])
    out, logsumexp = decode_attention(q, k, v, lengths, return_logsumexp=True, implementation=implementation)
    assert not np.any(out[0])
    assert np.all(logsumexp[0] == -np.inf)
    assert not np.any(out[1, 0])
    np.testing.assert_allclose(out[1, 1], jnp.repeat(v[1, 0], 2, axis=0), rtol=1e-6)
    assert np.all(np.isnan(out[2:]))
    assert np.all(np.isnan(logsumexp[2:]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_lengths_and_pages_of_other_integers(dtype: str) -> None:
    """Also where the room, or the pool, is more than they can hold."""
    q, k, v = draw(b=2, s=304)
    lengths, table = np.array([0, 100]), np.array([[1], [0]])
    got = decode_attention(q, k, v, jnp.asarray(lengths, dtype))
    np.testing.assert_array_equal(got, decode_attention(q, k, v, jnp.asarray(lengths)))
    pools = (x.reshape(-1, 1, 2, 16) for x in (k, v))
    got = paged_attention(q, *pools, jnp.asarray(table, dtype), jnp.array([1, 1], dtype))
    np.testing.assert_allclose(got[:, 1], jnp.repeat(v[0, 1::-1], 2, axis=1), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint32"])
def test_lengths_of_other_integers_out_of_range(dtype: str) -> None:
    q, k, v = draw(b=1)
    length = jnp.asarray(np.array([-1], "int64").astype(dtype))
    assert np.all(np.isnan(decode_attention(q, k, v, length)))


def test_one_token_may_come_without_its_axis() -> None:
    q, k, v = draw(t=1)
    lengths = jnp.array([40, 17, 2])
    np.testing.assert_array_equal(decode_attention(q[:, 0], k, v, lengths), decode_attention(q, k, v, lengths)[:, 0])


def test_the_tpu_kernel_lowers_without_a_tpu() -> None:
    struct = jax.ShapeDtypeStruct
    cache = struct((64, 32, 8, 128), "bfloat16")
    with tilewright.target("v5e"):
        traced = jax.jit(paged_attention).trace(
            struct((4, 32, 128), "bfloat16"), cache, cache, struct((4, 16), "int32"), struct((4,), "int32")
        )
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


@pytest.mark.slow
@pytest.mark.parametrize("paged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_vmap_with_a_cache_and_sinks_for_each_call_is_one_kernel(paged: bool) -> None:
    """Pools of pages are joined into one; each sequence has the sinks of its call."""
    q, k, v = (jnp.stack([x, 2 * x[::-1]]) for x in draw(b=2, s=32))
    lengths, sinks = jnp.array([[30, 5], [17, 32]]), jnp.array([[0.0, 3.0, -1.0, 2.0], [-jnp.inf, 1.0, 0.5, 5.0]])
    arrays = (q, k, v, lengths, sinks)
    if paged:
        pools = (x.reshape(2, 4, 16, 2, 16) for x in (k, v))
        tables = jnp.array([[[0, 1], [2, 3]], [[2, 3], [0, 1]]])
        arrays = (q, *pools, tables, lengths, sinks)

    def run(*arrays, implementation):
        op = paged_attention if paged else decode_attention
        return op(*arrays[:-1], sinks=arrays[-1], return_logsumexp=True, implementation=implementation)

    mapped = jax.jit(jax.vmap(lambda *arrays: run(*arrays, implementation="pallas_tpu")))
    with able_to_run("pallas_tpu", plain=True):
        got = mapped(*arrays)
    with tilewright.target("v6e"):
        text = mapped.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "stablehlo.while" not in text
    for n in range(2):
        want = run(*(x[n] for x in arrays), implementation="xla")
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one[n], other, rtol=2e-5, atol=2e-6)


def test_no_sequences_give_empty_results() -> None:
    q, k, v = draw(b=0)
    lengths, table = jnp.zeros((0,), jnp.int32), jnp.zeros((0, 3), jnp.int32)
    pools = (jnp.ones((6, 16, 2, 16)),) * 2
    for shape, queries in (((0, 2, 4), q), ((0, 4), q[:, 0])):
        for got in (
            decode_attention(queries, k, v, lengths, return_logsumexp=True),
            paged_attention(queries, *pools, table, lengths, return_logsumexp=True),
        ):
            assert [x.shape for x in got] == [(*shape, 16), shape]


LENGTHS = jnp.array([40, 17, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((3, 0, 4, 16))}, r"q is float32\[3, 0, 4, 16\]; it must be .* with no axis of 0"),
        ({"q": jnp.zeros((3, 100, 4, 16))}, r"q has T=100 queries per sequence; .*use flash_attention for whole"),
        ({"q": jnp.zeros((3, 1, 3, 16))}, r"q has H=3 heads and k has KV=2; H must be a multiple of KV"),
        ({"q": jnp.zeros((3, 1, 4, 8))}, r"k is float32\[3, 40, 2, 16\] and q .*last axes must be equal \(D=8\)"),
        ({"q": jnp.zeros((3, 1, 4, 16), jnp.bfloat16)}, r"q has dtype bfloat16, k float32 .*pass q.astype\(k.dtype\)"),
        ({"k": jnp.zeros((40, 2, 16))}, r"k is float32\[40, 2, 16\]; it must be \[B, S, KV, D\]"),
        ({"k": jnp.zeros((2, 40, 2, 16))}, r"k is float32\[2, 40, 2, 16\] and q has B=3; .*a cache for each q"),
        ({"v": jnp.zeros((3, 41, 2, 16))}, r"v is float32\[3, 41, 2, 16\] and k .*only their last axes may differ"),
        ({"lengths": jnp.zeros((3,))}, r"lengths is float32\[3\]; it must be integers \[B\] = \[3\]"),
        ({"window": -1}, r"window=-1 must be a number of tokens, 0 or more; use None for all"),
        ({"window": float("inf")}, r"window=inf must be a number of tokens, 0 or more; use None for all"),
        ({"q": 1.0}, r"q is float32\[\]; it must be \[B, T, H, D\] or \[B, H, D\]"),
        ({"k": jnp.zeros((3, 0, 2, 16))}, r"k is float32\[3, 0, 2, 16\]; .* with no axis of 0"),
        ({"scale": float("inf")}, r"scale=inf must be finite; use None for D \*\* -0.5"),
        ({"scale": jnp.ones(())}, r"scale=.* is not a Python number"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be positive and finite"),
        ({"sinks": jnp.zeros((2,))}, r"sinks is float32\[2\]; it must be floating \[H\] = \[4\]"),
    ],
)
def test_bad_input_is_named_with_its_remedy(change: dict, message: str) -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match=message):
        decode_attention(**{"q": q, "k": k, "v": v, "lengths": LENGTHS} | change)


def test_bad_pages_are_named_with_their_remedy() -> None:
    q, _, _ = draw()
    pages = jnp.zeros((6, 16, 2, 16))
    with pytest.raises(ValueError, match=r"k_pages is float32\[16, 2, 16\]; it must be \[P, page, KV, D\]"):
        paged_attention(q, pages[0], pages, jnp.zeros((3, 2), jnp.int32), LENGTHS)
    with pytest.raises(
        ValueError, match=r"page_table is int32\[2, 2\] and q has B=3; it must be integers \[B, pages\]"
    ):
        paged_attention(q, pages, pages, jnp.zeros((2, 2), jnp.int32), LENGTHS)


def test_lengths_of_few_bits_and_a_table_without_pages() -> None:
    q, _, _ = draw()
    k = jnp.zeros((3, 300, 2, 16))
    np.testing.assert_array_equal(
        decode_attention(q, k, k, LENGTHS.astype(jnp.int8)), decode_attention(q, k, k, LENGTHS)
    )
    pages = jnp.zeros((6, 16, 2, 16))
    with pytest.raises(ValueError, match=r"page_table is int32\[3, 0\]; it must have a page or more"):
        paged_attention(q, pages, pages, jnp.zeros((3, 0), jnp.int32), LENGTHS)


def test_what_the_kernel_cannot_take_is_refused_with_a_way_out() -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"block_k=24 must be a positive multiple of 16 \(sublanes"):
        DecodeTpuForward(24, 1, 1)
    with (
        tilewright.target("v6e"),
        pytest.raises(
            tilewright.Unsupported, match=r"block_heads=1 must divide KV=2, and fill whole lanes .*use 2, or"
        ),
    ):
        decode_attention(q, k, v, LENGTHS, implementation="pallas_tpu", config=DecodeTpuForward(32, 1, 1))
    pages = jnp.zeros((6, 4, 2, 16))
    with (
        tilewright.target("v6e"),
        pytest.raises(
            tilewright.Unsupported, match=r"pages of 4 keys are not whole tiles of 8; use pages of 8 or more"
        ),
    ):
        paged_attention(q, pages, pages, jnp.zeros((3, 2), jnp.int32), LENGTHS, implementation="pallas_tpu")
