"""What only the Hopper kernel of decoding has: rows in eights, stages, splits of the keys, pages, and its limits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import able_to_run, assert_close
from tilewright import decode_attention, paged_attention
from tilewright.configs import DecodeSm90Forward


def draw(lengths, t=1, s=70, h=2, kv=1, d=64, dv=None, seed=0):
    """Queries, a clean cache, the lengths, and which keys lie past them."""
    b = len(lengths)
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((b, t, h, d), (b, s, kv, d), (b, s, kv, dv or d))
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    beyond = (np.arange(s)[None, :] >= np.asarray(lengths)[:, None])[:, :, None, None]
    return q, k, v, jnp.array(lengths), beyond


def in_pages(caches, page, seed=0):
    """Caches [B, S, KV, D] as pools, whose pages lie in no order, and the table of them. Pages in no use are NaN."""
    b, s = caches[0].shape[:2]
    count = -(-s // page)
    pool = b * count + 2
    table = np.random.default_rng(seed).permutation(pool)[: b * count].reshape(b, count)
    pools = []
    for cache in caches:
        whole = jnp.pad(cache, ((0, 0), (0, count * page - s), (0, 0), (0, 0)))
        empty = jnp.full((pool, page, *cache.shape[2:]), jnp.nan, cache.dtype)
        pools.append(empty.at[table].set(whole.reshape(b, count, page, *cache.shape[2:])))
    return *pools, jnp.asarray(table, jnp.int32)


def assert_right(lengths, *, page=None, config=None, options=None, **shape):
    """Out and logsumexp over a cache that is NaN past the lengths, by the 2x rule, against one that is clean."""
    q, k, v, lengths, beyond = draw(lengths, **shape)
    dirty = tuple(jnp.where(beyond, jnp.nan, cache) for cache in (k, v))
    options = {"return_logsumexp": True, **(options or {})}
    with able_to_run("pallas_gpu"):
        run = {"implementation": "pallas_gpu", "config": config, **options}
        if page is None:
            got = jax.jit(lambda *a: decode_attention(*a, **run))(q, *dirty, lengths)
        else:
            got = jax.jit(lambda *a: paged_attention(*a, **run))(q, *in_pages(dirty, page), lengths)
    plain = decode_attention(q, k, v, lengths, **options, implementation="xla")
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    oracle = decode_attention(*exact, lengths, **options, implementation="reference")
    has_keys = np.isfinite(oracle[1])
    assert np.array_equal(np.isfinite(got[1]), has_keys)
    assert not np.any(np.asarray(got[0], np.float32)[~has_keys])
    assert_close(got[0], plain[0], oracle[0], "out")
    assert_close(*(np.asarray(x[1])[has_keys] for x in (got, plain, oracle)), "logsumexp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        # The room is neither whole blocks nor whole eights: the last block begins earlier than its place.
        pytest.param({"lengths": [75, 0], "s": 75, "h": 1, "d": 64}, id="odd_room"),
        pytest.param(
            {"lengths": [40, 1], "s": 40, "h": 6, "kv": 2, "d": 32}, id="groups_of_3_room_of_less_than_a_block"
        ),
        pytest.param({"lengths": [64, 2], "s": 64, "t": 3, "h": 3, "d": 64}, id="fewer_keys_than_queries"),
        # The rest is the same in larger.
        pytest.param({"lengths": [70, 5], "d": 192, "dv": 128}, id="d192"),
        pytest.param({"lengths": [70, 12], "t": 12, "h": 8}, id="two_tiles_of_rows"),
        pytest.param(
            {
                "lengths": [200, 40, 3],
                "s": 200,
                "t": 2,
                "h": 6,
                "kv": 2,
                "options": {"window": 70, "soft_cap": 5.0, "sinks": np.linspace(-1, 2, 6, dtype=np.float32)},
            },
            id="window_sinks_soft_cap",
        ),
    ],
)
def test_unequal_lengths_over_a_cache_that_is_nan_past_them(arguments) -> None:
    assert_right(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("page", [8, 64, 192])
def test_pages_of_many_sizes(page: int) -> None:
    """Less than a block, one, and more; the last of a sequence is not full, and the table ends inside of a block."""
    assert_right([90, 17], s=90, t=2, h=2, page=page)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        # Five blocks in two splits: two stages are used again. One split of the short sequence is empty.
        DecodeSm90Forward(64, 2, 2),
        DecodeSm90Forward(64, 3, 1),
        DecodeSm90Forward(64, 2, 5),
        DecodeSm90Forward(128, 2, 1),
    ],
    ids=str,
)
def test_other_stages_and_splits(config: DecodeSm90Forward) -> None:
    assert_right([300, 3], s=300, h=4, d=16, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        # Unequal lengths, equal ones, and none.
        pytest.param({"lengths": [70, 0, 200, 3, 129, 70], "s": 200, "h": 4, "kv": 2, "d": 16}, id="groups_of_2"),
        pytest.param({"lengths": [90] * 3, "s": 90, "h": 2, "d": 32}, id="equal"),
        pytest.param({"lengths": [0] * 5, "s": 90, "h": 2, "d": 32}, id="zeros"),
        # Copies of a quarter of the last block, of a half and of all, next to the lengths where that changes.
        pytest.param({"lengths": [80, 81, 96, 97, 128, 129], "s": 129, "h": 2, "d": 16}, id="parts_of_a_block"),
        pytest.param(
            {"lengths": [9, 200, 65], "s": 200, "h": 8, "d": 16, "t": 2, "options": {"window": 70}}, id="tokens_window"
        ),
        pytest.param({"lengths": [9, 200, 65], "s": 200, "h": 2, "d": 16, "page": 16}, id="pages"),
        pytest.param({"lengths": [3, 300], "s": 300, "h": 4, "d": 16, "splits": 2}, id="splits"),
    ],
)
def test_long_sequences_first(arguments: dict) -> None:
    assert_right(config=DecodeSm90Forward(64, 3, arguments.pop("splits", 1), longest_first=True), **arguments)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order_of_sequences() -> None:
    """Which sequence a thread block takes depends on all lengths, also on those out of range; its sums do not."""
    q, k, v, lengths, _ = draw([70, 0, 200, 201, 3, 129, -(2**31), 2**31 - 1, 70], s=200, h=2, d=16)
    order = jnp.array([3, 2, 4, 8, 0, 1, 7, 5, 6])

    def run(longest_first: bool, *arrays: jax.Array):
        config = DecodeSm90Forward(64, 3, 1, longest_first=longest_first)
        with able_to_run("pallas_gpu"):
            return decode_attention(*arrays, return_logsumexp=True, implementation="pallas_gpu", config=config)

    arrays = q, k, v, lengths
    results = (run(True, *arrays), run(True, *(x[order] for x in arrays)), run(False, *arrays))
    for got, other, wanted in zip(*(jax.tree.map(np.float32, given) for given in results), strict=True):
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(other, wanted[order])
        assert np.flatnonzero(np.isnan(got.reshape(9, -1)).any(axis=1)).tolist() == [3, 6, 7]


_SINKS = {"sinks": np.linspace(-1, 2, 6, dtype=np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        # A sink for each head; the last group of an eight begins inside of its tile.
        pytest.param({"h": 6, "kv": 3, "d": 32, "options": _SINKS}, 1, id="groups_of_2_sinks"),
        # Rows of the output are less than a line: no tile begins earlier.
        pytest.param({"h": 3, "kv": 3, "d": 16}, 2, id="groups_of_1_narrow"),
        pytest.param({"h": 9, "kv": 9, "d": 64}, 1, id="groups_of_1"),
        pytest.param({"h": 16, "kv": 2, "d": 32}, 2, id="groups_of_8"),
        # The second tile of the first group ends in the next group's rows; that of the next begins earlier.
        pytest.param({"h": 144, "kv": 2, "d": 16}, 1, id="groups_of_72"),
        pytest.param({"h": 144, "kv": 2, "d": 16}, 2, id="groups_of_72_splits"),
        pytest.param({"t": 3, "h": 6, "kv": 2, "d": 32, "options": _SINKS}, 2, id="tokens"),
        pytest.param({"h": 2, "d": 32, "dv": 24}, 1, id="odd_width"),
    ],
)
def test_rows_of_every_kind_are_put_back(shape: dict, splits: int) -> None:
    assert_right([130, 3], s=130, config=DecodeSm90Forward(64, 2, splits), **shape)


@pytest.mark.slow
def test_more_splits_than_are_loaded_at_a_time() -> None:
    """Nearly every split of the first sequence has a block, and one of the second."""
    assert_right([64 * 70, 5], s=64 * 70, d=16, config=DecodeSm90Forward(64, 2, 70))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_at_their_ends(splits: int) -> None:
    """No tokens give zeros, with a sink of -inf too; out of range gives NaN, though the room of 65 is padded to 72."""
    q, k, v, _, _ = draw([0] * 4, s=65, d=16)
    lengths, sinks = jnp.array([0, 1, 66, -1]), jnp.array([-jnp.inf, 0.0])
    with able_to_run("pallas_gpu"):
        out, logsumexp = decode_attention(
            q,
            k,
            v,
            lengths,
            sinks=sinks,
            return_logsumexp=True,
            implementation="pallas_gpu",
            config=DecodeSm90Forward(64, 2, splits),
        )
    assert not np.any(np.asarray(out[0], np.float32))
    np.testing.assert_allclose(logsumexp[0, 0], [-np.inf, 0.0])
    np.testing.assert_array_equal(out[1, 0, 0], v[1, 0, 0])
    assert np.all(np.isnan(np.asarray(out[2:], np.float32)))
    assert np.all(np.isnan(logsumexp[2:]))


@pytest.mark.slow
def test_entries_of_the_table_past_a_length_may_be_anything() -> None:
    q, k, v, lengths, _ = draw([40, 3], s=40, d=16)
    *pools, table = in_pages((k, v), 16)
    dirty = table.at[1, 1:].set(jnp.array([-7, 10_000]))
    with able_to_run("pallas_gpu"):
        got, wanted = (paged_attention(q, *pools, t, lengths, implementation="pallas_gpu") for t in (dirty, table))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("pools_differ", [pytest.param(True, id="a_pool_each"), pytest.param(False, id="one_pool")])
def test_vmap_over_pages(pools_differ: bool) -> None:
    """Calls with a pool each, or with one that they share, are one call over more sequences."""
    q, k, v, lengths, _ = draw([40, 3], s=40, d=16)
    pools = in_pages((k, v), 16)
    # Sequences of the second call read the same pages, in the other order.
    tables = jnp.stack([pools[2], pools[2][::-1]])
    queries, lengths = jnp.stack([q, -q]), jnp.stack([lengths, lengths[::-1]])
    axes = (0, 0, 0, 0, 0) if pools_differ else (0, None, None, 0, 0)
    both = [jnp.stack([pool, 2 * pool]) if pools_differ else pool for pool in pools[:2]]

    def run(*arrays, implementation):
        return paged_attention(*arrays, return_logsumexp=True, implementation=implementation)

    batched = jax.vmap(lambda *arrays: run(*arrays, implementation="pallas_gpu"), axes)
    arrays = (queries, *both, tables, lengths)
    with able_to_run("pallas_gpu"):
        got = jax.jit(batched)(*arrays)
    with tilewright.target("h200"):
        text = jax.jit(batched).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.while" not in text
    for n in range(2):
        own = [pool[n] if pools_differ else pool for pool in both]
        want = run(queries[n], *own, tables[n], lengths[n], implementation="xla")
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(one[n], np.float32), np.asarray(other, np.float32), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "paged"), [(1, False), (2, True)])
def test_vmap_with_sinks_for_each_call(splits: int, paged: bool) -> None:
    """They stay one set for all sequences of a call."""
    q, k, v, lengths, _ = draw([40, 3], s=40, d=16)
    arrays = (q, *in_pages((k, v), 16), lengths) if paged else (q, k, v, lengths)
    sinks = jnp.array([[0.0, 3.0], [-2.0, 1.0], [-jnp.inf, 5.0]])

    def run(sinks, **options):
        op = paged_attention if paged else decode_attention
        return op(*arrays, sinks=sinks, return_logsumexp=True, **options)

    with able_to_run("pallas_gpu"):
        config = DecodeSm90Forward(64, 2, splits)
        got = jax.jit(jax.vmap(lambda s: run(s, implementation="pallas_gpu", config=config)))(sinks)
    for n in range(3):
        for one, other in zip(got, run(sinks[n], implementation="xla"), strict=True):
            np.testing.assert_allclose(np.asarray(one[n], np.float32), np.asarray(other, np.float32), atol=0.02)


def structs(b=2, t=1, s=256, h=8, kv=2, d=64, dtype="bfloat16", page=None, pages=4):
    struct = jax.ShapeDtypeStruct
    if page is None:
        return struct((b, t, h, d), dtype), *(struct((b, s, kv, d), dtype),) * 2, struct((b,), "int32")
    pool = struct((b * pages + 1, page, kv, d), dtype)
    return struct((b, t, h, d), dtype), pool, pool, struct((b, pages), "int32"), struct((b,), "int32")


@pytest.mark.parametrize(
    ("chip", "shape", "config", "message"),
    [
        (
            "a100",
            {},
            None,
            r"for Hopper GPUs .*, and the chip is a100, with compute capability 8.0; use implementation='xla'",
        ),
        (
            "b200",
            {},
            None,
            r"for Hopper GPUs .*, and the chip is b200, with compute capability 10.0; use implementation='xla'",
        ),
        ("h200", {"dtype": "float32"}, None, r"q is float32, and it multiplies bfloat16 only .*implementation='xla'"),
        ("h200", {"d": 264}, None, r"D=264 and Dv=264 must be 256 at most .*; use implementation='xla'"),
        (
            "h200",
            {"page": 4},
            None,
            r"pages of 4 keys are not whole parts of a block of 64 keys, .*; use pages of 8, 16",
        ),
        ("h200", {"page": 24}, None, r"pages of 24 keys .* or a multiple of 64 keys, or implementation='xla'"),
        ("h200", {"page": 96}, None, r"pages of 96 keys are not whole parts of a block of 64 keys"),
        ("h200", {"page": 192}, DecodeSm90Forward(128, 2, 1), r"pages of 192 keys .* a block of 128 keys"),
        (
            "h200",
            {"b": 129},
            DecodeSm90Forward(64, 3, 1, longest_first=True),
            r"longest_first with B=129 and .*: at most 128 sequences of \d+ keys .*; use longest_first=False",
        ),
        (
            "h200",
            {"d": 256},
            DecodeSm90Forward(64, 4, 1),
            r"its decode kernel needs about 2\d\d KiB of shared memory for .* D=256 .* has 227; use fewer stages",
        ),
    ],
)
def test_what_it_refuses(chip: str, shape: dict, config: DecodeSm90Forward | None, message: str) -> None:
    arrays = structs(**shape)
    op = decode_attention if len(arrays) == 4 else paged_attention
    with tilewright.target(chip):
        with pytest.raises(tilewright.Unsupported, match=message):
            jax.eval_shape(lambda *a: op(*a, implementation="pallas_gpu", config=config), *arrays)
        if config is None:
            (decision,) = tilewright.explain(op, *arrays).decisions
            assert decision.implementation == "xla"
            assert "not pallas_gpu: " in str(decision)


def test_a_config_that_breaks_a_rule_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"block_k=96 must be one of 64, 128 \(a product's columns, .*; use 64"):
        DecodeSm90Forward(96, 2, 1)
    with pytest.raises(ValueError, match=r"stages=1 must be 2 or more \(a copy runs while a block is used\); use 2"):
        DecodeSm90Forward(64, 1, 1)
    with pytest.raises(ValueError, match=r"splits=0 must be from 1 to 128; use 1"):
        DecodeSm90Forward(64, 2, 0)


def operations(op, arrays, **options) -> list[str]:
    """What a call is for XLA on an H200, by name; the kernels are custom calls."""
    with tilewright.target("h200"):
        text = jax.jit(lambda *a: op(*a, **options)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == text.count("stablehlo.custom_call")
    return re.findall(r"stablehlo\.(\w+)", text)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "page"), [(16, None), (64, 8), (128, None), (192, 64), (256, 192)])
def test_an_h200_takes_the_kernel(d: int, page: int | None) -> None:
    """By default, with stages that fit."""
    arrays = structs(d=d, page=page)
    op = decode_attention if page is None else paged_attention
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(op, *arrays).decisions
    assert decision.implementation == "pallas_gpu"
    assert "custom_call" in operations(op, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"h": 32, "kv": 8, "d": 128}, id="groups_of_4"),
        pytest.param({"h": 64, "kv": 8, "d": 64, "sinks": True}, id="groups_of_8_sinks"),
        pytest.param({"h": 16, "kv": 16, "d": 64}, id="groups_of_1"),
        pytest.param({"h": 8, "kv": 4, "d": 96, "page": 64, "sinks": True}, id="groups_of_2_pages_sinks"),
    ],
)
def test_a_call_is_one_launch_and_two_with_splits(shape: dict, splits: int) -> None:
    """Beside the kernels there is nothing but other names for the same memory."""
    arrays = structs(**{name: value for name, value in shape.items() if name != "sinks"})
    op = decode_attention if len(arrays) == 4 else paged_attention
    options = {"return_logsumexp": True, "config": DecodeSm90Forward(64, 2, splits), "implementation": "pallas_gpu"}
    if "sinks" in shape:
        arrays = *arrays, jax.ShapeDtypeStruct((shape["h"],), "float32")
    found = operations(
        lambda *a, **rest: op(*a[:-1], sinks=a[-1], **rest) if "sinks" in shape else op(*a, **rest), arrays, **options
    )
    assert found.count("custom_call") == (1 if splits == 1 else 2)
    assert set(found) <= {"custom_call", "reshape"}


@pytest.mark.parametrize("splits", [1, 4])
def test_several_tokens_are_laid_out_and_back(splits: int) -> None:
    found = operations(decode_attention, structs(t=3, d=128), config=DecodeSm90Forward(64, 2, splits))
    assert found.count("custom_call") == (1 if splits == 1 else 2)
    assert not {"gather", "reduce", "dot_general", "exponential"} & set(found)


@pytest.mark.parametrize(
    ("b", "s", "d", "wanted"),
    [
        # As measured: see docs/measurements. Two thread blocks per multiprocessor, 264 in all.
        (1, 32768, 128, DecodeSm90Forward(64, 3, 31)),
        (16, 8192, 128, DecodeSm90Forward(64, 3, 2)),
        # More than run at a time: long sequences first, up to 128.
        (64, 8192, 128, DecodeSm90Forward(64, 3, 1, longest_first=True)),
        (40, 1088, 128, DecodeSm90Forward(64, 3, 3, longest_first=True)),
        (128, 1088, 128, DecodeSm90Forward(64, 3, 1, longest_first=True)),
        (256, 1088, 128, DecodeSm90Forward(64, 3, 1)),
        # Narrower heads have more stages; with wide ones a thread block has a multiprocessor to itself.
        (16, 8192, 64, DecodeSm90Forward(64, 6, 2)),
        (16, 8192, 256, DecodeSm90Forward(64, 3, 1)),
        # A cache of one block has nothing to share.
        (1, 64, 128, DecodeSm90Forward(64, 3, 1)),
    ],
)
def test_the_heuristic_fills_the_multiprocessors(
    b: int, s: int, d: int, wanted: DecodeSm90Forward, without_tables: None
) -> None:
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(decode_attention, *structs(b=b, s=s, h=32, kv=8, d=d)).decisions
    assert decision.configs == {"forward": wanted}
    assert "backward: the gradient of implementation='xla'" in str(decision)
