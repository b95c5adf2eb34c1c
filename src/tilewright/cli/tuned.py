"""`tilewright tuned`: shows the tuned configs that dispatch has, how old they are and which are stale; merges tables."""

import dataclasses
import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import Mistake, arguments, check_tables, console, new_table
from tilewright.core import tuned as tables_of
from tilewright.core.call import bucket_text
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, explain, find_op, registered
from tilewright.core.target import target
from tilewright.core.tuned import DamagedTable, Entry
from tilewright.workbench.check import call
from tilewright.workbench.figures import seconds
from tilewright.workbench.records import installed_versions
from tilewright.workbench.tuning.results import TAKEN, put
from tilewright.workbench.tuning.source import source_hash
from tilewright.workbench.tuning.target import targets
from tilewright.workbench.tuning.worker import config_of


@prints_json
def tuned(
    op: Annotated[str | None, typer.Argument(help="The op's name; defaults to all.")] = None,
    merge: Annotated[
        Path | None, typer.Option(help="Take the entries of another machine's table, or of a folder of tables.")
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(help="The folder of tables to show or to merge into; defaults to the package's and the user's."),
    ] = None,
    chip: Annotated[
        str | None, typer.Option(help="Show the entries for this chip alone, such as h200; defaults to all.")
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(help="List the large cases in bfloat16 that have no entry for this chip, such as h200."),
    ] = None,
) -> None:
    """Show the tuned configs that dispatch takes, how old they are, and which are stale.

    An entry is stale where the kernel's source has changed since; dispatch takes it until it is tuned again. With --merge,
    entries of another table are taken where they are newer, and a measured entry always replaces an estimated one. That
    fails where a table cannot be read, after the others are taken (exit code 2), and where no entry can be used (1).
    """
    with arguments():
        ops = {op: find_op(op)} if op is not None else dict(registered())
        for_chip, without = (None if name is None else Chip.named(name) for name in (chip, missing))
        if for_chip is not None and (merge is not None or without is not None):
            raise ValueError("--chip is for the entries that are shown; leave it out with --merge and --missing")
        if merge is not None and missing is not None:
            raise ValueError("--merge takes entries and --missing lists what has none; leave one of them out")
        check_tables(tables)
    if merge is not None:
        _merge(merge, tables or tables_of.user_tables(), ops)
        return
    if without is not None:
        _show_missing(without, ops)
        return
    folders = {"given": tables} if tables is not None else _folders()
    rows = [
        (name, found, where, entry)
        for name, found in ops.items()
        for where, entry in _entries(name, folders, "*" if for_chip is None else for_chip.name)
    ]
    states = [_state(found, entry) for _, found, _, entry in rows]
    tell(
        tuned=[
            {"op": name, "from": where, "state": Text.from_markup(state).plain, **dataclasses.asdict(entry)}
            for (name, _, where, entry), state in zip(rows, states, strict=True)
        ]
    )
    if not rows:
        places = " or ".join(str(folder) for folder in folders.values())
        what = f"of {op} " if op is not None else ""
        what += f"for {for_chip.name} " if for_chip is not None else ""
        console().print(f"No tuned config {what}in {places}; `tilewright tune OP` makes them.", soft_wrap=True)
        return
    table = new_table(
        "Tuned configs", ("op", "chip", "pass", "bucket", "config", "from", "state"), ("time", "gain", "tried", "age")
    )
    for (name, _, where, entry), state in zip(rows, states, strict=True):
        fields = " ".join(f"{key}={value}" for key, value in entry.config.items() if key != "config")
        mark = "" if entry.kind == "measured" else " (est.)"
        mark += " (device)" if entry.clock == "device" else ""
        table.add_row(
            name,
            str(entry.provenance.get("chip", "?")),
            f"{entry.implementation} {entry.direction}",
            bucket_text(entry.bucket),
            fields,
            where,
            state,
            f"{seconds(entry.seconds)}{mark}",
            "-" if entry.gain is None else f"{entry.gain:.2f}x",
            _tried(entry),
            _age(entry),
        )
    console().print(table)
    measured = sum(entry.kind == "measured" for *_, entry in rows)
    console().print(f"{measured} measured, {len(rows) - measured} estimated from schedules (est.).")


def _folders() -> dict[str, Path]:
    return {"package": tables_of.PACKAGE_TABLES, "user": tables_of.user_tables()}


def _entries(op: str, folders: dict[str, Path], chips: str) -> Iterator[tuple[str, Entry]]:
    for where, folder in folders.items():
        for path in sorted(folder.glob(f"{chips}/{op}.json")):
            for entry in tables_of.read_table(folder, path.parent.name, op):
                yield where, entry


def _state(op: Op, entry: Entry) -> str:
    """Whether an entry is of the kernel as it is now."""
    if entry.implementation not in op.implementations:
        return "[bold red]stale[/]: no such implementation"
    try:
        config_of(op, entry.implementation, entry.config)
    except ValueError as error:
        return f"[bold red]stale[/]: {escape(str(error))}"
    if entry.provenance.get("source") != source_hash(op, entry.implementation):
        return "[yellow]stale[/]: the kernel has changed"
    then, here = (entry.provenance.get("versions") or {}).get("jax"), installed_versions().get("jax")
    return "current" if then == here else f"current, jax {then}"


def _tried(entry: Entry) -> str:
    """How many configs the search has tried, of how many; and whether it was of the neighbours only, or did not end."""
    tried, of = entry.search.get("tried"), entry.search.get("of")
    if tried is None:
        return "-"
    how = "" if entry.search.get("complete") else ", not ended"
    how = ", neighbours" if not how and entry.search.get("reach") == "neighbours" and tried != of else how
    return f"{tried} of {'many' if of is None else of}{how}"


def _age(entry: Entry) -> str:
    try:
        made = datetime.datetime.fromisoformat(str(entry.provenance.get("date")))
    except ValueError:
        return "?"
    days = (datetime.datetime.now(datetime.UTC) - made).days
    return "today" if days < 1 else f"{days} d"


def _show_missing(chip: Chip, ops: dict[str, Op]) -> None:
    """Lists the passes of the large cases that a chip runs and that have no entry of their own."""
    table = new_table(f"Without a tuned config of their own on {chip.name}", ("op", "case", "pass", "now takes"))
    have = 0
    lacking: list[dict[str, str]] = []
    for op, case in ((each, case) for each in ops.values() for case in each.cases if not case.small):
        with target(chip):
            decisions = explain(call(op, case, None), **case.structs("bfloat16")).decisions
        for each in targets(op, case, "bfloat16", decisions[0].implementation, chip) if decisions else ():
            known = each.known()
            if known and known[0].exact:
                have += 1
            else:
                takes = f"tuned {known[0]}" if known else "the heuristic's"
                table.add_row(op.name, case.name, f"{each.implementation} {each.direction}", takes)
                which = {"implementation": each.implementation, "direction": each.direction}
                lacking.append({"op": op.name, "case": case.name, **which, "takes": takes})
    tell(chip=chip.name, missing=lacking, have=have)
    console().print(table)
    console().print(f"{have} have one, {table.row_count} do not.")


def _merge(source: Path, into: Path, ops: dict[str, Op]) -> None:
    files = sorted(source.glob("*/*.json")) if source.is_dir() else [source]
    if not files:
        raise Mistake(f"--merge {source} has no table; a folder of tables has a folder per chip, with a file per op")
    merged: list[dict[str, Any]] = []
    every: Counter[str] = Counter()
    unusable = 0
    unreadable: list[str] = []
    for path in files:
        try:
            name, chip, entries, wrong = tables_of.parse_table(path.read_text())
        except (OSError, DamagedTable, UnicodeDecodeError) as error:
            unreadable.append(f"{path} is not a table that can be read: {error}")
            continue
        if name not in ops:
            console().print(f"{path}: [yellow]left out[/], of op {escape(name)}", soft_wrap=True)
            unusable += len(entries) + len(wrong)
            continue
        valid: list[Entry] = []
        for entry in entries:
            try:
                config_of(ops[name], entry.implementation, entry.config)
            except (ValueError, ModuleNotFoundError) as error:
                wrong.append(f"{' '.join(entry.key)}: {error}")
            else:
                valid.append(entry)
        became = put(into, chip, name, valid)
        every += became
        unusable += len(wrong)
        where = tables_of.table_path(into, chip, name)
        taken, not_taken = became[TAKEN], {why: count for why, count in became.items() if why != TAKEN}
        merged.append(
            {
                "op": name,
                "chip": chip,
                "table": where if where.exists() else None,
                "taken": taken,
                "not_taken": not_taken,
                "left_out": wrong,
            }
        )
        tell(merged=merged)
        place = f", in {where}" if taken else ""
        console().print(f"{name} on {chip}: {_counted({TAKEN: taken, **not_taken})}{place}", soft_wrap=True)
        for each in wrong:
            console().print(f"  [yellow]left out:[/] {escape(each)}", soft_wrap=True)
    if unreadable:
        rest = "" if len(files) == 1 else "; the other tables are done"
        raise Mistake(f"--merge {'; '.join(unreadable)}{rest}")
    if every[TAKEN]:
        return
    if every or not unusable:
        why = _counted(every) or "it has no entry"
        console().print(f"Nothing was taken from {source}: {why}.", soft_wrap=True)
        return
    console().print(
        f"[bold red]Nothing was taken[/] from {source}: none of its entries can be used here ({unusable} left out). Tune "
        "again with `tilewright tune`.",
        soft_wrap=True,
    )
    raise typer.Exit(1)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())
