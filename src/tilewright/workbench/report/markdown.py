"""A report as Markdown, with its charts as SVG files beside it."""

from collections.abc import Iterator
from pathlib import Path

from tilewright.workbench.report.page import STYLE
from tilewright.workbench.report.parts import Chart, Report, Table

FIGURES = "figures"


def markdown(report: Report) -> str:
    """The report, with links to the charts in the folder `figures`."""
    lines = [
        f"# {report.title}",
        f"Made by `tilewright report`, {report.date}. A figure of kind *estimate* is a lower bound that was computed "
        "without the chip; every other one was measured.",
        "\n".join(f"- {name}: {value}" for name, value in report.figures.items()),
    ]
    for section in report.sections:
        lines += [f"## {section.title}", *section.text]
        for block in section.blocks:
            lines.append(_table(block) if isinstance(block, Table) else _chart(block))
    return "\n\n".join(lines) + "\n"


def chart_files(report: Report) -> Iterator[tuple[Path, str]]:
    """The path and the text of each chart, relative to the report."""
    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, Chart):
                yield Path(FIGURES) / f"{block.name}.svg", _alone(block.svg)


def _alone(svg: str) -> str:
    """An SVG that is a file of its own: with its namespace and the style sheet, on paper of its own."""
    head, rest = svg.split(">", 1)
    paper = "svg { background: var(--paper); }"
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}{paper}</style>{rest}\n'


def _chart(chart: Chart) -> str:
    return f"![{_text(chart.title)}]({FIGURES}/{chart.name}.svg)"


def _table(table: Table) -> str:
    marks = ["---:" if name in table.right else "---" for name in table.columns]
    lines = [table.columns, marks]
    for row in table.rows:
        lines.append([_text(" ".join(filter(None, (cell.text, cell.under)))) for cell in row.cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(text: str) -> str:
    """Text of a cell: no character ends it or is taken for markup."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
