"""`tilewright report`: one HTML page of records that needs nothing else, and the same in Markdown."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tilewright.cli.screen import Mistake, arguments, console, writing
from tilewright.cli.track import check_tracker, import_tracker, tracking_mode
from tilewright.workbench.records import write_durably
from tilewright.workbench.report.entries import Found, read_files
from tilewright.workbench.report.markdown import chart_files, markdown
from tilewright.workbench.report.page import page
from tilewright.workbench.report.sections import build

_DEFAULT = Path("results")
_SHOWN_UNREAD = 3


def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            help="JSONL files of bench and tune, JSON files of `compile --out`, or folders of them; defaults to results."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to.")] = Path("results/report"),
    title: Annotated[str, typer.Option(help="The heading.")] = "Kernels, measured and estimated",
    track: Annotated[str | None, typer.Option(help="wandb, or wandb-offline, which sends nothing.")] = None,
) -> None:
    """Write a report of records: report.html, one page that needs nothing else, and report.md.

    What ran where, speed beside peers and ceilings, kernels, a roofline, growth with length, errors, tuning, and what was
    not measured. Estimates are marked wherever they stand. The page sorts and filters, has light and dark colours, and fits
    a phone. With --track, the records and the page are uploaded as an artifact of Weights & Biases.
    """
    check_tracker(track)
    with arguments():
        found = _read(records)
    made = build(found, title)
    text = markdown(made)
    with writing("out", out):
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / "report.html", page(made))
        for path, svg in chart_files(made):
            (out / path).parent.mkdir(exist_ok=True)
            write_durably(out / path, svg)
        write_durably(out / "report.md", text)
    entries = sum(found.files.values())
    files = "1 file" if len(found.files) == 1 else f"{len(found.files)} files"
    console().print(f"{entries} records of {files}: {escape(str(out))}/report.html, report.md", highlight=False)
    if found.repeated:
        console().print(f"left out, since they are copies: {found.repeated}", highlight=False)
    if found.unread:
        shown = "; ".join(found.unread[:_SHOWN_UNREAD])
        more = f"; and {len(found.unread) - _SHOWN_UNREAD} more" if len(found.unread) > _SHOWN_UNREAD else ""
        line = escape(f"{shown}{more}")
        console().print(f"[yellow]not read:[/] {line}", highlight=False, soft_wrap=True)
    if track is not None:
        _upload(track, found, out, title)


def _read(records: list[Path] | None) -> Found:
    if records is None and not _DEFAULT.exists():
        raise ValueError(
            f"{_DEFAULT} does not exist; name files of records, such as those that `tilewright bench` wrote"
        )
    paths = records or [_DEFAULT]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; pass files of records, or folders of them")
    found = read_files(paths)
    if not sum(found.files.values()):
        reason = f" ({found.unread[0]})" if found.unread else ""
        raise ValueError(f"there is no record in {', '.join(map(str, paths))}{reason}; `tilewright bench` writes some")
    return found


def _upload(track: str, found: Found, out: Path, title: str) -> None:
    """Logs the records and the page as an artifact."""
    wandb = import_tracker(track)
    run = wandb.init(project="tilewright", job_type="report", name=title, dir=str(out), mode=tracking_mode(track))
    try:
        artifact = wandb.Artifact("report", type="report")
        for number, path in enumerate(found.files, 1):
            artifact.add_file(path, name=f"records/{number}-{Path(path).name}")
        for path in (out / "report.html", out / "report.md", *sorted((out / "figures").glob("*.svg"))):
            artifact.add_file(str(path), name=str(path.relative_to(out)))
        run.log_artifact(artifact)
        run.log({"report": wandb.Html(str(out / "report.html"), inject=False)})
    except OSError as error:
        raise Mistake(f"--track {track}: {error}") from error
    finally:
        run.finish()
