"""When a job is over: how it ended, its log and its files are brought into the journal, and its files to the checkout."""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tilewright.runners import journal
from tilewright.runners.base import Job, Runner, RunnerError, State, Status


@dataclass(frozen=True)
class Finished:
    """How a job ended, and what it brought back."""

    status: Status
    fetched: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def finish(runner: Runner, job: Job, into: Path) -> Finished:
    """Keep what a job that is over left behind. Asking again, or from another terminal, does no harm.

    Files go below `into`, never over what is in the checkout: results are git-ignored, and the ones of the checkout may be
    the only ones. A local job's files are in the checkout already.
    """
    if runner.target == "local":
        collected = runner.collect(job)
        made = tuple(job.workdir / path for path in job.fetch if (job.workdir / path).exists())
        return Finished(runner.status(job), made, collected.notes)
    if (kept := journal.kept_status(job.id)) is not None:
        packed = journal.directory(job.id) / "files.tar.gz"
        return Finished(kept, _unpack(packed.read_bytes(), into) if packed.exists() else ())
    status = runner.status(job)
    collected = runner.collect(job)
    if collected.exit_code == 0 and not status.state.over:
        status = runner.wait(job)  # A host other than the first may still fail.
    if collected.exit_code is not None and status.state is not State.CANCELLED:
        # The command's own code, rather than what the runner makes of it.
        code = collected.exit_code or (1 if status.state is State.FAILED else 0)
        status = Status(State.FAILED if code else State.SUCCEEDED, code)
    directory = journal.directory(job.id)
    journal.write(directory / "log", collected.log)
    if collected.files is not None:
        journal.write(directory / "files.tar.gz", collected.files)
    notes = list(collected.notes)
    if job.fetch and collected.files is None and not notes:
        notes.append("--fetch: the job ended before it could pack its files")
    journal.keep_status(job.id, status)
    return Finished(status, _unpack(collected.files, into) if collected.files is not None else (), tuple(notes))


def status_of(runner: Runner, job: Job) -> Status:
    """The job's status: as kept, where it is over and was collected, else as the runner says."""
    return journal.kept_status(job.id) or runner.status(job)


def log_of(runner: Runner, job: Job) -> str:
    """The log so far: as kept, where the job was collected, since its machine may be gone."""
    if runner.target != "local" and journal.kept_status(job.id) is not None:
        return (journal.directory(job.id) / "log").read_text()
    return "".join(runner.logs(job, follow=False))


def _unpack(packed: bytes, into: Path) -> tuple[Path, ...]:
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            # "data": a name that leads out of the directory is refused, and no owner or device comes along.
            archive.extractall(into, filter="data")
            tops = dict.fromkeys(member.name.removeprefix("./") for member in archive if not member.isdir())
    except (tarfile.TarError, EOFError) as error:
        raise RunnerError(f"the files that came back cannot be unpacked into {into}: {error}") from error
    return tuple(into / name for name in tops)
