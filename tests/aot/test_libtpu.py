"""Real compiles with libtpu, for TPUs that are not there. Skipped, with the reason, where it is not set up."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import tilewright
from tests.aot.kernels import copy, looped_by_data, matmul, roomy, struct
from tilewright import aot
from tilewright.cli.main import app
from tilewright.core.chip import Chip
from tilewright.core.dispatch import registered
from tilewright.workbench.check import call, call_with_gradients

LACKS = [f"{finding.what}: {finding.found}" for finding in aot.doctor() if finding.needed and not finding.ok]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.aot,
    pytest.mark.skipif(bool(LACKS), reason=f"libtpu's compiler is not set up ({'; '.join(LACKS)})"),
]


# One kernel or two of each family: what libtpu refuses is usually refused at any size. `tilewright compile` does the rest.
# The norms' are in test_an_op_of_sharded_arrays_compiles_for_a_slice.
SMOKE_SET = [
    ("linear_cross_entropy", True, "v6e"),
    ("short_conv", False, "v6e"),
    ("flash_attention", False, "v6e"),
    ("gated_delta_rule", True, "v6e"),
]


@pytest.mark.parametrize(("op_name", "grad", "chip"), SMOKE_SET)
def test_each_family_compiles(op_name: str, grad: bool, chip: str) -> None:
    """The smallest case of an op, forward or gradient."""
    op = registered()[op_name]
    case = min(op.cases, key=lambda case: case.work(4).bytes)
    function, structs = call(op, case, "pallas_tpu"), case.structs("bfloat16")
    if grad:
        cotangents = jax.eval_shape(call(op, case, "reference"), **structs)
        report = aot.compile(call_with_gradients(function, case), structs, cotangents, chip=chip)
    else:
        report = aot.compile(lambda arrays: function(**arrays), structs, chip=chip)
    assert report.ok, report.cause
    assert report.kernels
    for kernel in report.kernels:
        assert kernel.schedule is not None, kernel.note
        # A kernel whose blocks are data has no floor, and says so.
        assert kernel.floor_us is not None or "data" in kernel.note
        assert kernel.schedule.vmem_bytes > 0


@functools.cache
def matmul_report(chip: str, block: int) -> aot.CompileReport:
    return aot.compile(functools.partial(matmul, block=block), struct(1024, 1024), struct(1024, 1024), chip=chip)


@pytest.mark.parametrize(
    ("chip", "by_hand"),
    [
        ("v5e", 512**3 / (4 * 128**2)),
        ("v6e", 512**3 / (2 * 256**2 * 2)),
    ],
)
def test_the_mxu_cycles_of_a_matmul_are_those_counted_by_hand(chip: str, by_hand: float) -> None:
    """A step of 512 x 512 x 512. v6e's MXUs take two rows a cycle, or 918 TFLOP/s at 1.75 GHz could not be."""
    report = matmul_report(chip, 512)
    assert report.ok, report.cause
    (kernel,) = report.kernels
    assert kernel.schedule is not None
    assert kernel.schedule.mxu_cycles == pytest.approx(by_hand, rel=0.15)
    assert kernel.schedule.cycles >= kernel.schedule.mxu_cycles
    if chip == "v5e":
        # The whole step is bound by the MXU there, so its cycles are the MXU's.
        assert kernel.schedule.cycles == pytest.approx(by_hand, rel=0.15)
    peak = Chip.named(chip).flops_per_s("bfloat16")
    assert peak is not None
    assert kernel.compute_us is not None
    assert kernel.compute_us >= 0.99 * 2 * 1024**3 / peak * 1e6


def test_a_memory_bound_copy_takes_the_bandwidths_time() -> None:
    shape = (8192, 1024)
    report = aot.compile(copy, struct(*shape, dtype="float32"), chip="v5e")
    assert report.ok, report.cause
    (kernel,) = report.kernels
    by_hand = 2 * 4 * shape[0] * shape[1] / 819e9 * 1e6
    assert kernel.floor_us == pytest.approx(by_hand, rel=0.02)
    assert kernel.bottleneck == ("DMA", 1.0)
    assert kernel.roofline_fraction == 1.0


def test_larger_blocks_rank_before_smaller_ones() -> None:
    """Four times the block is a quarter of the traffic and fewer steps: 512 before 128."""
    reports = [matmul_report("v5e", block) for block in (512, 128)]
    floors = [report.kernels[0].floor_us for report in reports]
    assert floors == sorted(floors)
    traffic = [report.kernels[0].hbm_bytes for report in reports]
    assert traffic == sorted(traffic)


def test_too_much_vmem_is_an_overflow_with_its_remedy() -> None:
    report = aot.compile(functools.partial(roomy, rows=65536), struct(8, 128, dtype="float32"), chip="v5e")
    assert not report.ok
    assert report.cause == "VMEM overflow: scratch operand f32[65536,1024] alone is 256.0 MiB and a v5e has 128 MiB"
    assert "make the block of the largest allocation smaller" in report.remedy


def test_what_depends_on_data_is_not_estimated() -> None:
    report = aot.compile(looped_by_data, struct(8, dtype="int32"), struct(64, 128, dtype="float32"), chip="v6e")
    assert report.ok, report.cause
    (kernel,) = report.kernels
    assert kernel.floor_us is None
    assert report.floor_us is None
    assert "cannot estimate: a loop of" in kernel.note


def test_a_shard_mapped_function_compiles_for_a_slice() -> None:
    """Eight v6e chips, with a sum over them: the kernel runs on each shard, and XLA puts the collective in."""
    mesh = AbstractMesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(copy(x, block=128), "rows")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=P("rows"), out_specs=P(), check_vma=False)
    jitted = jax.jit(sharded, in_shardings=(split,), out_shardings=whole)
    report = aot.compile(jitted, struct(8 * 256, 128, dtype="float32"), chip="v6e", topology="2x4")
    assert report.ok, report.cause
    assert report.topology == "v6e:2x4"
    assert [kernel.name for kernel in report.kernels] == ["copy"]


def test_an_op_of_sharded_arrays_compiles_for_a_slice() -> None:
    """Each chip runs its part, and all that is exchanged is the gradient of the shared weights. Under Explicit axes the
    op is inside a `shard_map`, as the test before has it.
    """
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def sharded(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def gradients(x: jax.Array, w: jax.Array) -> Any:
        return jax.grad(lambda *given: jnp.sum(jnp.square(tilewright.rms_norm(*given))), (0, 1))(x, w)

    with jax.sharding.use_abstract_mesh(mesh):
        arguments = sharded(8, 64, 256, spec=P("x", "y")), sharded(256, spec=P())
        report = aot.compile(gradients, *arguments, chip="v6e", topology="2x4")
    assert report.ok, report.cause
    assert report.argument_bytes == 64 * 256 * 4 + 256 * 4  # An eighth of x, and w.
    assert len(report.kernels) == 2
    assert report.collectives == {"all-reduce": 1}


def test_the_verb_prints_the_table_and_writes_the_reports(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "reports.json"
    args = ["compile", "linear_cross_entropy", "--out", str(file), "--case"]
    done = runner.invoke(app, [*args, "odd", "--chip", "v6e"])
    assert done.exit_code == 0, done.output
    assert "Times are lower bounds, estimated from the schedule; they are not measurements." in done.output
    (report,) = json.loads(file.read_text())
    assert (report["kind"], report["chip"], report["ok"]) == ("estimate", "v6e", True)
    assert report["kernels"][0]["estimate"]["floor_us"] > 0
    assert report["versions"]["jax"] == jax.__version__

    refused = runner.invoke(app, [*args, "many_blocks", "--chip", "v5p", "--config", "block_n=65536"])
    assert refused.exit_code == 1
    flat = " ".join(refused.output.split())
    assert (
        "v5p: linear_cross_entropy: implementation='pallas_tpu' cannot run this call: its forward kernel needs" in flat
    )
    assert "remedy: use a smaller block_n or block_v" in flat
