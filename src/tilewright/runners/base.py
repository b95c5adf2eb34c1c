"""What every runner does, what it is told, and what it answers.

A runner takes a command to where it runs: here (`local`), on a machine that SkyPilot rents (`skypilot`), or on a Ray
cluster that somebody else keeps (`ray`). They do not all do the same: Ray rents nothing, and here there is nothing to
sync. What a runner cannot do raises `CannotDo`, with the reason and the way out; nothing is a silent no-op.
"""

import enum
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

TARGETS = "local, sky:CLUSTER or ray:ADDRESS"
_POLL_S = 0.5
_RECONNECTS = 20
_LONGEST_PAUSE_S = 15.0


class RunnerError(RuntimeError):
    """Something outside this program refused or failed; the text says what and what to do, in one line."""


class CannotDo(RunnerError):
    """This runner has no such operation."""


class LostConnection(RunnerError):
    """The other side stopped answering. What was asked for may have happened; following a log resumes after this."""


class State(enum.StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """It is over, and nobody knows how it ended: its supervisor was killed, or its machine is gone."""

    @property
    def over(self) -> bool:
        return self not in (State.PENDING, State.RUNNING)


@dataclass(frozen=True)
class Status:
    """A job's state, and the exit code of its command once it is over and known."""

    state: State
    exit_code: int | None = None
    note: str = ""

    @property
    def code(self) -> int:
        """What a shell should see: the command's own code, and never 0 for what did not succeed."""
        if self.state is State.SUCCEEDED:
            return 0
        return self.exit_code or (130 if self.state is State.CANCELLED else 1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command to run, and where. `env` is never printed and never written to the journal; only its names are."""

    id: str
    target: str
    command: tuple[str, ...]
    workdir: Path
    accelerator: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    fetch: tuple[str, ...] = ()
    """Paths below `workdir` that the job brings back."""
    created: float = 0.0
    commit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a job left: its whole log, the .tar.gz of the files it was to bring back, and what went wrong with those."""

    log: str
    files: bytes | None = None
    exit_code: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rental:
    """A machine to rent."""

    accelerator: str | None
    """None leaves it to the template."""
    infra: str | None = None
    """Where, as SkyPilot spells it: gcp, gcp/us-east5, slurm. The cheapest there is unless told."""
    spot: bool = False
    idle_minutes: int | None = 10
    """Torn down after so long without a job; None keeps it, and its bill, until somebody takes it down."""
    template: Path | None = None
    """A SkyPilot YAML file with the rest: setup commands, disk, image."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a launch would rent, and its price. `lines` are for people."""

    target: str
    accelerator: str
    lines: tuple[str, ...]
    dollars_per_hour: float | None
    exists: bool = False
    """The cluster is there, or on its way: a launch finds it and rents no second one."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine that is rented now."""

    target: str
    resources: str
    state: str
    launched: float
    dollars_per_hour: float | None
    idle_minutes: int | None
    """After how long without a job it is torn down or stopped; None for never."""
    torn_down: bool = True

    def cost(self, now: float) -> float | None:
        """Dollars since the launch, or None where the price is not known."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * (now - self.launched) / 3600


@runtime_checkable
class Runner(Protocol):
    """One place that commands run at. Methods raise `RunnerError`, in one line, where the place refuses."""

    target: str
    notice: str = ""
    """What whoever uses it should be told first."""
    rents: bool = False
    """Whether its machine is there only once it is launched."""

    def is_up(self) -> bool:
        """Whether its machine is there and takes jobs."""
        return True

    def plan(self, rental: Rental) -> Plan:
        """What `launch` would rent and what it costs, renting nothing."""
        ...

    def launch(self, rental: Rental, workdir: Path, say: Callable[[str], None]) -> None:
        """Rent the machine, or find it if it is there. `say` gets the provisioning log as it comes."""
        ...

    def sync(self, workdir: Path) -> None:
        """Bring the files of `workdir` there, without those that git ignores."""
        ...

    def submit(self, job: Job) -> None:
        """Start a job and return; it goes on when this process ends."""
        ...

    def status(self, job: Job) -> Status: ...

    def logs(self, job: Job, *, follow: bool, skip: int = 0) -> Iterator[str]:
        """What the job printed, without the first `skip` characters; with `follow`, until it is over."""
        ...

    def cancel(self, job: Job) -> bool:
        """Stop a job and everything it started. False where it was over already."""
        ...

    def down(self) -> None:
        """Give the machine back, with everything on it."""
        ...

    def jobs(self) -> list[tuple[str, Status]]:
        """The jobs of this place, by id, newest first: also those that others started."""
        ...

    def collect(self, job: Job) -> Collected:
        """Everything that a job which is over left behind."""
        ...

    def wait(self, job: Job, *, timeout_s: float | None = None) -> Status:
        """The status once the job is over, or `TimeoutError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (status := self.status(job)).state.over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job.id} is still {status.state} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status

    def follow(self, job: Job, *, pause_s: float = 1.0) -> Iterator[str]:
        """The whole log until the job is over, across lost connections: each character comes once."""
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
                raise lost or LostConnection(f"{self.target} ends the log of {job.id} again and again while it runs")
            time.sleep(min(pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S) if lost else _POLL_S)

    def ended(self, job: Job) -> bool:
        """Whether a log that has ended is all there will be, rather than a connection that was closed."""
        return self.status(job).state.over

    def exec(self, job: Job) -> Iterator[str]:
        """Submit and follow: the log of the command, until it is over."""
        self.submit(job)
        yield from self.follow(job)


def open_runner(target: str) -> Runner:
    """The runner for `local`, `sky:CLUSTER` or `ray:ADDRESS`. SkyPilot and Ray are imported when they are first asked."""
    kind, colon, place = target.partition(":")
    if target == "local":
        from tilewright.runners.local import LocalRunner

        return LocalRunner()
    if kind == "sky" and colon:
        from tilewright.runners.skypilot import SkyRunner

        return SkyRunner(place)
    if kind == "ray" and colon:
        from tilewright.runners.ray import RayRunner

        return RayRunner(place)
    hint = f"; did you mean {kind}:NAME?" if kind in ("sky", "ray") else ""
    raise ValueError(f"--on {target} is not a place to run at; use {TARGETS}{hint}")


def slug(words: str) -> str:
    """Lower-case letters, digits and single dashes, for names of jobs and clusters."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:40].strip("-") or "job"
