"""Real compiles for GPUs that are not there. Skipped, with the reason, where the compiler is not set up."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import tilewright
from tests.aot.kernels import struct
from tilewright import aot
from tilewright.cli.main import app
from tilewright.layers.layer import project_each

LACKS = [f"{finding.what}: {finding.found}" for finding in aot.doctor("gpu") if finding.needed and not finding.ok]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.aot,
    pytest.mark.skipif(bool(LACKS), reason=f"the compiler for GPUs is not set up ({'; '.join(LACKS)})"),
]


def test_a_product_has_the_instructions_and_the_memory_that_are_counted_by_hand() -> None:
    """Tiles of 128 x 256, summed in steps of 64, by two consumer warpgroups of 64 rows each."""
    config = tilewright.configs.MatmulSm90Forward(block_n=256, stages=4, band=8)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return tilewright.matmul(x, w, implementation="pallas_gpu", config=config)

    report = aot.compile(product, struct(4096, 4096), struct(4096, 4096), chip="h200", use_cache=False)
    assert report.ok, report.error
    assert report.argument_bytes == 2 * 2 * 4096**2
    (kernel,) = report.kernels
    binary = kernel.binary
    assert binary is not None
    # Two consumers and a producer. The 64 x 256 outputs of a consumer are 128 registers of each of its threads.
    assert (binary.threads, binary.setmaxnreg) == (3 * 128, (232, 40))
    assert (binary.spill_store_bytes, binary.spill_load_bytes, binary.spill_bytes_in_loops) == (0, 0, 0)
    assert binary.smem_bytes >= config.stages * (128 + 256) * 64 * 2
    steady = binary.steady_state
    assert steady is not None
    assert steady.opcodes["HGMMA"] == 64 // 16  # A wgmma of bfloat16 is 16 deep.
    assert steady.depth == 2  # Steps of a tile, in tiles of a block.
    assert any("UTMALDG" in loop.opcodes and "HGMMA" not in loop.opcodes for loop in binary.loops)
    assert kernel.occupancy is not None
    assert (kernel.occupancy.blocks, kernel.occupancy.limits) == (1, ("registers", "SMEM"))
    assert report.floor_us is None


@pytest.mark.parametrize(("chip", "arch"), [("h100", "sm_90a"), ("b200", "sm_100a")])
def test_a_kernel_of_ones_own_compiles_for_hopper_and_blackwell(chip: str, arch: str) -> None:
    def exponentials_kernel(x_ref, out_ref, scratch) -> None:
        layout = plgpu.Layout.WG_STRIDED((128, 128), vec_size=4)
        scratch[...] = jnp.exp(plgpu.load(x_ref, layout=layout, optimized=False))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch, out_ref)
        plgpu.wait_smem_to_gmem(0)

    x = struct(128, 128, dtype="float32")
    exponentials = plgpu.kernel(
        exponentials_kernel, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype)], kernel_name="exponentials"
    )
    report = aot.compile(exponentials, x, chip=chip)
    assert report.ok, report.error
    (kernel,) = report.kernels
    assert kernel.binary is not None
    assert (kernel.name, kernel.binary.arch, kernel.binary.threads) == ("exponentials", arch, 128)
    assert kernel.binary.opcodes["MUFU"] == 128 * 128 // 128
    assert kernel.binary.steady_state is None  # Straight through.
    assert kernel.binary.smem_bytes >= 128 * 128 * 4


def test_an_op_of_sharded_arrays_compiles_for_two_gpus() -> None:
    """The mesh has Auto axes: Shardy's choice is made here, as for TPUs."""
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def sharded(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return tilewright.matmul(x, w, implementation="pallas_gpu")

    report = aot.compile(jax.jit(product), sharded(256, 256, spec=P("x")), sharded(256, 256, spec=P()), chip="h100")
    assert report.ok, report.error
    assert report.topology == "h100:1x1x2"
    assert report.argument_bytes == 2 * (128 * 256 + 256 * 256)
    assert [kernel.name for kernel in report.kernels] == ["matmul_forward"]


def test_the_verb_reports_kernels_and_refusals(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    words = ["compile", "matmul", "--case", "cpu_bench", "--grad", "--chip", "h200,b200", "--out", str(file)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 1, done.output  # There is no kernel for Blackwell.
    assert "written for Hopper GPUs" in done.output
    assert "not measured" in done.output
    assert "nothing was run, and no time is estimated" in done.output
    hopper, blackwell = json.loads(file.read_text())
    assert (hopper["kind"], hopper["ok"], blackwell["ok"], blackwell["stage"]) == ("estimate", True, False, "lower")
    # In the order of the program, which is not that of the compiler.
    assert [kernel["name"] for kernel in hopper["kernels"]] == ["matmul_forward", "matmul_dx", "matmul_dw"]
    for kernel in hopper["kernels"]:
        assert kernel["occupancy"]["blocks"] >= 1
        assert kernel["binary"]["opcodes"]["HGMMA"] % 4 == 0 < kernel["binary"]["opcodes"]["HGMMA"]  # Steps of 64.
        assert kernel["estimate"]["floor_us"] is None


def test_the_gradient_of_an_x_of_several_products_is_one_kernel_on_each_device() -> None:
    """Rows are cut over two devices, by the compiler: nothing is added up behind the kernel, and it spills nothing."""
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def sharded(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def gradient(x: jax.Array, weights: list[jax.Array], cotangents: list[jax.Array]) -> jax.Array:
        return jax.vjp(lambda x: project_each(x, weights), x)[1](cotangents)[0]

    widths = (512, 96, 32)
    weights = [sharded(2048, width, spec=P()) for width in widths]
    cotangents = [sharded(8192, width, spec=P("x")) for width in widths]
    x = sharded(8192, 2048, spec=P("x"))
    report = aot.compile(jax.jit(gradient), x, weights, cotangents, chip="h200", hlo=True)
    assert report.ok, report.error
    assert report.hlo is not None
    assert not re.search(r"bf16\[4096,2048\]\S* (add|dot|fusion)\(", report.hlo)
    (kernel,) = report.kernels
    assert kernel.name == "matmul_sum"
    assert kernel.binary is not None
    assert (kernel.binary.spill_store_bytes, kernel.binary.spill_load_bytes) == (0, 0)


def test_the_scores_of_kda_leave_next_to_nothing_in_local_memory() -> None:
    """With 340 bytes per thread, which do not stay in what shared memory leaves of the L1 cache, the kernel takes 0.87 ms
    instead of 0.59 ms (H200, H96 T8192 D128).
    """
    q, g = struct(1, 8192, 96, 128), struct(1, 8192, 96, 128, dtype="float32")
    beta = struct(1, 8192, 96, dtype="float32")

    def rule(*arrays: jax.Array) -> jax.Array:
        return tilewright.kda(*arrays, implementation="pallas_gpu")[0]

    report = aot.compile(rule, q, q, q, g, beta, chip="h200")
    assert report.ok, report.error
    scores, states = (kernel.binary for kernel in report.kernels)
    assert scores is not None
    assert (scores.name, scores.threads, states and states.name) == ("kda_scores", 3 * 128, "kda_states")
    assert scores.spill_load_bytes <= 64


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_gate_s_gradient_has_the_thread_blocks_that_it_counts_on(bound) -> None:
    """They all run at a time, nothing is spilled, and a token's x and cotangent are three accesses of 16 bytes."""
    shape, weights = (4, 4096, 32, 128), (struct(32, dtype="float32"), struct(32, 128, dtype="float32"))
    x, dg = struct(*shape), struct(*shape, dtype="float32")

    def gradient(x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, dg: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *given: tilewright.kda_gate(*given, bound), x, A_log, dt_bias)[1](dg)

    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda *given: tilewright.kda_gate(*given, bound), x, *weights).decisions
    config = decision.backward.config
    report = aot.compile(gradient, x, *weights, dg, chip="h200")
    assert report.ok, report.error
    (kernel,) = report.kernels
    assert kernel.binary is not None
    assert kernel.occupancy is not None
    assert kernel.occupancy.blocks >= config.blocks
    assert (kernel.binary.spill_store_bytes, kernel.binary.spill_load_bytes) == (0, 0)
    steady = kernel.binary.steady_state
    assert steady is not None
    assert (steady.opcodes["LDG"], steady.opcodes["STG"]) == (3 * config.unroll, config.unroll)
