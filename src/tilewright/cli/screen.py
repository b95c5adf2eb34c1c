"""What the verbs share on the screen: consoles, progress bars, and figures a person can read."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_WIDTH_IN_A_PIPE = 160


class Mistake(Exception):
    """A wrong word on the command line. It is shown as one line; every other error keeps its traceback."""


@contextlib.contextmanager
def arguments(
    *, mistakes: tuple[type[Exception], ...] = (ValueError, FileExistsError, FileNotFoundError)
) -> Iterator[None]:
    """Around what reads a verb's arguments: an error of these kinds there is the caller's mistake."""
    try:
        yield
    except mistakes as error:
        raise Mistake(str(error)) from error


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a pipe or a log, wide enough for the tables."""
    stream = sys.stderr if stderr else sys.stdout
    # sky:one is a cluster, not a digit.
    return Console(stderr=stderr, width=None if stream.isatty() else _WIDTH_IN_A_PIPE, emoji=False)


def progress_bar() -> Progress:
    """A bar on stderr, so that a table on stdout can be piped. It leaves nothing behind when done."""
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
    """The comma-separated names in `given`, each one of `known`; all of `known` where nothing is given."""
    if given is None:
        return known
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"--{argument} {name} is not known; use one of {', '.join(known)}")
    return names


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def duration(value: float) -> str:
    """Hours and minutes, for what lasts that long."""
    minutes = int(value // 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else f"{value:.0f} s"
    )


def memory(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def rate(value: float | None, unit: str, fraction: float | None) -> str:
    """A rate in tera- or giga-units, with its share of the device's ceiling where that is known."""
    if value is None:
        return "-"
    prefix, factor = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    share = "" if fraction is None else f" ({fraction:.0%})"
    return f"{value / factor:.3g} {prefix}{unit}{share}"
