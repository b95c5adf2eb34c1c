"""Jobs on this machine: each is a process in its own session, with its log and exit code in the journal.

A job runs in the checkout itself, so there is nothing to sync or to fetch. supervise.py runs the command; this file
starts the supervisor and reads the journal.
"""

import codecs
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tilewright.runners import journal, supervise
from tilewright.runners.base import Collected, Job, Runner, RunnerError, State, Status

_START_S = 20.0
_POLL_S = 0.05


class LocalRunner(Runner):
    """Commands on this machine. They outlive the terminal they were started from."""

    target = "local"
    cannot = {  # noqa: RUF012
        "plan": "rents nothing, so it cannot provide an accelerator; use sky:CLUSTER",
        "sync": "has nothing to sync: its jobs run in the checkout itself",
        "down": "has no rented machine; `tilewright remote cancel JOB` stops a job",
    }

    def submit(self, job: Job) -> None:
        directory = journal.directory(job.id)
        with (directory / "supervisor.log").open("wb") as errors:
            # -I: neither the working directory nor PYTHONPATH may change what the supervisor imports.
            process = subprocess.Popen(
                [sys.executable, "-I", supervise.__file__, str(directory), *job.command],
                cwd=job.workdir,
                env={**os.environ, **job.env},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not ((directory / "process.json").exists() or (directory / "status.json").exists()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunnerError(f"job {job.id} did not start; see {directory / 'supervisor.log'}")
            time.sleep(_POLL_S)

    def status(self, job: Job) -> Status:
        alive = self._alive(job, "supervisor.json") or self._alive(job, "process.json")
        # Read after the processes were checked: one that ended in between has written its status.
        if ended := journal.final_status(job.id):
            return ended
        if alive:
            return Status(State.RUNNING)
        if not (journal.directory(job.id) / "supervisor.json").exists():
            if time.time() - job.created < _START_S:
                return Status(State.PENDING)
            return Status(State.LOST, note="it never started: the process that was to submit it was killed")
        return Status(
            State.LOST, note="its supervisor was killed, or the machine restarted: its exit code is not known"
        )

    def _alive(self, job: Job, name: str) -> int | None:
        """The pid in this file of the journal, if it still belongs to the same process."""
        try:
            written = json.loads((journal.directory(job.id) / name).read_text())
        except FileNotFoundError:
            return None
        now = supervise.started_at(written["pid"])
        return written["pid"] if now is not None and now == written["started_at"] else None

    def logs(self, job: Job, *, follow: bool, skip: int = 0) -> Iterator[str]:
        path = journal.directory(job.id) / "log"
        over = not follow
        while not path.exists():
            if over or self.status(job).state.over:
                return
            time.sleep(_POLL_S)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with path.open("rb") as file:
            while True:
                # The status is checked before reading, so that one more read follows the job's last write.
                over = over or self.status(job).state.over
                while chunk := file.read(65536):
                    text = decoder.decode(chunk)
                    if skip < len(text):
                        yield text[skip:]
                    skip = max(0, skip - len(text))
                if over:
                    return
                time.sleep(_POLL_S)

    def cancel(self, job: Job) -> bool:
        asked = None
        while not (status := self.status(job)).state.over:
            if supervisor := self._alive(job, "supervisor.json"):
                if asked != supervisor:
                    asked = supervisor
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(supervisor, signal.SIGTERM)
            elif process := self._alive(job, "process.json"):
                # The supervisor is gone, so the process and its descendants are stopped from here.
                supervise.stop_all(process)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                journal.write_status(job.id, Status(State.CANCELLED, note="its supervisor had been killed"))
            time.sleep(_POLL_S)
        return status.state is State.CANCELLED and (asked is not None or bool(status.note))

    def jobs(self) -> list[tuple[str, Status]]:
        return [(job.id, self.status(job)) for job in journal.every() if job.target == self.target]

    def collect(self, job: Job) -> Collected:
        missing = [path for path in job.fetch if not (job.workdir / path).exists()]
        notes = tuple(f"--fetch {path}: the job made no such file" for path in missing)
        return Collected(log="".join(self.logs(job, follow=False)), notes=notes)
