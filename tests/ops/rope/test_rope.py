"""apply_rope: the contract, and what is its own: exact angles, layouts, scalings, inverses, tables, errors."""

import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.ops.contract import OpContract
from tilewright import apply_rope, rope_tables
from tilewright.ops.rope.api import Linear, Llama3, Yarn
from tilewright.ops.rope.call import RopeCall
from tilewright.ops.rope.cases import _case

every_implementation = pytest.mark.parametrize("implementation", ["xla", "reference"])


class TestContract(OpContract):
    op_name = "apply_rope"
    call_type = RopeCall
    plainly_differentiable = ("xla",)
    cuts: ClassVar = {"batch": {"B": "x"}, "heads": {"H": "y"}, "tokens": {"T": "y"}}
    whole_letter = "D"
    mesh_case = _case("mesh", 4, 6, 4, 16, most=100)
    tokens = ("x", "positions", "out")

    def chained(self, run: Callable, arrays: dict) -> tuple:
        """The positions say where the second part continues."""
        return self.joined([self.named(run(self.cut(arrays, part))) for part in (slice(0, 9), slice(9, None))])


def draw(shape=(2, 7, 3, 16), dtype="float32", seed: int = 0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def by_complex_numbers(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """An oracle in another form: a pair is a complex number, turned by e^(i a), in float64."""
    d = x.shape[-1]
    angle = positions[:, None] * theta ** (-np.arange(0, d, 2) / d)  # [T, D / 2]
    turned = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@every_implementation
def test_it_is_a_rotation_of_complex_numbers(implementation: str) -> None:
    x, positions = draw(), np.array([0, 1, 5, 100, 7, 7, 3000])
    got = apply_rope(x, jnp.asarray(positions), theta=500.0, implementation=implementation)
    expected = by_complex_numbers(np.asarray(x, np.float64), positions, 500.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("position", [0, 4095, 4096, 131_071, 1_000_003, 2**24 - 1, 2**24 + 1, 2**31 - 1])
def test_angles_are_exact_at_any_position(position: int) -> None:
    """Where a float32 product is off by radians, these are within a millionth."""
    cos, sin = rope_tables(jnp.array([position], jnp.int32), 128)
    angle = [
        math.fmod(position * float(np.longdouble(10_000.0) ** (-np.longdouble(2 * i) / 128)), 2 * math.pi)
        for i in range(64)
    ]
    # float64 has 53 bits: at a position of 2^31 its own product is right to 5e-7 only.
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=2e-6)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=2e-6)


@pytest.mark.parametrize("position", [1, 4097, 1_000_003, 2**31 - 1])
def test_a_negative_position_turns_the_other_way(position: int) -> None:
    positions = jnp.array([position, -position], jnp.int32)
    cos, sin = rope_tables(positions, 64)
    np.testing.assert_array_equal(cos[1], cos[0])
    np.testing.assert_array_equal(sin[1], -sin[0])
    # Positions that int32 does not have: two halves of a turn by 2^31 are that turn.
    cos, sin = rope_tables(jnp.array([2**31, 2**30], jnp.uint32), 64)
    np.testing.assert_allclose(sin[0], 2 * sin[1] * cos[1], atol=2e-6)


def test_queries_and_keys_meet_by_their_distance_alone() -> None:
    q, k = draw((1, 1, 1, 64)), draw((1, 1, 1, 64), seed=1)

    def score(p: int, s: int) -> float:
        one, other = (apply_rope(x, jnp.array([at])) for x, at in ((q, p), (k, s)))
        return float(jnp.sum(one * other))

    np.testing.assert_allclose(score(100, 90), score(900_100, 900_090), rtol=1e-4)


def test_the_layouts_are_each_others_permutation() -> None:
    x = draw()
    d = x.shape[-1]
    order = np.arange(d).reshape(2, d // 2).T.reshape(-1)  # Interleaved from halves.
    half = apply_rope(x)
    interleaved = apply_rope(x[..., order], layout="interleaved")
    np.testing.assert_array_equal(interleaved, half[..., order])


@every_implementation
@pytest.mark.parametrize("scaling", [None, Linear(4.0), Llama3(), Yarn(8.0, 2048)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_inverse_undoes_it(implementation: str, scaling, layout: str) -> None:
    x, positions = draw(), jnp.arange(7) * 1000
    options = {"scaling": scaling, "layout": layout, "rotary_dim": 12, "implementation": implementation}
    there = apply_rope(x, positions, **options)
    np.testing.assert_allclose(apply_rope(there, positions, inverse=True, **options), x, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(there[..., 12:], x[..., 12:])


def test_llama3_frequencies() -> None:
    """High ones kept, low ones divided by 8, and in between as the formula of the model's authors has it."""
    from tilewright.ops.rope.frequencies import frequencies

    plain, scaled = frequencies(128, 5e5, None), frequencies(128, 5e5, Llama3())
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 2048) & (wavelength < 8192)
    smooth = (8192 / wavelength[between] - 1) / 3
    np.testing.assert_allclose(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between])
    assert between.sum() > 3


def test_yarn_frequencies_and_factor() -> None:
    from tilewright.ops.rope.frequencies import frequencies

    plain, scaled = frequencies(64, 1e4, None), frequencies(64, 1e4, Yarn(4.0, 4096))
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4)
    assert np.all(np.diff(scaled / plain) <= 1e-12)
    cos, sin = rope_tables(jnp.arange(5), 64, scaling=Yarn(4.0, 4096))
    np.testing.assert_allclose(cos**2 + sin**2, (0.1 * np.log(4) + 1) ** 2, rtol=1e-5)


def test_tables_made_once_are_the_same() -> None:
    x, positions = draw(), jnp.arange(14).reshape(2, 7) * 3
    tables = rope_tables(positions, 16, theta=1e6)
    np.testing.assert_array_equal(apply_rope(x, tables=tables), apply_rope(x, positions, theta=1e6))


def test_unbatched_and_empty() -> None:
    x = draw()
    np.testing.assert_array_equal(apply_rope(x[0]), apply_rope(x)[0])
    assert apply_rope(x[:, :0]).shape == (2, 0, 3, 16)


@every_implementation
def test_shard_map(implementation: str, cpu_devices: list) -> None:
    x = draw((4, 7, 3, 16))
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])

    def total(x):
        y = apply_rope(x, implementation=implementation)
        return jax.lax.psum(jnp.sum(y**3), "batch")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec())
    got = jax.jit(jax.grad(sharded))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(apply_rope(x) ** 3))(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((7, 16))}, r"x is float32\[7, 16\]; it must be \[B, T, H, D\] or \[T, H, D\]"),
        ({"layout": "pairs"}, r"layout='pairs' is not a layout; use 'half' .* or 'interleaved'"),
        ({"rotary_dim": 7}, r"rotary_dim=7 must be an even number, 2 or more"),
        ({"rotary_dim": 32}, r"rotary_dim=32 is more than D=16 of x; use 16 or less"),
        ({"positions": jnp.zeros((3,), jnp.int32)}, r"positions is int32\[3\] .* \[2, 7\] or \[7\]"),
        ({"positions": jnp.zeros((7,))}, r"positions has dtype float32; positions must be integers"),
        ({"theta": 0.5}, r"theta=0.5 must be a number more than 1, known when traced; use 10000"),
        ({"theta": float("inf")}, r"theta=inf must be a number more than 1"),
        ({"inverse": "no"}, r"inverse='no' is not True or False"),
        ({"tables": jnp.zeros((7, 8))}, r"tables is a .*; it must be a pair \(cos, sin\): make it with rope_tables"),
        ({"tables": (jnp.zeros((7, 8)),) * 2, "theta": 5e5}, r"tables and theta are both given; .*leave one out"),
        ({"tables": (jnp.zeros((7, 8)),) * 2, "scaling": Llama3()}, r"tables and scaling are both given"),
        ({"scaling": "yarn"}, r"scaling='yarn' is not a scaling; use Linear, Llama3 or Yarn"),
        (
            {"tables": (jnp.zeros((7, 4)), jnp.zeros((7, 4))), "rotary_dim": 16},
            r"tables are float32\[7, 4\] .*rope_tables",
        ),
        (
            {"tables": (jnp.zeros((7, 8)),) * 2, "positions": jnp.zeros((7,), jnp.int32)},
            r"tables and positions are both given; .*leave one out",
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_rope(**{"x": draw()} | change)


def test_a_scaling_that_makes_no_sense_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"factor=0 of Linear must be positive"):
        Linear(0)
    with pytest.raises(ValueError, match=r"factor=inf of Yarn must be positive and finite"):
        Yarn(math.inf, 4096)
    with pytest.raises(ValueError, match=r"attention_factor=0.0 of Yarn must be positive"):
        Yarn(8.0, 4096, attention_factor=0.0)
    with pytest.raises(ValueError, match=r"beta_fast=1.0 of Yarn must be more than beta_slow=32.0; use 32 and 1"):
        Yarn(8.0, 4096, beta_fast=1.0, beta_slow=32.0)
    with pytest.raises(ValueError, match=r"dtype='bfloat16' must be float32, or float64"):
        rope_tables(jnp.arange(3), 16, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"low_freq_factor=4.0 of Llama3 must be less than high_freq_factor=4.0"):
        Llama3(low_freq_factor=4.0)
