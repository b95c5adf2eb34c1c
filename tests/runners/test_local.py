"""Local jobs, as real processes that are killed, orphaned, cancelled, followed and left alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.runners import journal, supervise
from tilewright.runners.base import CannotDo, Job, Rental, State
from tilewright.runners.local import LocalRunner
from tilewright.runners.registry import open_runner


def submitted(script: str, tmp_path: Path, *, env: dict[str, str] | None = None, name: str | None = None) -> Job:
    job = journal.new_job("local", ("bash", "-c", script), workdir=tmp_path, env=env, name=name)
    LocalRunner().submit(job)
    return job


def until(what, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return supervise.started_at(pid) is None


@pytest.fixture
def stray() -> Iterator[list[int]]:
    """The pids that a test started; they are killed after it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_exit_code_and_log_are_the_commands_own(tmp_path: Path) -> None:
    job = submitted("echo out; echo err >&2; printf end; exit 7", tmp_path)
    runner = LocalRunner()
    assert "".join(runner.follow(job)) == "out\nerr\nend"
    status = runner.wait(job, timeout_s=20)
    assert (status.state, status.exit_code, status.code) == (State.FAILED, 7, 7)
    assert "".join(runner.logs(job, follow=False, skip=4)) == "err\nend"


def test_a_signal_has_the_exit_code_of_a_shell(tmp_path: Path) -> None:
    job = submitted("kill -9 $$", tmp_path)
    assert LocalRunner().wait(job, timeout_s=20).exit_code == 137


def test_a_missing_command_is_127_and_named_in_the_log(tmp_path: Path) -> None:
    job = journal.new_job("local", ("no-such-command",), workdir=tmp_path)
    LocalRunner().submit(job)
    assert LocalRunner().wait(job, timeout_s=20).exit_code == 127
    assert "".join(LocalRunner().logs(job, follow=False)) == "tilewright: no-such-command: No such file or directory\n"


def test_a_variable_reaches_the_job_and_no_file(tmp_path: Path, state: Path) -> None:
    job = submitted('echo "${#TOKEN}"', tmp_path, env={"TOKEN": "hunter2hunter2"})
    assert "".join(LocalRunner().follow(job)) == "14\n"
    kept = {path.name: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert b"TOKEN" in kept["job.json"]
    assert not [name for name, data in kept.items() if b"hunter2hunter2" in data]
    assert "hunter2" not in repr(job)


def test_the_log_is_streamed_and_no_character_is_repeated(tmp_path: Path) -> None:
    """Including a character whose bytes are split between two writes."""
    job = submitted(r"printf 'a\xc3'; sleep 0.4; printf '\xa9b\n'; sleep 0.2; echo last", tmp_path)
    runner = LocalRunner()
    pieces = []
    for text in runner.follow(job):
        pieces.append(text)
        if len(pieces) == 1:
            assert runner.status(job).state is State.RUNNING
    assert "".join(pieces) == "aéb\nlast\n"


@pytest.mark.slow
def test_a_job_outlives_its_starter_and_is_reported_later(tmp_path: Path) -> None:
    """The starter kills itself, its session gets a hangup, and no process waits for the job."""
    code = f"""
import os, signal
from pathlib import Path
from tilewright.runners import journal
from tilewright.runners.local import LocalRunner
job = journal.new_job("local", ("bash", "-c", "echo began; sleep 1; echo ended; exit 3"), workdir=Path({str(tmp_path)!r}))
LocalRunner().submit(job)
print(job.id, flush=True)
os.killpg(0, signal.SIGHUP)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert done.returncode in (-signal.SIGKILL, -signal.SIGHUP), done.stderr
    job = journal.find(done.stdout.strip())
    until(lambda: LocalRunner().status(job).state.over)
    assert LocalRunner().status(job).exit_code == 3
    assert "".join(LocalRunner().logs(job, follow=False)) == "began\nended\n"


@pytest.mark.slow
def test_cancel_leaves_no_process(tmp_path: Path, stray: list[int]) -> None:
    """Including a daemon in its own session that ignores SIGTERM."""
    script = "setsid bash -c 'trap \"\" TERM; echo $$ >daemon; while :; do sleep 1; done' & echo $$ >leader; sleep 100"
    job = submitted(script, tmp_path)
    until(lambda: (tmp_path / "daemon").exists() and (tmp_path / "daemon").read_text().strip())
    pids = [int((tmp_path / name).read_text()) for name in ("daemon", "leader")]
    stray += pids
    assert LocalRunner().cancel(job)
    assert all(gone(pid) for pid in pids)
    status = LocalRunner().status(job)
    assert status.state is State.CANCELLED
    assert status.code == 143
    assert not LocalRunner().cancel(job)


def test_processes_that_a_job_leaves_are_stopped(tmp_path: Path, stray: list[int]) -> None:
    job = submitted("setsid sleep 100 & echo $! >left; exit 0", tmp_path)
    assert LocalRunner().wait(job, timeout_s=20).state is State.SUCCEEDED
    stray.append(int((tmp_path / "left").read_text()))
    assert gone(stray[0])


def test_a_killed_supervisor_is_reported_and_its_job_can_still_be_cancelled(tmp_path: Path, stray: list[int]) -> None:
    runner = LocalRunner()
    jobs = [submitted("echo $$ >one; sleep 100", tmp_path), submitted("echo $$ >two; sleep 0.5", tmp_path)]
    for job in jobs:
        supervisor = runner._alive(job, "supervisor.json")
        assert supervisor is not None
        os.kill(supervisor, signal.SIGKILL)
    assert runner.status(jobs[0]).state is State.RUNNING
    assert runner.cancel(jobs[0])
    assert runner.status(jobs[0]).state is State.CANCELLED
    stray.append(int((tmp_path / "one").read_text()))
    assert gone(stray[0])
    until(lambda: runner.status(jobs[1]).state.over)
    lost = runner.status(jobs[1])
    assert lost.state is State.LOST
    assert lost.code == 1
    assert "its supervisor was killed" in lost.note


def test_a_reused_pid_is_not_taken_for_the_job(tmp_path: Path, state: Path) -> None:
    job = journal.new_job("local", ("true",), workdir=tmp_path)
    journal.write(state / job.id / "supervisor.json", f'{{"pid": {os.getpid()}, "started_at": 1}}')
    assert LocalRunner().status(job).state is State.LOST


def test_concurrent_jobs_mix_neither_logs_nor_names(tmp_path: Path) -> None:
    jobs = [submitted(f"for i in 1 2 3; do echo {n}; sleep 0.05; done", tmp_path, name="same") for n in range(5)]
    assert len({job.id for job in jobs}) == 5
    for n, job in enumerate(jobs):
        assert "".join(LocalRunner().follow(job)) == f"{n}\n" * 3


def test_unsupported_operations_are_errors() -> None:
    runner = open_runner("local")
    with pytest.raises(CannotDo, match=r"--on local rents nothing, so it cannot provide an accelerator; use sky"):
        runner.plan(Rental(accelerator="H100:1"))
    with pytest.raises(CannotDo, match=r"nothing to sync: its jobs run in the checkout itself"):
        runner.sync(Path("."))
    with pytest.raises(CannotDo, match=r"no rented machine; `tilewright remote cancel JOB` stops a job"):
        runner.down()
