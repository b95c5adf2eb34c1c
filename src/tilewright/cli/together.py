"""A verb that several processes run together: they join, and where one ends, the others end with one line."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

import typer
from rich.markup import escape

from tilewright.cli.screen import Mistake, console
from tilewright.parallel.processes import Watch, is_lost_process, join_processes

_FAILED = 2
_SHOWN = 200  # Characters of JAX's own error.
# Where a mistake is every process's, each ends by itself in this time, with its own line.
_GRACE_SECONDS = 2.0


@contextlib.contextmanager
def together(coordinator: str, processes: int, process: int) -> Iterator[None]:
    """Joins the processes of a run. An error inside, and the loss of another process, end this one at once.

    JAX would wait for the others when Python ends. They may be gone, or wait for this one.
    """
    lost = (
        f"process {process}: another of the {processes} processes has ended; start all of them again, and the run goes on "
        f"from its last checkpoint"
    )

    def on_loss() -> None:
        if process == 0:
            time.sleep(_GRACE_SECONDS / 2)
        _end(_FAILED, lost)

    try:
        join_processes(coordinator, processes, process)
        watch = Watch(coordinator, on_loss)
    except (ValueError, RuntimeError, OSError) as error:
        raise Mistake(f"process {process} of {processes} cannot join at {coordinator}: {error}") from error
    try:
        yield
    except typer.Exit as ended:
        _end(ended.exit_code)
    except Mistake as error:
        _end(_FAILED, str(error), wait=process == 0)
    except BaseException as error:
        if not is_lost_process(error):
            raise
        _end(_FAILED, f"{lost} ({' '.join(str(error).split())[:_SHOWN]})")
    watch.close()


def _end(status: int, message: str | None = None, *, wait: bool = False) -> None:
    if message is not None:
        console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    if wait:
        time.sleep(_GRACE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
