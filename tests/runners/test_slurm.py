"""The life of a SkyPilot cluster, on a real Slurm on loopback with one fake H100. `pytest -m slurm`, some minutes.

Outside, one test runs this file again in its own namespaces, next to the daemons of slurm_on_loopback.sh. Inside, the
tests are the steps in the life of one cluster, in this order.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli.main import app
from tilewright.cli.screen import Mistake
from tilewright.runners import journal, supervise
from tilewright.runners.base import Job, RunnerError, State
from tilewright.runners.finish import finish
from tilewright.runners.registry import open_runner
from tilewright.workbench.records import checkout_commit, read_records

pytestmark = pytest.mark.slurm
INSIDE = os.environ.get("TILEWRIGHT_TEST_SLURM")
HERE = Path(__file__).resolve()
ON = "sky:life"
SERVER = 46580  # The port of SkyPilot's server; the network is shared, since packages are downloaded over it.
NAMESPACES = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
outside = pytest.mark.skipif(INSIDE is not None, reason="this is inside")
inside = pytest.mark.skipif(INSIDE is None, reason="run inside, by test_the_life_of_a_cluster")


def missing() -> str | None:
    """Why this cannot run here, or None."""
    if importlib.util.find_spec("sky") is None:
        return "SkyPilot is not installed: uv run --extra sky pytest -m slurm"
    if os.geteuid() != 0:
        return "Slurm's daemons and the namespaces around them need root"
    for command in ("slurmctld", "slurmd", "munged", "sshd", "rsync", "unshare", "nsenter", "uv"):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"{command} is not installed: bash scripts/setup_slurm.sh"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", SERVER), timeout=2):
        return "a SkyPilot server runs on this machine, and the test would use it: `sky api stop` first"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        return "root may not create namespaces on this machine"
    return None


@outside
def test_the_life_of_a_cluster(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    directory = Path("/tmp") / f"tws{os.getpid()}"  # A short path, since it has sockets.
    directory.mkdir()
    catalogs = directory / "home" / ".sky" / "catalogs" / "v8"
    shutil.copytree(HERE.parent / "catalog", catalogs)
    environment = os.environ | {"PYTHON": sys.executable, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with (tmp_path / "daemons.log").open("wb") as log:
        script = str(HERE.with_name("slurm_on_loopback.sh"))
        daemons = subprocess.Popen(
            [*NAMESPACES, "bash", script, str(directory)], env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while not (directory / "ready").exists():
            assert daemons.poll() is None, (tmp_path / "daemons.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "daemons.log").read_text()
            time.sleep(0.2)
        init = Path(f"/proc/{daemons.pid}/task/{daemons.pid}/children").read_text().split()[0]
        enter = ["nsenter", "--target", init, "--mount", "--pid", "env", "-C", str(HERE.parents[2])]
        private = {
            "HOME": str(directory / "home"),
            "XDG_STATE_HOME": str(directory / "state"),
            "TILEWRIGHT_TEST_SLURM": str(directory),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "PYTHONUNBUFFERED": "1",
        }
        pytest_again = [sys.executable, "-m", "pytest", "-m", "slurm", "-p", "no:cacheprovider", "-v", str(HERE)]
        words = [*enter, *(f"{name}={value}" for name, value in private.items()), *pytest_again]
        done = subprocess.run([*words, "--durations=0"], env=environment, stdin=subprocess.DEVNULL, timeout=1800)
        assert done.returncode == 0
    finally:
        daemons.kill()  # The first process of a pid namespace: the daemons, SkyPilot's server and every job end too.
        daemons.wait()
        shutil.rmtree(directory, ignore_errors=True)


# Inside.


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    """One journal for all steps, instead of one per test."""


@pytest.fixture(scope="module")
def project() -> Path:
    root = Path(INSIDE or "") / "project"
    root.mkdir(exist_ok=True)
    (root / ".gitignore").write_text("results/\nsecret.txt\n")
    (root / "secret.txt").write_text("swordfish")
    (root / "code.txt").write_text("one\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if INSIDE:
        monkeypatch.chdir(request.getfixturevalue("project"))


LAUNCH = ["remote", "launch", "--on", ON, "--accelerator", "H100:1", "--infra", "slurm"]


def said(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tilewright.cli.main", *words]


def slurm_jobs() -> list[str]:
    """The numbers of the rented Slurm jobs. SkyPilot also runs short jobs there, to find what Slurm has."""
    listed = subprocess.run(["squeue", "-h", "-o", "%j %i"], capture_output=True, text=True, check=True).stdout
    return [line.split()[1] for line in listed.splitlines() if line.startswith("life")]


def until(what, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def processes(word: str) -> list[int]:
    """The pids of this namespace whose command line contains the word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if word in line:
                    found.append(int(entry.name))
    return found


@inside
def test_a_machine_without_autostop_needs_keep() -> None:
    with pytest.raises(
        Mistake, match=r"--infra slurm cannot give a machine back by itself; pass --keep, and run `tilewright"
    ):
        said(*LAUNCH, "--yes")
    with pytest.raises(Mistake, match=rf"{ON} costs money and there is no terminal to confirm on; pass --yes"):
        said(*LAUNCH, "--keep")
    code, _, plan = said(*LAUNCH, "--keep", "--dry-run")
    assert code == 0
    assert re.search(r"Slurm \(loopback\).*H100:1.*0\.00", plan)
    assert "$0.00 an hour; torn down NEVER by itself" in plan
    assert slurm_jobs() == []


@inside
def test_a_killed_launch_is_resumed_and_nothing_is_rented_twice() -> None:
    with started(*LAUNCH, "--keep", "--yes") as first:
        until(lambda: slurm_jobs() or first.poll() is not None, 240)
        assert first.poll() is None, first.communicate()[0]
        rented = slurm_jobs()
        first.send_signal(signal.SIGKILL)
    code, out, err = said(*LAUNCH, "--keep", "--yes")
    assert code == 0, out + err
    assert slurm_jobs() == rented  # The same Slurm job, and no other.
    assert len(rented) == 1
    assert f"{ON} is up" in out
    code, _, err = said(*LAUNCH, "--keep", "--dry-run")
    assert "sky:life is up: H100:1; no second one is rented" in err
    assert open_runner(ON).is_up()


@inside
def test_a_failed_command_keeps_its_exit_code_and_its_files_are_fetched(project: Path) -> None:
    script = 'ls -A; echo err >&2; echo "${#PASSWORD}"; mkdir -p results; echo {} >results/x.json; printf end; exit 9'
    words = ["--env", "PASSWORD=hunter2hunter2", "--fetch", "results/x.json", "--fetch", "nope"]
    code, out, err = said("run", "--on", ON, *words, "--", "bash", "-c", script)
    assert code == 9, out + err
    assert out == ".gitignore\n.tilewright_job\ncode.txt\nerr\n14\nend\n"
    (made,) = project.glob("results/jobs/*/results/x.json")
    assert made.read_text() == "{}\n"
    assert "--fetch nope: the job made no such file" in err
    leaks = [
        path
        for place in ("home", "state", "spool", "log")
        for path in (Path(INSIDE or "") / place).rglob("*")
        if path.is_file() and not path.is_symlink() and b"hunter2hunter2" in path.read_bytes()
    ]
    assert leaks == []


@inside
def test_a_changed_file_is_synced(project: Path) -> None:
    (project / "code.txt").write_text("two\n")
    code, out, _ = said("remote", "sync", "--on", ON)
    assert code == 0
    assert f"is on {ON}" in out
    (there,) = (Path(INSIDE or "") / "home").glob(".sky_clusters/*/sky_workdir/code.txt")
    assert there.read_text() == "two\n"
    assert not (there.parent / "secret.txt").exists()


@inside
def test_an_unobserved_job_is_reported_with_its_exit_code_and_log() -> None:
    code, out, _ = said("run", "--on", ON, "--no-wait", "--name", "alone", "--", "bash", "-c", "echo out; exit 5")
    assert code == 0
    id = out.strip()
    job = journal.find(id)
    until(lambda: open_runner(ON).status(job).state.over, 60)
    code, out, _ = said("remote", "wait", id)
    assert (code, out) == (5, f"job {id} failed, exit code 5\n")
    assert said("remote", "logs", id)[1] == "out\n"
    assert re.search(rf"{id}.*failed", said("remote", "status", "--on", ON)[1])


@inside
def test_two_jobs_take_turns_and_do_not_mix_and_cancel_stops_one(project: Path) -> None:
    runner = open_runner(ON)
    beat = project.parent / "beat"
    one = _submitted(f"(while :; do date >>{beat}; sleep 0.1; done) & echo one; sleep 1000", project)
    two = _submitted("echo two; exit 2", project)
    until(beat.exists, 60)
    assert runner.status(two).state is State.PENDING  # There is one H100, and `one` has it.
    assert runner.cancel(one)
    assert "".join(runner.follow(two)) == "two\n"
    assert finish(runner, one, project).status.code == 130
    assert finish(runner, two, project).status.code == 2
    size = beat.stat().st_size
    time.sleep(1)
    assert beat.stat().st_size == size
    assert "".join(runner.logs(one, follow=False)).startswith("one\n")  # Then Slurm's message about the cancellation.


def _submitted(script: str, project: Path) -> Job:
    job = journal.new_job(ON, ("bash", "-c", script), workdir=project, name="same")
    open_runner(ON).submit(job)
    return job


@inside
def test_following_a_log_survives_the_death_of_skypilots_server(project: Path) -> None:
    """SkyPilot's server is killed: it is started again, and the log continues where it stopped."""
    job = _submitted("for i in $(seq 60); do echo line $i; sleep 0.5; done; exit 3", project)
    runner = open_runner(ON)
    text, killed = "", False
    for piece in runner.follow(job, pause_s=0.5):
        text += piece
        if not killed and text.count("\n") >= 5:
            killed = True
            (server,) = processes("sky.server.server --host")
            for pid in (server, *supervise.descendants(server)):  # Its children would keep its ports.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert killed
    assert text == "".join(f"line {n}\n" for n in range(1, 61))
    assert finish(runner, job, project).status.exit_code == 3


@inside
def test_cancel_during_sync_leaves_no_process(project: Path) -> None:
    big = project / "big.bin"
    with big.open("wb") as file:
        file.truncate(3 * 2**30)  # Sparse: it takes no disk space, and rsync a while.
    before = len(open_runner(ON).jobs())
    try:
        with started("run", "--on", ON, "--name", "never", "--", "bash", "-c", "echo ran") as process:
            until(lambda: processes("rsync") or process.poll() is not None, 120)
            assert process.poll() is None, process.communicate()[0]
            process.send_signal(signal.SIGINT)
            process.wait(timeout=90)
            assert process.returncode == 130
        until(lambda: not processes("rsync"), 30)
        assert not [job for job in journal.every() if job.id.startswith("never")]
        assert len(open_runner(ON).jobs()) == before
    finally:
        big.unlink()


@inside
def test_bench_runs_there_and_shows_the_same_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From this checkout, by `uv run` there."""
    monkeypatch.chdir(HERE.parents[2])
    records = tmp_path / "bench.jsonl"
    words = ["--implementation", "xla", "--dtype", "float32", "--seconds", "0.05", "--records", str(records)]
    try:
        code, out, err = said("bench", "rms_norm", *words, "--on", ON)
        assert code == 0, err
        assert out.lstrip().startswith("rms_norm, forward, on ")
        assert f"records appended to {records}" in " ".join(out.split())
        made = list(read_records(records))
        assert {record.provenance.commit for record in made} == {checkout_commit()}
    finally:
        for job in journal.every():
            shutil.rmtree(HERE.parents[2] / "results" / "jobs" / job.id, ignore_errors=True)


@inside
def test_rented_machines_are_listed_with_their_age_and_cost() -> None:
    assert re.search(rf"{ON}.*H100:1.*UP.*(min|s) .*\$0\.00 an hour.*\$0\.00.*never", said("remote", "list")[1])


@inside
def test_each_refusal_is_one_line_with_the_remedy() -> None:
    with pytest.raises(
        Mistake, match=r"sky:nowhere does not exist; `tilewright remote list` shows the clusters that do, and `tilew"
    ):
        said("remote", "exec", "--on", "sky:nowhere", "--", "true")
    with pytest.raises(Mistake, match=r"sky:nowhere does not exist; pass --accelerator to rent it"):
        said("run", "--on", "sky:nowhere", "--", "true")
    with pytest.raises(Mistake, match=r"sky:nowhere does not exist"):
        said("remote", "down", "sky:nowhere")
    with pytest.raises(Mistake, match=rf"{ON} exists and has H100:1, not H200:1; use another name, or run `tilewright"):
        said("remote", "launch", "--on", ON, "--accelerator", "H200:1", "--infra", "slurm", "--keep", "--yes")
    with pytest.raises(Mistake, match=r"sky:more cannot be had: .*'H100': 2"):
        said("remote", "launch", "--on", "sky:more", "--accelerator", "H100:2", "--infra", "slurm", "--keep", "--yes")


@inside
def test_down_tears_it_down_and_its_files_are_lost(project: Path) -> None:
    job = _submitted("echo unseen", project)
    until(lambda: open_runner(ON).status(job).state.over, 60)
    code, out, _ = said("remote", "down", ON)
    assert (code, out) == (0, f"{ON} is torn down\n")
    until(lambda: not slurm_jobs(), 60)
    assert said("remote", "list")[1] == "Nothing is rented.\n"
    lost = open_runner(ON).status(job)
    assert lost.state is State.LOST
    assert "its files there are gone" in lost.note
    with pytest.raises(RunnerError, match=rf"{ON} does not exist"):
        open_runner(ON).submit(job)
