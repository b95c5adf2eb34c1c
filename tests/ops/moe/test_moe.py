"""Mixture of experts: the router against loops in NumPy, rows sorted and back, the losses, transformations and meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.composition import mesh_of
from tilewright import moe_combine, moe_dispatch, moe_load_balance_loss, moe_route, moe_sort, moe_z_loss

E, K, D = 12, 3, 10
BIAS = np.linspace(0.6, -0.4, E).astype(np.float32)
ROUTERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"normalize": False},
    "qwen3_next": {},
    "kimi_linear": {"scoring": "sigmoid", "bias": BIAS, "scale": 2.446},
    "deepseek_v3": {"scoring": "sigmoid", "bias": BIAS, "groups": (4, 2), "scale": 2.5},
    "softmax_groups": {"groups": (6, 3), "bias": BIAS, "normalize": False},
}
QUICK = ("qwen3_moe", "qwen3_next", "deepseek_v3")
every_router = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ROUTERS]
)


def draw(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def route_one(
    logits: np.ndarray,
    chosen: list[int] | None = None,
    *,
    scoring: str = "softmax",
    bias: np.ndarray | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] | None = None,
) -> tuple[np.ndarray, list[int]]:
    """The router of one token, in NumPy and float64; the weights of the experts `chosen` where they are given."""
    exp = np.exp(logits - logits.max())
    scores = exp / exp.sum() if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    wanted = scores if bias is None else scores + np.asarray(bias, np.float64)
    allowed = list(range(len(logits)))
    if groups is not None:
        size = len(logits) // groups[0]
        members = [allowed[g * size : (g + 1) * size] for g in range(groups[0])]
        ranked = sorted(range(groups[0]), key=lambda g: (-sum(sorted(wanted[members[g]])[-2:]), g))
        allowed = [e for g in ranked[: groups[1]] for e in members[g]]
    chosen = chosen or sorted(allowed, key=lambda e: (-wanted[e], e))[:K]
    weights = scores[chosen]
    weights = weights / weights.sum() if normalize else weights
    return weights * scale, chosen


def slopes(logits: np.ndarray, chosen: list[int], cotangent: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """The gradient of one token's logits by central differences, the choice held fixed."""
    steps = 1e-6 * np.eye(E)
    rise = [route_one(logits + s, chosen, **options)[0] - route_one(logits - s, chosen, **options)[0] for s in steps]
    return np.array(rise) @ cotangent / 2e-6


@functools.cache
def jitted(name: str) -> Any:
    """(logits, cotangent) -> weights, experts, and the gradients of logits and bias."""
    options = dict(ROUTERS[name])
    bias = jnp.asarray(options.pop("bias", np.zeros(E, np.float32)))

    def run(logits: jax.Array, cotangent: jax.Array) -> Any:
        weights, pull_back, experts = jax.vjp(
            lambda logits, bias: moe_route(logits, K, bias=bias, **options), logits, bias, has_aux=True
        )
        return weights, experts, *pull_back(cotangent)

    return jax.jit(run)


@every_router
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_router_against_a_loop_over_tokens(name: str, dtype: str) -> None:
    """Values, and gradients through the weights alone: none through the choice, none to the bias."""
    logits, cotangent = draw(8, E, dtype=dtype), draw(8, K, seed=1)
    weights, experts, d_logits, d_bias = jitted(name)(logits, cotangent)
    assert (weights.dtype, experts.dtype, d_logits.dtype) == (jnp.float32, jnp.int32, logits.dtype)
    assert not np.any(d_bias)
    for n, row in enumerate(np.asarray(logits, np.float64)):
        want, chosen = route_one(row, **ROUTERS[name])
        assert experts[n].tolist() == chosen
        np.testing.assert_allclose(weights[n], want, rtol=2e-6, atol=1e-7)
        rounding = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
        got = np.asarray(d_logits[n], np.float64)
        np.testing.assert_allclose(got, slopes(row, chosen, np.asarray(cotangent[n]), ROUTERS[name]), atol=rounding)


@every_router
def test_extreme_logits(name: str) -> None:
    """Softmax and sigmoids that underflow: finite weights and gradients, and experts that exist."""
    logits = jnp.concatenate([1e4 * draw(4, E), jnp.full((2, E), -1e4), jnp.full((2, E), 1e4)])
    weights, experts, d_logits, _ = map(np.asarray, jitted(name)(logits, draw(8, K, seed=1)))
    assert np.isfinite(weights).all()
    assert np.isfinite(d_logits).all()
    assert np.all((experts >= 0) & (experts < E))
    assert all(len(set(row)) == K for row in experts.tolist())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_nan_among_the_logits_of_a_token_is_in_its_weights(scoring: Any) -> None:
    logits = jnp.array([[1.0, jnp.nan, 2.0, 3.0], [1.0, 0.0, 2.0, 3.0]])
    for k in (1, 2):
        weights, _ = tilewright.moe_route(logits, k, scoring=scoring)
        assert np.all(np.isnan(weights[0]))
        assert np.all(np.isfinite(weights[1]))


def test_infinite_logits_and_a_nan_in_the_bias() -> None:
    """A softmax of +inf is NaN, a sigmoid of it 1; -inf is an expert with the score 0. A bias of NaN orders nothing."""
    logits = jnp.zeros((3, 4)).at[0, 3].set(jnp.inf).at[1, 0].set(-jnp.inf)
    for normalize in (True, False):
        weights, _ = moe_route(logits, 3, normalize=normalize)
        np.testing.assert_array_equal(np.isnan(weights), [[True] * 3, [False] * 3, [False] * 3])
    weights, experts = moe_route(logits, 3, scoring="sigmoid")
    np.testing.assert_allclose(weights, [[0.5, 0.25, 0.25], *[[1 / 3] * 3] * 2], rtol=1e-6)
    assert experts.tolist() == [[3, 0, 1], [1, 2, 3], [0, 1, 2]]
    assert np.isnan(moe_route(logits, 3, scoring="sigmoid", bias=jnp.zeros(4).at[2].set(jnp.nan))[0]).all()


@pytest.mark.parametrize(
    ("scoring", "normalize", "of_all", "of_chosen"),
    [("softmax", True, np.nan, np.nan), ("softmax", False, np.nan, 0.0), ("sigmoid", True, 0.0, 0.0)],
)
def test_logits_of_minus_infinity(scoring: Any, normalize: bool, of_all: float, of_chosen: float) -> None:
    """Where all are, and where a bias chooses two that are."""
    least, bias = -jnp.inf, jnp.array([2.0, 2.0, 0.0, 0.0])
    logits = jnp.array([[least] * 4, [least, least, 0.0, 1.0]])
    weights, _ = moe_route(logits, 2, scoring=scoring, normalize=normalize, bias=bias)
    np.testing.assert_array_equal(weights, [[of_all] * 2, [of_chosen] * 2])


def test_of_equal_scores_the_lowest_index_comes_first() -> None:
    _, experts, *_ = jitted("qwen3_next")(jnp.zeros((8, E)), jnp.zeros((8, K)))
    np.testing.assert_array_equal(experts, np.tile(np.arange(K), (8, 1)))
    logits = jnp.tile(jnp.array([1.0, 2.0, 0.0, 2.0]), (8, E // 4))
    _, experts, *_ = jitted("qwen3_moe")(logits, jnp.zeros((8, K)))
    np.testing.assert_array_equal(experts, np.tile([1, 3, 5], (8, 1)))
    # Groups as good as each other: the first of them.
    _, experts = jax.jit(lambda logits: moe_route(logits, K, scoring="sigmoid", groups=(4, 2)))(jnp.zeros((8, E)))
    np.testing.assert_array_equal(experts, np.tile(np.arange(K), (8, 1)))


@pytest.mark.slow
def test_a_group_of_one_expert_has_its_score() -> None:
    weights, experts = moe_route(draw(6, E), K, groups=(E, K), scoring="sigmoid")
    plain_weights, plain_experts = moe_route(draw(6, E), K, scoring="sigmoid")
    np.testing.assert_array_equal(experts, plain_experts)
    np.testing.assert_array_equal(weights, plain_weights)


# Sorting.


def pairs(n: int, k: int, experts: int, seed: int = 0) -> np.ndarray:
    """k distinct experts per token, with experts that nobody chose."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(experts, k, replace=False) for _ in range(n)]
    return np.array(rows, np.int32).reshape(n, k)


@pytest.mark.parametrize(
    ("n", "k", "experts"),
    [
        (37, 3, 12),
        (0, 2, 4),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((5, 1, 40), (1, 2, 2), (64, 8, 300))),
    ],
)
def test_pairs_are_sorted_by_expert_and_stay_in_order(n: int, k: int, experts: int) -> None:
    chosen = pairs(n, k, experts)
    got = jax.jit(moe_sort, static_argnums=1)(jnp.asarray(chosen), experts)
    order = np.argsort(chosen.reshape(-1), kind="stable")
    np.testing.assert_array_equal(got.order, order)
    np.testing.assert_array_equal(got.inverse.reshape(-1)[order], np.arange(n * k))
    np.testing.assert_array_equal(got.group_sizes, np.bincount(chosen.reshape(-1), minlength=experts))


def test_experts_that_are_elsewhere_are_last_and_in_no_group() -> None:
    """A device with the experts 4 to 7 of 12."""
    chosen = pairs(20, K, E)
    got = jax.jit(moe_sort, static_argnums=1)(jnp.asarray(chosen - 4), 4)
    counts = np.bincount(chosen.reshape(-1), minlength=E)
    np.testing.assert_array_equal(got.group_sizes, counts[4:8])
    here = np.asarray(got.order)[: counts[4:8].sum()]
    np.testing.assert_array_equal(chosen.reshape(-1)[here], np.sort(chosen[(chosen >= 4) & (chosen < 8)]))


def moe(x: jax.Array, logits: jax.Array, w: jax.Array) -> jax.Array:
    """All of it around a product that stands in for the experts: row times its expert's vector."""
    weights, experts = moe_route(logits, K)
    sorting = moe_sort(experts, E)
    rows = moe_dispatch(x, sorting)
    own = jnp.repeat(w, sorting.group_sizes, axis=0, total_repeat_length=rows.shape[0])
    return moe_combine(jnp.tanh(rows * own.astype(rows.dtype)), weights, sorting)


def moe_plainly(x: jax.Array, logits: jax.Array, w: jax.Array) -> jax.Array:
    """The same with all experts of all tokens."""
    weights, experts = moe_route(logits, K)
    every = jnp.tanh(x[:, None] * w[None])  # [N, E, D]
    return jnp.einsum("nk,nkd->nd", weights, jnp.take_along_axis(every, experts[..., None], axis=1))


def test_rows_go_to_their_experts_and_back() -> None:
    """Values and gradients of x, of the logits through the weights, and of the experts."""
    arguments = draw(23, D), draw(23, E, seed=1), draw(E, D, seed=2)
    cotangent = draw(23, D, seed=3)

    def both(function: Any) -> Any:
        def run(*given: jax.Array) -> Any:
            y, pull_back = jax.vjp(function, *given)
            return y, *pull_back(cotangent)

        return jax.jit(run)(*arguments)

    for ours, theirs in zip(both(moe), both(moe_plainly), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def test_bfloat16_is_summed_in_float32() -> None:
    """256 and fifteen times 1: bfloat16 has 256 + 1 = 256."""
    n, k = 2, 16
    weights = jnp.concatenate([jnp.full((n, 1), 256.0), jnp.ones((n, k - 1))], axis=1)

    @jax.jit
    def both(rows: jax.Array, x: jax.Array) -> Any:
        sorting = moe_sort(jnp.tile(jnp.arange(k, dtype=jnp.int32), (n, 1)), k)
        _, pull_back = jax.vjp(lambda x: moe_dispatch(x, sorting), x)
        y = moe_combine(rows, weights, sorting)
        # The gradient of a token's pairs: 256 for its first choice and 1 for the others.
        return y, *pull_back(rows * weights.T.reshape(-1)[:, None].astype(rows.dtype))

    for got in both(jnp.ones((n * k, D), jnp.bfloat16), jnp.ones((n, D), jnp.bfloat16)):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.astype(jnp.float32), 272.0)  # 271 to the nearest.


def equations_in(jaxpr: Any) -> list[Any]:
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += equations_in(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.slow
def test_rows_that_a_gpu_copies_as_32_bits_are_the_same_bits() -> None:
    x, weights = draw(7, D, dtype="bfloat16"), draw(7, K, seed=1)
    order = moe_sort(jax.random.randint(jax.random.key(2), (7, K), 0, E), E)

    def there_and_back(x: jax.Array, weights: jax.Array) -> jax.Array:
        return moe_combine(moe_dispatch(x, order) * 3, weights, order)

    def results() -> Any:
        y, pull_back = jax.vjp(there_and_back, x, weights)
        return y, pull_back(draw(7, D, dtype="bfloat16", seed=3))

    expected = results()
    with tilewright.target("h200"):
        found = results()
        assert "uint32" in str(jax.make_jaxpr(there_and_back)(x, weights))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_nothing_scatters_and_no_array_has_tokens_times_experts() -> None:
    """Forward and gradient: gathers and sums in a fixed order, and arrays of N k D, N E (the logits') or less."""
    n, experts, d = 59, 53, 61

    def around(x: jax.Array, logits: jax.Array) -> jax.Array:
        weights, chosen = moe_route(logits, K, scoring="sigmoid", bias=jnp.ones(experts))
        sorting = moe_sort(chosen, experts)
        y = moe_combine(jnp.tanh(moe_dispatch(x, sorting)), weights, sorting)
        return jnp.sum(y) + moe_load_balance_loss(logits, chosen) + moe_z_loss(logits)

    gradient = jax.grad(around, (0, 1))
    arguments = draw(n, d), draw(n, experts)
    for equation in equations_in(jax.make_jaxpr(gradient)(*arguments).jaxpr):
        assert "scatter" not in equation.primitive.name
        for x in equation.outvars:
            assert x.aval.size <= n * K * d, equation
            if {experts, experts + 1} & set(x.aval.shape) and x.aval.size > n * experts:
                raise AssertionError(f"an array of {x.aval.shape}: {equation}")
    compiled = jax.jit(gradient).lower(*arguments).compile()
    assert " scatter(" not in compiled.as_text()
    first, second = (compiled(*arguments) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


# Losses.


def balance_in_numpy(layers: list[np.ndarray], k: int, mask: np.ndarray | None = None) -> float:
    """transformers' formula, with its one-hot arrays: all layers' tokens in a row; logits [B T, E] each, mask [B, T]."""
    logits = np.concatenate(layers).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k]
    one_hot = np.eye(logits.shape[1])[chosen]  # [tokens, k, E]
    if mask is None:
        per_expert, probability = one_hot.mean(0), probabilities.mean(0)
    else:
        kept = np.tile(mask.reshape(-1), len(layers)).astype(np.float64)
        per_expert = (one_hot * kept[:, None, None]).sum(0) / kept.sum()
        probability = (probabilities * kept[:, None]).sum(0) / kept.sum()
    return float((per_expert * probability[None]).sum() * logits.shape[1])


@pytest.mark.parametrize("masked", [False, True])
def test_the_load_balance_loss_is_that_of_transformers(masked: bool) -> None:
    logits = draw(2, 3, 11, E)  # Two layers of [B, T, E].
    _, experts = jax.jit(moe_route, static_argnums=1)(logits, K)
    mask = np.random.default_rng(0).integers(0, 2, (3, 11)) if masked else None
    want = balance_in_numpy([np.asarray(layer).reshape(-1, E) for layer in logits], K, mask)
    every = None if mask is None else jnp.asarray(np.broadcast_to(mask, (2, 3, 11)))
    np.testing.assert_allclose(jax.jit(moe_load_balance_loss)(logits, experts, mask=every), want, rtol=1e-5)
    if masked:
        counted = np.asarray(logits)[:, mask.astype(bool)]
        np.testing.assert_allclose(want, balance_in_numpy(list(counted), K), rtol=1e-6)


def test_the_load_balance_loss_is_k_for_equal_loads_and_moves_the_probabilities() -> None:
    experts = jnp.stack([jnp.arange(E), (jnp.arange(E) + 1) % E], axis=1)
    np.testing.assert_allclose(jax.jit(moe_load_balance_loss)(jnp.zeros((E, E)), experts), 2.0, rtol=1e-6)
    # All tokens at one expert: the gradient lowers its probability and raises the others'.
    crowded = jnp.zeros((E, 1), jnp.int32)
    for scoring in ("softmax", "sigmoid"):
        loss = functools.partial(moe_load_balance_loss, scoring=scoring)
        gradient = jax.jit(jax.grad(loss))(jnp.zeros((E, E)), crowded)
        assert np.all(np.asarray(gradient)[:, 0] > 0)
        assert np.all(np.asarray(gradient)[:, 1:] < 0)


def test_the_z_loss() -> None:
    logits = draw(2, 9, E)
    mask = jnp.arange(18).reshape(2, 9) % 3 > 0
    each = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1)) ** 2
    run = jax.jit(moe_z_loss)
    np.testing.assert_allclose(run(logits), each.mean(), rtol=1e-5)
    np.testing.assert_allclose(run(logits, mask=mask), each[np.asarray(mask)].mean(), rtol=1e-5)
    assert run(logits, mask=jnp.zeros((2, 9), bool)) == 0


def _both_losses(logits: jax.Array, scoring: Any, mask: jax.Array | None) -> jax.Array:
    experts = jnp.zeros((*logits.shape[:-1], K), jnp.int32)
    return moe_load_balance_loss(logits, experts, scoring=scoring, mask=mask) + moe_z_loss(logits, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_of_extreme_masked_and_no_tokens(scoring: Any) -> None:
    """Scores that underflow, NaN and infinities at a token that does not count: finite, and 0 of no tokens."""
    run = jax.jit(jax.value_and_grad(functools.partial(_both_losses, scoring=scoring)))
    logits, mask = draw(4, E), jnp.array([False, True, True, True])
    value, gradient = run(logits.at[0].set(-200.0), mask=None)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    value, gradient = run(logits[1:], mask=None)
    for spoiled in (jnp.nan, jnp.inf, -jnp.inf):
        got, d_logits = run(logits.at[0].set(spoiled), mask=mask)
        np.testing.assert_allclose(got, value, rtol=1e-6)
        np.testing.assert_allclose(d_logits, jnp.pad(gradient, ((1, 0), (0, 0))), rtol=1e-5, atol=1e-7)
    assert _both_losses(logits[:0], scoring, None) == 0
    assert _both_losses(logits, scoring, ~mask & mask) == 0


# Transformations and meshes.


@pytest.mark.slow
def test_vmap() -> None:
    x, logits, w = draw(3, 11, D), draw(3, 11, E, seed=1), draw(E, D, seed=2)
    both = jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(moe(*given))), (0, 1, 2))
    got, one = jax.jit(jax.vmap(both, (0, 0, None)))(x, logits, w), jax.jit(both)
    for row in range(3):
        for ours, want in zip(jax.tree.leaves(got), jax.tree.leaves(one(x[row], logits[row], w)), strict=True):
            np.testing.assert_allclose(ours[row], want, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_shard_map_with_replicated_experts() -> None:
    """Each device sorts its own tokens; the experts' gradient is summed, the check of varying axes on."""
    x, logits, w = draw(8, D), draw(8, E, seed=1), draw(E, D, seed=2)
    mesh = mesh_of(AxisType.Auto)

    def total(x: jax.Array, logits: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.sin(moe(x, logits, w))), ("x", "y"))

    rows = P(("x", "y"))
    sharded = jax.shard_map(total, mesh=mesh, in_specs=(rows, rows, P()), out_specs=P())
    got = jax.jit(jax.grad(sharded, (0, 1, 2)))(x, logits, w)
    want = jax.grad(lambda *given: jnp.sum(jnp.sin(moe(*given))), (0, 1, 2))(x, logits, w)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_router_and_its_losses_on_a_mesh(kind: AxisType) -> None:
    """Tokens stay where they are: the only sums over the network are those of the losses."""
    logits, options = draw(4, 6, E), dict(ROUTERS["deepseek_v3"], bias=jnp.asarray(BIAS))
    mask = jnp.arange(24).reshape(4, 6) % 5 > 0

    def both(logits: jax.Array, mask: jax.Array) -> Any:
        weights, experts = moe_route(logits, K, **options)
        balance = moe_load_balance_loss(logits, experts, scoring="sigmoid", mask=mask)
        return jnp.sum(jnp.sin(weights)) + balance + moe_z_loss(logits, mask=mask), (weights, experts)

    run = jax.jit(jax.value_and_grad(both, has_aux=True))
    want = run(logits, mask)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = (jax.device_put(x, NamedSharding(mesh, P("x", "y"))) for x in (logits, mask))
        got = run(*placed)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    if kind == AxisType.Explicit:
        (weights, experts), gradient = got[0][1], got[1]
        assert {x.sharding.spec for x in (weights, experts, gradient)} == {P("x", "y", None)}


def test_what_an_explicit_mesh_cannot_cut_is_told() -> None:
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        logits = jax.device_put(draw(4, E), NamedSharding(mesh, P(None, "y")))
        with pytest.raises(
            ValueError, match=r"moe_route: logits is sharded over mesh axis 'y' along its axis E, of .*, and .*"
        ):
            moe_route(logits, K)
        experts = jax.device_put(jnp.zeros((4, K), jnp.int32), NamedSharding(mesh, P("x")))
        with pytest.raises(
            ValueError, match=r"moe_sort: experts is sharded over mesh axis 'x', .*jax.shard_map, as .*MoE"
        ):
            moe_sort(experts, E)
        rows = jax.device_put(draw(4 * K, 8), NamedSharding(mesh, P("x")))
        with pytest.raises(
            ValueError, match=r"moe_combine: rows is sharded over mesh axis 'x', and rows are sorted among"
        ):
            moe_combine(rows, draw(4, K), moe_sort(jnp.zeros((4, K), jnp.int32), E))


def _moved(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    sorting = moe_sort(experts, E)
    return moe_combine(jnp.sin(moe_dispatch(x, sorting)), weights, sorting)


def test_rows_whose_columns_are_sharded_stay_where_they_are() -> None:
    """Dispatch and combine under an Explicit mesh axis, values and gradients."""
    x, weights, experts = draw(6, 8), draw(6, K), jnp.arange(6 * K, dtype=jnp.int32).reshape(6, K) % E
    run = jax.jit(lambda x, weights: jax.vjp(lambda x, w: _moved(x, w, experts), x, weights)[1](jnp.cos(x)))
    mesh = mesh_of(AxisType.Explicit)
    want = run(x, weights)
    with jax.set_mesh(mesh):
        got = run(jax.device_put(x, NamedSharding(mesh, P(None, "y"))), weights)
    assert (got[0].sharding.spec, got[1].sharding.spec) == (P(None, "y"), P(None, None))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["cpu", "h200"])
def test_forward_mode_and_second_derivatives(chip: str) -> None:
    """Of routing, dispatch and combine, against plain indexing. On a GPU bfloat16 rows are copied as 32 bits."""
    dtype = jnp.float32 if chip == "cpu" else jnp.bfloat16
    logits, x = draw(6, E), draw(6, 8, seed=1).astype(dtype)

    def ours(logits: jax.Array, x: jax.Array) -> jax.Array:
        weights, experts = moe_route(logits, K, normalize=False)
        return jnp.sum(jnp.square(_moved(x, weights, experts).astype(jnp.float32)))

    def plain(logits: jax.Array, x: jax.Array) -> jax.Array:
        chosen, _ = jax.lax.top_k(jax.nn.softmax(logits), K)
        y = jnp.einsum("nk,nd->nd", chosen, jnp.sin(x).astype(jnp.float32))
        return jnp.sum(jnp.square(y.astype(dtype).astype(jnp.float32)))

    def derivatives(logits: jax.Array, x: jax.Array, function: Any) -> Any:
        directions = jax.grad(plain, argnums=(0, 1))(logits, x)  # Along the gradient the tangent does not cancel.
        _, tangent = jax.jvp(function, (logits, x), directions)
        _, hessian = jax.jvp(jax.grad(function, argnums=(0, 1)), (logits, x), directions)
        return tangent, hessian, jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(function, 1)(logits, x))))(x)

    compute = jax.jit(derivatives, static_argnums=2)
    with tilewright.target(chip):
        got = compute(logits, x, ours)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(compute(logits, x, plain)), strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=(1e-5 if chip == "cpu" else 0.03) * np.abs(other).max())


# Bad input.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 13}, r"k=13 experts cannot be chosen from E=12; use an integer from 1 to 12"),
        ({"k": jnp.int32(2)}, r"k is int32\[\]; it must be a Python integer .*static_argnames='k'"),
        ({"k": 0}, r"k=0 experts cannot be chosen"),
        ({"k": 2.0}, r"k=2.0 experts cannot be chosen"),
        ({"scoring": "relu"}, r"scoring='relu' is not a scoring; use 'softmax' or 'sigmoid'"),
        ({"groups": (5, 2)}, r"groups=\(5, 2\): 5 groups do not divide E=12 experts; use a divisor of 12"),
        ({"groups": (4, 5)}, r"groups=\(4, 5\) keeps 5 of 4 groups; keep at most 4"),
        ({"groups": (6, 1)}, r"groups=\(6, 1\) leaves 2 of E=12 experts to choose k=3 from; keep at least 2 groups"),
        ({"groups": 4}, r"groups=4 must be \(number of groups, groups kept\), such as \(8, 4\); or None"),
        ({"bias": jnp.zeros(5)}, r"bias is float32\[5\] and logits is float32\[4, 12\]; bias must be \[E\] = \[12\]"),
        ({"bias": jnp.zeros(12, int)}, r"bias is int32\[12\]; .*: bias.astype\(jnp.float32\)"),
        ({"normalize": "yes"}, r"normalize='yes' is not True or False"),
        ({"scale": "2"}, r"scale='2' must be a number that is known when traced"),
        ({"logits": jnp.zeros((4, 12), jnp.int32)}, r"logits is int32\[4, 12\]; it must be \[..., E\] of float32"),
    ],
)
def test_a_bad_router_is_named_with_its_remedy(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_route(**{"logits": draw(4, E), "k": K} | change)


def test_bad_rows_are_named_with_their_remedy() -> None:
    sorting = moe_sort(jnp.zeros((4, K), jnp.int32), E)
    rows, weights = jnp.zeros((4 * K, D)), jnp.zeros((4, K))
    for function, message in (
        (
            lambda: moe_sort(jnp.zeros((4, K)), E),
            r"experts is float32\[4, 3\]; it must be \[N, k\] integers, the second result of moe_route",
        ),
        (lambda: moe_sort(jnp.zeros((2, 4, K), jnp.int32), E), r"experts is int32\[2, 4, 3\]; it must be \[N, k\]"),
        (lambda: moe_sort(jnp.zeros((4, 0), jnp.int32), E), r"each token has at least one expert"),
        (lambda: moe_sort(jnp.zeros((4, K), jnp.int32), 0), r"num_experts=0 must be a positive integer"),
        (lambda: moe_dispatch(jnp.zeros((5, D)), sorting), r"x is float32\[5, 10\]; it must be \[N, D\] with N=4"),
        (lambda: moe_dispatch(jnp.zeros((4, D), "float16"), sorting), r"x is float16\[4, 10\]; .*: x.astype\(jnp.bfl"),
        (lambda: moe_dispatch(jnp.zeros((4, D)), None), r"sorting is a NoneType; pass what moe_sort"),
        (
            lambda: moe_combine(rows[1:], weights, sorting),
            r"rows is float32\[11, 10\]; it must be \[N k, D\] = \[12, D\]",
        ),
        (lambda: moe_combine(rows, weights.T, sorting), r"weights is float32\[3, 4\]; it must be \[N, k\] = \[4, 3\]"),
        (
            lambda: moe_load_balance_loss(draw(4, E), jnp.zeros((5, K), jnp.int32)),
            r"must be \[4, k\] integers, as moe_ro",
        ),
        (
            lambda: moe_z_loss(draw(4, E), mask=jnp.ones(3, bool)),
            r"mask is bool\[3\]; it must be \[4\] booleans or int",
        ),
        (lambda: moe_z_loss(draw(E)), r"logits is float32\[12\]; it must be \[..., E\] .*with a row per token"),
    ):
        with pytest.raises(ValueError, match=message):
            function()
