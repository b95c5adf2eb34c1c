"""The interface of a runner: its methods, the values they take and return, and its errors.

A runner executes commands in one place: on this machine (local.py), on a machine that SkyPilot rents (skypilot.py), or
on an existing Ray cluster (ray.py). Not every runner supports every method: Ray rents nothing, and on this machine
there is nothing to sync. An unsupported method raises `CannotDo` with the reason and the way out, which the runner has in
`cannot`. registry.py opens the runner for a target; this module imports none of them.
"""

import enum
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

_POLL_S = 0.5
_RECONNECTS = 20
_LONGEST_PAUSE_S = 15.0


class RunnerError(RuntimeError):
    """Something outside this program refused or failed. The text says in one line what happened and what to do."""


class CannotDo(RunnerError):
    """This runner does not support the operation."""


class NotInstalled(RunnerError):
    """The package that a runner needs is not installed."""


class LostConnection(RunnerError):
    """The other side stopped answering. The request may have been carried out. Following a log resumes after this."""


class State(enum.StrEnum):
    """The state of a job."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """It has ended and its exit code is not known: its supervisor was killed, or its machine is gone."""

    @property
    def over(self) -> bool:
        return self not in (State.PENDING, State.RUNNING)


@dataclass(frozen=True)
class Status:
    """A job's state, and the exit code of its command once the job has ended and the code is known."""

    state: State
    exit_code: int | None = None
    note: str = ""

    @property
    def code(self) -> int:
        """The exit code for a shell: the command's own, and never 0 for a job that did not succeed."""
        if self.state is State.SUCCEEDED:
            return 0
        return self.exit_code or (130 if self.state is State.CANCELLED else 1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command to run, and where. The values of `env` are never printed or written to the journal; the names are."""

    id: str
    target: str
    command: tuple[str, ...]
    workdir: Path
    accelerator: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    fetch: tuple[str, ...] = ()
    """Paths below `workdir` to copy back when the job has ended."""
    created: float = 0.0
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a job that has ended left: its log, a .tar.gz of the files to fetch, and notes on files that are missing."""

    log: str
    files: bytes | None = None
    exit_code: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rental:
    """A machine to rent."""

    accelerator: str | None
    """None takes the template's."""
    infra: str | None = None
    """Where, as SkyPilot spells it: gcp, gcp/us-east5, slurm. None takes the cheapest offer."""
    spot: bool = False
    idle_minutes: int | None = 10
    """Minutes without a job after which it is torn down; None keeps it, at its price, until `down` is called."""
    template: Path | None = None
    """A SkyPilot YAML file with everything else: setup commands, disk, image."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a launch would rent, and its price. `lines` describe it for a person."""

    target: str
    accelerator: str
    lines: tuple[str, ...]
    dollars_per_hour: float | None
    exists: bool = False
    """The cluster exists or is being provisioned: a launch takes it and rents no second one."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine that is currently rented."""

    target: str
    resources: str
    state: str
    launched: float
    dollars_per_hour: float | None
    idle_minutes: int | None
    """Minutes without a job after which it is torn down or stopped; None for never."""
    torn_down: bool = True
    """Whether an idle machine is torn down; it is stopped otherwise."""

    def cost(self, now: float) -> float | None:
        """The cost since the launch in dollars, or None where the price is not known."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * (now - self.launched) / 3600


@runtime_checkable
class Runner(Protocol):
    """Runs commands in one place. Methods raise `RunnerError`, with a text of one line, where the place refuses."""

    target: str
    notice: str = ""
    """A warning to show before the runner is used."""
    rents: bool = False
    """Whether its machine has to be launched before it exists."""
    cannot: Mapping[str, str] = {}
    """Why it does not support some of `plan`, `launch`, `sync` and `down`, and what to do instead."""

    def is_up(self) -> bool:
        """Whether the machine is up and takes jobs."""
        return True

    def plan(self, rental: Rental) -> Plan:
        """What `launch` would rent, and its price. Rents nothing."""
        raise self._unsupported("plan")

    def launch(self, rental: Rental, workdir: Path, say: Callable[[str], None]) -> None:
        """Rents the machine, or takes it if it exists. `say` is called with the provisioning log as it arrives."""
        raise self._unsupported("plan")

    def sync(self, workdir: Path) -> None:
        """Copies the files of `workdir` to the machine, without those that git ignores."""
        raise self._unsupported("sync")

    def submit(self, job: Job) -> None:
        """Starts a job and returns. The job continues when this process ends."""
        ...

    def status(self, job: Job) -> Status: ...

    def logs(self, job: Job, *, follow: bool, skip: int = 0) -> Iterator[str]:
        """The job's output without the first `skip` characters. With `follow`, until the job has ended."""
        ...

    def cancel(self, job: Job) -> bool:
        """Stops a job and every process it started. False where the job had already ended."""
        ...

    def down(self) -> None:
        """Returns the machine and deletes everything on it."""
        raise self._unsupported("down")

    def _unsupported(self, method: str) -> CannotDo:
        return CannotDo(f"--on {self.target} {self.cannot[method]}")

    def jobs(self) -> list[tuple[str, Status]]:
        """All jobs in this place by id, newest first, including those started from other machines."""
        ...

    def collect(self, job: Job) -> Collected:
        """The log and files of a job that has ended."""
        ...

    def wait(self, job: Job, *, timeout_s: float | None = None) -> Status:
        """The status once the job has ended. Raises `TimeoutError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (status := self.status(job)).state.over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job.id} is still {status.state} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status

    def follow(self, job: Job, *, pause_s: float = 1.0) -> Iterator[str]:
        """The whole log until the job has ended. Reconnects when a connection is lost; no character is repeated."""
        seen, failures = 0, 0
        while True:
            try:
                for text in self.logs(job, follow=True, skip=seen):
                    seen, failures = seen + len(text), 0
                    yield text
                if self.ended(job):
                    return
                lost: LostConnection | None = None
            except LostConnection as error:
                lost = error
            failures += 1
            if failures > _RECONNECTS:
                raise lost or LostConnection(f"{self.target} keeps closing the log of {job.id} while the job runs")
            time.sleep(min(pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S) if lost else _POLL_S)

    def ended(self, job: Job) -> bool:
        """Whether a log that stopped is complete, rather than cut off by a closed connection."""
        return self.status(job).state.over

    def exec(self, job: Job) -> Iterator[str]:
        """Submits the job and follows its log until it has ended."""
        self.submit(job)
        yield from self.follow(job)


def slug(words: str) -> str:
    """A name for a job or cluster: lower-case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:40].strip("-") or "job"
