"""What the verbs share: consoles, progress bars, and the formatting of figures."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_WIDTH_IN_A_PIPE = 160


class Mistake(Exception):
    """A wrong argument on the command line. It is printed as one line; every other error keeps its traceback."""


@contextlib.contextmanager
def arguments(
    *, mistakes: tuple[type[Exception], ...] = (ValueError, FileExistsError, FileNotFoundError)
) -> Iterator[None]:
    """A context for reading a verb's arguments: an error of these kinds inside it is the caller's mistake."""
    try:
        yield
    except mistakes as error:
        raise Mistake(str(error)) from error


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a pipe or a log file, wide enough for the tables."""
    stream = sys.stderr if stderr else sys.stdout
    # Without this, rich prints "sky:one" as a digit.
    return Console(stderr=stderr, width=None if stream.isatty() else _WIDTH_IN_A_PIPE, emoji=False)


def progress_bar() -> Progress:
    """A progress bar on stderr, so that a table on stdout can be piped. It disappears when it is done."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
    )


def split_names(given: str | None, known: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """The comma-separated names in `given`, each of which must be in `known`; all of `known` where `given` is None."""
    if given is None:
        return known
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"--{argument} {name} is not known; use one of {', '.join(known)}")
    return names


def duration(value: float) -> str:
    """A duration in hours and minutes, in minutes, or in seconds."""
    minutes = int(value // 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else f"{value:.0f} s"
    )
