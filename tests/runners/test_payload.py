"""The script of a remote job, run by bash here, and the reader of its log, whatever pieces the log arrives in."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runners import payload
from tilewright.runners.base import Job, LostConnection, State, Status
from tilewright.runners.carried import LogCarried
from tilewright.runners.payload import LogReader


def a_job(*command: str, env: dict[str, str] | None = None, fetch: tuple[str, ...] = ()) -> Job:
    return Job(id="a-job-1", target="test", command=command, workdir=Path("."), env=env or {}, fetch=fetch)


def ran(job: Job, cwd: Path, env_file: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    script = payload.script(job, env_file=env_file)
    environment = {**os.environ, **variables}
    return subprocess.run(["bash", "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_the_log_carries_output_files_and_exit_code(tmp_path: Path) -> None:
    made = "mkdir -p results/deep; printf data >results/deep/x; echo out; echo err >&2; printf end; exit 9"
    job = a_job("bash", "-c", made, fetch=("results", "nope", "a file"))
    done = ran(job, tmp_path)
    assert done.returncode == 9
    assert done.stderr == ""
    reader = LogReader(job)
    assert reader.feed("noise of the runner\n" + done.stdout) == "out\nerr\nend"
    assert reader.exit_code == 9
    assert reader.notes == [
        "--fetch nope: the job made no such file",
        "--fetch a file: the job made no such file",
    ]
    assert reader.files is not None
    with tarfile.open(fileobj=io.BytesIO(reader.files)) as archive:
        assert archive.extractfile("./results/deep/x").read() == b"data"  # type: ignore[union-attr]


def test_files_over_the_limit_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "FETCH_LIMIT_BYTES", 2**20)
    job = a_job("dd", "if=/dev/urandom", "of=big", "bs=1M", "count=2", "status=none", fetch=("big",))
    reader = LogReader(job)
    assert reader.feed(ran(job, tmp_path).stdout) == ""
    assert reader.files is None
    assert reader.notes == [
        "--fetch: 2 MiB is more than the 1 MiB that a log carries; copy the files to a bucket in the command, or fetch less"
    ]


def test_variables_come_from_a_file_that_is_deleted_before_the_command_runs(tmp_path: Path) -> None:
    value = 'it\'s "quoted" $HOME `x` é\nsecond line'
    job = a_job("bash", "-c", 'printf %s "$TOKEN"; ls', env={"TOKEN": value})
    (tmp_path / "variables").write_text(payload.environment_file(job.env))
    reader = LogReader(job)
    assert reader.feed(ran(job, tmp_path, env_file="variables").stdout) == value
    assert not (tmp_path / "variables").exists()
    assert value not in payload.script(job, env_file="variables")


def test_without_its_variables_a_job_does_not_run(tmp_path: Path) -> None:
    done = ran(a_job("touch", "ran", env={"TOKEN": "x"}), tmp_path, env_file="variables")
    assert done.returncode != 0
    assert not (tmp_path / "ran").exists()


def test_on_a_slice_of_several_hosts_only_the_first_prints_marks(tmp_path: Path) -> None:
    job = a_job("bash", "-c", "echo $SKYPILOT_NODE_RANK; exit $SKYPILOT_NODE_RANK")
    first, second = (ran(job, tmp_path, SKYPILOT_NODE_RANK=rank) for rank in "01")
    reader = LogReader(job)
    assert reader.feed(first.stdout) == "0\n"
    assert "@tilewright" not in second.stdout
    assert second.returncode == 1


def test_the_runners_banner_is_removed_at_any_place() -> None:
    """Including in the middle of a line of the command."""
    job = a_job("x")
    for log in (
        "Running x\nout\nRunning x twice\nend",
        "out\nRunning x twice\nendRunning x\n",
        "ouRunning x\nt\nRunning x twice\nend",
    ):
        reader = LogReader(job, banner="Running x")
        assert (
            reader.feed(f"@tilewright:a-job-1:begin\n{log}@tilewright:a-job-1:exit 0\n") == "out\nRunning x twice\nend"
        )
        assert reader.exit_code == 0


LINES = st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=12), max_size=12)


@given(lines=LINES, unfinished=st.text("ab", max_size=3), sizes=st.lists(st.integers(1, 9), min_size=1))
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_a_log_do_not_matter(lines: list[str], unfinished: str, sizes: list[int]) -> None:
    job = a_job("x")
    said = "".join(f"{line}\n" for line in lines) + unfinished
    raw = f"noise\n@tilewright:{job.id}:begin\n{said}@tilewright:{job.id}:exit 3\nafterwards\n"
    reader = LogReader(job)
    pieces = []
    while raw:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(reader.feed(raw[:size]))
        raw = raw[size:]
    assert "".join(pieces) == said
    assert reader.exit_code == 3


class Breaking(LogCarried):
    """A runner whose connection breaks repeatedly, each time after a given number of pieces."""

    target = "breaking"

    def __init__(self, raw: list[str], breaks: list[int]):
        super().__init__()
        self.raw, self.breaks = raw, breaks

    def _raw_log(self, job: Job, *, follow: bool) -> Iterator[str]:
        count = self.breaks.pop(0) if self.breaks else len(self.raw)
        yield from self.raw[:count]
        if count < len(self.raw):
            raise LostConnection("broken")

    def status(self, job: Job) -> Status:
        return Status(State.RUNNING if self.breaks else State.SUCCEEDED)


@given(lines=LINES, breaks=st.lists(st.integers(0, 12), max_size=6))
@settings(max_examples=60, deadline=None)
def test_following_across_broken_connections_repeats_no_character(lines: list[str], breaks: list[int]) -> None:
    job = a_job("x")
    mark = f"@tilewright:{job.id}:"
    raw = [f"{mark}begin\n", *(f"{line}\n" for line in lines), f"{mark}exit 0\n"]
    runner = Breaking(raw, breaks)
    assert "".join(runner.follow(job, pause_s=0.0)) == "".join(f"{line}\n" for line in lines)


def test_following_stops_when_a_connection_never_recovers() -> None:
    with pytest.raises(LostConnection, match="broken"):
        list(Breaking(["a"] * 3, [1] * 100).follow(a_job("x"), pause_s=0.0))
