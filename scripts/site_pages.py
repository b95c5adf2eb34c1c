"""MkDocs' hook: the pages of the site that are not files under docs/, and the check of what was built.

README.md is the home page; CONTRIBUTING.md, CHANGELOG.md and the comparison's README are pages. Each command of the
command line gets a page from its own help, each layer one from its docstrings and each model one from its file; each op's
page ends with the reference of its functions, and measurements get a list. Links between files of the repository become
links between pages; a link to a file that is no page becomes its text.

A comment `<!-- plot: COLUMN | COLUMN -->` above a table draws these columns of it as bars, row by row. The code of
a comment `<!-- with: CODE -->`, which a page's examples take for granted, becomes a block that unfolds.

After a build, `problems` finds links that lead nowhere and files that another host would have to serve. Each is a warning,
with which `mkdocs build --strict` fails.
"""

import ast
import html
import html.parser
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "delta_attention_comparison/README.md": "comparison.md",
    "docs/measurements": "measurements/index.md",
    "docs": "index.md",
}
"""Files and folders of the repository, and the pages that they are."""
FURTHER = {
    "bench": ("peers.md", "profile.md"),
    "bench model": ("models.md",),
    "check": ("contributing.md",),
    "compile": ("compile.md",),
    "generate": ("models.md",),
    "new": ("contributing.md",),
    "plan": ("plan.md",),
    "profile": ("profile.md",),
    "remote": ("remote.md",),
    "report": ("report.md",),
    "run": ("remote.md",),
    "train": ("train.md",),
    "tune": ("tune.md",),
    "tuned": ("tune.md",),
}
"""The pages that explain a command at length."""
_PUBLIC = re.compile(r"^from (tilewright\.\S+) import (\w+) as \2$", re.M)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"(?ms)^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)[ \t]*$")

_GIVEN = re.compile(r"(?ms)^<!-- with: (?P<code>.*?) ?-->$")
_PLOT = re.compile(r"^<!-- plot: (?P<columns>[^\n]+) -->\n", re.M)
_TABLE = re.compile(r"^(?P<head>\|[^\n]*\|)\n\|[-:| ]+\|\n(?P<rows>(?:\|[^\n]*\|\n?)+)", re.M)
_FIGURE = re.compile(r"(\d[\d,]*(?:\.\d+)?)\s*(ms|us|s\b)?")
_LONGEST_BAR = 80
"""Per cent of the width; the figure stands behind the bar."""
_CHIPS = {"h200": "H200", "cpu": "CPU"}
"""Words of the names of pages of measurements; the others are about TPUs."""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_config(config: Any) -> Any:
    """Replaces folders in the navigation by their pages, and "*.md" by the pages that it does not name."""
    generated = _generated()
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]

    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))

    def pages_of(folder: str) -> list[str]:
        if folder == "*.md":
            return sorted(page for page in {*there, *generated} - named if "/" not in page)
        found = sorted(page for page in {*there, *generated} if page.startswith(folder))
        if folder == "measurements/":
            found.reverse()  # The newest first.
        first = f"{folder}index.md"
        return [first, *(page for page in found if page != first)] if first in found else found

    def expanded(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            if isinstance(entry, dict):
                ((title, inside),) = entry.items()
                yield {title: list(expanded([inside] if isinstance(inside, str) else inside))}
            elif entry == "*.md" or entry.endswith("/"):
                yield from pages_of(entry)
            else:
                yield entry

    config.nav = list(expanded(config.nav))
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that are made here."""
    for page, text in _generated().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Appends the reference to the page of an op family, and turns links to files into links to pages."""
    at = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == at and path.endswith(".md")), f"docs/{at}")
    if names := reference_of(at):
        markdown += "\n\n## Reference\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"
    known = {file.src_uri for file in files}
    return linked(unfolding(plotted(markdown, at)), source, at, known)


def on_post_build(*, config: Any) -> None:
    """Warns of each broken link, and of each thing that a page would load from another host."""
    for problem in problems(Path(config.site_dir)):
        log.warning(problem)


def linked(markdown: str, source: str, page: str, known: set[str]) -> str:
    """The text of the file `source` as the page `page`: its links lead to pages. Code blocks stay as they are."""

    def replaced(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or urlsplit(target).scheme:
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        to = PAGES.get(file, file.removeprefix("docs/"))
        if to not in known:
            is_there = (ROOT / file).exists()
            return label if is_there else match[0]  # What is not there stays a link, and is warned of.
        there = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{picture}[{label}]({there}{'#' + anchor if anchor else ''})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])


def unfolding(markdown: str) -> str:
    """The text of a page with the code of each `with` comment in a block that unfolds."""

    def shown(match: re.Match[str]) -> str:
        lines = ["```python", *match["code"].rstrip().splitlines(), "```"]
        indented = "\n".join(f"    {line}" if line else "" for line in lines)
        return f'??? note "What the code below takes for granted"\n\n{indented}\n'

    return _GIVEN.sub(shown, markdown)


def plotted(markdown: str, page: str) -> str:
    """The text of a page with bars in place of each `plot` comment. A column that is not there is warned of."""

    def drawn(match: re.Match[str]) -> str:
        table = _TABLE.search(markdown, match.end())
        columns = [name.strip() for name in match["columns"].split(" | ")]
        head = [_shown(cell) for cell in _cells(table["head"])] if table else []
        if wrong := [name for name in columns if name not in head]:
            log.warning(f"{page}: the plot of {wrong[0]!r} is of no column of the next table; its columns: {head}")
            return ""
        assert table is not None
        rows = [_cells(line) for line in table["rows"].splitlines()]
        places = [head.index(name) for name in columns]
        names = [[_shown(cell) for cell in row[: min(places)] if not _FIGURE.fullmatch(cell)] for row in rows]
        cells = [[row[place] for place in places] for row in rows]
        return _bars([(", ".join(filter(None, name)), each) for name, each in zip(names, cells, strict=True)], columns)

    return _PLOT.sub(drawn, markdown)


def _bars(rows: list[tuple[str, list[str]]], columns: list[str]) -> str:
    """Bars as HTML that no script draws. Bars of one column are drawn to one scale, those of several row by row."""
    several = len(columns) > 1
    figures = [(name, _figures(cells)) for name, cells in rows]
    figures = [(name, found) for name, found in figures if len(found) > several]
    parts = ['<figure class="bars">', '<p class="bars-key">']
    parts += [f'<span class="s{place}"></span>{html.escape(column)} ' for place, column in enumerate(columns)]
    parts.append("</p>")
    longest = max((size for _, found in figures for size, _ in found.values()), default=1.0)
    for name, found in figures:
        parts.append(f'<div class="bars-row"><div class="bars-name">{html.escape(name)}</div>')
        scale = max(size for size, _ in found.values()) if several else longest
        for place, (size, shown) in found.items():
            parts.append(
                f'<div class="bar"><span class="s{place}" style="width: {_LONGEST_BAR * size / scale:.1f}%" '
                f'title="{html.escape(columns[place])}"></span><b>{shown}</b></div>'
            )
        parts.append("</div>")
    scaled = "<figcaption>Each row has a scale of its own.</figcaption>" if several else ""
    return "\n".join([*parts, f"{scaled}</figure>"]) + "\n\n"


def _figures(cells: list[str]) -> dict[int, tuple[float, str]]:
    """The figures that cells begin with, by their place: each in seconds, and as text. One without a unit has the row's."""
    found = {place: match for place, cell in enumerate(cells) if (match := _FIGURE.match(_shown(cell)))}
    common = next((match[2] for match in found.values() if match[2]), None)
    units = {place: match[2] or common for place, match in found.items()}
    return {
        place: (float(match[1].replace(",", "")) * _UNITS[units[place]], f"{match[1]} {units[place] or ''}".strip())
        for place, match in found.items()
    }


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _shown(cell: str) -> str:
    """A cell without the marks of Markdown."""
    return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", cell).strip()


def reference_of(page: str) -> list[str]:
    """The public functions and classes whose reference stands at the end of a page."""
    public = _PUBLIC.findall((ROOT / "src/tilewright/__init__.py").read_text())
    if match := re.fullmatch(r"ops/(\w+)\.md", page):
        return [f"tilewright.{name}" for module, name in public if module.startswith(f"tilewright.ops.{match[1]}.")]
    packages = {"models.md": "models", "parallel.md": "parallel", "reference/masks.md": "masks"}
    if page in packages:
        package = packages[page]
        init = (ROOT / f"src/tilewright/{package}/__init__.py").read_text()
        return [f"tilewright.{package}.{name}" for _, name in _PUBLIC.findall(init) if not name.isupper()]
    if page == "reference/configs.md":
        configs = _PUBLIC.findall((ROOT / "src/tilewright/configs.py").read_text())
        return [f"tilewright.configs.{name}" for _, name in configs]
    if page == "reference/top.md":
        return [
            f"tilewright.{name}" for module, name in public if module.startswith("tilewright.core.") and name[0] != "_"
        ]
    return []


def _generated() -> dict[str, str]:
    """The pages that are no files under docs/, as Markdown."""
    made = {page: (ROOT / file).read_text() for file, page in PAGES.items() if (ROOT / file).is_file()}
    made["reference/masks.md"] = (
        "# Masks\n\nWhich query attends to which key, as values that are combined with `&`, `|` and `~`."
    )
    made["reference/configs.md"] = (
        "# Configs\n\nThe block sizes of an op's kernels: what `config=` takes, and what `tilewright tune` searches."
    )
    made["reference/top.md"] = (
        "# Which implementation runs\n\n"
        "What every op shares: `explain`, `target`, `interpret`, quantised arrays, and the error of a call that cannot run."
    )
    made["measurements/index.md"] = _measurements()
    made |= {f"layers/{name}.md": _layer_page(name) for name in _layers()}
    made |= {f"models/{path.stem}.md": _model_page(path) for path in _families()}
    for name, command in _verbs():
        made[f"verbs/{name.replace(' ', '_')}.md"] = _verb_page(name, command)
    return made


def _layers() -> list[str]:
    """The public layers."""
    return [name for _, name in _PUBLIC.findall((ROOT / "src/tilewright/layers/__init__.py").read_text())]


def _layer_page(name: str) -> str:
    return (
        f"# {name}\n\n[Layers](../layers.md) says what all layers share: weights, states, chunks, packed sequences.\n\n"
        f"::: tilewright.layers.{name}\n    options:\n      heading_level: 2\n      inherited_members: true\n"
        '      filters: ["!^_", "!^check_", "!^unpacked$", "!^rotated$"]\n'
    )


def _families() -> list[Path]:
    """The files of the families of models."""
    found = sorted((ROOT / "src/tilewright/models").glob("*.py"))
    return [path for path in found if re.search(r"^def architecture\(", path.read_text(), re.M)]


def _model_page(path: Path) -> str:
    """A family of models: what it is, and its file, which says what its config.json means."""
    code = path.read_text()
    title, _, text = (ast.get_docstring(ast.parse(code)) or path.stem).partition(":")
    return (
        f"# {title}\n\n{text.strip()[:1].upper()}{text.strip()[1:]}\n\n"
        "`tilewright.models.load` takes its checkpoints, and [models](../models.md) says what every model can do. This is "
        f"the whole family, `src/tilewright/models/{path.name}`: what each key of its config.json means for its layers.\n\n"
        f"```python\n{code}```\n"
    )


def _measurements() -> str:
    """The index of measurements, the newest first, with what each page has."""
    lines = [
        "# Measurements",
        "",
        "What was measured, with chip, versions and date, and what fell short. Each op's page has the newest figures, and",
        "[the frontier](../frontier.md) sets them beside other libraries'. Pages about TPUs have the compiler's",
        "schedules: no TPU has run.",
        "",
        "| date | chip | measurement | plots | records |",
        "|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "docs/measurements").glob("*.md"), reverse=True):
        text = path.read_text()
        title = re.sub(r",? \(?\d{4}-\d\d-\d\d\)?", "", text.splitlines()[0].removeprefix("# "))
        date = path.name[: len("2026-01-01")]
        chip = next((chip for word, chip in _CHIPS.items() if f"-{word}-" in path.name), "TPUs")
        chip += ", estimates" if re.search("schedules|compiled", title) else ""
        plots, records = len(_PLOT.findall(text)), path.with_suffix(".jsonl").exists()
        lines.append(f"| {date} | {chip} | [{title}]({path.name}) | {plots or ''} | {'yes' if records else ''} |")
    return "\n".join(lines) + "\n"


def _verbs() -> Iterator[tuple[str, Any]]:
    """Every command of the command line, those of a group by two words."""
    import typer

    from tilewright.cli.main import app

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield name, command
        for inner, each in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", each


def _verb_page(name: str, command: Any) -> str:
    """A command's help as a page: what it does, its arguments and its options."""
    lines = [f"# tilewright {name}", "", _prose(command.help), ""]
    inner = getattr(command, "commands", {})
    if inner:
        lines += ["| command | |", "|---|---|"]
        for each, of in inner.items():
            said = _cell((of.help or "").strip().split("\n\n")[0])
            lines.append(f"| [`tilewright {name} {each}`]({name}_{each}.md) | {said} |")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    if arguments:
        lines += ["## Arguments", "", "| argument | |", "|---|---|"]
        lines += [f"| `{(each.metavar or each.name).upper()}` | {_cell(each.help)} |" for each in arguments]
        lines.append("")
    if options:
        lines += ["## Options", "", "| option | default | |", "|---|---|---|"]
        for each in options:
            names = ", ".join(f"`{option}`" for option in (*each.opts, *each.secondary_opts))
            given = None if each.is_flag or each.default in (None, (), []) or callable(each.default) else each.default
            default = "" if given is None else f"`{given}`"
            lines.append(f"| {names} | {default} | {_cell(each.help)} |")
        lines.append("")
    pages = FURTHER.get(name) or FURTHER.get(name.split(" ")[0], ())
    if pages := [page for page in pages if page in PAGES.values() or (ROOT / "docs" / page).exists()]:
        lines += ["See also: " + ", ".join(f"[{Path(page).stem}](../{page})" for page in pages) + ".", ""]
    return "\n".join(lines)


def _prose(text: str | None) -> str:
    return (text or "").replace("\b", "").strip()


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


class _Links(html.parser.HTMLParser):
    """What a page of HTML has by name, what it links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loads.append(given.get("href", ""))
        elif tag not in ("a", "link"):
            self.loads += [given[name] for name in ("src", "poster", "data") if given.get(name)]
            self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]


def problems(site: Path) -> list[str]:
    """Every link of a built site that leads nowhere, and everything that a page would load from another host."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text())
    found = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for target in page.loads:
            url = urlsplit(target)
            if url.netloc or url.scheme not in ("", "data"):
                found.append(f"{name} loads {target}, which another host has; put the file into docs/")
            elif not url.scheme and not _file(site, path, url.path).exists():
                found.append(f"{name} loads {target}, which is not there")
        for target in page.links:
            url = urlsplit(target)
            if url.scheme or url.netloc or path.name == "404.html":
                continue
            file = _file(site, path, url.path)
            anchors = pages[file].anchors if file in pages else None
            if not file.exists():
                found.append(f"{name} links to {target}, which is not there")
            elif url.fragment and anchors is not None and unquote(url.fragment) not in anchors | {"__top"}:
                found.append(f"{name} links to {target}, and there is no such heading")
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(r"(?:@import\s*|url\()\s*['\"]?((?:https?:)?//[^'\")\s]+)", path.read_text()):
            found.append(f"{path.relative_to(site).as_posix()} loads {target}, which another host has")
    return found


def _file(site: Path, page: Path, target: str) -> Path:
    """The file that a link of a page leads to."""
    base = site if target.startswith("/") else page.parent
    file = Path(posixpath.normpath(base / unquote(target).lstrip("/"))) if target else page
    return file / "index.html" if file.is_dir() else file
