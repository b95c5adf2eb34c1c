"""short_conv with `normalize`: each head divided by its length, on every implementation, in steps and on meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.composition import collectives, kernels_that_return_zeros
from tests.ops.contract import able_to_run
from tilewright import short_conv, short_conv_step
from tilewright.configs import ShortConvSm90Backward, ShortConvSm90Forward, ShortConvTpuBackward, ShortConvTpuForward
from tilewright.core.dispatch import find_op
from tilewright.ops.short_conv.cases import _case
from tilewright.workbench.check import CaseCheck

Arrays = tuple[jax.Array, ...]


def draw(b: int = 2, t: int = 9, d: int = 64, width: int = 4) -> Arrays:
    """x, w, bias and the initial state."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (b, t, d), (width, d), (d,), (b, width - 1, d)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def by_formula(y: jax.Array, size: int) -> jax.Array:
    heads = y.reshape(*y.shape[:-1], -1, size)
    return (heads / jnp.sqrt(jnp.sum(heads**2, axis=-1, keepdims=True) + 1e-6)).reshape(y.shape)


def close(got: Any, expected: Any, what: str = "") -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=what)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_values_and_gradients_are_those_of_the_formula(implementation: str, activation: Any) -> None:
    """Of every array and through both results. Heads of 16 channels, an odd length, segments and a state."""
    arrays, ids = draw(), jnp.array([[0, 0, 0, 1, 1, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4, 4, 4, 4]])

    def whole(x, w, bias, state, **options):
        return short_conv(x, w, bias=bias, initial_state=state, segment_ids=ids, activation=activation, **options)

    def normalised(*arrays):
        return whole(*arrays, normalize=16, implementation=implementation)

    def plainly(*arrays):
        y, final = whole(*arrays, implementation="reference")
        return by_formula(y, 16), final

    def with_gradients(function):
        def both(*arrays):
            out, pull = jax.vjp(function, *arrays)
            return *out, *pull((jnp.cos(arrays[0]), jnp.sin(arrays[3])))

        return jax.jit(both)(*arrays)

    for got, expected in zip(with_gradients(normalised), with_gradients(plainly), strict=True):
        close(got, expected)


@pytest.mark.slow
def test_bfloat16_is_rounded_once() -> None:
    """Each value is the nearest bfloat16 of the float32 result."""
    x, w, *_ = (a.astype(jnp.bfloat16) for a in draw())
    got, _ = short_conv(x, w, activation="silu", normalize=16)
    wide, _ = short_conv(x.astype(jnp.float32), w.astype(jnp.float32), activation="silu", normalize=16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_less(jnp.abs(got.astype(jnp.float32) - wide), jnp.abs(wide) * 2.0**-8 + 1e-9)


def test_a_head_of_zeros_stays_zero_and_has_a_gradient() -> None:
    x, w, *_ = draw()
    (y, _), pull = jax.vjp(lambda x: short_conv(x, w, normalize=16), jnp.zeros_like(x))
    np.testing.assert_array_equal(y, 0.0)
    (gradient,) = pull((jnp.ones_like(x), jnp.zeros((2, 3, 64))))
    close(gradient[:, -1], jnp.broadcast_to(1e3 * w[-1], (2, 64)))


def test_the_final_state_holds_inputs() -> None:
    x, w, *_ = draw()
    np.testing.assert_array_equal(short_conv(x, w, normalize=16)[1], x[:, -3:])


@pytest.mark.slow
def test_packed_sequences_with_states() -> None:
    x, w, bias, _ = draw(b=1)
    ends, states = jnp.array([0, 4, 4, 9]), jax.random.normal(jax.random.key(1), (3, 3, 64))

    def run(x, states, normalize=None):
        return short_conv(
            x, w, bias=bias, activation="silu", normalize=normalize, initial_state=states, cu_seqlens=ends
        )

    y, final = run(x, states, 16)
    plain, plain_final = run(x, states)
    close(y, by_formula(plain, 16))
    np.testing.assert_array_equal(final, plain_final)


def test_steps_are_the_whole_call() -> None:
    x, w, bias, state = draw()
    expected, _ = short_conv(x, w, bias=bias, activation="silu", normalize=16, initial_state=state)
    step = jax.jit(lambda state, x_t: short_conv_step(state, x_t, w, bias=bias, activation="silu", normalize=16))
    for t in range(x.shape[1]):
        y, state = step(state, x[:, t])
        close(y, expected[:, t])
    alone, _ = short_conv_step(state[0], x[0, 0], w, normalize=16)
    close(alone, short_conv_step(state, x[:, 0], w, normalize=16)[0][0])


@pytest.mark.slow
def test_vmap_over_calls_that_differ_in_everything() -> None:
    x, w, *_ = draw()
    xs, ws = jnp.stack([x, 2 * x + 1]), jnp.stack([w, w[::-1]])

    def total(x, w):
        return jnp.sum(jnp.sin(short_conv(x, w, activation="silu", normalize=16)[0]))

    gradients = jax.vmap(jax.grad(total, (0, 1)))(xs, ws)
    for n in range(2):
        for got, expected in zip(gradients, jax.grad(total, (0, 1))(xs[n], ws[n]), strict=True):
            close(got[n], expected)


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        (
            48,
            r"is float32\[2, (9, )?64\], of D=64 channels, and normalize=48 must divide D, .* cut channels between heads",
        ),
        (128, r"normalize=128 must divide D"),
        (0, r"normalize=0 must be the number of channels of a head, a positive integer; use 128 .*, or None"),
        (-16, r"normalize=-16 must be the number of channels of a head"),
        (True, r"normalize=True must be the number of channels of a head"),
    ],
)
def test_bad_heads_are_named_with_their_remedy(normalize: Any, message: str) -> None:
    x, w, _, state = draw()
    with pytest.raises(ValueError, match=message):
        short_conv(x, w, normalize=normalize)
    with pytest.raises(ValueError, match=message):
        short_conv_step(state, x[:, 0], w, normalize=normalize)


# Meshes: 4 devices, over which channels are cut. 4 heads of 16 channels are whole on each; 2 heads of 32, and 1 of 64, are
# not.


def run(x: jax.Array, w: jax.Array, bias: jax.Array, state: jax.Array, **options: Any) -> Any:
    """Outputs and gradients."""

    def call(x, w, bias, state):
        return short_conv(x, w, bias=bias, activation="silu", initial_state=state, **options)

    (y, final), pull = jax.vjp(call, x, w, bias, state)
    return y, final, *pull((y + 1.0, jnp.cos(final)))


def cut_channels(kind: AxisType, devices: list) -> tuple[Any, Arrays]:
    """A mesh, and arrays that are cut along D."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(kind,), devices=devices[:4])
    return mesh, tuple(jax.device_put(a, NamedSharding(mesh, P(*[None] * (a.ndim - 1), "heads"))) for a in draw())


@pytest.mark.parametrize("normalize", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 64))])
def test_auto_axes(normalize: int, cpu_devices: list) -> None:
    """Whole heads stay where they are; channels that are not whole heads are gathered, and the numbers are right."""
    _, arrays = cut_channels(AxisType.Auto, cpu_devices)
    compiled = jax.jit(lambda *arrays: run(*arrays, normalize=normalize)).lower(*arrays).compile()
    assert bool(collectives(compiled)) == (normalize > 16)
    for got, expected in zip(compiled(*arrays), run(*draw(), normalize=normalize), strict=True):
        close(got, expected)


@pytest.mark.parametrize("chip", ["h200", "v6e"])
def test_auto_axes_cut_the_kernels(chip: str, cpu_devices: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitioning rules: whole heads stay where they are."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])
    x, w = (jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 8, 2048), (4, 2048)))
    placed = [jax.device_put(a, NamedSharding(mesh, P(*[None] * (a.ndim - 1), "heads"))) for a in (x, w)]

    def both(x, w):
        y, pull = jax.vjp(lambda x, w: short_conv(x, w, activation="silu", normalize=128)[0], x, w)
        return pull(y)

    with tilewright.target(chip), kernels_that_return_zeros(monkeypatch):
        assert tilewright.explain(both, x, w).decisions[0].implementation.startswith("pallas")
        assert not collectives(jax.jit(both).lower(*placed).compile())


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [16, 32, 64])
def test_auto_axes_of_the_tpu_kernels(normalize: int, cpu_devices: list) -> None:
    """4, 2 and 1 heads over 4 devices: a kernel never sees a part of a head."""
    _, arrays = cut_channels(AxisType.Auto, cpu_devices)
    with tilewright.interpret(plain=True):
        results = jax.jit(lambda *arrays: run(*arrays, normalize=normalize, implementation="pallas_tpu"))(*arrays)
    for got, expected in zip(results, run(*draw(), normalize=normalize), strict=True):
        close(got, expected)


def test_explicit_axes(cpu_devices: list) -> None:
    mesh, arrays = cut_channels(AxisType.Explicit, cpu_devices)
    with jax.set_mesh(mesh):
        results = jax.jit(lambda *arrays: run(*arrays, normalize=16))(*arrays)
        step = short_conv_step(arrays[3], arrays[0][:, 0], arrays[1], normalize=16)
    for got, expected in zip(results, run(*draw(), normalize=16), strict=True):
        assert got.sharding.spec[-1] == "heads"
        close(got, expected)
    x, w, _, state = draw()
    close(step[0], short_conv_step(state, x[:, 0], w, normalize=16)[0])


@pytest.mark.parametrize(("normalize", "heads"), [(32, 2), (64, 1)])
def test_explicit_axes_that_cut_a_head_are_refused(normalize: int, heads: int, cpu_devices: list) -> None:
    mesh, (x, w, bias, state) = cut_channels(AxisType.Explicit, cpu_devices)
    whole = draw()
    told = (
        rf"over mesh axis 'heads' along its axis D, into 4 parts, and normalize={normalize} makes {heads} heads of D=64"
    )
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=rf"x is sharded {told}, .* or pass jax.sharding.reshard\(x, ...\)"):
            short_conv(x, whole[1], normalize=normalize)
        with pytest.raises(ValueError, match=rf"w is sharded {told}"):
            short_conv(whole[0], w, normalize=normalize)
        with pytest.raises(ValueError, match=rf"bias is sharded {told}"):
            short_conv(whole[0], whole[1], bias=bias, cu_seqlens=jnp.array([0, 9]), normalize=normalize)
        with pytest.raises(ValueError, match=rf"state is sharded {told}"):
            short_conv_step(state, whole[0][:, 0], whole[1], normalize=normalize)


@pytest.mark.slow
def test_shard_map(cpu_devices: list) -> None:
    """Each device has a head. Parts that are not whole heads are refused: they have too few channels."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])
    specs = P(None, None, "heads"), P(None, "heads"), P("heads"), P(None, None, "heads")

    def over(normalize: int) -> Any:
        def on_part(*arrays):
            return run(*arrays, normalize=normalize)

        return jax.shard_map(on_part, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[3], *specs))

    for got, expected in zip(jax.jit(over(16))(*draw()), run(*draw(), normalize=16), strict=True):
        close(got, expected)
    with pytest.raises(ValueError, match=r"x is float32\[2, 9, 16\], of D=16 channels, and normalize=32 must divide D"):
        over(32)(*draw())


def test_a_sequence_that_is_cut_over_a_mesh_axis(cpu_devices: list) -> None:
    x, w, *_ = draw(t=16)
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,), devices=cpu_devices[:4])

    def on_part(x, w):
        return short_conv(x, w, activation="silu", normalize=16, axis_name="time")[0]

    sharded = jax.shard_map(on_part, mesh=mesh, in_specs=(P(None, "time"), P()), out_specs=P(None, "time"))
    close(jax.jit(sharded)(x, w), short_conv(x, w, activation="silu", normalize=16)[0])


# Kernels.


# Every number of lanes per head that a warp may have, both ways to come without an activation, and runs of odd lengths.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "normalize", "block_d", "activation"),
    [
        (512, 64, 256, "silu"),
        (512, 8, 512, None),
        (1024, 128, 1024, "silu"),
        (1024, 256, 1024, "silu"),
        (1024, 8, 1024, "silu"),
    ],
)
def test_the_gpu_kernels_with_other_heads(d: int, normalize: int, block_d: int, activation: Any) -> None:
    case = _case("drawn", 2, 13, d, state=True, bias=False, activation=activation, normalize=normalize)
    held = CaseCheck(find_op("short_conv"), case, "bfloat16", seed=d)
    blocks = 8, block_d, 4
    with able_to_run("pallas_gpu"):
        results = held.check("pallas_gpu", config=(ShortConvSm90Forward(*blocks), ShortConvSm90Backward(*blocks)))
    for result in results:
        assert result.verdict.ok, f"D={d} normalize={normalize} {result.quantity}: {result.verdict}"


# Lanes past the end of the channels, which are another head's.
@pytest.mark.slow
@pytest.mark.parametrize(("d", "normalize", "activation"), [(192, 64, "silu"), (256, 128, None), (96, 32, "silu")])
def test_the_tpu_kernels_with_other_heads(d: int, normalize: int, activation: Any) -> None:
    case = _case("drawn", 2, 50, d, state=True, segments=True, activation=activation, normalize=normalize)
    held = CaseCheck(find_op("short_conv"), case, "float32", seed=d)
    blocks = {"block_t": 32, "block_d": 128, "tile_t": 16}
    with tilewright.target("v6e"), able_to_run("pallas_tpu"):
        results = held.check("pallas_tpu", config=(ShortConvTpuForward(**blocks), ShortConvTpuBackward(**blocks)))
    for result in results:
        assert result.verdict.ok, f"D={d} normalize={normalize} {result.quantity}: {result.verdict}"


def told(chip: str, d: int, normalize: int, config: Any = None) -> str:
    x, w = jax.ShapeDtypeStruct((2, 9, d), "bfloat16"), jax.ShapeDtypeStruct((4, d), "bfloat16")
    with tilewright.target(chip):
        return str(tilewright.explain(lambda x, w: short_conv(x, w, normalize=normalize, config=config), x, w))


def test_which_heads_the_kernels_take() -> None:
    """Others are served by the plain implementation, which says why."""
    for d, normalize in ((512, 128), (256, 64), (1024, 256), (4096, 128)):
        assert told("h200", d, normalize).startswith("short_conv: pallas_gpu")
    assert told("v6e", 512, 128).startswith("short_conv: pallas_tpu")
    assert told("v6e", 192, 64).startswith("short_conv: pallas_tpu")
    assert told("h200", 768, 96).startswith("short_conv: xla")
    assert "not pallas_gpu: normalize=96 must be one of 8, 16, 32, 64, 128, 256 (a head" in told("h200", 768, 96)
    assert "not pallas_gpu: normalize=512 must be one of" in told("h200", 1024, 512)
    assert "not pallas_gpu: D=768 must be a multiple of 512, 4 heads of normalize=128 channels" in told(
        "h200", 768, 128
    )
    narrow = told("h200", 1024, 128, ShortConvSm90Forward(16, 256))
    assert "block_d=256 must be 512 or more for normalize=128, 4 heads; use block_d=512" in narrow
    assert "not pallas_tpu: normalize=256 must divide 128 (a head lies" in told("v6e", 512, 256)
