"""No measurement is lost: what one entry raises, Ctrl-C and a full disk leave the others, on the screen and on disk."""

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.aot.test_compiler import GOOD, fake_worker  # noqa: F401, a fixture
from tests.cli.test_cli import ran
from tilewright.cli import bench, check, screen
from tilewright.workbench.peers.agreement import Wanted
from tilewright.workbench.records import append_records, read_records

BENCH = ("bench", "rms_norm", "--implementation", "xla,reference", "--case", "odd,heads_of_64", "--seconds", "0")


def at_call(number: int, real: Any, instead: Any) -> Any:
    """`real`, with one of its calls replaced."""
    calls: list[None] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return (instead if len(calls) == number else real)(*args, **kwargs)

    return function


def interrupt(*_: Any, **__: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def exhaust(*_: Any, **__: Any) -> None:
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate 3 GiB")


@pytest.mark.slow
def test_ctrl_c_prints_the_table_so_far_and_its_records_are_on_disk(tmp_path: Path) -> None:
    """A real one, of a process whose second entry takes a minute."""
    code = """
import time
import tilewright.workbench.bench as bench
from tilewright.cli.main import main
real, calls = bench.samples, []
def samples(*args):
    calls.append(None)
    if len(calls) == 2:
        print("begun", flush=True)
        time.sleep(60)
    return real(*args)
bench.samples = samples
main()
"""
    # SIGINT may be ignored where the tests run in the background, and that is inherited.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    words = [sys.executable, "-c", code, *BENCH, "--records", "mine.jsonl"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, preexec_fn=heard, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        (kept,) = read_records(tmp_path / "mine.jsonl")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert (kept.implementation, kept.case) == ("xla", "odd")
    assert "│ odd  │ bfloat16 │ xla " in out
    assert "│ reference " not in out
    assert "1 records appended to mine.jsonl" in out
    assert "interrupted: the rest was not run" in out
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_what_one_implementation_raises_is_a_row_and_a_record(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "bench_case", at_call(2, bench.bench_case, exhaust))
    done = ran(*BENCH, "--plot", "o.svg", cwd=tmp_path)
    assert done.code == 1
    assert "│ odd         │ bfloat16 │ reference      │     failed │" in done.stdout
    text = "RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB"
    assert f"failed: reference odd bfloat16: {text}" in done.flat
    records = list(read_records(tmp_path / "results" / "bench.jsonl"))
    assert [record.metrics.get("failure") for record in records] == [None, text, None, None]
    assert [bool(record.samples_s) for record in records] == [True, False, True, True]
    assert (tmp_path / "o.svg").exists()


def test_a_full_disk_in_the_middle_ends_with_the_table(tmp_path: Path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "append_records", at_call(2, append_records, full))
    done = ran(*BENCH, cwd=tmp_path)
    assert done.code == 2
    assert done.stdout.count("│ odd ") == 2
    assert done.stderr == (
        "error: --records results/bench.jsonl cannot be written: No space left on device; use another path, or make room "
        "there\n"
    )
    assert len(list(read_records(tmp_path / "results" / "bench.jsonl"))) == 1


def test_a_peer_that_fails_is_a_row_and_one_that_cannot_be_compared_keeps_its_time(tmp_path: Path, monkeypatch) -> None:
    words = ("bench", "flash_attention", "--against", "jax", "--implementation", "xla", "--seconds", "0")
    monkeypatch.setattr(bench, "bench_peer", exhaust)
    monkeypatch.setattr(Wanted, "judge", exhaust)
    done = ran(*words, "--case", "large_logits", cwd=tmp_path)
    assert done.code == 1
    ours, theirs, _ = read_records(tmp_path / "results" / "bench.jsonl")
    assert ours.samples_s
    assert str(ours.metrics["not_judged"]).startswith("RuntimeError: RESOURCE_EXHAUSTED")
    assert "not compared: xla large_logits bfloat16: RuntimeError" in done.flat
    assert theirs.metrics["peer"] is True
    assert "failed: jax large_logits bfloat16: RuntimeError: RESOURCE_EXHAUSTED" in done.flat


@pytest.mark.parametrize(
    ("fault", "code", "line"), [(interrupt, 130, "interrupted: the rest"), (exhaust, 1, "failed: ")]
)
def test_check_shows_what_there_is(fault: Any, code: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_implementation", at_call(2, check.check_implementation, fault))
    done = ran("check", "rms_norm", "--implementation", "xla,reference", "--case", "odd", "--dtype", "float32")
    assert done.code == code
    assert "3 of 3 within bounds." in done.stdout
    assert line in done.stdout
    assert ("│ failed │" in done.stdout) == (fault is exhaust)


def test_an_interrupt_that_jax_has_made_an_error_of_is_still_one() -> None:
    with screen.Entries("trying", total=2) as entries, entries.one("a"):
        try:
            interrupt()
        except KeyboardInterrupt as error:
            raise RuntimeError("INTERNAL: CpuCallback error") from error
    with pytest.raises(screen.typer.Exit) as ended:
        entries.end()
    assert ended.value.exit_code == 130


def test_a_compile_that_is_interrupted_is_stopped_and_the_others_are_kept(
    fake_worker,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The v5e's report is there when the v4's compile, which takes a minute, is interrupted."""
    fake_worker(f"if 'v4' in sys.argv[2]: time.sleep(60){GOOD}")
    words = ("compile", "rms_norm", "--case", "odd", "--chip", "v4,v5e", "--no-schedule", "-j", "2", "-o", "r.json")
    real = screen.Entries.one
    monkeypatch.setattr(screen.Entries, "one", lambda *args: InterruptedAfter(real(*args)))
    began = time.monotonic()
    done = ran(*words, cwd=tmp_path)
    assert time.monotonic() - began < 30
    assert done.code == 130, done
    assert [report["chip"] for report in json.loads((tmp_path / "r.json").read_text())] == ["v5e"]
    assert "│ v5e " in done.stdout
    assert "│ v4 " not in done.stdout


class InterruptedAfter:
    """A context that is interrupted when it has ended."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)
        interrupt()


def test_ctrl_c_while_jax_is_imported_says_so_without_a_traceback() -> None:
    code = """
import sys
import time
class Slow:
    def find_spec(self, name, *_):
        if name == "jax":
            print("begun", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from tilewright_command import main
main()
"""
    heard = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, "ops"], preexec_fn=heard, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")
