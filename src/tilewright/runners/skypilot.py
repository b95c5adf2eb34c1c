"""Machines that SkyPilot rents, on any of its clouds and on Slurm, and jobs on them, through its Python SDK.

A cluster is identified by its name: launching a name that exists or is being provisioned takes that cluster and rents
no second one, even after this process was killed in the middle of a launch. SkyPilot's server does the work and
continues without this process; by default it runs on this machine, on loopback.
"""

import contextlib
import importlib
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import Cluster, Job, LostConnection, NotInstalled, Plan, Rental, RunnerError, State, Status
from tilewright.runners.carried import LogCarried
from tilewright.runners.payload import HAVE_UV
from tilewright.runners.upload import script_path, staged

# SkyPilot prepends "(name, pid=123) " to each line, in colour; on several hosts "(head, rank=0, pid=123) ".
_PREFIX = re.compile(r"^(?:\x1b\[[0-9;]*m)*\([^()\n]*pid=\d+[^()\n]*\)(?:\x1b\[[0-9;]*m)* ?")
_STATES = {
    "INIT": State.PENDING,
    "PENDING": State.PENDING,
    "SETTING_UP": State.PENDING,
    "RUNNING": State.RUNNING,
    "SUCCEEDED": State.SUCCEEDED,
    "CANCELLED": State.CANCELLED,
}


class SkyRunner(LogCarried):
    """Commands on the SkyPilot cluster called `name`."""

    rents = True
    prefix = _PREFIX

    def __init__(self, name: str):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,60}[a-z0-9])?", name):
            raise ValueError(
                f"--on sky:{name} must name a cluster in lower-case letters, digits and dashes, a letter first; use "
                "sky:my-experiment"
            )
        super().__init__()
        self.name = name
        self._numbers: dict[str, int] = {}
        self.target = f"sky:{name}"

    def is_up(self) -> bool:
        record = self._record()
        return record is not None and record.status.value == "UP"

    def _record(self, *, refresh: bool = True) -> Any:
        """SkyPilot's record of the cluster, or None.

        `refresh` queries the cloud: a cluster that tore itself down or was preempted is still in SkyPilot's table. A
        cluster that is being provisioned is not refreshed: its cloud may not list it yet, and SkyPilot would forget it.
        """
        sky = _sky()
        with one_line(self.target):
            found = _answer(sky.status([self.name]))
            if found and refresh and found[0].status.value != "INIT":
                found = _answer(sky.status([self.name], refresh=sky.StatusRefreshMode.AUTO))
        return found[0] if found else None

    def _task(self, rental: Rental) -> Any:
        sky = _sky()
        if rental.template is not None and not rental.template.is_file():
            raise ValueError(f"--template {rental.template} is not a file")
        with one_line(self.target):
            task = sky.Task(setup=HAVE_UV) if rental.template is None else sky.Task.from_yaml(str(rental.template))
            task.name = self.name
            # A template may have a command to run; a launch only sets up the machine.
            task.run = None
            changes: dict[str, Any] = {}
            if rental.accelerator is not None:
                changes["accelerators"] = rental.accelerator
            if rental.infra is not None:
                changes["infra"] = rental.infra
            if rental.spot:
                changes["use_spot"] = True
            changes["autostop"] = (
                False if rental.idle_minutes is None else {"idle_minutes": rental.idle_minutes, "down": True}
            )
            task.set_resources({_changed(each, changes) for each in task.resources})
        return task

    def plan(self, rental: Rental) -> Plan:
        if rental.infra is not None and rental.infra.startswith("slurm") and rental.idle_minutes is not None:
            raise RunnerError(
                f"--infra {rental.infra} cannot give a machine back by itself; pass --keep, and run `tilewright remote "
                f"down {self.target}` when you are done"
            )
        task = self._task(rental)
        record = self._record()
        if record is not None:
            return self._found(record, rental)
        sky = _sky()
        said: list[str] = []
        with one_line(self.target):
            dag = sky.Dag()
            dag.add(task)
            sky.stream_and_get(sky.optimize(dag), output_stream=_Lines(said.append))
        table = "".join(said)
        ends = "NEVER by itself" if rental.idle_minutes is None else f"after {rental.idle_minutes} idle minutes"
        price = chosen_price(table)
        dollars = "not known" if price is None else f"${price:.2f} an hour"
        return Plan(
            target=self.target,
            accelerator=rental.accelerator or "the template's",
            lines=(*table.strip("\n").splitlines(), f"{self.target}: {dollars}; torn down {ends}"),
            dollars_per_hour=price,
        )

    def _found(self, record: Any, rental: Rental) -> Plan:
        there = _accelerators(record.handle.launched_resources) if record.handle else "not known"
        if rental.accelerator is not None and there not in (rental.accelerator, "not known"):
            raise RunnerError(
                f"{self.target} exists and has {there}, not {rental.accelerator}; use another name, or run "
                f"`tilewright remote down {self.target}` first"
            )
        state = {"UP": "is up", "INIT": "is being provisioned, or was interrupted", "STOPPED": "is stopped"}
        return Plan(
            target=self.target,
            accelerator=there,
            lines=(
                f"{self.target} {state.get(record.status.value, record.status.value)}: {there}; no second one is rented",
            ),
            dollars_per_hour=_price(record),
            exists=True,
        )

    def launch(self, rental: Rental, workdir: Path, say: Callable[[str], None]) -> None:
        sky = _sky()
        task = self._task(rental)
        with staged(workdir) as stage, one_line(self.target):
            task.workdir = str(stage)
            request = sky.launch(task, cluster_name=self.name)
            with _cancelled_with(request):
                sky.stream_and_get(request, output_stream=_Lines(say))

    def sync(self, workdir: Path) -> None:
        sky = _sky()
        with staged(workdir) as stage, one_line(self.target):
            request = sky.exec(sky.Task(workdir=str(stage)), cluster_name=self.name)
            with _cancelled_with(request):
                _answer(request)

    def submit(self, job: Job) -> None:
        sky = _sky()
        record = self._record(refresh=False)
        if record is None:
            raise _missing(self.target)
        with staged(job.workdir, job) as stage, one_line(self.target):
            task = sky.Task(name=job.id, workdir=str(stage), run=f"bash {script_path(job)}")
            # A job that asks for all accelerators of the cluster: SkyPilot's queue then runs one job at a time.
            accelerators = record.handle.launched_resources.accelerators if record.handle else None
            if accelerators:
                task.set_resources(sky.Resources(accelerators=accelerators))
            request = sky.exec(task, cluster_name=self.name)
            with _cancelled_with(request):
                self._numbers[job.id], _ = _answer(request)

    def _queue(self) -> list[Any]:
        sky = _sky()
        with one_line(self.target):
            return _answer(sky.queue(self.name))

    def _number(self, job: Job) -> int | None:
        """SkyPilot's number for the job. Our id is the job's name there."""
        if job.id not in self._numbers:
            self._numbers |= {record.job_name: record.job_id for record in self._queue()}
        return self._numbers.get(job.id)

    def status(self, job: Job) -> Status:
        try:
            queue = self._queue()
        except ClusterGone as error:
            return Status(State.LOST, note=f"{error}; its files there are gone")
        for record in queue:
            if record.job_name == job.id:
                return _status(record)
        return Status(
            State.LOST, note=f"{self.target} has no such job: it never started, or the cluster was launched again"
        )

    def jobs(self) -> list[tuple[str, Status]]:
        return [(record.job_name, _status(record)) for record in self._queue()]

    def _raw_log(self, job: Job, *, follow: bool) -> Iterator[str]:
        sky = _sky()
        number = self._number(job)
        if number is None:
            return
        with one_line(self.target):
            # Every call starts at the beginning of the log; a reader that reconnects skips what it has.
            for text in sky.tail_logs(self.name, number, follow, preload_content=False):
                if text is not None:
                    yield text

    def cancel(self, job: Job) -> bool:
        sky = _sky()
        if self.status(job).state.over:
            return False
        number = self._number(job)
        with one_line(self.target):
            _answer(sky.cancel(self.name, job_ids=[number]))
        self.wait(job, timeout_s=60)
        return True

    def down(self) -> None:
        sky = _sky()
        with one_line(self.target):
            _answer(sky.down(self.name))


def _changed(resources: Any, changes: dict[str, Any]) -> Any:
    """A copy with the changes. Another TPU generation drops the template's arguments, such as its runtime version."""
    named = changes.get("accelerators")
    if (
        named is not None
        and resources.accelerators
        and Accelerator.parse(named).kind not in str(resources.accelerators)
    ):
        changes = {**changes, "accelerator_args": None}
    return resources.copy(**changes)


def chosen_price(table: str) -> float | None:
    """Dollars per hour, from the row that SkyPilot's optimizer chose: its API returns only the printed table."""
    for line in table.splitlines():
        if chosen := re.search(r"([\d.]+)\s+✔", line):
            return float(chosen[1])
    return None


class ClusterGone(RunnerError):
    """There is no cluster of this name."""


def clusters() -> list[Cluster]:
    """The clusters that are currently rented, newest first, with their cost."""
    sky = _sky()
    with one_line("sky"):
        found = _answer(sky.status(refresh=sky.StatusRefreshMode.AUTO))
        # A second launch of a cluster resets its launch time; the cost report keeps the first one.
        since = {each["name"]: each for each in _answer(sky.cost_report()) if each.get("status") is not None}
    rows = []
    for record in found:
        intervals = since.get(record.name, {}).get("usage_intervals") or []
        rows.append(
            Cluster(
                target=f"sky:{record.name}",
                resources=record.resources_str or "not known",
                state=record.status.value,
                launched=float(min((begin for begin, _ in intervals), default=record.launched_at)),
                dollars_per_hour=_price(record),
                idle_minutes=record.autostop if record.autostop >= 0 else None,
                torn_down=record.to_down,
            )
        )
    return sorted(rows, key=lambda each: each.launched, reverse=True)


def _price(record: Any) -> float | None:
    """Dollars per hour, or None where the catalog has no price."""
    try:
        return record.handle.launched_resources.get_cost(3600) * record.nodes
    except (AttributeError, ValueError, KeyError, AssertionError):
        return None


def _accelerators(resources: Any) -> str:
    """The accelerators as --accelerator spells them."""
    accelerators = resources.accelerators
    if not accelerators:
        return "no accelerator"
    name, count = next(iter(accelerators.items()))
    plain = name if name.startswith("tpu") else f"{name}:{count:g}"
    with contextlib.suppress(ValueError):
        return Accelerator.parse(plain).name
    return plain


def _status(record: Any) -> Status:
    state = _STATES.get(record.status.value, State.FAILED)
    note = "" if state is not State.FAILED or record.status.value == "FAILED" else record.status.value.lower()
    # The exit code is in the log: SkyPilot only records that a job failed.
    return Status(state, 0 if state is State.SUCCEEDED else None, note)


def _sky() -> Any:
    # By default SkyPilot reports usage to its developers.
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    try:
        sky = importlib.import_module("sky")
    except ImportError as error:
        raise NotInstalled(
            "--on sky:CLUSTER needs SkyPilot, which is not installed: pip install 'tilewright[sky]', or "
            "uv sync --extra sky in a checkout"
        ) from error
    logging.getLogger("sky").setLevel(logging.ERROR)
    # SkyPilot stores the command line of its caller in its database, which would include the values of --env.
    sys.argv[1:] = []
    return sky


def _answer(request: Any) -> Any:
    return _sky().get(request)


@contextlib.contextmanager
def _cancelled_with(request: Any) -> Iterator[None]:
    """Ctrl-C also stops the request on SkyPilot's server, which would otherwise continue."""
    try:
        yield
    except KeyboardInterrupt:
        sky = _sky()
        # In a thread, so that a second Ctrl-C does not interrupt the cancellation.
        done = threading.Thread(target=lambda: sky.get(sky.api_cancel(request, silent=True)))
        done.start()
        done.join(timeout=30)
        raise


def _missing(target: str) -> ClusterGone:
    return ClusterGone(
        f"{target} does not exist; `tilewright remote list` shows the clusters that do, and `tilewright remote launch "
        f"--on {target} --accelerator ...` rents it"
    )


@contextlib.contextmanager
def one_line(target: str) -> Iterator[None]:
    """Turns SkyPilot's exceptions into a `RunnerError` of one line with the remedy."""
    requests, exceptions = (importlib.import_module(name) for name in ("requests", "sky.exceptions"))
    try:
        yield
    except exceptions.ClusterDoesNotExist:
        raise _missing(target) from None
    except exceptions.ClusterNotUpError:
        raise RunnerError(
            f"{target} is not up; `tilewright remote launch` with the same --on starts it again"
        ) from None
    except (exceptions.NoCloudAccessError, exceptions.CloudUserIdentityError, exceptions.InvalidCloudCredentials):
        raise RunnerError(
            f"{target}: SkyPilot has no valid credentials for any cloud on this machine; `sky check` shows what each "
            "cloud needs (gcp: `gcloud auth application-default login`)"
        ) from None
    except exceptions.ApiServerAuthenticationError:
        raise RunnerError(
            f"{target}: SkyPilot's server refuses the token: it is missing or expired; run `sky api login`"
        ) from None
    except exceptions.CloudError as error:
        raise RunnerError(f"{target}: a cloud or its price list cannot be reached: {_plain(error)}") from None
    except exceptions.ResourcesUnavailableError as error:
        raise RunnerError(f"{target} cannot be had: {_plain(error)}") from None
    except (exceptions.ApiServerConnectionError, requests.exceptions.RequestException) as error:
        raise LostConnection(
            f"{target}: SkyPilot's server does not answer ({type(error).__name__}); see `sky api info`"
        ) from None
    except RuntimeError as error:
        if isinstance(error, RunnerError) or "API server" not in str(error):
            raise
        # Processes of a server that was killed may block the new one for a while.
        raise LostConnection(
            f"{target}: SkyPilot's server does not start; run `sky api stop` and try again: {_plain(error)}"
        ) from None
    except (
        exceptions.NotSupportedError,
        exceptions.ResourcesMismatchError,
        exceptions.ProvisionPrechecksError,
        exceptions.InvalidClusterNameError,
        exceptions.ClusterSetUpError,
        exceptions.CommandError,
        exceptions.RequestCancelled,
        ValueError,
    ) as error:
        raise RunnerError(f"{target}: SkyPilot refuses: {_plain(error)}") from None


def _plain(error: BaseException) -> str:
    """The message in one line, without colour codes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return " ".join(text.split())[:500]


class _Lines(io.TextIOBase):
    """A stream that passes what is written to it to a function."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._say(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
        return len(text)
