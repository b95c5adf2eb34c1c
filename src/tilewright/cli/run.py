"""`tilewright run`: runs any command on this machine or another one, with its log, its exit code and its files."""

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
from tilewright.runners import journal
from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import CannotDo, Job, LostConnection, Rental, Runner, RunnerError, Status
from tilewright.runners.finish import finish
from tilewright.runners.registry import open_runner
from tilewright.runners.upload import shipped_files
from tilewright.workbench.records import checkout_commit

On = Annotated[str, typer.Option(help="local, sky:CLUSTER or ray:ADDRESS.")]
AcceleratorOption = Annotated[
    str | None, typer.Option(help="What to rent or reserve: tpu-v6e-8, H200:1. Defaults to what the machine has.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE, or NAME to pass on its value. Repeatable. Values are never logged or stored."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Rent without asking.")]
Fetch = Annotated[list[str] | None, typer.Option(help="A file or folder that the command writes, to copy back.")]

_DETACHED = 130


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after `--`.")],
    on: On = "local",
    accelerator: AcceleratorOption = None,
    env: Environment = None,
    fetch: Fetch = None,
    name: Annotated[str | None, typer.Option(help="The job's name. Defaults to the command's.")] = None,
    workdir: Annotated[Path, typer.Option(help="The checkout to run in; its files are uploaded.")] = Path("."),
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Submit, print the job's id, and return.")] = False,
    yes: Yes = False,
) -> None:
    """Run a command here, on a machine that SkyPilot rents, or on a Ray cluster; stream its log; return its exit code.

    The files of the checkout are uploaded, except those that git ignores. A cluster that does not exist yet is rented
    after its price is shown and confirmed, and is torn down after ten idle minutes. The job continues if this command
    is stopped: `tilewright remote logs|wait|cancel JOB` work from any terminal of this machine.
    """
    with arguments(mistakes=(ValueError, RunnerError)):
        job, runner = prepare(on, tuple(command), accelerator, env, fetch, name, workdir, rents=True, yes=yes)
        submit(runner, job)
    if no_wait:
        console().print(job.id, highlight=False)
        _say(f"the job continues; `tilewright remote wait {job.id}` fetches its log, exit code and files")
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
    """Checks every argument, rents the machine where `rents` and it does not exist, and adds the job to the journal."""
    variables = read_environment(env or [])
    for path in fetch or []:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"--fetch {path} must be below --workdir, where the command runs; use a relative path")
    if not workdir.is_dir():
        raise ValueError(f"--workdir {workdir} is not a directory")
    if len(command) == 1 and re.search(r"\s", command[0]) and shutil.which(command[0]) is None:
        raise ValueError(f"the command {command[0]!r} is one argument with spaces; use -- bash -c {command[0]!r}")
    if accelerator is not None:
        Accelerator.parse(accelerator)
    runner = open_runner(on)
    if runner.notice:
        _say(f"note: {runner.notice}")
    if on == "local" and accelerator is not None:
        raise CannotDo(f"--on local uses what this machine has: omit --accelerator {accelerator}, or use sky:CLUSTER")
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
    """The variables of --env. No error shows a value, which may be a secret."""
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            shown = name if equals or len(name) < 16 else f"{name[:3]}..."
            raise ValueError(
                f"--env {shown} is not the name of a variable; use NAME=VALUE, or NAME to pass on its value"
            )
        if not equals:
            if name not in os.environ:
                raise ValueError(f"--env {name} is not set in this shell; use {name}=VALUE, or export it first")
            value = os.environ[name]
        variables[name] = value
    return variables


def ensure_cluster(runner: Runner, accelerator: str | None, workdir: Path, *, yes: bool) -> None:
    """Rents the runner's cluster, if the runner rents machines and the cluster does not exist."""
    if not runner.rents or runner.is_up():
        return
    if accelerator is None:
        raise RunnerError(
            f"{runner.target} does not exist; pass --accelerator to rent it, or use one of `tilewright remote list`"
        )
    rent(runner, Rental(accelerator=accelerator), workdir, yes=yes)


def rent(runner: Runner, rental: Rental, workdir: Path, *, yes: bool, only_plan: bool = False) -> None:
    """Shows what would be rented and its price, asks for confirmation, and rents it."""
    plan = runner.plan(rental)
    shipped_files(workdir)  # Raises where files cannot be uploaded, before anything is rented.
    out = console(stderr=True)
    for line in plan.lines:
        out.print(escape(line), highlight=False, soft_wrap=True)
    if only_plan:
        return
    if not yes and not plan.exists:
        if not sys.stdin.isatty():
            raise RunnerError(
                f"{runner.target} costs money and there is no terminal to confirm on; pass --yes to rent it"
            )
        if not typer.confirm("Rent it?", err=True):
            raise RunnerError("nothing was rented")
    runner.launch(rental, workdir, lambda text: out.print(escape(text), end="", highlight=False, soft_wrap=True))


def submit(runner: Runner, job: Job) -> None:
    """Submits a job. Its journal entry is removed if the job cannot have reached the other side."""
    try:
        runner.submit(job)
    except LostConnection as error:
        raise RunnerError(f"{error}; job {job.id} may have started: see `tilewright remote status {job.id}`") from error
    except KeyboardInterrupt:
        _say("cancelling the submission")
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
    """Follows the log to its end, fetches the files and returns the job's status. Ctrl-C leaves the job running."""
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
        _say(f"\njob {job.id} continues; `tilewright remote logs {job.id} --follow` follows it again, and ")
        _say(f"`tilewright remote cancel {job.id}` stops it")
        raise typer.Exit(_DETACHED) from None
    except RunnerError as error:
        raise Mistake(f"{error} (job {job.id}: `tilewright remote wait {job.id}` tries again)") from error


def bring(runner: Runner, job: Job) -> Status:
    """Collects a job that has ended, and prints the files that were fetched and how it ended."""
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
    """The directory of a job's files: below results/, which git ignores, one per job."""
    return job.workdir / "results" / "jobs" / job.id


def _say(text: str) -> None:
    console(stderr=True).print(escape(text), highlight=False, soft_wrap=True)
