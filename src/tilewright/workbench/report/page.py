"""A report as one HTML page. Styles, script and charts are in it, and its policy lets no request leave it."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from tilewright.workbench.report.parts import Cell, Chart, Report, Row, Section, Table

_HERE = Path(__file__).resolve().parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_LONG = 60
STYLE = (_HERE / "style.css").read_text()


def page(report: Report) -> str:
    """The whole page."""
    figures = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in report.figures.items()
    )
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in report.sections)
    sections = "\n".join(map(_section, report.sections))
    script = (_HERE / "script.js").read_text()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(report.title)}</h1>
<p class="faint">Made by <code>tilewright report</code>, {escape(report.date)}.
<span class="tag measured">measured</span> is a figure from a run on the chip;
<span class="tag estimate">estimate</span> is a lower bound computed without it.</p>
<dl class="figures">{figures}</dl>
<nav>{links}</nav>
</header>
<main>
{_tools(report)}
{sections}
</main>
<footer>Every figure is from the records that the first table names. Click a heading to sort by it.</footer>
<script>
{script}</script>
</body>
</html>
"""


def _tools(report: Report) -> str:
    selects = "".join(
        f'<select data-facet="{name}" aria-label="{name}"><option value="">every {name}</option>'
        + "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in values)
        + "</select>"
        for name, values in report.facets.items()
    )
    return (
        '<div class="tools"><input id="search" type="search" placeholder="filter rows: op, case, chip ..." '
        f'aria-label="filter rows">{selects}<button id="reset" type="button">reset</button>'
        '<button id="theme" type="button">light / dark</button><span class="count" id="count"></span></div>'
    )


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}"><h2>{escape(section.title)}</h2>']
    parts += [f"<p>{escape(line)}</p>" for line in section.text]
    charts: list[Chart] = []
    for block in (*section.blocks, None):
        if isinstance(block, Chart):
            charts.append(block)
            continue
        if charts:
            parts.append(_charts(charts))
            charts = []
        if block is not None:
            parts.append(_table(block))
    return "\n".join([*parts, "</section>"])


def _charts(charts: Iterable[Chart]) -> str:
    charts = list(charts)
    figures = "".join(f"<figure><h3>{escape(chart.title)}</h3>{chart.svg}{chart.legend}</figure>" for chart in charts)
    small = " small" if all(chart.small for chart in charts) else ""
    return f'<div class="charts{small}">{figures}</div>'


def _table(table: Table) -> str:
    headings = "".join(
        f'<th scope="col"{_class("right" if name in table.right else "")}>'
        f'<button type="button">{escape(name)}</button></th>'
        for name in table.columns
    )
    rows = "\n".join(_row(row, table) for row in table.rows)
    return (
        f'<div class="scroll"><table id="table-{table.name}"><thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}\n</tbody>'
        '</table><div class="empty">No row matches the filter.</div></div>'
    )


def _row(row: Row, table: Table) -> str:
    facets = "".join(f' data-{name}="{escape(value)}"' for name, value in row.facets.items())
    kind = row.facets.get("kind", "") if "kind" in table.columns else ""
    cells = "".join(
        _cell(cell, name, right=name in table.right) for cell, name in zip(row.cells, table.columns, strict=True)
    )
    return f"<tr{_class(kind)}{facets}>{cells}</tr>"


def _cell(cell: Cell, column: str, *, right: bool) -> str:
    value = cell.text if cell.value is None and not right else cell.value
    number = " data-number" if isinstance(value, int | float) else ""
    sorted_by = "" if value is None else f' data-value="{escape(str(value))}"{number}'
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    is_tag = column == "kind"
    classes = [
        "right" if right else "",
        "" if is_tag else cell.mark,
        "" if cell.text else "blank",
        "long" if len(cell.text) > _LONG else "",
    ]
    inner = f'<b class="tag {cell.mark}">{escape(cell.text)}</b>' if is_tag else escape(cell.text)
    under = f"<small>{escape(cell.under)}</small>" if cell.under else ""
    bar = "" if cell.bar is None else f'<span class="bar"><i style="width:{100 * cell.bar:.1f}%"></i></span>'
    label = f' data-label="{escape(column)}"'
    return (
        f"<td{_class(' '.join(filter(None, classes)))}{sorted_by}{title}{label}><span>{inner}{under}{bar}</span></td>"
    )


def _class(name: str) -> str:
    return f' class="{escape(name)}"' if name else ""
