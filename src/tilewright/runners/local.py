"""Jobs on this machine: a process of its own session, with its log and how it ended in the journal.

The job runs in the checkout itself, so there is nothing to sync and nothing to fetch, and its files are where they would
be brought to. `supervise.py` runs it; this file starts that, and asks the journal.
"""

import codecs
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tilewright.runners import journal, supervise
from tilewright.runners.base import CannotDo, Collected, Job, Plan, Rental, Runner, RunnerError, State, Status

_START_S = 20.0
_POLL_S = 0.05


class LocalRunner(Runner):
    """Commands here, that outlive the terminal they were started from."""

    target = "local"

    def plan(self, rental: Rental) -> Plan:
        raise CannotDo(
            f"--on local rents nothing, and --accelerator {rental.accelerator} cannot be had by it; use sky:CLUSTER"
        )

    def launch(self, rental: Rental, workdir: Path, say: Callable[[str], None]) -> None:
        self.plan(rental)

    def sync(self, workdir: Path) -> None:
        raise CannotDo("--on local has nothing to sync: its jobs run in the checkout itself")

    def submit(self, job: Job) -> None:
        directory = journal.directory(job.id)
        with (directory / "supervisor.log").open("wb") as errors:
            # -I: neither the job's directory nor its PYTHONPATH may change what the supervisor imports.
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
                raise RunnerError(f"job {job.id} did not start; {directory / 'supervisor.log'} says why")
            time.sleep(_POLL_S)

    def status(self, job: Job) -> Status:
        alive = self._alive(job, "supervisor.json") or self._alive(job, "process.json")
        # Asked after the processes: one that ended in between has left its status.
        if kept := journal.kept_status(job.id):
            return kept
        if alive:
            return Status(State.RUNNING)
        if not (journal.directory(job.id) / "supervisor.json").exists():
            if time.time() - job.created < _START_S:
                return Status(State.PENDING)
            return Status(State.LOST, note="it was entered and never started: whoever entered it was killed")
        return Status(State.LOST, note="its supervisor was killed, or the machine was restarted: no exit code was kept")

    def _alive(self, job: Job, name: str) -> int | None:
        """The pid in the journal's file, if it is still that process."""
        try:
            kept = json.loads((journal.directory(job.id) / name).read_text())
        except FileNotFoundError:
            return None
        now = supervise.started_at(kept["pid"])
        return kept["pid"] if now is not None and now == kept["started_at"] else None

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
                # Whether it is over is asked before the read: after the last write there is one more read.
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
                # Nobody supervises it any more: end it and what is below it from here.
                supervise.stop_all(process)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                journal.keep_status(job.id, Status(State.CANCELLED, note="its supervisor had been killed"))
            time.sleep(_POLL_S)
        return status.state is State.CANCELLED and (asked is not None or bool(status.note))

    def down(self) -> None:
        raise CannotDo("--on local has no machine to give back; `tilewright remote cancel JOB` stops a job")

    def jobs(self) -> list[tuple[str, Status]]:
        return [(job.id, self.status(job)) for job in journal.every() if job.target == self.target]

    def collect(self, job: Job) -> Collected:
        missing = [path for path in job.fetch if not (job.workdir / path).exists()]
        notes = tuple(f"--fetch {path}: the job made no such file" for path in missing)
        return Collected(log="".join(self.logs(job, follow=False)), notes=notes)
