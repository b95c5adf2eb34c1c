"""The verbs as a person runs them: what they print, what they write, and how they end."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
import typer
from typer.main import get_command

from tilewright import configs as configs_module
from tilewright.aot import CompileReport
from tilewright.cli import bench as cli_bench
from tilewright.cli import check as cli_check
from tilewright.cli import compile as cli_compile
from tilewright.cli import ops as cli_ops
from tilewright.cli.compile import _changed_configs
from tilewright.cli.document import prints_json, tell
from tilewright.cli.main import app, main
from tilewright.cli.screen import console, new_table
from tilewright.core.chip import Chip
from tilewright.core.dispatch import find_op
from tilewright.core.version import __version__
from tilewright.ops.linear_cross_entropy import xla
from tilewright.ops.norm import xla as norm_xla
from tilewright.workbench.records import read_records


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def flat(self) -> str:
        """Both of its outputs, with a space for each break."""
        return " ".join((self.stdout + self.stderr).split())


def ran(*args: str, cwd: Path | None = None) -> Done:
    """Runs a command in this process, since starting another one takes seconds."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["tilewright", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or Path()):
            main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())


def tilewright(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from tilewright.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300, cwd=cwd)


def assert_refused(*refusals: tuple[tuple[str, ...], str], cwd: Path | None = None) -> None:
    """Commands that end with 2 and say so in a line."""
    for command, message in refusals:
        done = ran(*command, cwd=cwd)
        assert done.code == 2, (command, done)
        assert message in " ".join(done.stderr.split())
        assert len(done.stderr.splitlines()) == 1


def test_help_says_what_each_verb_is_for() -> None:
    done = ran("--help")
    assert done.code == 0
    for word in ("ops", "check", "bench", "new", "tilewright check linear_cross_entropy"):
        assert word in done.flat


def test_version_says_what_is_installed() -> None:
    assert ran("--version") == Done(0, f"tilewright {__version__}, jax {jax.__version__}\n", "")


def test_ops_names_the_choice_and_why_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one op, since tracing all of them takes seconds; the scaffold's tests list all of them."""
    monkeypatch.setattr(cli_ops, "registered", lambda: {"linear_cross_entropy": find_op("linear_cross_entropy")})
    done = ran("ops")
    assert done.code == 0
    flat = done.flat
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


def test_check_exits_with_1_on_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference with a wrong gradient is the plain version too, so break another implementation."""
    right = norm_xla.IMPLEMENTATION

    def wrong(call, launch, *, save):
        y, saved = right.forward.run(call, launch, save=save)
        return y * 1.001, saved

    forward = dataclasses.replace(right.forward, run=wrong)
    monkeypatch.setattr(norm_xla, "IMPLEMENTATION", dataclasses.replace(right, forward=forward))
    done = ran("check", "rms_norm", "--case", "odd", "--implementation", "xla", "--dtype", "float32")
    assert done.code == 1
    assert "MISS" in done.stdout
    assert "miss: xla odd float32 y: max" in done.stdout

    # The same as a document: nothing else is on stdout, and the exit code is the same.
    done = ran("check", "rms_norm", "--case", "odd", "--implementation", "xla", "--dtype", "float32", "--json")
    assert done.code == 1
    told = json.loads(done.stdout)
    missed = next(each for each in told["checked"] if not each["ok"])
    assert (missed["implementation"], missed["quantity"]) == ("xla", "y")
    assert missed["max_abs"] > missed["max_abs_bound"]
    assert (told["failed"], told["interrupted"]) == ({}, False)
    assert "miss: xla odd float32 y: max" in done.stderr


def test_every_verb_that_prints_a_table_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    having = set()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for inner, each in {"": command, **getattr(command, "commands", {})}.items():
            if any("--json" in parameter.opts for parameter in each.params):
                having.add(f"{name} {inner}".strip())
    tables = {"ops", "doctor", "check", "bench", "bench model", "compile", "plan", "tune", "tuned", "profile", "stalls"}
    assert having == tables | {"remote list", "remote status"}
    done = ran("check", "rms_norm", "--case", "hgue", "--json")  # A mistake leaves stdout empty.
    assert (done.code, done.stdout) == (2, "")
    assert_refused((("check", "rms_norm", "--json", "--on", "sky:a"), "leave it or --on sky:a out"))

    @prints_json
    def verb() -> None:
        print("by the way")
        console().print(new_table("a", ("b",)))
        tell(time=float("nan"), path=Path("x"), config=find_op("rms_norm").case("odd").work(2))
        raise typer.Exit(3)

    with pytest.raises(typer.Exit):
        verb(as_json=True)
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["time"], told["path"], set(told["config"])) == (None, "x", {"flops", "bytes"})
    assert err == "by the way\n"


@pytest.mark.slow
def test_check_names_a_case_that_is_not_taken_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right, op = xla.IMPLEMENTATION, find_op("linear_cross_entropy")

    def reason(call, launch):
        return None if call.soft_cap is None else "it takes no soft cap; use None"

    forward = dataclasses.replace(right.forward, unsupported_reason=reason)
    monkeypatch.setattr(xla, "IMPLEMENTATION", dataclasses.replace(right, forward=forward))
    monkeypatch.setitem(vars(op), "cases", tuple(case for case in op.cases if case.name in ("odd", "soft_cap")))
    command = ("check", "linear_cross_entropy", "--implementation", "xla", "--dtype", "float32")
    done = ran(*command)
    assert done.code == 0, done
    assert "not taken: xla soft_cap float32: " in done.flat
    assert "it takes no soft cap; use None" in done.flat
    asked = ran(*command, "--case", "soft_cap")
    assert asked.code == 2
    assert "it takes no soft cap; use None" in asked.flat


@pytest.mark.slow
def test_bench_prints_appends_records_and_plots(tmp_path: Path) -> None:
    args = ("bench", "linear_cross_entropy", "--case", "odd", "--grad", "--seconds", "0.1", "--plot", "out.png")
    for _ in range(2):
        done = tilewright(*args, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    flat = " ".join(done.stdout.split())
    for word in ("first step", "median", "spread", "GFLOP/s", "temp memory", "2 records appended"):
        assert word in flat
    assert (
        "not timed: pallas_tpu odd bfloat16: linear_cross_entropy: implementation='pallas_tpu' cannot run this call"
        in flat
    )
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
    what = ("--case", "gpt2", "--grad", "--implementation", "xla", "--compile-only")
    done = ran("bench", "linear_cross_entropy", *what, cwd=tmp_path)
    assert done.code == 0, done
    (record,) = read_records(tmp_path / "results" / "bench.jsonl")
    assert record.samples_s == ()
    assert list(record.configs) == ["forward", "backward"]
    assert record.metrics["temp_bytes"] > 2**20


def test_a_wrong_word_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    op = "linear_cross_entropy"
    assert_refused(
        (("check", "softmax"), "op='softmax' is not an op of tilewright; use one of flash_attention, decode_attention"),
        (("check", "RMS-nrm"), "short_conv; did you mean rms_norm?"),
        (
            ("bench", "kda,rms_norm"),
            "op='kda,rms_norm' names several ops, and it takes one at a time; pass kda, then the",
        ),
        (("bench", "fp8_matmul"), "op='fp8_matmul' is a plain function of tilewright, not an op"),
        (("check", op, "--case", "huge"), "--case huge is not known; use one of odd, batched"),
        (("check", op, "--dtype", "fp8"), "--dtype fp8 is not known; use one of float32, bfloat16"),
        (("bench", op, "--implementation", "cuda"), "--implementation cuda is not known; use one of"),
        (("bench", op, "--plot", "a.png", "--compile-only"), "--plot draws times and"),
        (
            ("bench", op, "--plot", "a.jpgg"),
            "--plot a.jpgg has no suffix of a format for plots; use a.png, .pdf or .svg",
        ),
        (("bench", op, "--plot", "a"), "--plot a has no suffix of a format for plots; use a.png"),
        (("bench", op, "--seconds", "nan"), "--seconds nan is not a number of seconds; use 0 or more, such as 2"),
        (("bench", op, "--seconds", "-1"), "--seconds -1.0 is not a number of seconds"),
        (("bench", op, "--seconds", "inf"), "--seconds inf is not a number of seconds"),
        (("bench", op, "--case", ""), "--case '' names nothing; use one of odd, batched"),
        (("check", op, "--case", ","), "--case ',' names nothing; use one of odd, batched"),
        (
            ("bench", op, "--records", "/dev/full"),
            "--records /dev/full cannot be written: No space left on device; use",
        ),
        (("bench", op, "--records", "."), "--records . cannot be written: Is a directory; use another path"),
        (
            ("bench", op, "--records", "/dev/null/a"),
            "--records /dev/null/a cannot be written: /dev/null is no folder; use",
        ),
        (("bench", op, "--plot", "/proc/a.png"), "--plot /proc/a.png cannot be written: "),
        cwd=tmp_path,
    )


def test_benching_only_what_cannot_run_here_exits_with_1(tmp_path: Path) -> None:
    done = ran("bench", "linear_cross_entropy", "--case", "odd", "--implementation", "pallas_tpu", cwd=tmp_path)
    assert done.code == 1
    assert "not timed" in done.stdout
    assert not (tmp_path / "results" / "bench.jsonl").exists()


def test_compile_reads_its_arguments_before_it_compiles() -> None:
    op = ("compile", "linear_cross_entropy")
    assert_refused(
        (("compile",), "OP is missing; name an op (`tilewright ops` lists them), or pass --doctor"),
        ((*op, "--dtype", "float16"), "--dtype float16 is not known; use one of float32, bfloat16"),
        ((*op, "--out", "/dev/full"), "--out /dev/full cannot be written: No space left on device"),
        ((*op, "--limit", "nan"), "--limit nan is not a number of seconds"),
        (
            (*op, "--chip", "v6"),
            "--chip v6 is not known; use one of v4, v5e, v5p, v6e, v7x, h100, h200, b200; did you mean v6e?",
        ),
        (("compile", "rms_norm", "--chip", "v6e,h200"), "rms_norm has no GPU kernel to compile; its implementations:"),
        ((*op, "--config", "block_n"), "--config block_n is not name=number"),
        (
            (*op, "--config", "block_q=8"),
            "--config block_q is not a block size of linear_cross_entropy; use one of forward: block_h, tile_n, block_n, "
            "block_v, slots, stored; backward: block_h, tile_n, block_n_dx",
        ),
        ((*op, "--config", "backward.block_n=16"), "--config backward.block_n is not a block size of"),
        (
            (*op, "--config", "block_n=8"),
            "block_n=8 must be a positive multiple of 16 (sublanes of a bfloat16 tile); use 16",
        ),
        ((*op, "--config", "block_v_dw=8"), "block_v_dw=8 must be a positive multiple of 128"),
        (
            ("compile", "matmul", "--chip", "b200", "--config", "block_n=64"),
            "and the chip is b200, with compute capability 10.0; use --chip h100 or h200",
        ),
        (
            ("compile", "matmul", "--chip", "h200", "--dtype", "float32", "--config", "block_n=64"),
            "pass --dtype bfloat16, or use another case: here a call takes 'xla'",
        ),
    )


def test_compile_prints_remedies_that_it_has_options_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What refuses a call is written for its caller, who has `implementation=`."""
    remedy = "use x.astype(jnp.bfloat16), or implementation='xla'"
    refused = CompileReport("h200", "1x1", ok=False, stage="lower", seconds=0.0, cause="refused", remedy=remedy)
    monkeypatch.setattr(cli_compile, "compile_for", lambda *_, **__: refused)
    monkeypatch.setattr(cli_compile.Toolchain, "here", lambda *_: None)
    done = ran("compile", "short_conv", "--case", "odd", "--chip", "h200")
    assert done.code == 1
    assert "remedy: use --dtype bfloat16, or another case: here a call takes 'xla', which has no kernel" in done.stdout
    assert "implementation=" not in ran("compile", "linear_cross_entropy", "--config", "block_n=8").stderr


def test_compile_without_a_schedule_says_whether_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompileReport("h100", "1x1", ok=True, stage="done", seconds=8.0, compiler="ptxas 13")
    monkeypatch.setattr(cli_compile, "compile_for", lambda *_, **__: compiled)
    monkeypatch.setattr(cli_compile.Toolchain, "here", lambda *_: None)
    done = ran("compile", "short_conv", "--case", "odd", "--chip", "h100", "--no-schedule")
    assert done.code == 0
    assert "│ h100 │ compiles │ 8 s │" in done.flat
    assert "machine code" not in done.stdout
    assert "no figures" not in done.stdout


def test_a_field_on_the_command_line_changes_the_configs_that_have_it() -> None:
    op = find_op("rms_norm")
    case, chip = op.cases[-1], Chip.named("v6e")
    forward, backward = _changed_configs(op, case, chip, "bfloat16", {"tile_n": 16, "backward.block_n": 48})
    assert (forward.tile_n, backward.tile_n, backward.block_n) == (16, 16, 48)
    assert forward.block_n != 48
    assert _changed_configs(op, case, chip, "bfloat16", {}) is None


def test_the_doctor_tells_what_this_machine_has() -> None:
    done = ran("compile", "--doctor")
    assert "libtpu" in done.stdout
    assert "ptxas" in done.stdout
    assert "libtpu" not in ran("compile", "--doctor", "--chip", "h200").stdout
    assert done.code in (0, 1)
    assert ("setup_aot.sh" in done.stdout) == (done.code == 1)


@pytest.mark.parametrize("words", [("ops",), ("check", "rms_norm"), ("bench", "rms_norm", "--case", "odd")])
def test_a_device_that_is_not_here_is_one_line(words: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    def unavailable() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu': no libtpu.so (set JAX_PLATFORMS='' to choose)")

    for module in (cli_ops, cli_check, cli_bench):
        monkeypatch.setattr(module, "default_device", unavailable)
    assert_refused((words, "error: Unable to initialize backend 'tpu': no libtpu.so (set JAX_"), cwd=tmp_path)


@pytest.mark.slow
def test_jax_platforms_that_are_not_here_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: JAX looks for its devices once."""
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    if importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is installed, and may find a TPU")
    for words in (("ops",), ("check", "rms_norm"), ("bench", "rms_norm"), ("compile", "rms_norm")):
        done = tilewright(*words, cwd=tmp_path)
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: Unable to initialize backend 'tpu'")
        assert len(done.stderr.splitlines()) == 1
