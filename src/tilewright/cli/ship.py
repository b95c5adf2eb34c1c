"""`--on` for any verb: the verb runs on another machine, and its records are fetched.

    @runs_elsewhere(check=_settle, records="records", show=_show)
    def bench(asked, ...)

adds --on, --accelerator, --env and --yes to a verb, which receives the result of `check` first. With --on, `uv run` there
runs the same command line without these options, with the extras that the command line and the accelerator need. The
arguments are checked here first, so that a mistyped name rents no machine.
"""

import dataclasses
import functools
import inspect
import secrets
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli import document
from tilewright.cli.run import AcceleratorOption, Environment, Yes, fetched_into, prepare, submit, watch
from tilewright.cli.screen import Mistake, arguments, writing
from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import Job, Runner, RunnerError
from tilewright.runners.payload import HAVE_UV
from tilewright.workbench.records import Record, append_records, read_records

_ON = Annotated[
    str | None, typer.Option(help="Where to run it: local, sky:CLUSTER, ray:ADDRESS. See `tilewright run --help`.")
]
_ADDED: dict[str, tuple[Any, Any]] = {
    "on": (_ON, None),
    "accelerator": (AcceleratorOption, None),
    "env": (Environment, None),
    "yes": (Yes, False),
}
# Where no accelerator was named, the extra follows from the machine's devices.
_EXTRA_THERE = (
    "$(if [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then echo --extra tpu; "
    "elif [ -e /dev/nvidia0 ]; then echo --extra gpu; fi) "
)


def runs_elsewhere(
    *,
    check: Callable[..., Any],
    records: str | None = None,
    here_only: tuple[str, ...] = (),
    show: Callable[..., None] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds `--on` to a verb; see the module.

    `check` is called with the verb's arguments before anything is run or uploaded. `records` names the verb's option for
    its records file: the job runs with --quiet and a file of its own, which is fetched and appended to the requested one,
    and `show` prints what the verb would have printed here. `here_only` names options that are for this machine.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def either(ctx: Any, **given: Any) -> None:
            own = {name: given.pop(name) for name in _ADDED}
            if own["on"] is None:
                for name in ("accelerator", "env", "yes"):
                    if own[name]:
                        raise Mistake(f"--{name} is for another machine; pass --on too, or omit it")
            with arguments():
                asked = check(**given)
            if own["on"] is None:
                return verb(asked, **given)
            if records is None and document.wanted():
                raise Mistake(f"--json prints what is computed here; leave it or --on {own['on']} out")
            here = {*_ADDED, *here_only, document.PARAMETER, *([records] if records else [])}
            words = command_line(ctx, leave_out=here)
            code, made = ship(ctx.info_name or "", words, **own, with_records=records is not None)
            if records is not None and made:
                with writing("records", given[records]):
                    append_records(given[records], made)
                if show is not None:
                    show(made, **given)
            raise typer.Exit(code)

        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in _ADDED.items()
        ]
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        parameters = [context, *list(signature.parameters.values())[1:], *added]
        # Typer reads a verb's options from its signature.
        vars(either)["__signature__"] = signature.replace(parameters=parameters)
        either.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return either

    return decorate


def command_line(ctx: Any, leave_out: set[str]) -> list[str]:
    """The command line of a verb without some options: arguments first, then options."""
    positional: list[str] = []
    options: list[str] = []
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in leave_out or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[parameter.name]
        values = value if isinstance(value, (list, tuple)) else [value]
        if parameter.param_type_name == "argument":
            positional += [str(each) for each in values]
        elif getattr(parameter, "is_flag", False):
            options.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            for each in values:
                options += [parameter.opts[0], str(each)]
    return [*positional, *options]


def ship(
    verb: str,
    words: list[str],
    *,
    on: str,
    accelerator: str | None,
    env: list[str] | None,
    yes: bool,
    with_records: bool,
) -> tuple[int, list[Record]]:
    """Runs `tilewright VERB WORDS` there. Returns its exit code and its records."""
    name = verb.replace(" ", "-")
    made = Path("results") / f"{name}-{secrets.token_hex(4)}.jsonl"
    if with_records:
        words = [*words, "--records", str(made), "--quiet"]
    with arguments(mistakes=(ValueError, RunnerError)):
        command = _command(on, accelerator, [*verb.split(), *words])
        fetch = [str(made)] if with_records else []
        job, runner = prepare(on, command, accelerator, env, fetch, name, Path("."), rents=True, yes=yes)
        submit(runner, job)
    # The job's output goes to stderr where `show` prints a table, so that stdout has what it would have had here.
    code = watch(runner, job, stderr=with_records).code
    return code, _records(runner, job, made) if with_records else []


def _command(on: str, accelerator: str | None, words: list[str]) -> tuple[str, ...]:
    if on == "local":
        # `uv run` might change the environment that this process runs from.
        return (sys.executable, "-m", "tilewright.cli.main", *words)
    kind = Accelerator.parse(accelerator).extra if accelerator else None
    extra = f"--extra {kind} " if kind else _EXTRA_THERE
    extra = f"--extra models {extra}" if words[:2] == ["bench", "model"] else extra
    return ("bash", "-c", f"{HAVE_UV}; exec uv run --extra bench {extra}tilewright {shlex.join(words)}")


def _records(runner: Runner, job: Job, made: Path) -> list[Record]:
    path = job.workdir / made if runner.target == "local" else fetched_into(job) / made
    if not path.exists():
        return []
    records = list(read_records(path))
    if runner.target == "local":
        for left in path.parent.glob(f"*{path.stem}*"):  # With the CSV and the locks of `tune`.
            left.unlink()
    # Git's history is not uploaded, so the job does not know the commit.
    return [
        dataclasses.replace(
            each, provenance=dataclasses.replace(each.provenance, commit=each.provenance.commit or job.commit)
        )
        for each in records
    ]
