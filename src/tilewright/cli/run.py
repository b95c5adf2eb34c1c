"""`tilewright run`: any command, here or on a machine somewhere, with its log, its exit code and its files."""

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tilewright.cli.screen import Mistake, arguments, console
from tilewright.core.records import checkout_commit
from tilewright.runners import journal
from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import CannotDo, Job, LostConnection, Rental, Runner, RunnerError, Status, open_runner
from tilewright.runners.finish import finish
from tilewright.runners.upload import shipped_files

On = Annotated[str, typer.Option(help="local, sky:CLUSTER or ray:ADDRESS.")]
AcceleratorOption = Annotated[
    str | None, typer.Option(help="tpu-v6e-8, H200:1: what to rent or to reserve; what is there unless told.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE, or NAME for the value it has here. Repeatable. Never logged or stored."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Rent without asking.")]
Fetch = Annotated[list[str] | None, typer.Option(help="A file or folder that the command makes, to bring back.")]

_DETACHED = 130


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after `--`.")],
    on: On = "local",
    accelerator: AcceleratorOption = None,
    env: Environment = None,
    fetch: Fetch = None,
    name: Annotated[str | None, typer.Option(help="The job's name; the command's unless told.")] = None,
    workdir: Annotated[Path, typer.Option(help="The checkout to run in; its files go along.")] = Path("."),
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Submit, print the job's id, and return.")] = False,
    yes: Yes = False,
) -> None:
    """Run a command on this machine, on one that SkyPilot rents, or on a Ray cluster; stream its log; return its exit code.

    The files of the checkout go along, without those that git ignores. A cluster that is not there yet is rented, after
    its price is shown and confirmed, and is torn down after ten idle minutes. The job goes on if this command is stopped:
    `tilewright remote logs|wait|cancel JOB` work from any terminal of this machine.
    """
    with arguments(mistakes=(ValueError, RunnerError)):
        job, runner = prepare(on, tuple(command), accelerator, env, fetch, name, workdir, rents=True, yes=yes)
        submit(runner, job)
    if no_wait:
        console().print(job.id, highlight=False)
        _say(f"it runs on without this command; `tilewright remote wait {job.id}` brings its log, code and files")
        return
    raise typer.Exit(watch(runner, job).code)


def prepare(
    on: str,
    command: tuple[str, ...],
    accelerator: str | None,
    env: list[str] | None,
    fetch: list[str] | None,
    name: str | None,
    workdir: Path,
    *,
    rents: bool = False,
    yes: bool = False,
) -> tuple[Job, Runner]:
    """Check every word, rent the machine if that is asked for and it is not there, then enter the job in the journal."""
    variables = read_environment(env or [])
    for path in fetch or []:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"--fetch {path} must be below --workdir, where the command runs; use a relative path")
    if not workdir.is_dir():
        raise ValueError(f"--workdir {workdir} is not a directory")
    if len(command) == 1 and re.search(r"\s", command[0]) and shutil.which(command[0]) is None:
        raise ValueError(f"the command {command[0]!r} is one word with spaces in it; use -- bash -c {command[0]!r}")
    if accelerator is not None:
        Accelerator.parse(accelerator)
    runner = open_runner(on)
    if runner.notice:
        _say(f"note: {runner.notice}")
    if on == "local" and accelerator is not None:
        raise CannotDo(
            f"--on local takes what this machine has: leave --accelerator {accelerator} out, or use sky:CLUSTER"
        )
    if rents:
        ensure_cluster(runner, accelerator, workdir, yes=yes)
    job = journal.new_job(
        runner.target,
        command,
        name=name,
        workdir=workdir,
        accelerator=accelerator,
        env=variables,
        fetch=tuple(fetch or ()),
        commit=checkout_commit(),
    )
    return job, runner


def read_environment(given: list[str]) -> dict[str, str]:
    """The variables of --env. No error shows a value: it may be a secret."""
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            shown = name if equals or len(name) < 16 else f"{name[:3]}..."
            raise ValueError(
                f"--env {shown} is not a variable's name; use NAME=VALUE, or NAME for the value it has here"
            )
        if not equals:
            if name not in os.environ:
                raise ValueError(f"--env {name} has no value here; use {name}=VALUE, or export it first")
            value = os.environ[name]
        variables[name] = value
    return variables


def ensure_cluster(runner: Runner, accelerator: str | None, workdir: Path, *, yes: bool) -> None:
    """Rent the runner's cluster if it rents at all and there is none."""
    if not runner.rents or runner.is_up():
        return
    if accelerator is None:
        raise RunnerError(
            f"{runner.target} is not there; pass --accelerator to rent it, or use one of `tilewright remote list`"
        )
    rent(runner, Rental(accelerator=accelerator), workdir, yes=yes)


def rent(runner: Runner, rental: Rental, workdir: Path, *, yes: bool, only_plan: bool = False) -> None:
    """Show what would be rented and its price, ask, and rent it."""
    plan = runner.plan(rental)
    shipped_files(workdir)  # What cannot be shipped is told before anything is rented.
    out = console(stderr=True)
    for line in plan.lines:
        out.print(escape(line), highlight=False, soft_wrap=True)
    if only_plan:
        return
    if not yes and not plan.exists:
        if not sys.stdin.isatty():
            raise RunnerError(f"{runner.target} costs money and nobody is here to ask; pass --yes to rent it")
        if not typer.confirm("Rent it?", err=True):
            raise RunnerError("nothing was rented")
    runner.launch(rental, workdir, lambda text: out.print(escape(text), end="", highlight=False, soft_wrap=True))


def submit(runner: Runner, job: Job) -> None:
    """Submit. A job that never reached the other side leaves no entry; one that may have keeps it."""
    try:
        runner.submit(job)
    except LostConnection as error:
        raise RunnerError(
            f"{error}; whether job {job.id} began is not known: `tilewright remote status {job.id}`"
        ) from error
    except KeyboardInterrupt:
        _say("stopping what was begun")
        with contextlib.suppress(RunnerError):
            runner.cancel(job)
        journal.discard(job.id)
        raise typer.Exit(_DETACHED) from None
    except Exception:
        if runner.target != "local":
            journal.discard(job.id)
        raise
    _say(f"job {job.id} on {job.target}")


def watch(runner: Runner, job: Job, *, stderr: bool = False) -> Status:
    """Follow the log to its end, then bring the files; the job's status. Ctrl-C leaves the job running, and says so."""
    stream = sys.stderr if stderr else sys.stdout
    try:
        last = "\n"
        for text in runner.follow(job):
            stream.write(text)
            stream.flush()
            last = text[-1]
        if last != "\n":
            stream.write("\n")
        return bring(runner, job)
    except KeyboardInterrupt:
        _say(f"\njob {job.id} runs on; `tilewright remote logs {job.id} --follow` comes back to it, and ")
        _say(f"`tilewright remote cancel {job.id}` stops it")
        raise typer.Exit(_DETACHED) from None
    except RunnerError as error:
        raise Mistake(f"{error} (job {job.id}: `tilewright remote wait {job.id}` asks again)") from error


def bring(runner: Runner, job: Job) -> Status:
    """Collect a job that is over, and say what came of it."""
    finished = finish(runner, job, fetched_into(job))
    for path in finished.fetched:
        _say(f"fetched {os.path.relpath(path)}")
    for note in finished.notes:
        _say(note)
    status = finished.status
    if status.code:
        why = f" ({status.note})" if status.note else ""
        _say(f"job {job.id} {status.state}, exit code {status.code}{why}")
    return status


def fetched_into(job: Job) -> Path:
    """Where a job's files go: below results/, which git ignores, and apart from every other job's."""
    return job.workdir / "results" / "jobs" / job.id


def _say(text: str) -> None:
    console(stderr=True).print(escape(text), highlight=False, soft_wrap=True)
