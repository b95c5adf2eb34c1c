"""`tilewright remote`: rents machines and manages the jobs on them, one step per command."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from tilewright.cli.document import prints_json, tell
from tilewright.cli.run import (
    AcceleratorOption,
    Environment,
    Fetch,
    On,
    Yes,
    bring,
    prepare,
    rent,
    submit,
    watch,
)
from tilewright.cli.screen import arguments, console, duration, new_table
from tilewright.runners import journal
from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import Job, NotInstalled, Rental, Runner, RunnerError, State, Status
from tilewright.runners.finish import log_of, status_of
from tilewright.runners.registry import open_runner
from tilewright.runners.skypilot import clusters


class _Group(TyperGroup):
    """Runs a subcommand. What a runner refuses, and a wrong argument, is the caller's mistake."""

    def invoke(self, ctx: Any) -> Any:
        with arguments(mistakes=(ValueError, RunnerError, TimeoutError)):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Rented machines, and the jobs on them.

**Rent** a machine, after its price is shown: `tilewright remote launch --on sky:mine --accelerator tpu-v6e-8`

**Run** on it: `tilewright remote exec --on sky:mine -- uv run --extra tpu pytest`, or `tilewright run`, which rents

**Follow** a job from any terminal: `tilewright remote logs JOB --follow`, `status`, `wait`, `cancel`

**Control costs**: `tilewright remote list`, `tilewright remote down sky:mine`
""",
)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, or the start of it.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="sky:CLUSTER.")]
Workdir = Annotated[Path, typer.Option(help="The checkout whose files are uploaded.")]
_SHOWN = 20


@app.command()
def launch(
    on: Annotated[str, typer.Option(help="sky:CLUSTER, with a name of your choice.")],
    accelerator: AcceleratorOption = None,
    infra: Annotated[
        str | None, typer.Option(help="Where to rent: gcp, gcp/us-east5, slurm. Defaults to the cheapest offer.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Cheaper; the cloud may preempt it at any time.")] = False,
    idle_minutes: Annotated[int, typer.Option(help="Minutes without a job after which it is torn down.")] = 10,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not tear it down when idle: it costs money until `remote down`.")
    ] = False,
    template: Annotated[
        Path | None, typer.Option(help="A SkyPilot YAML file with setup, disk, image and the like.")
    ] = None,
    workdir: Workdir = Path("."),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its price; rent nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Rent a machine, or take it if it exists: shows the plan and its price, asks for confirmation, and launches it.

    The same command resumes a launch that was interrupted: one name never becomes two clusters.
    """
    runner = open_runner(on)
    if accelerator is None and template is None:
        raise ValueError("--accelerator is missing; name what to rent (tpu-v6e-8, H200:1), or a --template that does")
    rental = Rental(
        accelerator=None if accelerator is None else Accelerator.parse(accelerator).name,
        infra=infra,
        spot=spot,
        idle_minutes=None if keep else idle_minutes,
        template=template,
    )
    rent(runner, rental, workdir, yes=yes, only_plan=dry_run)
    if not dry_run:
        console().print(
            f"{runner.target} is up; `tilewright remote down {runner.target}` tears it down", highlight=False
        )


@app.command()
def sync(on: On, workdir: Workdir = Path(".")) -> None:
    """Copy the checkout's files to a cluster, except those that git ignores. Deleted files are not deleted there."""
    began = time.monotonic()
    runner = open_runner(on)
    runner.sync(workdir.resolve())
    console().print(f"{workdir.resolve()} is on {runner.target} ({time.monotonic() - began:.1f} s)", highlight=False)


@app.command(context_settings={"allow_interspersed_args": False})
def exec(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after `--`.")],
    on: On,
    accelerator: AcceleratorOption = None,
    env: Environment = None,
    fetch: Fetch = None,
    name: Annotated[str | None, typer.Option(help="The job's name. Defaults to the command's.")] = None,
    workdir: Workdir = Path("."),
) -> None:
    """Run a command on an existing cluster: like `tilewright run`, but never rents."""
    job, runner = prepare(on, tuple(command), accelerator, env, fetch, name, workdir)
    submit(runner, job)
    raise typer.Exit(watch(runner, job).code)


@app.command()
@prints_json
def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="A job's id. Defaults to the newest jobs.")] = None,
    on: Annotated[str | None, typer.Option(help="List every job there, including those started elsewhere.")] = None,
) -> None:
    """Show the status of the jobs started from this machine, of one of them, or of all jobs in a place."""
    if on is not None:
        _show_jobs([(id, on, each, "") for id, each in open_runner(on).jobs()])
    else:
        _show_jobs(_rows(list(journal.every())[:_SHOWN] if job is None else [journal.find(job)]))


def _rows(jobs: list[Job]) -> list[tuple[str, str, Status, str]]:
    return [(each.id, each.target, _status_or_lost(each), " ".join(each.command)) for each in jobs]


def _show_jobs(rows: list[tuple[str, str, Status, str]]) -> None:
    tell(
        jobs=[
            {
                "job": id,
                "on": where,
                "state": each.state,
                "exit_code": each.exit_code,
                "command": words,
                "note": each.note,
            }
            for id, where, each, words in rows
        ]
    )
    table = new_table(None, ("job", "on", "state", "exit code", "command", "note"))
    for id, where, each, words in rows:
        code = "" if each.exit_code is None else str(each.exit_code)
        table.add_row(id, escape(where), str(each.state), code, escape(words[:60]), escape(each.note))
    console().print(table)


def _status_or_lost(job: Job) -> Status:
    """A runner that does not answer is one row of the table, not an error of the whole command."""
    try:
        return status_of(open_runner(job.target), job)
    except (RunnerError, ValueError) as error:
        return Status(State.LOST, note=str(error))


@app.command()
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it has ended; returns its exit code.")] = False,
) -> None:
    """Print a job's output. --follow reconnects after a lost connection and continues where it stopped."""
    found, runner = _find(job)
    if not follow or journal.final_status(found.id) is not None:
        typer.echo(log_of(runner, found), nl=False)
        if not follow:
            return
    raise typer.Exit(bring(runner, found).code if journal.final_status(found.id) else watch(runner, found).code)


@app.command()
def wait(
    job: JobId,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which to stop waiting, with exit code 2.")
    ] = None,
) -> None:
    """Wait until a job has ended, fetch its log and files, and return its exit code."""
    found, runner = _find(job)
    if journal.final_status(found.id) is None:
        runner.wait(found, timeout_s=timeout)
    ended = bring(runner, found)
    console().print(f"job {found.id} {ended.state}, exit code {ended.code}", highlight=False)
    raise typer.Exit(ended.code)


@app.command()
def cancel(job: JobId) -> None:
    """Stop a job and everything it started."""
    found, runner = _find(job)
    stopped = journal.final_status(found.id) is None and runner.cancel(found)
    if stopped and runner.target != "local":
        bring(runner, found)
    what = "is cancelled" if stopped else f"had already ended: {status_of(runner, found).state}"
    console().print(f"job {found.id} {what}", highlight=False)


@app.command()
def down(target: Target) -> None:
    """Tear a machine down, with everything on it. Files that were not fetched are lost."""
    runner = open_runner(target)
    runner.down()
    console().print(f"{runner.target} is torn down", highlight=False)


@app.command("list")
@prints_json
def list_everything() -> None:
    """List the newest jobs here and on Ray clusters, and the rented machines: their age, price, and cost so far."""
    jobs = [job for job in journal.every() if not job.target.startswith("sky:")][:_SHOWN]
    tell(jobs=[], clusters=None)
    if jobs:
        _show_jobs(_rows(jobs))
    try:
        found = clusters()
    except NotInstalled as error:
        none = "" if jobs else "No jobs were started from this machine. "
        console().print(f"{none}Rented machines are not listed: {escape(str(error))}", soft_wrap=True)
        return
    now = time.time()
    tell(
        clusters=[{**dataclasses.asdict(each), "age_s": now - each.launched, "cost": each.cost(now)} for each in found]
    )
    if not found:
        console().print("Nothing is rented.")
        return
    table = new_table(None, ("cluster", "resources", "state", "age", "price", "cost so far", "torn down"))
    for each in found:
        price = "not known" if each.dollars_per_hour is None else f"${each.dollars_per_hour:.2f} an hour"
        cost = each.cost(now)
        ends = "never" if each.idle_minutes is None else f"after {each.idle_minutes} idle minutes"
        table.add_row(
            each.target,
            escape(each.resources),
            each.state,
            duration(now - each.launched),
            price,
            "not known" if cost is None else f"${cost:.2f}",
            ends if each.torn_down or each.idle_minutes is None else f"{ends}, stopped only",
        )
    console().print(table)


def _find(job: str) -> tuple[Job, Runner]:
    found = journal.find(job)
    return found, open_runner(found.target)
