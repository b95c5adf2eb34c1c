"""The compiler's life: what it does when the worker crashes, hangs or answers garbage, and what it reads from errors.

None of this needs libtpu. What does is in test_libtpu.py.
"""

import json
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.aot.kernels import copy, looped_by_data, matmul, sorting, struct
from tests.aot.test_sass import ATTENTION, SERIALISED
from tilewright import aot, configs, linear_cross_entropy
from tilewright.aot import compiler, toolchain, worker
from tilewright.aot.diagnosis import diagnose
from tilewright.aot.program import lower
from tilewright.aot.toolchain import CUDA_PLUGIN, NotSetUp, Toolchain, cuda_wanted, libtpu_wanted, too_old
from tilewright.core.chip import Chip

V5E = Chip.named("v5e")


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replace the worker with a script, and keep results in a folder of the test's."""

    def replace(script: str) -> None:
        path = tmp_path / "worker.py"
        path.write_text("import json, os, signal, sys, time\nanswer = sys.argv[-1]\n" + script)
        monkeypatch.setattr(worker, "__file__", str(path))
        for_tpu = Toolchain((sys.executable, "-S"), (), Path("libtpu.so"), libtpu_wanted() + ".1")
        for_gpu = Toolchain((sys.executable, "-S"), (), Path("plugin.so"), f"{cuda_wanted()}, ptxas 13.4", CUDA_PLUGIN)
        here = {"tpu": for_tpu, "gpu": for_gpu}
        monkeypatch.setattr(Toolchain, "here", staticmethod(lambda platform: here[platform]))
        monkeypatch.setattr(compiler, "home", lambda: tmp_path / "home")

    return replace


def add(x: jax.Array) -> jax.Array:
    return x + 1


GOOD = """
sizes = {'code_bytes': 5, 'argument_bytes': 6, 'output_bytes': 7, 'temp_bytes': 8}
json.dump({'ok': True, **sizes}, open(answer, 'w'))
"""


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGABRT)", r"was ended by signal 6 \(SIGABRT\) without an answer"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was ended by signal 9 \(SIGKILL\) without an answer"),
        ("print('last words', flush=True); sys.exit(3)", r"ended with exit code 3 without an answer"),
        ("open(answer, 'w').write('garbage')", r"ended with exit code 0 without an answer"),
        ("json.dump([1], open(answer, 'w'))", r"ended with exit code 0 without an answer"),
        ("json.dump({'ok': True}, open(answer, 'w'))", r"ended with exit code 0 without an answer"),
        ("time.sleep(60)", r"the compiler was stopped after 1 s"),
    ],
)
def test_however_the_worker_ends_it_is_a_line_of_the_report(fake_worker, script: str, cause: str) -> None:
    fake_worker(script)
    report = aot.compile(add, struct(8, 128), chip="v5e", limit_s=1)
    assert not report.ok
    assert report.stage == "compile"
    assert re.search(cause, report.cause)
    if "last words" in script:
        assert "last words" in report.error


def test_a_probe_reads_the_memory_of_a_refusal_and_keeps_it(fake_worker, tmp_path: Path) -> None:
    """libtpu is told that there is next to no memory. A program that fits all the same says its sizes."""
    said = "E1000: Ran out of memory on HBM, the total memory required for HLO temporaries (3.61G) exceeds (64.00M)."
    told = f"open({str(tmp_path / 'flags')!r}, 'a').write(os.environ['LIBTPU_INIT_ARGS'] + '\\n')\n"
    fake_worker(f"{told}json.dump({{'ok': False, 'error': {said!r}}}, open(answer, 'w'))")
    assert aot.probe_memory(add, struct(8, 128), chip="v5e").bytes == int(3.61 * 2**30)
    assert aot.probe_memory(add, struct(8, 128), chip="v5e").bytes == int(3.61 * 2**30)
    assert (tmp_path / "flags").read_text().splitlines() == ["--xla_tpu_max_hbm_size_mib=64"]
    assert not aot.compile(add, struct(8, 128), chip="v5e", schedule=False).ok  # A refusal is no result of a compile.
    fake_worker(GOOD)
    assert aot.probe_memory(add, struct(16, 128), chip="v5e").bytes == 6 + 7 + 8
    fake_worker("json.dump({'ok': False, 'error': 'nothing to say'}, open(answer, 'w'))")
    assert aot.probe_memory(add, struct(32, 128), chip="v5e").cause == "nothing to say"


def test_a_result_is_kept_by_program_chip_libtpu_and_flags(fake_worker, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    fake_worker(f"open({str(runs)!r}, 'a').write('.'){GOOD}")
    first = aot.compile(add, struct(8, 128), chip="v5e")
    again = aot.compile(add, struct(8, 128), chip="v5e")
    assert (first.ok, first.cached, again.ok, again.cached) == (True, False, True, True)
    assert (again.code_bytes, again.temp_bytes) == (5, 8)
    aot.compile(add, struct(16, 128), chip="v5e")
    aot.compile(add, struct(8, 128), chip="v6e")
    aot.compile(add, struct(8, 128), chip="v5e", use_cache=False)
    assert runs.read_text() == "." * 4


def test_without_a_schedule_the_compiler_is_not_asked_for_one(fake_worker, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    fake_worker(f"open({str(asked)!r}, 'a').write(os.environ['LIBTPU_INIT_ARGS'] + '\\n'){GOOD}")
    plain = aot.compile(copy, struct(4096, 128), chip="v5e", schedule=False)
    whole = aot.compile(copy, struct(4096, 128), chip="v5e")
    assert (plain.ok, plain.floor_us, whole.cached) == (True, None, False)
    first, second = asked.read_text().splitlines()
    assert first == ""
    assert "dump" in second


def test_what_a_gpu_compiler_prints_is_read_and_kept(fake_worker, tmp_path: Path) -> None:
    asked = tmp_path / "asked.json"
    told = "{**os.environ, **json.load(open(sys.argv[3]))}"
    fake_worker(f"json.dump({told}, open({str(asked)!r}, 'w')); print({ATTENTION + SERIALISED!r}){GOOD}")
    first = aot.compile(add, struct(8, 128), chip="h200")
    assert first.ok, first.cause
    assert (first.topology, first.compiler) == ("h200:1x1x1", f"jax-cuda13-plugin {cuda_wanted()}, ptxas 13.4")
    assert [kernel.name for kernel in first.kernels] == ["flash_attention_forward", "matmul_dx"]
    for kernel in first.kernels:
        assert kernel.occupancy is not None
        assert (kernel.occupancy.blocks, kernel.floor_us, kernel.bottleneck) == (1, None, None)
    assert first.floor_us is None
    again = aot.compile(add, struct(8, 128), chip="h200")
    assert again.cached
    assert again.kernels == first.kernels
    given = json.loads(asked.read_text())
    assert "core_count: 132" in given["target_config"]
    assert "cuda_compute_capability { major: 9 minor: 0 }" in given["target_config"]
    assert given["MOSAIC_GPU_DUMP_SASS"] == "1"
    assert aot.compile(add, struct(8, 128), chip="h200", schedule=False).kernels == ()
    assert "MOSAIC_GPU_DUMP_SASS" not in json.loads(asked.read_text())


def test_what_a_gpu_compiler_prints_and_cannot_be_read_is_a_line(fake_worker) -> None:
    fake_worker(f"print({ATTENTION.replace('bytes spill', 'octets')!r}){GOOD}")
    report = aot.compile(add, struct(8, 128), chip="h200")
    assert not report.ok
    assert report.cause.startswith("it compiled, and what the compiler printed could not be read: ptxas reported no")


def test_a_kernel_for_hopper_says_on_blackwell_what_dispatch_says(fake_worker) -> None:
    fake_worker(GOOD)
    x, w = struct(128, 128), struct(128, 128)
    report = aot.compile(lambda x, w: tilewright.matmul(x, w, implementation="pallas_gpu"), x, w, chip="b200")
    with tilewright.target("b200"):
        refusal = tilewright.explain("matmul", x=x, w=w, implementation="pallas_gpu").refusal
    assert (report.ok, report.stage) == (False, "lower")
    assert f"{report.cause}; {report.remedy}" == refusal
    assert "written for Hopper GPUs" in report.cause


def test_a_spoilt_result_on_disk_is_compiled_anew(fake_worker, tmp_path: Path) -> None:
    fake_worker(GOOD)
    aot.compile(add, struct(8, 128))
    (kept,) = (tmp_path / "home" / "results").glob("*.json")
    kept.write_text("{")
    assert not aot.compile(add, struct(8, 128)).cached


def test_compiles_go_side_by_side(fake_worker) -> None:
    fake_worker(f"time.sleep(1){GOOD}")
    jobs = [lambda chip=chip: aot.compile(add, struct(8, 128), chip=chip) for chip in ("v4", "v5e", "v5p")]
    began = time.monotonic()
    ended = dict(aot.compile_each(jobs, side_by_side=3))
    assert time.monotonic() - began < 2.5
    assert [ended[place].result().chip for place in range(3)] == ["v4", "v5e", "v5p"]
    assert all(future.result().ok for future in ended.values())


def test_closing_stops_the_compiles_that_run_and_those_that_wait(fake_worker) -> None:
    fake_worker(f"if 'v4' not in sys.argv[2]: time.sleep(60){GOOD}")
    jobs = [lambda chip=chip: aot.compile(add, struct(8, 128), chip=chip) for chip in ("v5e", "v4", "v5p", "v6e")]
    began, ended = time.monotonic(), aot.compile_each(jobs, side_by_side=2)
    place, future = next(ended)
    ended.close()
    assert (place, future.result().ok) == (1, True)
    assert time.monotonic() - began < 20
    assert not compiler._stop.is_set()


def test_estimates_are_labelled_so_in_json(fake_worker) -> None:
    fake_worker(GOOD)
    data = aot.compile(copy, struct(4096, 128), chip="v5e").to_dict()
    (kernel,) = data["kernels"]
    assert not any("_us" in name for name in kernel)
    assert kernel["estimate"]["copy_us"] > 0
    json.dumps(data)


def test_an_unknown_chip_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"chip='l4' cannot be compiled for; use one of v4, .* v7x, h100, h200, b200"):
        aot.compile(add, struct(8, 128), chip="l4")


def test_a_primitive_that_cannot_be_lowered_is_named_with_its_line(fake_worker) -> None:
    fake_worker(GOOD)
    report = aot.compile(sorting, struct(256, 256, dtype="float32"))
    assert (report.ok, report.stage) == (False, "lower")
    assert "Unimplemented primitive in Pallas TPU lowering for tc: sort" in report.cause
    assert "kernels.py:" in report.cause
    assert "(sorting.<locals>.kernel)" in report.cause


def test_a_block_that_cannot_fit_is_refused_with_the_block_to_shrink(fake_worker) -> None:
    """Before the compiler: the op knows what its blocks take."""
    fake_worker(GOOD)
    huge = configs.LinearCrossEntropyTpuForward(block_n=65536, block_v=512)
    x, w, labels = struct(65536, 64), struct(64, 1024), struct(65536, dtype="int32")
    report = aot.compile(
        lambda x, w, labels: linear_cross_entropy(x, w, labels, implementation="pallas_tpu", config=huge),
        *(x, w, labels),
        chip="v5p",
    )
    assert (report.ok, report.stage) == (False, "lower")
    assert "its forward kernel needs about" in report.cause
    assert "a v5p has 64" in report.cause
    assert report.remedy == "use a smaller block_n or block_v, or implementation='xla'"


def test_hbm_traffic_is_counted_from_the_grid() -> None:
    """Each operand is read once for each block of the other: 4 x 3 x 2 steps of 128-blocks."""
    kernel = lower(lambda x, w: matmul(x, w, block=128), (struct(512, 256), struct(256, 384)), {}, V5E).kernels[0]
    assert (kernel.name, kernel.grid, kernel.parallel) == ("matmul", (4, 3, 2), True)
    block = 128 * 128 * 2
    assert kernel.hbm_bytes == 24 * block + 24 * block + 12 * block
    (whole,) = lower(copy, (struct(4096, 256),), {}, V5E).kernels
    assert whole.hbm_bytes == 2 * 4096 * 256 * 2


def test_traffic_that_depends_on_data_is_not_guessed() -> None:
    (kernel,) = lower(looped_by_data, (struct(8, dtype="int32"), struct(64, 128, dtype="float32")), {}, V5E).kernels
    assert kernel.hbm_bytes is None
    assert kernel.why_unknown == "its block indices are data (prefetched scalars)"


def test_kernels_inside_of_jit_and_scan_are_found() -> None:
    @jax.jit
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return copy(carry), None

    program = lower(lambda x: jax.lax.scan(body, x, None, length=3)[0], (struct(2048, 128),), {}, V5E)
    assert [kernel.name for kernel in program.kernels] == ["copy"]


# As libtpu 0.0.50 says it, of kernels of ours.
OVER_THE_CHIP = """XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 256.00M of 128.00M vmem.

  Largest program allocations in vmem:

  1. Size: 128.00M
     Operator: op_name="jit(windows)/windows/pallas_call"
     Shape: u8[134217728]{0}
     Unpadded size: 128.00M
     Tag: input window allocation for operator input 0. The window shape is f32[16384,1024], while the full shape is \
f32[65536,1024]. The u8 shape/size shown above represents the raw byte size. This allocation has 2 buffering levels.
     Allocation type: scoped
     ==========================

  2. Size: 64.00M
     Shape: f32[16384,1024]{1,0}
     Tag: scratch operand
     ==========================
"""
A_SINGLE_ONE = """Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation3 [shape = \
'f32[65536,1024]{1,0:T(8,128)}', space=vmem, size = 0x10000000, scoped, tag = 'scratch operand'] :: roomy.1"""
OVER_ITS_LIMIT = """E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %small_limit.1 = f32[16384,1024]{1,0}. Scoped \
allocation with size 64.00M and limit 16.00M exceeded scoped vmem limit by 48.00M."""


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (
            OVER_THE_CHIP,
            "VMEM overflow: it needs 256.0 MiB and a v5e has 128 MiB; the largest: "
            "128.0 MiB input 0, window f32[16384,1024], 2 buffers; 64.0 MiB scratch operand f32[16384,1024]",
            "make the block of the largest allocation smaller",
        ),
        (
            A_SINGLE_ONE,
            "VMEM overflow: scratch operand f32[65536,1024] alone is 256.0 MiB and a v5e has 128 MiB",
            "make the block of the largest allocation smaller",
        ),
        (
            OVER_ITS_LIMIT,
            "VMEM overflow: it needs 64.0 MiB and its limit is 16.0; a v5e has 128 MiB",
            "raise CompilerParams(vmem_limit_bytes=...)",
        ),
        (
            "INTERNAL: Mosaic failed to compile TPU kernel: 'tpu.dynamic_rotate' op Not implemented: unsupported shape",
            "v5e cannot do this: tpu.dynamic_rotate: Not implemented: unsupported shape",
            "use another operation",
        ),
        (
            "INTERNAL: Mosaic failed: cannot statically prove that index in dimension 1 is a multiple of 128",
            "misaligned: INTERNAL: Mosaic failed: cannot statically prove that index in dimension 1 is a multiple of 128",
            "make slices and blocks multiples of 8 along the second-last axis, of 128 along the last",
        ),
        ("something else\nand more", "something else", "full message in the report's `error`"),
    ],
)
def test_the_first_cause_and_its_remedy(error: str, cause: str, remedy: str) -> None:
    said = diagnose(error, V5E, libtpu_wanted() + ".1")
    assert said.cause == cause
    assert remedy in said.remedy


def test_an_instruction_that_does_not_fit_the_registers() -> None:
    error = (
        "INTERNAL: ptxas fatal : (C7602) Insufficient registers (56) to compile instruction at line 296 in function "
    )
    said = diagnose(f"{error}matmul_dx. Try to compile with", Chip.named("h200"), cuda_wanted())
    assert (
        said.cause == "out of registers: an instruction of matmul_dx needs more than the 56 per thread that it may have"
    )
    assert "fewer warpgroups" in said.remedy


def test_an_old_libtpu_is_named_before_mosaics_own_message() -> None:
    said = diagnose("INTERNAL: unsupported Mosaic version 9", V5E, "0.0.1")
    assert said.cause.startswith("libtpu 0.0.1 is older than the")
    assert "unsupported Mosaic version 9" in said.remedy
    assert too_old(libtpu_wanted()) is None
    assert too_old(libtpu_wanted() + ".3") is None
    assert too_old("1.0") is None


def test_the_doctor_names_what_is_missing_and_what_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    found = {finding.what: finding for finding in aot.doctor()}
    for what in ("libtpu", "emulator", "x86-64 root"):
        assert not found[what].ok
        assert found[what].remedy == "bash scripts/setup_aot.sh"
    with pytest.raises(NotSetUp, match=r"libtpu: none found; run bash scripts/setup_aot.sh"):
        aot.compile(lambda x: jnp.sin(x), struct(8, 128))


def test_the_doctor_knows_what_compiling_for_gpus_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lacks = {finding.what: finding.remedy for finding in aot.doctor("gpu") if not finding.ok}
    files = ("xla_cuda_plugin.so", "libmosaic_gpu_runtime.so", "bin/ptxas", "bin/nvdisasm")
    assert lacks == dict.fromkeys((*files, "set-up"), "bash scripts/setup_aot.sh gpu")
    with pytest.raises(NotSetUp, match=r"xla_cuda_plugin.so: none found; run bash scripts/setup_aot.sh gpu"):
        aot.compile(add, struct(8, 128), chip="h200")
    for name, text in (*dict.fromkeys(files, "").items(), ("VERSION", "0.1, ptxas 12.9")):
        (toolchain.cuda_home() / name).parent.mkdir(parents=True, exist_ok=True)
        (toolchain.cuda_home() / name).write_text(text)
    (old,) = [finding for finding in aot.doctor("gpu") if not finding.ok]
    assert not old.needed
    assert old.found.startswith("jax-cuda13-plugin 0.1, ptxas 12.9 is older than the")
    assert Toolchain.here("gpu").compiler == "jax-cuda13-plugin 0.1, ptxas 12.9"
    monkeypatch.setattr(toolchain.platform, "system", lambda: "Darwin")
    with pytest.raises(NotSetUp, match=r"machine: Darwin .*; run this on Linux, x86-64 or aarch64"):
        Toolchain.here("gpu")


@pytest.mark.parametrize("installed", [("qemu-x86_64-static",), ("qemu-x86_64-static", "box64")])
def test_box64_is_taken_where_it_is_installed(
    installed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster of the emulators; both run the same Python with the same libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/bin/{name}" if name in installed else None)
    home = toolchain.home()
    for file, text in (("libtpu/libtpu.so", ""), ("libtpu/VERSION", libtpu_wanted()), ("root/usr/bin/python3.11", "")):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(text)
    chosen = toolchain.Toolchain.here()
    assert chosen.command[0].endswith(installed[-1])
    assert chosen.command[-2:] == (str(home / "root/usr/bin/python3.11"), "-S")
    assert "lib/x86_64-linux-gnu" in " ".join(chosen.command) + str(dict(chosen.environment))
