"""Reports: what is read, what is told, the page in a browser, and the same in Markdown."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import assert_refused, ran, tilewright
from tests.workbench.browser import NAMES, browser, find_browser
from tests.workbench.report_records import H200, timed, write_records
from tilewright.cli.bench import told_record
from tilewright.workbench.figures import ratio
from tilewright.workbench.records import Record, append_records
from tilewright.workbench.report.entries import read_files
from tilewright.workbench.report.markdown import markdown
from tilewright.workbench.report.page import page
from tilewright.workbench.report.parts import Chart, Report, Section, Table
from tilewright.workbench.report.sections import build


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder)
    return folder


@pytest.fixture(scope="module")
def report(records: Path) -> Report:
    return build(read_files([records]), "A report")


def section(report: Report, name: str) -> Section:
    return next(each for each in report.sections if each.name == name)


def rows(report: Report, name: str, table: int = 0) -> list[dict[str, str]]:
    """The rows of a table as text by column, with the second line of a cell after a space."""
    found = [block for block in section(report, name).blocks if isinstance(block, Table)][table]
    texts = [[" ".join(filter(None, (cell.text, cell.under))) for cell in row.cells] for row in found.rows]
    return [dict(zip(found.columns, each, strict=True)) for each in texts]


def test_every_kind_of_file_is_read_and_what_is_none_is_noted(records: Path) -> None:
    found = read_files([records])
    assert (len(found.entries), len(found.checks), len(found.trials)) == (18, 1, 8)
    assert {entry.kind for entry in found.entries} == {"measured", "estimate"}
    assert len(found.unread) == 1  # A line that a killed process left unfinished.
    assert found.unread[0].startswith(f"{records / 'tune.jsonl'}:9: Unterminated string")
    assert [Path(name).name for name in found.files] == ["bench.jsonl", "compiled.json", "tune.jsonl"]


def test_other_files_in_a_folder_are_one_line_or_none(tmp_path: Path) -> None:
    append_records(tmp_path / "a.jsonl", [timed("rms_norm", "odd", "xla", 1e-3)])
    (tmp_path / "training.jsonl").write_text(
        json.dumps({"step": 1, "loss": 2.0}) + "\n" + json.dumps({"step": 2}) + "\n"
    )
    (tmp_path / "settings.json").write_text(json.dumps({"op": 3}))
    (tmp_path / "answer.json").write_text("42")
    found = read_files([tmp_path])
    assert list(found.files) == [str(tmp_path / "a.jsonl")]
    assert found.unread == [f"{tmp_path / 'training.jsonl'}: none of its lines is a record"]


def test_a_later_record_replaces_an_earlier_one(tmp_path: Path) -> None:
    first, second = (timed("rms_norm", "odd", "xla", seconds, H200) for seconds in (2e-3, 1e-3))
    append_records(tmp_path / "a.jsonl", [first, second])
    found = read_files([tmp_path])
    assert [entry.wall_s for entry in found.latest] == [1e-3]
    told = section(build(found, "t"), "where").text
    assert "Earlier records are not shown (1 of them)" in told[1]


def test_records_that_are_given_twice_count_once(records: Path, tmp_path: Path) -> None:
    """The same file by two names, a copy of it, and the document that --json printed of its records."""
    again = tmp_path / "copy.jsonl"
    lines = (records / "bench.jsonl").read_text().splitlines()
    again.write_text("".join(f"{line}\n" for line in lines[:5]))
    told = [told_record(Record.from_json(line)) for line in lines[:3]]
    (tmp_path / "document.json").write_text(json.dumps({"records": told}))
    once, found = read_files([records]), read_files([records, records / "bench.jsonl", records / ".", tmp_path])
    assert (found.entries, found.checks, found.trials) == (once.entries, once.checks, once.trials)
    assert (found.unread, found.repeated) == (once.unread, 8)
    assert "Records that were read again count once: 8 were left out." in section(build(found, "t"), "where").text


def test_the_documentations_own_records_make_a_report() -> None:
    """They are of three schemas, and lines of runs whose samples were not kept."""
    found = read_files([Path(__file__).resolve().parents[2] / "docs" / "measurements"])
    made = build(found, "t")
    assert len(found.entries) > 90
    assert any(entry.of_ceiling and 0 < entry.of_ceiling < 1 for entry in found.latest)
    assert "</html>" in page(made)


def test_speed_beside_peers_and_ceilings(report: Report) -> None:
    speed = {(row["what"], row["implementation"].split()[0]): row for row in rows(report, "speed")}
    ours = speed["flash_attention causal_8k", "pallas_gpu"]
    assert (ours["kind"], ours["wall time"], ours["device"]) == ("measured", "1.25 ms ± 2.0%", "1.20 ms")
    assert ours["device, cold"] == "1.30 ms"
    assert ours["beside peers"] == "0.89 of cudnn"
    assert ours["x fastest"] == "1.00"  # What is faster differs from the reference.
    wrong = speed["flash_attention causal_8k", "fast_but_wrong"]
    assert (wrong["x fastest"], wrong["of ceiling"]) == ("differs", "")
    estimate = speed["flash_attention causal_8k", "pallas_tpu"]
    assert (estimate["kind"], estimate["wall time"], estimate["rate"]) == ("estimate", "≥ 1.50 ms", "")
    # A ceiling is of the memory behind the caches: 135 us with cold ones, and not 118 us.
    assert next(row["of ceiling"] for (what, _), row in speed.items() if what.startswith("decode")) == "83%"


def test_a_ratio_within_the_spreads_is_marked() -> None:
    assert [ratio(value, 0.3, 0.4) for value in (0.5, 0.7, 1.0, 1.4, 1.6)] == [
        "0.50",
        "~0.70",
        "~1.00",
        "~1.40",
        "1.60",
    ]
    assert (ratio(1.01), ratio(1.0, None, 0.0), ratio(1.2, math.nan, 0.3)) == ("1.01", "1.00", "~1.20")


def test_what_is_wrong_failed_or_missing_is_told(report: Report) -> None:
    errors = {row["implementation"]: row["verdict"] for row in rows(report, "errors")}
    assert errors["fast_but_wrong bfloat16"] == "DIFFERS"
    assert "4 of 5 are within their bounds" in section(report, "errors").text[0]
    check = next(row for row in rows(report, "errors") if row["what"] == "kda short")
    assert (check["worst in"], check["of bound"], check["where"]) == ("d k", "75%", "cpu, in the interpreter")
    missing = rows(report, "not_measured")
    assert any(row["what"] == "failed" and "Out of memory" in row["why"] for row in missing)
    assert any(row["which"] == "flash_attention on v6e" and "estimated only" in row["why"] for row in missing)
    assert any(row["what"] == "device time" and row["why"] == "this is a CPU" for row in missing)
    assert any(row["what"] == "implementations" and row["which"].startswith("rms_norm: ") for row in missing)
    assert any(row["what"] == "ops" and "short_conv" in row["which"] for row in missing)


def test_tuning_counts_no_candidate_that_is_wrong(report: Report) -> None:
    (search,) = (row for row in rows(report, "tuning") if row["what"] == "flash_attention causal_8k")
    assert search["tried"] == "7 (5 ok, 1 crash, 1 wrong)"
    assert (search["heuristic"], search["chosen"], search["gain"]) == ("2.00 ms", "1.50 ms", "1.33x")
    assert search["its config"] == "block_q=384, block_k=128"
    assert [row["verdict"] for row in rows(report, "tuning", 1)] == ["crash", "wrong"]


def test_what_a_search_tried_again_counts_once(tmp_path: Path) -> None:
    """A search that goes on after Ctrl-C times the heuristic's config and the best one again."""
    path = write_records(tmp_path)[1]
    trials = [Record.from_json(line) for line in path.read_text().splitlines()[:8]]
    later = dataclasses.replace(H200, date="2026-11-17T12:00:00+00:00")
    again = [dataclasses.replace(trials[place], provenance=later) for place in (0, 5, 4)]
    append_records(tmp_path / "again.jsonl", again)
    (search,) = rows(build(read_files([tmp_path / "again.jsonl", path]), "A report"), "tuning")
    assert search["tried"] == "7 (5 ok, 1 crash, 1 wrong)"
    assert (search["heuristic"], search["chosen"]) == ("2.00 ms", "1.50 ms")
    newer = {**again[0].metrics, "source": "of the kernel as it is now"}
    append_records(tmp_path / "newer.jsonl", [dataclasses.replace(again[0], metrics=newer)])
    report = build(read_files([tmp_path / "newer.jsonl", path]), "A report")
    (search,) = rows(report, "tuning")
    assert (search["tried"], search["its config"]) == ("1 (1 ok)", "none: the search was not ended")
    assert "8 earlier trials are not shown: they are of another version" in section(report, "tuning").text[-1]


def test_kernels_that_were_compiled_for_a_gpu_are_a_row_each(tmp_path: Path) -> None:
    def kernel(name: str, steady: dict[str, int] | None, spilled: int) -> dict[str, Any]:
        spills = {"spill_store_bytes": spilled, "spill_load_bytes": spilled, "spill_bytes_in_loops": 0}
        code = None if steady is None else {"start": 0, "kinds": steady}
        binary = {"registers": 168, "smem_bytes": 2**17, "steady_state": code, **spills}
        return {"name": name, "estimate": {"floor_us": None}, "binary": binary, "occupancy": {"blocks": 1}}

    named = {"kind": "estimate", "op": "kda", "case": "h96", "dtype": "bfloat16", "mode": "forward+backward"}
    kernels = [kernel("kda_forward", {"wgmma": 8, "FP32": 100}, 4), kernel("kda_backward", None, 0)]
    report = {**named, "chip": "h200", "ok": True, "kernels": kernels, "estimate": {"floor_us": None}}
    (tmp_path / "compiled.json").write_text(json.dumps([report]))
    found = build(read_files([tmp_path]), "A report")
    forward, backward = rows(found, "kernels")
    assert (forward["what"], forward["implementation"]) == ("kda h96", "pallas_gpu bfloat16 forward+backward")
    assert forward["kind"] == "estimate"
    assert list(forward.values())[4:] == ["kda_forward", "168", "128 KiB", "1", "8 B", "0 B", "108"]
    assert (backward["kernel"], backward["steady state"]) == ("kda_backward", "no loop")
    (tmp_path / "compiled.json").write_text(json.dumps([report | {"chip": "v5p", "kernels": []}]))
    missing = rows(build(read_files([tmp_path]), "A report"), "not_measured")
    assert any(row["what"] == "estimated time" and row["which"].startswith("kda h96 bfloat16") for row in missing)


def test_a_search_that_was_not_ended_has_no_gain(tmp_path: Path) -> None:
    """The least time of its trials may be that of a quiet moment."""
    records = write_records(tmp_path)[1]
    lines = [line for line in records.read_text().splitlines() if '"chosen"' not in line]
    records.write_text("".join(f"{line}\n" for line in lines))
    (search,) = rows(build(read_files([records]), "A report"), "tuning")
    assert (search["heuristic"], search["chosen"], search["gain"]) == ("2.00 ms", "", "")
    assert search["its config"] == "none: the search was not ended"


def test_growth_and_roofline_are_drawn(report: Report) -> None:
    (growth,) = (block for block in section(report, "growth").blocks if isinstance(block, Chart))
    assert "Layer softmax (xla): T^1.90" in growth.legend
    assert "Layer delta (xla): T^1.00" in growth.legend
    assert growth.svg.count("<circle") == 10
    charts = {block.name: block for block in section(report, "roofline").blocks if isinstance(block, Chart)}
    assert "mark hollow" in charts["roofline-v6e"].svg
    assert "mark hollow" not in charts["roofline-h200"].svg
    assert "fast_but_wrong" not in charts["roofline-h200"].svg


def test_the_same_in_markdown(report: Report) -> None:
    text = markdown(report)
    for each in report.sections:
        assert f"## {each.title}\n" in text
    assert "| measured | flash_attention causal_8k | bfloat16 forward | pallas_gpu | h200 | 1.25 ms ± 2.0% |" in text
    assert "| estimate | flash_attention causal_8k | bfloat16 forward | pallas_tpu | v6e | ≥ 1.50 ms |" in text
    assert "<script>" not in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) == sum(isinstance(block, Table) for each in report.sections for block in each.blocks)
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert "](figures/roofline-h200.svg)" in text


def test_nothing_in_a_page_is_from_elsewhere_or_taken_for_markup(report: Report) -> None:
    text = page(report)
    assert "<script>alert" not in text
    assert not re.search(r"""(?:src|href)=["'](?!#|data:,)""", text)
    assert "url(" not in text
    assert "@import" not in text


def test_the_verb_writes_both_and_refuses_what_it_cannot_read(records: Path, tmp_path: Path) -> None:
    done = ran("report", str(records), "-o", "out", "--title", "Ours & theirs", cwd=tmp_path)
    assert done.code == 0, done
    assert "27 records of 3 files: out/report.html, report.md" in done.stdout
    assert "not read: " in done.stdout
    assert "<title>Ours &amp; theirs</title>" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "figures" / "roofline-h200.svg").read_text().startswith("<svg ")
    (tmp_path / "empty.jsonl").write_text(json.dumps({"step": 3}) + "\n")
    assert_refused(
        (("report", "none.jsonl"), "none.jsonl does not exist; pass files of records, or folders of them"),
        (("report",), "results does not exist; name files of records"),
        (("report", "empty.jsonl"), "there is no record in empty.jsonl (empty.jsonl:1: ValueError: it is not a record"),
        (("report", str(records), "--track", "paper"), "--track paper is not known; use wandb or wandb-offline"),
        (("report", str(records), "-o", "/proc/none"), "--out /proc/none cannot be written"),
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_wandb_offline(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    # In a process of its own, so that wandb's service ends with it.
    done = tilewright("report", str(records), "-o", "out", "--track", "wandb-offline", cwd=tmp_path)
    assert done.returncode == 0, done
    (run,) = (tmp_path / "out").glob("wandb/offline-run-*")
    assert list(run.glob("*.wandb"))
    assert list(run.glob("files/media/html/report_*.html"))


@pytest.mark.slow
def test_the_page_in_a_browser(report: Report, tmp_path: Path) -> None:
    """It loads, sorts, filters and changes its colours, fits a phone, reports no error, and asks for nothing."""
    path = find_browser()
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium")
    file = tmp_path / "report.html"
    file.write_text(page(report))
    column = """(name) => { const table = document.getElementById('table-speed');
        const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === name);
        const shown = [...table.tBodies[0].rows].filter((row) => row.style.display !== 'none');
        return [table.tHead.rows[0].cells[place], shown.map((row) => row.cells[place].textContent)]; }"""
    with browser(path) as tab:
        tab.size(1400, 900)
        tab.open(file.as_uri())
        assert tab.evaluate("document.title") == "A report"

        def click(name: str) -> list[str]:
            return tab.evaluate(f"(({column})('{name}')[0].querySelector('button').click(), ({column})('{name}')[1])")

        ascending = click("wall time")
        assert ascending[0].startswith("50.0 us")
        assert ascending[-1].startswith("194 ms")
        assert click("wall time")[0].startswith("194 ms")
        assert tab.evaluate(f"({column})('wall time')[0].getAttribute('aria-sort')") == "descending"
        ceilings = click("of ceiling")
        assert ceilings[0] == "1.5%"
        assert ceilings[-1] == ""  # What is not known stays last, whichever way it is sorted.
        assert click("of ceiling")[-1] == ""

        def choose(facet: str, value: str) -> list[str]:
            select = f"document.querySelector('select[data-facet={facet}]')"
            tab.evaluate(f"({select}.value = '{value}', {select}.dispatchEvent(new Event('change')))")
            return tab.evaluate(f"({column})('kind')[1]")

        assert choose("kind", "estimate") == ["estimate"]
        assert tab.evaluate("document.querySelectorAll('.mark.dim').length") > 10
        tab.evaluate("document.getElementById('reset').click()")
        assert len(tab.evaluate(f"({column})('kind')[1]")) == 17
        search = "document.getElementById('search')"
        tab.evaluate(f"({search}.value = 'softmax t16384', {search}.dispatchEvent(new Event('input')))")
        assert tab.evaluate(f"({column})('what')[1]") == ["Layer softmaxt16384"]
        tab.evaluate("document.getElementById('reset').click()")

        paper = "getComputedStyle(document.body).backgroundColor"
        light = tab.evaluate(paper)
        tab.size(1400, 900, dark=True)
        dark = tab.evaluate(paper)
        assert dark != light
        tab.evaluate("document.getElementById('theme').click()")
        assert tab.evaluate(paper) == light
        for width in (360, 390, 768, 1400):
            tab.size(width, 800)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.errors == []
        assert tab.requests == [file.as_uri()]
