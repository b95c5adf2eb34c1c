"""`tilewright run`, `tilewright remote` and `--on` on the command line: their output and exit codes."""

import functools
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_cli import tilewright
from tilewright.cli.main import app
from tilewright.cli.screen import Mistake
from tilewright.runners import journal
from tilewright.runners.base import State
from tilewright.runners.local import LocalRunner
from tilewright.workbench.records import read_records


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "state" / "tilewright" / "jobs"


def said(*words: str):
    return CliRunner().invoke(app, list(words))


def test_run_streams_the_log_and_returns_the_commands_exit_code() -> None:
    done = said("run", "--", "bash", "-c", "echo hi; exit 7")
    assert done.exit_code == 7
    assert done.stdout == "hi\n"
    assert re.search(r"job bash-\S+ on local\njob bash-\S+ failed, exit code 7", done.stderr)


def test_options_after_the_command_belong_to_the_command() -> None:
    assert said("run", "echo", "--no-wait", "-x").stdout == "--no-wait -x\n"


def test_a_background_job_is_managed_by_other_commands(tmp_path: Path) -> None:
    done = said("run", "--no-wait", "--name", "Long One", "--", "bash", "-c", "echo out; sleep 0.3; exit 4")
    assert done.exit_code == 0
    id = done.stdout.strip()
    assert id.startswith("long-one-")
    assert f"`tilewright remote wait {id}` fetches its log, exit code and files" in done.stderr
    waited = said("remote", "wait", "long")
    assert waited.exit_code == 4
    assert f"job {id} failed, exit code 4" in waited.stdout
    assert said("remote", "logs", id).stdout == "out\n"
    followed = said("remote", "logs", id, "--follow")
    assert (followed.stdout, followed.exit_code) == ("out\n", 4)
    table = said("remote", "status").stdout
    assert re.search(rf"{id}.*local.*failed.*4.*bash -c echo out", table)
    assert f"job {id} had already ended: failed" in said("remote", "cancel", id).stdout


def test_cancel_and_wait_with_a_timeout() -> None:
    id = said("run", "--no-wait", "sleep", "100").stdout.strip()
    with pytest.raises(Mistake, match=rf"job {id} is still running after 0.1 s"):
        CliRunner().invoke(app, ["remote", "wait", id, "--timeout", "0.1"], catch_exceptions=False)
    assert f"job {id} is cancelled" in said("remote", "cancel", id).stdout
    assert said("remote", "wait", id).exit_code == 143


def test_missing_files_to_fetch_are_reported(tmp_path: Path) -> None:
    done = said("run", "--fetch", "made", "--fetch", "not-made", "--", "touch", "made")
    assert done.exit_code == 0
    assert "fetched made" in done.stderr
    assert "--fetch not-made: the job made no such file" in done.stderr


def test_env_passes_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    done = said("run", "--env", "FROM_HERE", "--env", "GIVEN=a=b", "--", "bash", "-c", "echo $FROM_HERE $GIVEN")
    assert done.stdout == "here a=b\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--on", "tpu", "--", "x"), "--on tpu is not a place to run at; use local, sky:CLUSTER or ray:ADDRESS"),
        (("run", "--on", "sky", "--", "x"), "--on sky is not a place to run at; .*; did you mean sky:NAME"),
        (("run", "--on", "sky:My_Cluster", "--", "x"), "--on sky:My_Cluster must name a cluster in lower-case letters"),
        (("run", "--on", "ray:head", "--", "x"), "--on ray:head is not an address; use ray:HOST:PORT"),
        (
            ("run", "--on", "ray:10.0.0.1:8265", "--", "x"),
            "--on ray:10.0.0.1:8265 is not this machine and there is no token: .* ~/.ray/auth_token",
        ),
        (("run", "--env", "=x", "--", "x"), "--env  is not the name of a variable; use NAME=VALUE, or NAME"),
        (
            ("run", "--env", "NOT_SET_HERE", "--", "x"),
            "--env NOT_SET_HERE is not set in this shell; use NOT_SET_HERE=VALUE",
        ),
        (("run", "--fetch", "/etc/passwd", "--", "x"), "--fetch /etc/passwd must be below --workdir"),
        (("run", "--fetch", "../x", "--", "x"), r"--fetch \.\./x must be below --workdir"),
        (("run", "--workdir", "nowhere", "--", "x"), "--workdir nowhere is not a directory"),
        (("run", "--", "echo a; exit 3"), "the command 'echo a; exit 3' is one argument with spaces; use -- bash -c"),
        (("run", "--accelerator", "H1000", "--", "x"), "--accelerator H1000 is not known; did you mean H100:1?"),
        (
            ("run", "--accelerator", "H100", "--", "x"),
            "--on local uses what this machine has: omit --accelerator H100",
        ),
        (("remote", "launch", "--on", "local", "--accelerator", "H100"), "--on local rents nothing"),
        (("remote", "launch", "--on", "sky:a"), "--accelerator is missing; name what to rent"),
        (("remote", "sync", "--on", "local"), "--on local has nothing to sync"),
        (("remote", "down", "local"), "--on local has no rented machine"),
        (("remote", "logs", "nothing"), "job nothing is not known on this machine; `tilewright remote status`"),
        (("check", "softmax", "--on", "sky:a"), "op='softmax' is not an op of tilewright"),
        (("bench", "rms_norm", "--accelerator", "H100"), "--accelerator is for another machine; pass --on too"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_remedy(words: tuple[str, ...], message: str, state: Path) -> None:
    with pytest.raises(Mistake, match=message) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert not state.exists() or not list(state.iterdir())  # No job was added.


def test_an_ambiguous_job_id_lists_the_jobs() -> None:
    ids = [said("run", "--no-wait", "true").stdout.strip() for _ in range(2)]
    with pytest.raises(Mistake, match=r"job true is not one job; use one of true-.*, true-"):
        CliRunner().invoke(app, ["remote", "logs", "true"], catch_exceptions=False)
    assert {job.id for job in journal.every()} == set(ids)


@pytest.mark.slow
def test_ctrl_c_stops_following_and_not_the_job(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tilewright.cli.main", "run", "--", "bash", "-c", "echo begun; sleep 100"]
    # SIGINT may be ignored where the tests run in the background, and that is inherited.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, preexec_fn=heard, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    (job,) = journal.every()
    assert f"job {job.id} continues; `tilewright remote logs {job.id} --follow` follows it again" in told
    assert LocalRunner().status(job).state is State.RUNNING
    assert LocalRunner().cancel(job)


@pytest.mark.parametrize(
    ("module", "target", "message"),
    [
        ("sky", "sky:a", r"--on sky:CLUSTER needs SkyPilot, which is not installed: pip install 'tilewright\[sky\]'"),
        (
            "ray.job_submission",
            "ray:127.0.0.1:8265",
            r"--on ray:127.0.0.1:8265 needs Ray, which is not installed: pip install 'tilewright\[ray\]'",
        ),
    ],
)
def test_a_missing_package_is_an_error_with_the_remedy(
    module: str, target: str, message: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["tilewright"])
    with pytest.raises(Mistake, match=message):
        CliRunner().invoke(app, ["run", "--on", target, "--", "true"], catch_exceptions=False)
    assert not state.exists() or not list(state.iterdir())  # A job that was never submitted leaves no entry.


def test_without_skypilot_the_jobs_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    told = "Rented machines are not listed: --on sky:CLUSTER needs SkyPilot, which is not installed"
    nothing = said("remote", "list")
    assert nothing.exit_code == 0
    assert f"No jobs were started from this machine. {told}" in nothing.stdout
    id = said("run", "true").stderr.split()[1]
    journal.new_job("ray:127.0.0.1:8265", ("train",), workdir=Path())
    journal.new_job("sky:mine", ("elsewhere",), workdir=Path())
    listed = said("remote", "list")
    assert listed.exit_code == 0
    assert re.search(rf"{id} .*local .*succeeded ", listed.stdout)
    assert re.search(r"train-\S+ .*ray:127.0.0.1:8265 .*lost ", listed.stdout)
    assert "elsewhere" not in listed.stdout
    assert told in listed.stdout


def test_no_error_shows_a_value() -> None:
    secret = "ghp_0123456789abcdef"
    with pytest.raises(Mistake) as caught:
        CliRunner().invoke(app, ["run", "--env", f"{secret}!", "--", "x"], catch_exceptions=False)
    assert secret not in str(caught.value)


@pytest.mark.slow
def test_bench_on_local_shows_the_same_table_and_fetches_its_records(tmp_path: Path) -> None:
    args = (
        "bench",
        "rms_norm",
        "--implementation",
        "xla",
        "--dtype",
        "float32",
        "--seconds",
        "0.05",
        "--plot",
        "o.png",
    )
    done = tilewright(*args, "--on", "local", "--records", "mine.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.lstrip().startswith("rms_norm, forward, on ")
    assert "records appended to mine.jsonl" in done.stdout
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    assert list(read_records(tmp_path / "mine.jsonl"))
    assert not list((tmp_path / "results").glob("*"))  # The job's own file is merged and deleted.
    (job,) = journal.every()
    assert job.command[:4] == (sys.executable, "-m", "tilewright.cli.main", "bench")
    assert "--plot" not in job.command


@pytest.mark.slow
def test_check_on_local_returns_its_exit_code(tmp_path: Path) -> None:
    done = tilewright(
        "check", "rms_norm", "--implementation", "xla", "--dtype", "float32", "--on", "local", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within bounds." in done.stdout
