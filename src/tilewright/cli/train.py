"""`tilewright train`: trains a model as a TOML file says, with records, a plot of the loss, and checkpoints."""

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.cli import interrupt
from tilewright.cli.screen import INTERRUPTED, Mistake, arguments, console, duration, progress_bar, writing
from tilewright.cli.together import together
from tilewright.cli.track import check_tracker, import_tracker, tracking_mode
from tilewright.core.chip import Chip
from tilewright.core.target import default_device
from tilewright.plan.advice import advise_training, is_out_of_memory
from tilewright.workbench.records import Provenance

# A `TrainConfig`, `Training` and `Metrics` of tilewright.models, which the `models` extra is needed for.
Config = Any
Run = Any
Step = Any

_LINES = 20
_SECONDS_PER_LINE = 60.0


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; docs/train.md lists its keys.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run; defaults to runs/ and the file's name.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of those in the file.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on from the last checkpoint, or delete the earlier run.")
    ] = True,
    track: Annotated[str | None, typer.Option(help="wandb, or wandb-offline, which sends nothing.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of process 0, where several processes train together.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many processes there are.")] = 1,
    process: Annotated[int, typer.Option(min=0, help="Which of them this is, from 0.")] = 0,
) -> None:
    """Train a model, or fine-tune one, whole or with LoRA.

    The folder gets records.jsonl (a line per step, written at once), loss.png, checkpoints, and at the end final/, which
    tilewright.models.load and transformers read. A run that was interrupted or killed goes on from its last checkpoint,
    with the same bits as if it had not been. Ctrl-C writes a checkpoint and ends with 130. A loss that is not a number ends
    the run with 2; a device without memory ends it with 1, and with what would fit.

    Several processes, on one host or many, train together with --coordinator, --processes and --process, over the [mesh] of
    all of their devices and in one shared folder. The first one writes and prints.
    """
    if coordinator is None and processes > 1:
        raise Mistake(f"--processes {processes} needs --coordinator, the host and port of process 0")
    if coordinator is None:
        _train(config, out, steps, track, resume=resume)
        return
    with together(coordinator, processes, process):
        _train(config, out, steps, track, resume=resume)


def _train(config: Path, out: Path | None, steps: int | None, track: str | None, *, resume: bool) -> None:
    folder = out if out is not None else Path("runs") / config.stem
    with _advising(config):
        read, run = _begun(config, folder, steps, track, fresh=not resume)
        if not run.writes:
            _follow(run, folder)
            return
        _lead(config, read, run, folder, track)


@contextlib.contextmanager
def _advising(config: Path) -> Iterator[None]:
    """A context in which a device that runs out of memory ends the run with 1 and one message: what was largest, and which
    remat policy, microbatches or mesh would fit.
    """
    try:
        yield
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    from tilewright.models.train_config import TrainConfig

    message = advise_training(TrainConfig.read(config))
    console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _lead(config: Path, read: Config, run: Run, folder: Path, track: str | None) -> None:
    """Makes the steps of the process that writes and prints."""
    begun, first = time.perf_counter(), run.step
    records = folder / "records.jsonl"
    with writing("out", folder):
        _keep_until(records, first)
        _append(records, {"event": "start", "step": first, **dataclasses.asdict(Provenance.here(default_device()))})
    _show_start(run, folder)
    interrupted = False
    try:
        with _tracker(track, read, folder) as log:
            _make_steps(run, records, log)
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        if not interrupt.seen():
            if _is_mistake(error):
                raise Mistake(str(error)) from error
            raise
        interrupted = True  # JAX has made an error of its own of the interrupt.
    finally:
        with writing("out", folder):
            _plot(records, folder / "loss.png", title=str(config))
    if interrupted:
        interrupt.answered()
        with writing("out", folder), arguments():
            # Processes may be interrupted between different steps, and a checkpoint takes all of them.
            saved = run.save() if run.num_processes == 1 else []
            made = [record["step"] for record in _read_records(records) if "loss" in record]
            for metrics in saved:
                if metrics.step not in made:
                    _append(records, _record(metrics, run.flops_per_token, None))
        console().print(
            f"[bold red]interrupted[/] at step {run.step}; the last checkpoint is of step {run.last_checkpoint or 0}: "
            f"the same command goes on from there",
            highlight=False,
        )
        raise typer.Exit(INTERRUPTED)
    with writing("out", folder):
        run.model().save(folder / "final")
    run.close()
    taken = duration(time.perf_counter() - begun)
    where = escape(str(folder))
    console().print(f"{run.step - first} steps in {taken}: {where}/final, records.jsonl, loss.png", highlight=False)


def _follow(run: Run, folder: Path) -> None:
    """Makes the steps of a process that writes nothing."""
    interrupt.listen()
    try:
        for _ in run.steps():
            if interrupt.seen():
                raise KeyboardInterrupt
        run.model().save(folder / "final")
    except KeyboardInterrupt:
        interrupt.answered()
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _is_mistake(error):
            raise Mistake(str(error)) from error
        raise
    run.close()


def _begun(config: Path, folder: Path, steps: int | None, track: str | None, *, fresh: bool) -> tuple[Config, Run]:
    """The configuration and the run, restored where there is a checkpoint."""
    check_tracker(track)
    return begin(config, folder, lambda read: read if steps is None else read.with_steps(steps), fresh=fresh)


def begin(config: Path, folder: Path, change: Callable[[Config], Config], *, fresh: bool = False) -> tuple[Config, Run]:
    """Reads a configuration, changes it, and begins or resumes its run in `folder`."""
    try:
        import grain  # noqa: F401
        import orbax.checkpoint  # noqa: F401

        from tilewright.models.train_config import TrainConfig
        from tilewright.models.training import Training
    except ImportError as error:
        raise Mistake(f"training needs {error.name}: pip install 'tilewright[models]'") from error
    with arguments():
        read = change(TrainConfig.read(config))
        with writing("out", folder):
            return read, Training(read, folder, fresh=fresh)


def _is_mistake(error: Exception) -> bool:
    from tilewright.models.train_config import TrainingError

    return isinstance(error, TrainingError)


def _show_start(run: Run, folder: Path) -> None:
    architecture, table = run.architecture, run.config.train
    trained = "" if run.config.lora is None else f", {run.num_trained:,} of them in LoRA's factors trained"
    console().print(
        f"{architecture.family}, {len(architecture.blocks)} layers, {run.num_parameters:,} parameters{trained}; "
        f"{run.tokens_per_step:,} tokens per step in {table.dtype}, on {default_device().device_kind}{_mesh_named(run)}",
        highlight=False,
    )
    if run.step:
        done = "; nothing is left to do" if run.step >= table.steps else ""
        console().print(f"resumed from step {run.step} of {escape(str(folder))}{done}", highlight=False)


def _mesh_named(run: Run) -> str:
    if run.mesh is None:
        return ""
    axes = " x ".join(f"{name}={size}" for name, size in run.mesh.shape.items() if size > 1) or "data=1"
    several = f" of {run.num_processes} processes" if run.num_processes > 1 else ""
    return f", a mesh of {axes}{several}"


def _make_steps(run: Run, records: Path, log: Callable[[dict[str, Any]], None]) -> None:
    total = run.config.train.steps
    peak = Chip.of(default_device()).flops_per_s(run.config.train.dtype)
    peak = None if peak is None else peak * run.num_devices
    every, shown = max(1, total // _LINES), time.perf_counter()
    since: list[Step] = []  # The last line.
    interrupt.listen()
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=total, completed=run.step)
        for metrics in run.steps():
            record = _record(metrics, run.flops_per_token, peak)
            with writing("out", records):
                _append(records, record)
            log(record)
            bar.update(task, description=f"loss {metrics.loss:.3f}", completed=metrics.step)
            since.append(metrics)
            now = time.perf_counter()
            if metrics.step in (1, total) or metrics.step % every == 0 or now - shown > _SECONDS_PER_LINE:
                console().print(_line(since, total, run.flops_per_token, peak), highlight=False)
                shown, since = now, []
            if interrupt.seen():  # Python may have dropped the exception (cli/interrupt.py).
                raise KeyboardInterrupt


def _speed(steps: list[Step], flops_per_token: float, peak: float | None) -> tuple[float | None, float | None]:
    """Tokens per second of some steps, and MFU, where they are known."""
    timed = [step for step in steps if step.seconds]
    if not timed:
        return None, None
    rate = sum(step.tokens for step in timed) / sum(step.seconds or 0.0 for step in timed)
    return rate, None if peak is None else rate * flops_per_token / peak


def _record(metrics: Step, flops_per_token: float, peak: float | None) -> dict[str, Any]:
    """A line of records.jsonl."""
    rate, mfu = _speed([metrics], flops_per_token, peak)
    return {
        "step": metrics.step,
        "loss": metrics.loss,
        "objective": metrics.objective,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        **metrics.others,
        "tokens": metrics.tokens * metrics.step,
        "seconds": metrics.seconds,
        "tokens_per_s": rate,
        "mfu": mfu,
    }


def _line(steps: list[Step], total: int, flops_per_token: float, peak: float | None) -> str:
    """The last of some steps, and the speed of all of them."""
    last, (rate, mfu) = steps[-1], _speed(steps, flops_per_token, peak)
    figures = [
        f"step {last.step}/{total}",
        f"loss {last.loss:.4f}",
        f"gradient {last.grad_norm:.2f}",
        f"learning rate {last.learning_rate:.2e}",
    ]
    figures += [] if rate is None else [f"{rate:,.0f} tokens/s"]
    figures += [] if mfu is None else [f"MFU {mfu:.1%}"]
    return "  ".join(figures)


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a records.jsonl; a killed run may have left part of one."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _keep_until(path: Path, step: int) -> None:
    """Removes the records of steps after the one that a run goes on from: they will be made again."""
    kept = [record for record in _read_records(path) if record["step"] <= step]
    if path.exists():
        part = path.with_suffix(".unfinished")
        part.write_text("".join(json.dumps(record) + "\n" for record in kept))
        part.replace(path)


def _plot(records: Path, path: Path, *, title: str) -> None:
    """The loss over steps, and its running mean."""
    made = [record for record in _read_records(records) if "loss" in record]
    if not made:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    at, losses = (np.array([record[name] for record in made]) for name in ("step", "loss"))
    width = max(1, len(made) // 50)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(at, losses, linewidth=0.8, alpha=0.4 if width > 1 else 1.0, label="each step")
    if width > 1:
        mean = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(at[width - 1 :], mean, linewidth=1.6, color="C0", label=f"mean of {width} steps")
        axes.legend(fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


@contextlib.contextmanager
def _tracker(track: str | None, config: Config, folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that sends a record to Weights & Biases, or does nothing."""
    if track is None:
        yield lambda record: None
        return
    wandb = import_tracker(track)
    name = folder / "wandb-id.txt"
    if not name.exists():
        name.write_text(secrets.token_hex(4))
    tracked = wandb.init(
        project="tilewright",
        name=folder.name,
        id=name.read_text().strip(),
        resume="allow",
        dir=str(folder),
        mode=tracking_mode(track),
        config=config.identity(),
    )
    try:
        yield lambda record: tracked.log({key: value for key, value in record.items() if value is not None})
    finally:
        tracked.finish()
