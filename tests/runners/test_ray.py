"""Ray jobs on a real head with token authentication, which all tests share."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.runners import ray_head
from tests.runners.ray_head import Head, breaking_proxy
from tilewright.cli.main import app
from tilewright.runners import journal
from tilewright.runners.base import CannotDo, Job, LostConnection, Rental, RunnerError, State
from tilewright.runners.finish import finish
from tilewright.runners.registry import open_runner

if reason := ray_head.missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head.running() as found:
        yield found


@pytest.fixture(autouse=True)
def inside(head: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(head.directory / "token"))
    with head.inside():
        yield


def entered(head: Head, checkout: Path, script: str, **more) -> Job:
    return journal.new_job(more.pop("target", head.target), ("bash", "-c", script), workdir=checkout, **more)


def test_a_job_from_its_files_to_its_exit_code(head: Head, checkout: Path, state: Path) -> None:
    """The values of its variables are stored nowhere: not on the head's disk, in its logs, API or in the journal."""
    runner = open_runner(head.target)
    script = (
        'ls -A; echo err >&2; echo "${#PASSWORD} chips $TPU_VISIBLE_CHIPS"; mkdir results; echo {} >results/x.json; '
        "printf end; exit 9"
    )
    job = entered(
        head, checkout, script, env={"PASSWORD": "hunter2hunter2"}, fetch=("results/x.json",), accelerator="tpu-v6e-8"
    )
    log = "".join(runner.exec(job))
    listed = ".gitignore\n.tilewright_job\ncode.txt\nnew.txt\n"
    assert log == f"{listed}err\n14 chips 0,1,2,3,4,5,6,7\nend"
    done = finish(runner, job, checkout / "back")
    assert (done.status.state, done.status.exit_code) == (State.FAILED, 9)
    assert done.fetched == (checkout / "back" / "results/x.json",)
    assert done.fetched[0].read_text() == "{}\n"
    for place in (head.directory, state):
        for secret in (b"hunter2hunter2", *([ray_head.TOKEN.encode()] if place == state else [])):
            leaks = [path for path in place.rglob("*") if path.is_file() and secret in path.read_bytes()]
            assert not leaks
    told = runner._client._do_request("GET", "/api/jobs/").text  # type: ignore[attr-defined]
    assert job.id in told
    assert "hunter2" not in told


def test_a_job_that_ends_unobserved_is_reported(head: Head, checkout: Path) -> None:
    words = ["run", "--on", head.target, "--workdir", str(checkout), "--no-wait", "--fetch", "made"]
    done = CliRunner().invoke(app, [*words, "--", "bash", "-c", "echo out; touch made; exit 5"])
    assert done.exit_code == 0, done.output
    id = done.stdout.strip()
    deadline = time.monotonic() + 60
    while not open_runner(head.target).status(journal.find(id)).state.over:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    waited = CliRunner().invoke(app, ["remote", "wait", id])
    assert waited.exit_code == 5
    assert (checkout / "results" / "jobs" / id / "made").exists()
    assert CliRunner().invoke(app, ["remote", "logs", id]).stdout == "out\n"
    listed = CliRunner().invoke(app, ["remote", "status", "--on", head.target])
    assert re.search(rf"{id}.*failed.*5", listed.stdout)


def test_following_continues_where_a_connection_broke(head: Head, checkout: Path) -> None:
    with breaking_proxy(head) as (target, links):
        job = entered(head, checkout, "for i in $(seq 40); do echo line $i; sleep 0.1; done; exit 3", target=target)
        runner = open_runner(target)
        runner.submit(job)
        pieces, broken = [], 0
        for text in runner.follow(job, pause_s=0.1):
            pieces.append(text)
            if "".join(pieces).count("\n") > 10 * (broken + 1) and broken < 2:
                broken += 1
                for link in links:
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)
        assert broken == 2
        assert "".join(pieces) == "".join(f"line {n}\n" for n in range(1, 41))
        assert finish(runner, job, checkout).status.exit_code == 3


def test_cancel_stops_every_process_and_concurrent_jobs_do_not_mix(head: Head, checkout: Path) -> None:
    runner = open_runner(head.target)
    beat = checkout / "beat"
    beating = f"(while :; do date +%s%N >>{beat}; sleep 0.05; done) & echo one; sleep 100"
    one = entered(head, checkout, beating, name="same")
    two = entered(head, checkout, "echo two; exit 2", name="same")
    runner.submit(one)
    runner.submit(two)
    assert one.id != two.id
    assert "".join(runner.follow(two)) == "two\n"
    deadline = time.monotonic() + 30
    while not beat.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert runner.cancel(one)
    assert runner.status(one).state is State.CANCELLED
    assert finish(runner, one, checkout).status.code == 130
    size = beat.stat().st_size
    time.sleep(0.5)
    assert beat.stat().st_size == size
    assert "".join(runner.logs(one, follow=False)) == "one\n"
    assert not runner.cancel(two)


def test_the_job_of_a_killed_submitter_is_found(head: Head, checkout: Path) -> None:
    """kill -9 right after the submission: the id is in the journal, and Ray has the job under the same id."""
    job = entered(head, checkout, "echo found; exit 6")
    code = f"""
import os, signal
from tilewright.runners import journal
from tilewright.runners.registry import open_runner
runner = open_runner({head.target!r})
client = runner._client
submit = client.submit_job
client.submit_job = lambda **words: (submit(**words), os.kill(os.getpid(), signal.SIGKILL))
runner.submit(journal.find({job.id!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    runner = open_runner(head.target)
    assert runner.wait(job, timeout_s=60).exit_code == 6
    assert "".join(runner.logs(job, follow=False)) == "found\n"


def test_ctrl_c_stops_following_and_not_the_job(head: Head, checkout: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "tilewright.cli.main",
        "run",
        "--on",
        head.target,
        "--",
        "bash",
        "-c",
        "echo a; sleep 100",
    ]
    with subprocess.Popen(words, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    (job,) = journal.every()
    runner = open_runner(head.target)
    assert runner.status(job).state is State.RUNNING
    assert runner.cancel(job)


def test_accelerators_are_reserved(head: Head, checkout: Path) -> None:
    runner = open_runner(head.target)
    gpu = entered(head, checkout, "echo gpu $CUDA_VISIBLE_DEVICES", accelerator="H200:1")
    pod = entered(head, checkout, "echo first of a slice: $TPU_VISIBLE_CHIPS", accelerator="tpu-v6e-32")
    assert "".join(runner.exec(gpu)) == "gpu 0\n"
    assert re.fullmatch(r"first of a slice: \d(,\d){3}\n", "".join(runner.exec(pod)))


def test_each_refusal_is_one_line_with_the_remedy(
    head: Head, checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = entered(head, checkout, "true")
    with pytest.raises(RunnerError, match=rf"{head.target} has no job {job.id}: the head was restarted since"):
        open_runner(head.target).status(job)
    with pytest.raises(LostConnection, match=r"ray:127.0.0.1:1 does not answer .*; is the head up"):
        open_runner("ray:127.0.0.1:1").status(job)
    with pytest.raises(CannotDo, match=r"rents no machines; use --on sky:CLUSTER"):
        open_runner(head.target).plan(Rental(accelerator="H100:1"))
    with pytest.raises(CannotDo, match=r"each Ray job uploads its own files"):
        open_runner(head.target).sync(checkout)
    with pytest.raises(CannotDo, match=r"was not started by this runner; stop the cluster with `ray down`"):
        open_runner(head.target).down()
    (tmp_path / "expired").write_text("f" * 48)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "expired"))
    with pytest.raises(RunnerError, match=r"refuses the token: it is wrong, or expired; write the cluster's token to"):
        open_runner(head.target).submit(job)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(RunnerError, match=r"RAY_AUTH_TOKEN_PATH=\S+nowhere is not a file; write"):
        open_runner(head.target)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    with pytest.raises(RunnerError, match=r"requires a token, and there is none; write the cluster's token to"):
        open_runner(head.target).submit(job)
