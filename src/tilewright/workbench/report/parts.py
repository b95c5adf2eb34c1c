"""What a report is made of: sections of tables and charts, the rows and cells of tables, and how a cell shows a figure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.workbench.figures import seconds
from tilewright.workbench.report.entries import Check, Entry, Trial

FACETS = ("kind", "op", "chip", "mode", "dtype", "implementation")


@dataclass(frozen=True)
class Cell:
    """A cell: its text, what it is sorted by, how it is marked, and what is said beside the pointer."""

    text: str = ""
    value: float | str | None = None
    mark: Literal["", "good", "bad", "estimate", "measured", "peer", "faint"] = ""
    under: str = ""
    """A second line."""
    title: str = ""
    bar: float | None = None
    """A bar of this fraction of the cell."""


@dataclass(frozen=True)
class Row:
    """A row, and what the page filters it by."""

    cells: tuple[Cell, ...]
    facets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table. `right` are the columns of figures."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    right: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart, and the names of its colours as HTML."""

    name: str
    title: str
    svg: str
    legend: str = ""
    small: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    name: str
    title: str
    text: tuple[str, ...] = ()
    blocks: tuple[Table | Chart, ...] = ()


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    date: str
    figures: Mapping[str, str]
    """What is seen first: a label and a figure each."""
    sections: tuple[Section, ...]
    facets: Mapping[str, tuple[str, ...]]
    """The values of each facet, for the filters."""


def facets_of(entry: Any) -> dict[str, str]:
    return {name: str(value) for name in FACETS if (value := getattr(entry, name, None))}


def kind_cell(kind: str) -> Cell:
    return Cell(kind, kind, "estimate" if kind == "estimate" else "measured")


def name_cell(entry: Entry | Check | Trial) -> Cell:
    return Cell(entry.op, f"{entry.op} {entry.case}", under=entry.case)


def time_cell(value: float | None, *, estimate: bool = False, under: str = "", title: str = "") -> Cell:
    if value is None:
        return Cell("", None, title=title)
    shown = f"≥ {seconds(value)}" if estimate else seconds(value)
    return Cell(shown, value, "estimate" if estimate else "", under, title)
