"""`tilewright remote`: the machines that run jobs, and the jobs on them, one step at a time."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

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
from tilewright.cli.screen import arguments, console, duration
from tilewright.runners import journal
from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import Job, Rental, Runner, RunnerError, State, Status, open_runner
from tilewright.runners.finish import log_of, status_of

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Machines that run jobs, and the jobs on them.

**Rent** a machine, after its price is shown: `tilewright remote launch --on sky:mine --accelerator tpu-v6e-8`

**Run** on it: `tilewright remote exec --on sky:mine -- uv run --extra tpu pytest`, or `tilewright run`, which does it all

**Watch** a job from any terminal: `tilewright remote logs JOB --follow`, `status`, `wait`, `cancel`

**Look after the money**: `tilewright remote list`, `tilewright remote down sky:mine`
""",
)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, or how it begins.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="sky:CLUSTER.")]
Workdir = Annotated[Path, typer.Option(help="The checkout whose files go along.")]
_MISTAKES = (ValueError, RunnerError)
_SHOWN = 20


@app.command()
def launch(
    on: Annotated[str, typer.Option(help="sky:CLUSTER, with a name of your choice.")],
    accelerator: AcceleratorOption = None,
    infra: Annotated[
        str | None, typer.Option(help="gcp, gcp/us-east5, slurm: the cheapest there is unless told.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Cheaper, and the cloud may take it back at any time.")] = False,
    idle_minutes: Annotated[int, typer.Option(help="Torn down after so long without a job.")] = 10,
    keep: Annotated[
        bool, typer.Option("--keep", help="Never torn down by itself: the bill runs until `remote down`.")
    ] = False,
    template: Annotated[
        Path | None, typer.Option(help="A SkyPilot YAML file with setup, disk, image and the like.")
    ] = None,
    workdir: Workdir = Path("."),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its price, rent nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Rent a machine, or find it if it is there: the plan and its price first, then the question, then the launch.

    A launch that was stopped half-way is taken up by the same command: a name is one cluster, and never two.
    """
    with arguments(mistakes=_MISTAKES):
        runner = open_runner(on)
        if accelerator is None and template is None:
            raise ValueError(
                "--accelerator is missing; say what to rent (tpu-v6e-8, H200:1), or name a --template that does"
            )
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
            f"{runner.target} is up; `tilewright remote down {runner.target}` gives it back", highlight=False
        )


@app.command()
def sync(on: On, workdir: Workdir = Path(".")) -> None:
    """Bring the checkout's files to a cluster, without those that git ignores. A file deleted here stays there."""
    with arguments(mistakes=_MISTAKES):
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
    name: Annotated[str | None, typer.Option(help="The job's name; the command's unless told.")] = None,
    workdir: Workdir = Path("."),
) -> None:
    """Run a command on what is there: like `tilewright run`, and never rents."""
    with arguments(mistakes=_MISTAKES):
        job, runner = prepare(on, tuple(command), accelerator, env, fetch, name, workdir)
        submit(runner, job)
    raise typer.Exit(watch(runner, job).code)


@app.command()
def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="A job's id; the newest ones unless told.")] = None,
    on: Annotated[str | None, typer.Option(help="Every job there, also those started from elsewhere.")] = None,
) -> None:
    """How jobs are: those started from this machine, or one of them, or all there are somewhere."""
    if on is not None:
        with arguments(mistakes=_MISTAKES):
            rows = [(id, on, each, "") for id, each in open_runner(on).jobs()]
    else:
        with arguments(mistakes=_MISTAKES):
            chosen = list(journal.every())[:_SHOWN] if job is None else [journal.find(job)]
        rows = [(each.id, each.target, _asked(each), " ".join(each.command)) for each in chosen]
    table = Table()
    for column in ("job", "on", "state", "exit code", "command", "note"):
        table.add_column(column, overflow="fold")
    for id, where, each, words in rows:
        code = "" if each.exit_code is None else str(each.exit_code)
        table.add_row(id, escape(where), str(each.state), code, escape(words[:60]), escape(each.note))
    console().print(table)


def _asked(job: Job) -> Status:
    """A place that does not answer is a line of the table, not the end of it."""
    try:
        return status_of(open_runner(job.target), job)
    except (RunnerError, ValueError) as error:
        return Status(State.LOST, note=str(error))


@app.command()
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it is over; returns its exit code.")] = False,
) -> None:
    """What a job printed. With --follow a lost connection is taken up where it broke."""
    with arguments(mistakes=_MISTAKES):
        found, runner = _find(job)
        if not follow or journal.kept_status(found.id) is not None:
            typer.echo(log_of(runner, found), nl=False)
            if not follow:
                return
    raise typer.Exit(bring(runner, found).code if journal.kept_status(found.id) else watch(runner, found).code)


@app.command()
def wait(
    job: JobId,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which to give up, with exit code 2.")] = None,
) -> None:
    """Wait until a job is over, bring its log and files, and return its exit code."""
    with arguments(mistakes=(*_MISTAKES, TimeoutError)):
        found, runner = _find(job)
        if journal.kept_status(found.id) is None:
            runner.wait(found, timeout_s=timeout)
        ended = bring(runner, found)
    console().print(f"job {found.id} {ended.state}, exit code {ended.code}", highlight=False)
    raise typer.Exit(ended.code)


@app.command()
def cancel(job: JobId) -> None:
    """Stop a job and everything it started."""
    with arguments(mistakes=_MISTAKES):
        found, runner = _find(job)
        stopped = journal.kept_status(found.id) is None and runner.cancel(found)
        if stopped and runner.target != "local":
            bring(runner, found)
    what = "is cancelled" if stopped else f"was over already: {status_of(runner, found).state}"
    console().print(f"job {found.id} {what}", highlight=False)


@app.command()
def down(target: Target) -> None:
    """Give a machine back, with everything on it. What jobs left there and was not fetched is gone."""
    with arguments(mistakes=_MISTAKES):
        runner = open_runner(target)
        runner.down()
    console().print(f"{runner.target} is given back", highlight=False)


@app.command("list")
def list_clusters() -> None:
    """What is rented now: since when, at what price, what it has cost so far, and when it goes by itself."""
    with arguments(mistakes=_MISTAKES):
        from tilewright.runners.skypilot import clusters

        found = clusters()
    if not found:
        console().print("Nothing is rented.")
        return
    now = time.time()
    table = Table()
    for column in ("cluster", "resources", "state", "age", "price", "cost so far", "goes by itself"):
        table.add_column(column, overflow="fold")
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
