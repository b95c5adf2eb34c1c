"""GPU kernels with arguments by name: which the body receives, and the shared memory that they are counted as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import tilewright
from tilewright.core.chip import Chip
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import InTurns, processors, run_in_place, run_kernel, smem_bytes, tile

STRUCT = jax.ShapeDtypeStruct((128,), jnp.float32)


def _sum_kernel(*, x_ref, y_ref, z_ref, out_ref, other_ref, out_smem, other_smem, seen) -> None:
    seen.update(y=y_ref, other=other_ref, other_smem=other_smem)
    total = x_ref[...] + z_ref[...]
    out_smem[...] = total if y_ref is None else total + 10 * y_ref[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_ref)
    if other_ref is not None:
        other_smem[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(other_smem, other_ref)
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("given", [True, False])
def test_arguments_come_by_name_and_those_declared_as_none_as_none(given: bool) -> None:
    x, y, z = (jnp.full(128, value, jnp.float32) for value in (1, 2, 3))
    seen: dict = {}
    buffer = plgpu.SMEM((128,), jnp.float32)
    with tilewright.interpret():
        outputs = run_kernel(
            lambda **refs: _sum_kernel(**refs, seen=seen),
            name="sum",
            inputs={"x": x, "y": y if given else None, "z": z},
            outputs={"out": STRUCT, "other": STRUCT if given else None},
            scratch={"out_smem": buffer, "other_smem": buffer if given else None},
            grid={"row": 1},
        )
    assert list(outputs) == ["out", "other"]
    assert [value is not None for value in seen.values()] == [given] * 3
    np.testing.assert_array_equal(outputs["out"], jnp.full(128, 24 if given else 4))
    if given:
        np.testing.assert_array_equal(outputs["other"], x)
    else:
        assert outputs["other"] is None


def test_a_grid_and_warpgroups_have_names() -> None:
    def body(*, x_ref, y_ref, y_smem) -> None:
        row, warpgroup = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup")
        place = pl.ds((2 * row + warpgroup) * 128, 128)
        staged = y_smem.at[warpgroup]
        staged[...] = x_ref[place] + (2 * row + warpgroup).astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, y_ref.at[place])
        plgpu.wait_smem_to_gmem(0)

    x = jnp.zeros((4 * 128,), jnp.float32)
    with tilewright.interpret():
        y = run_kernel(
            body,
            name="places",
            inputs={"x": x},
            outputs={"y": jax.ShapeDtypeStruct(x.shape, x.dtype)},
            scratch={"y_smem": plgpu.SMEM((2, 128), jnp.float32)},
            grid={"row": 2},
            warpgroups=2,
        )["y"]
    np.testing.assert_array_equal(y.reshape(4, 128)[:, 0], [0, 1, 2, 3])


def _turns_kernel(*, x_ref, y_ref, buffers, full) -> None:
    """Copies a row, and writes twice that row, through buffers that share memory."""
    warpgroup = jax.lax.axis_index("warpgroup")
    loaded, doubled = (buffer.at[warpgroup] for buffer in buffers)
    row = pl.ds(warpgroup * 128, 128)
    plgpu.copy_gmem_to_smem(x_ref.at[row], loaded, full.at[warpgroup])
    plgpu.barrier_wait(full.at[warpgroup])
    x = loaded[...]
    plgpu.commit_smem()
    doubled[...] = (2 * x).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(doubled, y_ref.at[row])
    plgpu.wait_smem_to_gmem(0)


def _in_turns(warpgroups: int) -> dict:
    shapes = (plgpu.SMEM((warpgroups, 128), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    return {"buffers": InTurns(tuple(shapes)), "full": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups)}


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_buffers_that_take_turns_share_their_memory(warpgroups: int) -> None:
    x = jnp.arange(128.0 * warpgroups)
    with tilewright.interpret(detect_races=True):
        y = run_kernel(
            _turns_kernel,
            name="turns",
            inputs={"x": x},
            outputs={"y": jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)},
            scratch=_in_turns(warpgroups),
            grid={"row": 1},
            warpgroups=warpgroups,
        )["y"]
    np.testing.assert_array_equal(y, (2 * x).astype(jnp.bfloat16))


def test_shared_memory_of_buffers_that_take_turns_is_that_of_the_largest() -> None:
    assert smem_bytes(_in_turns(4)) == 4 * 128 * 4 + 4 * 8


def test_a_state_is_updated_in_place() -> None:
    def body(*, state_ref, new_state_ref, x_ref, y_ref, sum_ref) -> None:
        state = state_ref[...]
        new_state_ref[...] = state + x_ref[...]
        sum_ref[...] = 2 * state
        assert y_ref is None

    state, x = jnp.full(128, 3.0, jnp.float32), jnp.full(128, 4.0, jnp.float32)
    with tilewright.interpret():
        outputs, new_state = jax.jit(
            lambda state, x: run_in_place(
                body, name="add", state=state, inputs={"x": x, "y": None}, outputs={"sum": STRUCT}, grid={"row": 1}
            )
        )(state, x)
    np.testing.assert_array_equal(new_state, jnp.full(128, 7.0))
    np.testing.assert_array_equal(outputs["sum"], jnp.full(128, 6.0))


def test_shared_memory_is_counted_from_the_scratch() -> None:
    # 3 stages of 64 x 64 bfloat16 are 24 KiB. 100 float32 are 400 bytes, aligned to 1 KiB. 3 + 2 barriers of 8 bytes.
    scratch = {
        "a_smem": tile(3, 64, 64, dtype=jnp.bfloat16),
        "row_smem": plgpu.SMEM((100,), jnp.float32),
        "absent": None,
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=3),
        "empty": plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=2, num_barriers=2),
    }
    assert smem_bytes(scratch) == 24 * 1024 + 1024 + 5 * 8
    assert smem_bytes({"done": plgpu.Barrier(num_arrivals=1)}) == 8


def test_tiles_are_swizzled_by_the_bytes_of_a_row() -> None:
    for columns, dtype, swizzle in ((64, jnp.bfloat16, 128), (32, jnp.bfloat16, 64), (16, jnp.float32, 64)):
        transforms = tile(64, columns, dtype=dtype).transforms
        assert plgpu.SwizzleTransform(swizzle) in transforms
        assert plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)) in transforms


def test_padding_and_the_blocks_of_a_persistent_kernel() -> None:
    array = jnp.ones((3, 5))
    assert padded(array, 0, 4).shape == (4, 5)
    assert float(padded(array, 0, 4)[3].sum()) == 0
    assert padded(array, 1, 5) is array
    assert processors(Chip.named("h200")) == 132
    with tilewright.interpret():
        assert processors(Chip.named("h200")) == 2
