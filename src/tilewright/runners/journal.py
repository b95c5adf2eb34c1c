"""The jobs that were started from this machine: a directory each, that any terminal can ask.

    ~/.local/state/tilewright/jobs/<id>/
        job.json       the command, where it runs, the commit, the names of the variables it was given (never a value)
        log            what it printed: as it runs for a local job, once it is over for the others
        status.json    how it ended, once it has
        files.tar.gz   what it brought back

An entry is written before the job is submitted, under an id that the other side uses too: if this process is killed in
between, the job can still be found.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tilewright.runners.base import Job, State, Status, slug


def home() -> Path:
    """Where jobs are kept: XDG_STATE_HOME, or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "tilewright" / "jobs"


def new_job(
    target: str,
    command: tuple[str, ...],
    *,
    name: str | None = None,
    workdir: Path,
    accelerator: str | None = None,
    env: Mapping[str, str] | None = None,
    fetch: tuple[str, ...] = (),
    commit: str | None = None,
) -> Job:
    """Enter a job under an id of its own. The directory is made exclusively: two at once never share one."""
    home().mkdir(parents=True, exist_ok=True, mode=0o700)
    stem = slug(name or Path(command[0]).name)
    created = time.time()
    while True:
        id = f"{stem}-{time.strftime('%m%d-%H%M%S', time.gmtime(created))}-{secrets.token_hex(2)}"
        try:
            directory(id).mkdir(mode=0o700)
            break
        except FileExistsError:
            continue
    job = Job(
        id=id,
        target=target,
        command=command,
        workdir=workdir.resolve(),
        accelerator=accelerator,
        env=dict(env or {}),
        fetch=fetch,
        created=created,
        commit=commit,
    )
    kept = {
        "id": id,
        "target": target,
        "command": list(command),
        "workdir": str(job.workdir),
        "accelerator": accelerator,
        "env_names": sorted(job.env),
        "fetch": list(fetch),
        "created": created,
        "commit": commit,
    }
    write(directory(id) / "job.json", json.dumps(kept, indent=1))
    return job


def discard(id: str) -> None:
    """Remove the entry of a job that was never submitted."""
    shutil.rmtree(directory(id), ignore_errors=True)


def directory(id: str) -> Path:
    return home() / id


def write(path: Path, text: str | bytes) -> None:
    """All of it or nothing: another terminal may be reading, and this process may be killed."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(text if isinstance(text, bytes) else text.encode())
    part.replace(path)


def find(id: str) -> Job:
    """The job with this id, or the only one whose id begins so."""
    path = directory(id) / "job.json"
    if not id or "/" in id or not path.exists():
        begins = [job for job in every() if id and job.id.startswith(id)]
        if len(begins) == 1:
            return begins[0]
        if begins:
            raise ValueError(f"job {id} is not one job; use one of {', '.join(job.id for job in begins)}")
        raise ValueError(f"job {id} is not known on this machine; `tilewright remote status` lists those that are")
    return _read(path)


def _read(path: Path) -> Job:
    kept = json.loads(path.read_text())
    return Job(
        id=kept["id"],
        target=kept["target"],
        command=tuple(kept["command"]),
        workdir=Path(kept["workdir"]),
        accelerator=kept["accelerator"],
        fetch=tuple(kept["fetch"]),
        created=kept["created"],
        commit=kept["commit"],
    )


def every() -> Iterator[Job]:
    """Every job, newest first."""
    entries = [_read(path) for path in home().glob("*/job.json")]
    yield from sorted(entries, key=lambda job: job.created, reverse=True)


def keep_status(id: str, status: Status) -> None:
    kept = {"state": status.state.value, "exit_code": status.exit_code, "note": status.note}
    write(directory(id) / "status.json", json.dumps(kept))


def kept_status(id: str) -> Status | None:
    """How the job ended, where that is known here."""
    try:
        kept = json.loads((directory(id) / "status.json").read_text())
    except FileNotFoundError:
        return None
    return Status(State(kept["state"]), kept["exit_code"], kept["note"])
