"""Tables of the documentation are what their records say, and a table that cannot be made says why."""

import json
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import tilewright
from tests.core.test_tuned import entry
from tilewright.cli.main import app
from tilewright.core.tuned import table_text
from tilewright.workbench.records import Provenance, Record, append_records
from tilewright.workbench.tables import BadTable, written

ROOT = Path(__file__).resolve().parents[2]
HEAD = """<!-- table
records: records.jsonl
where: dtype=bfloat16
rows: case=small|large, mode
case: {case}
`xla`: {median_s implementation=xla} ({spread implementation=xla})
memory: {temp_bytes implementation=xla}
ours / theirs: {median_s implementation=xla / implementation=fla}
theirs, ms: {median_ms:.1f implementation=fla}
label small: T = 8
-->
"""
TABLE = """
| case | `xla` | memory | ours / theirs | theirs, ms |
|---|---|---|---|---|
| T = 8 | 2.00 ms (0.0 %) | 3.00 MiB | 0.500 | 4.0 |
| large | 1.50 s (0.0 %) | 1.00 GiB | | |

"""
END = "<!-- end of table -->"


def add(folder: Path, case: str, implementation: str, seconds: float, **metrics: float) -> None:
    record = Record(
        kind="bench",
        op="op",
        implementation=implementation,
        case=case,
        dtype="bfloat16",
        mode="forward",
        provenance=Provenance.here(jax.devices("cpu")[0]),
        samples_s=(seconds,) * 5,
        metrics=metrics,
    )
    append_records(folder / "records.jsonl", [record])


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with a stale table, whose records are of two cases; the second was timed in one implementation only."""
    add(tmp_path, "large", "xla", 1.5, temp_bytes=2**30)
    add(tmp_path, "small", "xla", 2e-3, temp_bytes=3 * 2**20)
    add(tmp_path, "small", "fla", 4e-3)
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{HEAD}\n| case |\n|---|\n| yesterday |\n\n{END}\n\nAfter.\n")
    return page


def test_a_table_is_written_from_its_records(page: Path) -> None:
    assert written(page) == f"Before.\n\n{HEAD}{TABLE}{END}\n\nAfter.\n"


def test_the_verb_writes_and_check_fails_until_it_did(page: Path) -> None:
    runner = CliRunner()
    stale = page.read_text()
    checked = runner.invoke(app, ["tables", "--check", str(page)])
    assert checked.exit_code == 1
    assert f"stale: {page}" in checked.output
    assert page.read_text() == stale
    assert runner.invoke(app, ["tables", str(page)]).exit_code == 0
    assert TABLE in page.read_text()
    assert runner.invoke(app, ["tables", "--check", str(page)]).exit_code == 0
    # A newer record makes the table stale again.
    add(page.parent, "large", "fla", 3.0)
    assert runner.invoke(app, ["tables", "--check", str(page)]).exit_code == 1


def test_lines_without_samples_are_read_in_their_units(tmp_path: Path) -> None:
    line = {"work": "T8", "what": "cudnn", "median_ms": 0.25, "first_s": 3.0, "temp_mib": 2, "run": 7}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    page = tmp_path / "page.md"
    columns = "work: {work}\nby: {implementation}\ntime: {median_s}\nfirst: {first_step_s}\nmemory: {temp_bytes}"
    page.write_text(f"<!-- table\nrecords: runs.jsonl\nwhere: run=7\nrows: work\n{columns}\n-->\n{END}\n")
    assert "| T8 | cudnn | 250 us | 3.00 s | 2.00 MiB |\n" in written(page)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("records.jsonl", "gone.jsonl"), r"page.md:3: .*gone.jsonl"),
        (("rows: case=small|large, mode\n", ""), r"page.md:3: the table has no line `rows: ...`"),
        (("dtype=bfloat16", "dtype=float8"), r"page.md:3: no record matches `where` and `rows`"),
        (("case=small|large, mode", "mode"), r"case is not the same in 3 records of one row; select one"),
        (("case: {case}\n", "case\n"), r"'case' is not a line of a table; write `heading: \{field\}`"),
        ((END, ""), r"page.md: 1 tables begin and 0 end; each needs a line '<!-- end of table -->' after it"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(page: Path, change: tuple[str, str], message: str) -> None:
    page.write_text(page.read_text().replace(*change))
    with pytest.raises(BadTable, match=message):
        written(page)


def test_every_table_of_the_documentation_is_up_to_date() -> None:
    """And there are some: the pages name their records by paths that must stay right."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    made = [page for page in pages if "<!-- table\n" in page.read_text()]
    assert len(made) >= 5
    for page in made:
        assert written(page) == page.read_text(), f"{page} is stale: run `tilewright tables`"


def test_a_table_is_written_from_tuned_configs(tmp_path: Path) -> None:
    for op, n, gain in (("first", 128, 1.5), ("second", 64, 1.0)):
        found = entry(n, tilewright.configs.LinearCrossEntropyXlaForward(n, 256), case="c", heuristic_s=gain * 1e-3)
        (tmp_path / f"{op}.json").write_text(table_text(op, "cpu", [found]))
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- table\nrecords: *.json\nrows: op, case, direction\n"
        "op: {op}, {direction}\ntime: {median_s}\ngain: {gain:.2f}\nconfig: {config}\n-->\n<!-- end of table -->\n"
    )
    assert "| first, forward | 1.00 ms | 1.50 | block_n=128, block_v=256 |" in written(page)
    assert "| second, forward | 1.00 ms | 1.00 | block_n=64, block_v=256 |" in written(page)
