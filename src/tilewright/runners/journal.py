"""The journal of the jobs that were started from this machine: one directory per job, readable from any terminal.

    ~/.local/state/tilewright/jobs/<id>/
        job.json       the command, its target, the commit, the names of its environment variables (never their values)
        log            its output: written while a local job runs, and when a remote job is collected
        status.json    how it ended; absent while it runs
        files.tar.gz   the files that were fetched

The entry is written before the job is submitted, and the remote side uses the same id. If this process is killed in
between, the job can still be found.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.runners.base import Job, State, Status, slug


def home() -> Path:
    """The directory of the journal, below XDG_STATE_HOME or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "tilewright" / "jobs"


def new_job(
    target: str,
    command: tuple[str, ...],
    *,
    name: str | None = None,
    workdir: Path,
    env: Mapping[str, str] | None = None,
    **fields: Any,
) -> Job:
    """Adds a job under a new id, with these fields of `Job`.

    Creating its directory is exclusive: two processes never get the same id.
    """
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
    where = {"id": id, "target": target, "workdir": workdir.resolve(), "created": created}
    job = Job(command=command, env=dict(env or {}), **where, **fields)
    kept = {name: value for name, value in vars(job).items() if name != "env"}
    kept |= {"workdir": str(job.workdir), "env_names": sorted(job.env)}
    write(directory(id) / "job.json", json.dumps(kept, indent=1))
    return job


def discard(id: str) -> None:
    """Removes the entry of a job that was never submitted."""
    shutil.rmtree(directory(id), ignore_errors=True)


def directory(id: str) -> Path:
    return home() / id


def write(path: Path, text: str | bytes) -> None:
    """Writes a file atomically: another terminal may be reading it, and this process may be killed."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(text if isinstance(text, bytes) else text.encode())
    part.replace(path)


def find(id: str) -> Job:
    """The job with this id, or the only job whose id starts with it."""
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
    fields = json.loads(path.read_text())
    del fields["env_names"]
    lists = {name: tuple(fields[name]) for name in ("command", "fetch")}
    return Job(**{**fields, **lists, "workdir": Path(fields["workdir"])})


def every() -> Iterator[Job]:
    """Every job, newest first."""
    entries = [_read(path) for path in home().glob("*/job.json")]
    yield from sorted(entries, key=lambda job: job.created, reverse=True)


def write_status(id: str, status: Status) -> None:
    fields = {"state": status.state.value, "exit_code": status.exit_code, "note": status.note}
    write(directory(id) / "status.json", json.dumps(fields))


def final_status(id: str) -> Status | None:
    """How the job ended, or None where the journal does not know."""
    try:
        fields = json.loads((directory(id) / "status.json").read_text())
    except FileNotFoundError:
        return None
    return Status(State(fields["state"]), fields["exit_code"], fields["note"])
