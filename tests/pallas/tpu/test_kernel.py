"""TPU kernels with arguments by name: which the body receives, and the VMEM that they are counted as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import tilewright
from tilewright.core.chip import MIB, Chip
from tilewright.core.implementation import Launch
from tilewright.ops.norm.config import NormTpuForward
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, block_pass, padded_bytes

V6E = Chip.named("v6e")


def rows(block_n: int = 8, dtype=jnp.float32) -> Block:
    return Block((block_n, 128), dtype, lambda i: (i, 0))


def values(*levels: float, n: int = 16) -> list[jax.Array]:
    return [jnp.full((n, 128), level, jnp.float32) for level in levels]


@pytest.mark.parametrize("given", [True, False])
def test_arguments_come_by_name_and_those_declared_as_none_as_none(given: bool) -> None:
    seen: dict = {}

    def body(*, x_ref, y_ref, z_ref, out_ref, other_ref, sum_scratch, other_scratch) -> None:
        seen.update(y=y_ref, other=other_ref, scratch=other_scratch)
        sum_scratch[...] = x_ref[...] + z_ref[...]
        out_ref[...] = sum_scratch[...] if y_ref is None else sum_scratch[...] + 10 * y_ref[...]
        if other_ref is not None:
            other_scratch[...] = x_ref[...]
            other_ref[...] = other_scratch[...]

    buffer = pltpu.VMEM((8, 128), jnp.float32)
    kernel = Kernel(
        name="sum",
        grid={"row": Axis(2, "parallel")},
        inputs={"x": rows(), "y": rows() if given else None, "z": rows()},
        outputs={"out": Output((16, 128), rows()), "other": Output((16, 128), rows()) if given else None},
        scratch={"sum_scratch": buffer, "other_scratch": buffer if given else None},
    )
    x, y, z = values(1, 2, 3)
    with tilewright.interpret():
        outputs = kernel.run(body, {"x": x, "y": y, "z": z}, chip=V6E)
    assert list(outputs) == ["out", "other"]
    assert [value is not None for value in seen.values()] == [given] * 3
    np.testing.assert_array_equal(outputs["out"], jnp.full((16, 128), 24 if given else 4))
    if given:
        np.testing.assert_array_equal(outputs["other"], x)
    else:
        assert outputs["other"] is None


def test_prefetched_arrays_choose_blocks_and_reach_the_body() -> None:
    def body(*, order_ref, x_ref, y_ref) -> None:
        y_ref[...] = x_ref[...] + order_ref[pl.program_id(0)].astype(jnp.float32)

    kernel = Kernel(
        name="reordered",
        grid={"row": Axis(2)},
        inputs={"x": Block((8, 128), jnp.float32, lambda i, order_ref: (order_ref[i], 0))},
        outputs={"y": Output((16, 128), Block((8, 128), jnp.float32, lambda i, order_ref: (i, 0)))},
        prefetched=("order",),
    )
    x = jnp.concatenate(values(10, 20, n=8))
    with tilewright.interpret():
        y = kernel.run(body, {"x": x, "order": jnp.array([1, 0], jnp.int32)}, chip=V6E)["y"]
    np.testing.assert_array_equal(y[:, 0], [21] * 8 + [10] * 8)


def test_an_output_takes_the_buffer_of_the_input_that_it_is_aliased_to() -> None:
    """Aliases are by name: a None input and prefetched arrays do not shift them."""

    def body(*, factors_ref, gate_ref, x_ref, y_ref) -> None:
        assert gate_ref is None
        y_ref[...] = factors_ref[pl.program_id(0)].astype(jnp.float32) * x_ref[...]

    block = Block((8, 128), jnp.float32, lambda i, factors_ref: (i, 0))
    kernel = Kernel(
        name="scaled",
        grid={"row": Axis(2)},
        inputs={"gate": None, "x": block},
        outputs={"y": Output((16, 128), block)},
        prefetched=("factors",),
        aliases={"x": "y"},
    )

    def run(x, factors):
        return kernel.run(body, {"x": x, "factors": factors}, chip=V6E)["y"]

    (x,), factors = values(3), jnp.array([2, 5], jnp.int32)
    with tilewright.interpret():
        np.testing.assert_array_equal(run(x, factors)[:, 0], [6] * 8 + [15] * 8)
    (call,) = (e for e in jax.make_jaxpr(run)(x, factors).jaxpr.eqns if e.primitive.name == "pallas_call")
    assert call.params["input_output_aliases"] == ((1, 0),)


def test_vmem_is_counted_from_blocks_and_scratch() -> None:
    kernel = Kernel(
        name="counted",
        grid={"row": Axis(4)},
        inputs={
            "x": Block((16, 200), jnp.bfloat16, lambda i: (i, 0)),  # [16, 256] bfloat16, two buffers
            "labels": Block((16, 1), jnp.int32, lambda i: (i, 0)),  # [16, 128] int32, two buffers
            "table": Block((None, 3, 128), jnp.float32, lambda i: (i, 0, 0), buffers=1),  # [8, 128] float32
            "pages": Block((), jnp.float32, memory=pl.ANY),  # stays in HBM
            "absent": None,
        },
        outputs={"y": Output((64, 128), rows(16)), "absent_too": None},
        scratch={
            "sum_scratch": pltpu.VMEM((16, 128), jnp.float32),
            "done": pltpu.SemaphoreType.DMA(()),
            "counts": pltpu.SMEM((4,), jnp.int32),
            "absent_scratch": None,
        },
    )
    inputs = 2 * 16 * 256 * 2 + 2 * 16 * 128 * 4 + 8 * 128 * 4
    assert kernel.vmem_bytes() == inputs + 2 * 16 * 128 * 4 + 16 * 128 * 4
    assert kernel.vmem_bytes(temporaries=100) == kernel.vmem_bytes() + 100


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 128), "float32", 4096),
        ((1, 1), "float32", 4096),
        ((1, 1), "bfloat16", 4096),
        ((17, 128), "bfloat16", 32 * 128 * 2),
        ((33, 128), "int8", 64 * 128),
        ((5,), "float32", 4096),
        ((3, None, 9, 129), "float32", 3 * 16 * 256 * 4),
    ],
)
def test_arrays_are_padded_to_tiles(shape: tuple, dtype: str, expected: int) -> None:
    assert padded_bytes(shape, jnp.dtype(dtype)) == expected


@pytest.mark.parametrize(("temporaries", "expected"), [(0, 1024), (40 * MIB, 16), (1024 * MIB, 16)])
def test_the_first_blocks_that_fit_are_taken_or_the_last(temporaries: int, expected: int) -> None:
    def kernel(call: None, launch: Launch) -> Kernel:
        block = rows(launch.config.block_n * 64)  # 64 KiB for each of block_n: 64 MiB for 1024, of the 96 to choose by
        return Kernel("chosen", {"row": Axis(1)}, {"x": block}, {})

    chosen = block_pass(
        lambda call, launch, save: None,
        NormTpuForward,
        "forward",
        kernel,
        lambda kind, chip, call: (kind(block_n) for block_n in (4096, 2048, 1024, 16)),
        temporaries=lambda call, launch: temporaries,
    )
    assert chosen.heuristic is not None
    assert chosen.heuristic(V6E, None) == NormTpuForward(expected)
