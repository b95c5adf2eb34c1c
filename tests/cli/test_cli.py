"""The verbs as a person runs them: what they print, what they write, and how they end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright import configs as configs_module
from tilewright.cli.compile import _changed_configs
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.workbench.records import read_records


def tilewright(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from tilewright.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300, cwd=cwd)


_ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from tilewright.cli.main import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["tilewright", *command]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


def assert_refused(*refusals: tuple[tuple[str, ...], str], cwd: Path | None = None) -> None:
    """Commands that end with 2 and say so in a line. One process runs them all, since starting one takes seconds."""
    commands = json.dumps([command for command, _ in refusals])
    code = [sys.executable, "-c", _ONE_AFTER_THE_OTHER, commands]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (command, message), (code, said) in zip(refusals, ends, strict=True):
        assert code == 2, (command, said)
        assert message in " ".join(said.split())
        assert "Traceback" not in said


def test_help_says_what_each_verb_is_for() -> None:
    done = tilewright("--help")
    assert done.returncode == 0
    for word in ("ops", "check", "bench", "new", "tilewright check linear_cross_entropy"):
        assert word in " ".join(done.stdout.split())


def test_ops_names_the_choice_and_why_not_the_others() -> None:
    done = tilewright("ops")
    assert done.returncode == 0
    flat = " ".join(done.stdout.split())
    assert "linear_cross_entropy" in flat
    assert "chosen" in flat
    assert "it is a TPU kernel and this is a CPU" in flat
    # The passes of what runs, with their block sizes; the reference has none, and no backward of its own.
    assert re.search(
        r"forward: tilewright.configs.LinearCrossEntropyXlaForward\(block_n=\d+, block_v=\d+\) \(heu", flat
    )
    assert "backward: tilewright.configs.LinearCrossEntropyXlaBackward(" in flat
    assert "backward: JAX differentiates the forward pass" in flat


@pytest.mark.slow
def test_check_passes_and_shows_errors_with_their_bounds() -> None:
    done = tilewright("check", "linear_cross_entropy", "--case", "odd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 of 28 within bounds" in done.stdout
    assert "In the interpreter, since this device cannot run it: pallas_tpu, pallas_gpu." in done.stdout
    assert "pallas_gpu does not take float32." in done.stdout
    for word in ("max error", "bound", "mean error", "relative", "logsumexp", "d w"):
        assert word in done.stdout


def test_check_exits_with_1_on_a_miss() -> None:
    """A reference with a wrong gradient is the plain version too, so break another implementation."""
    code = """
import dataclasses, sys
import tilewright.ops.linear_cross_entropy.xla as xla
right = xla.IMPLEMENTATION
def wrong(call, launch, *, save):
    (nll, logsumexp), saved = right.forward.run(call, launch, save=save)
    return (nll * 1.001, logsumexp), saved
xla.IMPLEMENTATION = dataclasses.replace(right, forward=dataclasses.replace(right.forward, run=wrong))
from tilewright.cli.main import main
sys.argv = ["tilewright", "check", "linear_cross_entropy", "--case", "odd", "--implementation", "xla"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "MISS" in done.stdout
    assert "miss: xla odd float32 loss: max" in done.stdout


@pytest.mark.slow
def test_check_names_a_case_that_is_not_taken_and_goes_on() -> None:
    code = """
import dataclasses, sys
import tilewright.ops.linear_cross_entropy.cases as cases
import tilewright.ops.linear_cross_entropy.xla as xla
cases.CASES = tuple(case for case in cases.CASES if case.name in ("odd", "soft_cap"))
def reason(call, launch):
    return None if call.soft_cap is None else "it takes no soft cap; use None"
right = xla.IMPLEMENTATION
xla.IMPLEMENTATION = dataclasses.replace(right, forward=dataclasses.replace(right.forward, unsupported_reason=reason))
from tilewright.cli.main import main
sys.argv = ["tilewright", "check", "linear_cross_entropy", "--implementation", "xla", "--dtype", "float32", *sys.argv[1:]]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    flat = " ".join(done.stdout.split())
    assert "not taken: xla soft_cap: " in flat
    assert "it takes no soft cap; use None" in flat
    asked = subprocess.run(
        [sys.executable, "-c", code, "--case", "soft_cap"], capture_output=True, text=True, timeout=300
    )
    assert asked.returncode == 2
    assert "it takes no soft cap; use None" in " ".join(asked.stderr.split() + asked.stdout.split())


@pytest.mark.slow
def test_bench_prints_appends_records_and_plots(tmp_path: Path) -> None:
    args = ("bench", "linear_cross_entropy", "--case", "odd", "--grad", "--seconds", "0.1", "--plot", "out.png")
    for _ in range(2):
        done = tilewright(*args, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    flat = " ".join(done.stdout.split())
    for word in ("first step", "median", "spread", "GFLOP/s", "temp memory", "2 records appended"):
        assert word in flat
    assert "not timed: linear_cross_entropy: implementation='pallas_tpu' cannot run this call" in flat
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    records = list(read_records(tmp_path / "results" / "bench.jsonl"))
    assert [record.implementation for record in records] == ["xla", "reference"] * 2
    for record in records:
        assert len(record.samples_s) >= 5
        assert record.mode == "forward+backward"
        assert record.metrics["first_step_s"] > record.metrics["compile_s"] > 0
        assert record.metrics["flops_fraction"] is None
    xla, reference = records[:2]
    configs = {name: configs_module.from_json(json.dumps(config)) for name, config in xla.configs.items()}
    assert {name: type(config).__name__ for name, config in configs.items()} == {
        "forward": "LinearCrossEntropyXlaForward",
        "backward": "LinearCrossEntropyXlaBackward",
    }
    assert xla.config_sources == {"forward": "heuristic", "backward": "heuristic"}
    assert (reference.configs, reference.config_sources) == ({}, {})


def test_bench_compile_only_reports_memory_without_running(tmp_path: Path) -> None:
    done = tilewright(
        "bench",
        "linear_cross_entropy",
        "--case",
        "gpt2",
        "--grad",
        "--implementation",
        "xla",
        "--compile-only",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_records(tmp_path / "results" / "bench.jsonl")
    assert record.samples_s == ()
    assert list(record.configs) == ["forward", "backward"]
    assert record.metrics["temp_bytes"] > 2**20


def test_a_wrong_word_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    op = "linear_cross_entropy"
    assert_refused(
        (("check", "softmax"), "op='softmax' is not an op of tilewright; use one of flash_attention, decode_attention"),
        (("check", op, "--case", "huge"), "--case huge is not known; use one of odd, batched"),
        (("check", op, "--dtype", "fp8"), "--dtype fp8 is not known; use one of float32, bfloat16"),
        (("bench", op, "--implementation", "cuda"), "--implementation cuda is not known; use one of"),
        (("bench", op, "--plot", "a.png", "--compile-only"), "--plot draws times and"),
        cwd=tmp_path,
    )


def test_benching_only_what_cannot_run_here_exits_with_1(tmp_path: Path) -> None:
    done = tilewright("bench", "linear_cross_entropy", "--case", "odd", "--implementation", "pallas_tpu", cwd=tmp_path)
    assert done.returncode == 1
    assert "not timed" in done.stdout


def test_compile_reads_its_arguments_before_it_compiles() -> None:
    op = ("compile", "linear_cross_entropy")
    assert_refused(
        (("compile",), "OP is missing; name an op (`tilewright ops` lists them), or pass --doctor"),
        ((*op, "--chip", "v6"), "--chip v6 is not known; use one of v4, v5e, v5p, v6e, v7x"),
        ((*op, "--config", "block_n"), "--config block_n is not name=number"),
        (
            (*op, "--config", "block_q=8"),
            "--config block_q is not a block size of linear_cross_entropy; use one of forward: block_h, tile_n, block_n, "
            "block_v; backward: block_h, tile_n, block_n_dx",
        ),
        ((*op, "--config", "backward.block_n=16"), "--config backward.block_n is not a block size of"),
        ((*op, "--config", "block_n=8"), "block_n=8 must be a positive multiple of 16"),
        ((*op, "--config", "block_v_dw=8"), "block_v_dw=8 must be a positive multiple of 128"),
    )


def test_a_field_on_the_command_line_changes_the_configs_that_have_it() -> None:
    op = find_op("rms_norm")
    case, chip = op.cases[-1], Chip.named("v6e")
    forward, backward = _changed_configs(op, case, chip, "bfloat16", {"tile_n": 16, "backward.block_n": 48})
    assert (forward.tile_n, backward.tile_n, backward.block_n) == (16, 16, 48)
    assert forward.block_n != 48
    assert _changed_configs(op, case, chip, "bfloat16", {}) is None


def test_the_doctor_tells_what_this_machine_has() -> None:
    done = tilewright("compile", "--doctor")
    assert "libtpu" in done.stdout
    assert done.returncode in (0, 1)
    assert ("setup_aot.sh" in done.stdout) == (done.returncode == 1)
