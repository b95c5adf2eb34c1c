"""What the verbs share: errors in one line, entries of which one may fail, consoles, progress bars, and durations."""

import contextlib
import errno
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewright.cli import document, interrupt
from tilewright.core.dispatch import Unsupported
from tilewright.core.nearest import did_you_mean
from tilewright.workbench.figures import one_line
from tilewright.workbench.records import try_destination

INTERRUPTED = 130
_WIDTH_IN_A_PIPE = 180
_DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)


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


@contextlib.contextmanager
def writing(option: str, path: Path, *, from_default: bool = False) -> Iterator[None]:
    """A context for writing the file that an option names, or defaults to: a full disk is the caller's mistake."""
    what = f"{path}, which --{option} defaults to," if from_default else f"--{option} {path}"
    try:
        yield
    except OSError as error:
        for folder in path.parents:
            if folder.exists() and not folder.is_dir():
                raise Mistake(f"{what} cannot be written: {folder} is no folder; use another path") from error
        raise Mistake(
            f"{what} cannot be written: {error.strerror or error}; use another path, or make room there"
        ) from error


def try_writing(**paths: Path | None) -> None:
    """Tries the files that options name, before anything is computed for them."""
    for option, path in paths.items():
        if path is not None:
            with writing(option, path):
                try_destination(path)


def as_mistake(error: BaseException) -> str | None:
    """The line that is printed of an error that is not this program's; None for one that keeps its traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, (Mistake, Unsupported)):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return text
    no_device = isinstance(error, RuntimeError) and text.startswith("Unable to initialize backend")
    return text if no_device else None


class Entries:
    """The entries that a verb goes through, behind a progress bar.

        with Entries("checking", total=2) as entries:
            for name in ("a", "b"):
                with entries.one(name):
                    results.append(compute(name))
        print(results)
        entries.end()

    An entry that raises is noted in `failed`, in one line, and one that is not supported in `refused`; the others go on.
    Ctrl-C, or a `Mistake` such as a full disk, ends the outer block, so that the verb prints what there is; `end` then
    exits with the code that says so.
    """

    def __init__(self, what: str, total: int):
        self.failed: dict[str, str] = {}
        self.refused: dict[str, list[str]] = {}
        """The entries that were refused, by the reason."""
        self._ended: BaseException | None = None
        self._bar = progress_bar()
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> "Entries":  # noqa: PYI034, as in core/call.py
        self._bar.start()
        interrupt.listen()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self._bar.stop()
        self._ended = error if isinstance(error, (KeyboardInterrupt, Mistake)) else None
        return self._ended is not None

    @property
    def complete(self) -> bool:
        """Whether every entry was run, and none failed."""
        return self._ended is None and not self.failed

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[list[str]]:
        """A context for one entry. The list has its error, in one line, if it failed.

        The error itself is not kept: it would keep the arrays of the entry in memory while the next one runs.
        """
        self._bar.update(self._task, description=name)
        raised: list[str] = []
        self._stop_if_interrupted()
        try:
            yield raised
        except Mistake:
            raise
        except Unsupported as error:
            self.refused.setdefault(str(error), []).append(name)
        except Exception as error:
            if interrupt.seen():  # JAX has made an error of its own of the interrupt.
                raise KeyboardInterrupt from error
            self.failed[name] = one_line(error)
            raised.append(self.failed[name])
        self._bar.advance(self._task)
        self._stop_if_interrupted()

    def _stop_if_interrupted(self) -> None:
        """Python may have dropped the exception of an interrupt (cli/interrupt.py)."""
        if interrupt.seen():
            raise KeyboardInterrupt

    def end(self, *, ok: bool = True, refused: str = "refused", named: bool = False) -> None:
        """Prints what failed and what was refused, in the words `refused`, and exits.

        The code is 130 after Ctrl-C, 2 after a `Mistake` and where what the caller `named` was refused, and 1 where an
        entry failed or not `ok`.
        """
        document.tell(
            failed=self.failed,
            refused=[{"entries": names, "reason": reason} for reason, names in self.refused.items()],
            interrupted=isinstance(self._ended, KeyboardInterrupt),
        )
        for reason, names in self.refused.items():
            console().print(f"[yellow]{refused}:[/] {escape(f'{", ".join(names)}: {reason}')}", soft_wrap=True)
        for name, error in self.failed.items():
            console().print(f"[bold red]failed:[/] {escape(f'{name}: {error}')}", soft_wrap=True)
        if isinstance(self._ended, Mistake):
            raise self._ended
        if self._ended is not None:
            interrupt.answered()
            console().print("[bold red]interrupted:[/] the rest was not run")
            raise typer.Exit(INTERRUPTED)
        if self.failed or not ok or (named and self.refused):
            raise typer.Exit(2 if named and self.refused else 1)


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a pipe or a log file, wide enough for the tables."""
    stream = sys.stderr if stderr else sys.stdout
    kind = _WithoutTables if document.wanted() else Console
    # Without `emoji`, rich prints "sky:one" as a digit.
    return kind(stderr=stderr, width=None if stream.isatty() else _WIDTH_IN_A_PIPE, emoji=False)


class _WithoutTables(Console):
    """The console of a verb that was given --json: its document has what its tables would have."""

    def print(self, *objects: Any, **how: Any) -> None:
        if not any(isinstance(each, Table) for each in objects):
            super().print(*objects, **how)


def progress_bar() -> Progress:
    """A progress bar on stderr, so that a table on stdout can be piped. It disappears when it is done.

    There is none where stderr is not a terminal.
    """
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def check_tables(folder: Path | None) -> None:
    """Raises where --tables is no folder. One that does not exist yet has no tables."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"--tables {folder} is a file; name a folder of tables, with a folder per chip")


def split_names(given: str | None, known: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """The comma-separated names in `given`, each of which must be in `known`; all of `known` where `given` is None."""
    if given is None:
        return known
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    if not names:
        raise ValueError(f"--{argument} {given!r} names nothing; use one of {', '.join(known)}, or leave it out")
    for name in names:
        check_name(name, known, f"--{argument}")
    return names


def check_name(given: str, known: Iterable[str], argument: str) -> None:
    """Raises where the value of an argument is not one of the known names; the error ends with the nearest of them."""
    if given not in known:
        raise ValueError(f"{argument} {given} is not known; use one of {', '.join(known)}{did_you_mean(given, known)}")


def new_table(title: str | None, left: tuple[str, ...], right: tuple[str, ...] = ()) -> Table:
    """A table with these columns, of text and of figures."""
    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right")
    return table


def check_seconds(value: float, argument: str, *, positive: bool = False) -> None:
    """Raises where an option is not a time in seconds."""
    if not (math.isfinite(value) and value >= 0) or (positive and not value):
        least = "more than 0" if positive else "0 or more"
        raise ValueError(f"--{argument} {value} is not a number of seconds; use {least}, such as 2")


def duration(value: float) -> str:
    """A duration in hours and minutes, in minutes, or in seconds."""
    minutes = int(value // 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else f"{value:.0f} s"
    )
