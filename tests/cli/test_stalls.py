"""`tilewright stalls`, on rows of an export of Nsight Compute 2025.3 from an H200 (stalls.csv), and on what is none."""

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import ran

EXPORT = Path(__file__).parents[1] / "workbench" / "stalls.csv"
HEAD = (
    '"Address","Source","# Samples","Instructions Executed",'
    '"stall_long_sb","stall_selected","stall_long_sb (Not Issued)"'
)


def _kernel(name: str, *rows: tuple[str, int, int, int, int]) -> str:
    """A kernel of an export, from the code of its instructions, and their samples, executions and samples by reason."""
    lines = [f'"Kernel Name","{name}",', HEAD]
    lines += [f'"0x{place:x}","   {code}","{samples}","{executed}","{memory}","{issued}","{memory}"'
              for place, (code, samples, executed, memory, issued) in enumerate(rows)]  # fmt: skip
    return "\n".join(lines) + "\n"


def test_samples_are_counted_by_kernel_region_and_instruction(tmp_path: Path) -> None:
    export = tmp_path / "export.csv"
    export.write_text(
        _kernel(
            "mine_mosaic_gpu_kernel",
            ("STL.64 [R1], R2", 0, 8, 0, 0),
            ("LDG.E R4, [R2]", 10, 8, 0, 10),
            ("@!P0  BRA 0x10", 60, 16, 55, 5),
            ("LDL R2, [R1]", 0, 16, 0, 0),
            ("@P1 FADD R4, R4, R2", 30, 8, 25, 5),
        )
        + _kernel("other", ("EXIT", 0, 4, 0, 0))
    )
    done = ran("stalls", str(export), "--top", "2", "--json")
    assert done.code == 0, done
    mine, other = json.loads(done.stdout)["kernels"]
    assert (mine["kernel"], mine["samples"], mine["warps"], mine["executed"]) == ("mine", 100, 8, 56)
    assert mine["reasons"] == {"long_sb": 80, "selected": 20}
    # Two words stored by each thread, and one loaded twice.
    assert (mine["local_words_stored"], mine["local_words_loaded"]) == (2, 2)
    assert mine["opcodes"] == {"BRA": 16, "LDL": 16, "STL": 8, "LDG": 8, "FADD": 8}
    assert [(part["first"], part["last"], part["samples"]) for part in mine["regions"]] == [(0, 2, 70), (3, 4, 30)]
    assert [(each["place"], each["code"]) for each in mine["instructions"]] == [
        (2, "@!P0  BRA 0x10"),
        (4, "@P1 FADD R4, R4, R2"),
    ]
    assert (other["kernel"], other["samples"], other["instructions"]) == ("other", 0, [])
    shown = ran("stalls", str(export), "--kernel", "min")
    assert "mine: 100 samples; 7 instructions per warp; spilled, words per thread: 2 stored, 2 loaded" in shown.flat
    assert "long_sb 55.0%, selected 5.0%" in shown.flat
    assert "other" not in shown.flat.replace("another", "")


def test_an_export_of_nsight_compute_is_read() -> None:
    done = ran("stalls", str(EXPORT), "--top", "3")
    assert done.code == 0, done
    assert "kda_scores: 29,970 samples" in done.flat
    assert "kda_pairs: 46,141 samples" in done.flat
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x0" in done.flat
    assert "other warps at a barrier, or a product" in done.flat


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (None, (), "cannot be read: No such file"),
        ('"Kernel Name","mine",""\n', (), "kernel mine has no instructions: the export was cut"),
        (f"{HEAD}\n", (), "line 1 has the columns of a kernel, and no line before it the kernel's name"),
        (_kernel("mine", ("EXIT", 1, 1, 0, 1)).rsplit(",", 3)[0], (), "line 3 has 4 of 7 columns: the export was cut"),
        (_kernel("mine", ("EXIT", 1, 1, 0, 1)).replace('"1"', '"1.5"', 1), (), "line 3: '# Samples' is '1.5', which is no"),
        (_kernel("mine", ("EXIT", 1, 1, 0, 1)).replace("stall_", ""), (), "no column 'stall_...'"),
        ("op,seconds\n", (), "no line begins with 'Kernel Name', so no kernel was profiled or exported; export a"),
        ('"Kernel Name","mine"\n"Address","Source"\n"0x0","EXIT"\n', (), "no column '# Samples'; record it with `ncu"),
        (_kernel("mine", ("EXIT", 1, 1, 0, 1)), ("--kernel", "his"), "which has mine"),
        (_kernel("mine", ("EXIT", 1, 1, 0, 1)), ("--kernel", "("), "--kernel ( is no regular expression"),
    ],
)  # fmt: skip
def test_what_it_cannot_read(tmp_path: Path, text: str | None, words: tuple[str, ...], told: str) -> None:
    export = tmp_path / "export.csv"
    if text is not None:
        export.write_text(text)
    done = ran("stalls", str(export), *words)
    assert done.code == 2
    assert told in done.flat


def test_names_and_code_are_shown_as_they_are(tmp_path: Path) -> None:
    """CUDA names kernels of lambdas with brackets, which the terminal's markup has, too."""
    export = tmp_path / "export.csv"
    name = "f<[lambda(int)]>[/x]"
    export.write_text(_kernel(name, ("[/red] R1", 3, 1, 2, 1)), encoding="utf-8-sig")
    done = ran("stalls", str(export))
    assert (done.code, f"{name}: 3 samples" in done.flat, "[/red] R1" in done.flat) == (0, True, True), done


def test_a_report_that_was_not_exported_is_told(tmp_path: Path) -> None:
    report = tmp_path / "mine.ncu-rep"
    report.write_bytes(bytes([0x4E, 0xFF, 0xFE, 0x00, 0x80]))
    done = ran("stalls", str(report))
    assert (done.code, f"export it with `ncu --import {report} --page source --csv`" in done.flat) == (2, True), done
