"""Collects a job that has ended: its status, log and files go to the journal, and its files to the checkout."""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tilewright.runners import journal
from tilewright.runners.base import Job, Runner, RunnerError, State, Status


@dataclass(frozen=True)
class Finished:
    """How a job ended, and the files that were fetched."""

    status: Status
    fetched: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def finish(runner: Runner, job: Job, into: Path) -> Finished:
    """Collects a job that has ended. It may be called again, and from another terminal.

    Files are written below `into` and never replace files of the checkout: results are ignored by git, so the checkout
    may have the only copy. The files of a local job are in the checkout already.
    """
    if runner.target == "local":
        collected = runner.collect(job)
        made = tuple(job.workdir / path for path in job.fetch if (job.workdir / path).exists())
        return Finished(runner.status(job), made, collected.notes)
    if (ended := journal.final_status(job.id)) is not None:
        packed = journal.directory(job.id) / "files.tar.gz"
        return Finished(ended, _unpack(packed.read_bytes(), into) if packed.exists() else ())
    status = runner.status(job)
    collected = runner.collect(job)
    if collected.exit_code == 0 and not status.state.over:
        status = runner.wait(job)  # Another host of the slice may still fail.
    if collected.exit_code is not None and status.state is not State.CANCELLED:
        # The command's own exit code, which a runner may not report (SkyPilot reports 100 for every failure).
        code = collected.exit_code or (1 if status.state is State.FAILED else 0)
        status = Status(State.FAILED if code else State.SUCCEEDED, code)
    directory = journal.directory(job.id)
    journal.write(directory / "log", collected.log)
    if collected.files is not None:
        journal.write(directory / "files.tar.gz", collected.files)
    notes = list(collected.notes)
    if job.fetch and collected.files is None and not notes:
        notes.append("--fetch: the job ended before it could pack its files")
    journal.write_status(job.id, status)
    return Finished(status, _unpack(collected.files, into) if collected.files is not None else (), tuple(notes))


def status_of(runner: Runner, job: Job) -> Status:
    """The job's status: from the journal once the job was collected, and from the runner before."""
    return journal.final_status(job.id) or runner.status(job)


def log_of(runner: Runner, job: Job) -> str:
    """The log so far: from the journal once the job was collected, since its machine may be gone."""
    if runner.target != "local" and journal.final_status(job.id) is not None:
        return (journal.directory(job.id) / "log").read_text()
    return "".join(runner.logs(job, follow=False))


def _unpack(packed: bytes, into: Path) -> tuple[Path, ...]:
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            # "data" refuses names that lead out of the directory, and restores no owners or device files.
            archive.extractall(into, filter="data")
            tops = dict.fromkeys(member.name.removeprefix("./") for member in archive if not member.isdir())
    except (tarfile.TarError, EOFError) as error:
        raise RunnerError(f"the files that came back cannot be unpacked into {into}: {error}") from error
    return tuple(into / name for name in tops)
