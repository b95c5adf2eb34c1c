"""Files that git ignores are never uploaded, whatever other ignore files say; and the names of accelerators."""

from pathlib import Path

import pytest

from tilewright.core.chip import CHIPS
from tilewright.runners import journal
from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import slug
from tilewright.runners.ray import _resources
from tilewright.runners.upload import script_path, shipped_files, staged


def files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_tracked_and_new_files_are_uploaded_and_ignored_ones_are_not(checkout: Path) -> None:
    (checkout / "gone.txt").touch()
    with staged(checkout) as stage:
        assert files(stage).keys() == {".gitignore", "code.txt", "new.txt", "gone.txt"}
        assert (stage / "code.txt").stat().st_mtime == (checkout / "code.txt").stat().st_mtime
    assert not stage.exists()
    assert (checkout / "code.txt").read_text() == "one\n"


def test_a_deleted_file_is_skipped_and_a_link_stays_a_link(checkout: Path) -> None:
    (checkout / "code.txt").unlink()
    (checkout / "link").symlink_to("nowhere")
    with staged(checkout) as stage:
        assert not (stage / "code.txt").exists()
        assert (stage / "link").is_symlink()


def test_a_jobs_variables_are_in_one_private_file(checkout: Path) -> None:
    job = journal.new_job("ray:x", ("true",), workdir=checkout, env={"TOKEN": "hunter2"})
    with staged(checkout, job) as stage:
        holding = [path for path in stage.rglob("*") if path.is_file() and "hunter2" in path.read_text()]
        assert [path.name for path in holding] == [f"{job.id}.env"]
        assert holding[0].stat().st_mode & 0o777 == 0o600
        assert (stage / script_path(job)).exists()


def test_a_skyignore_that_would_upload_what_git_ignores_is_refused(checkout: Path) -> None:
    (checkout / ".skyignore").write_text("# nothing secret here\n*.log\n")
    with pytest.raises(
        ValueError,
        match=r"\.skyignore replaces \.gitignore for SkyPilot, and would upload what git ignores: secret.txt; remove",
    ):
        shipped_files(checkout)
    (checkout / ".skyignore").write_text("/secret.txt\n")
    assert "code.txt" in shipped_files(checkout)
    (checkout / "results").mkdir()
    (checkout / "results" / "x").touch()
    with pytest.raises(ValueError, match=r"would upload what git ignores: results/; remove"):
        shipped_files(checkout)
    (checkout / ".skyignore").write_text("secret.*\nresults/\n")
    assert "code.txt" in shipped_files(checkout)


def test_without_git_nothing_is_uploaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"git cannot tell which files not to upload .*run `git init` first"):
        shipped_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "spelled", "chips", "per_host"),
    [
        ("tpu-v6e-1", "tpu-v6e-1", 1, 1),
        ("tpu-v6e-8", "tpu-v6e-8", 8, 8),
        ("tpu-v6e-32", "tpu-v6e-32", 32, 4),
        ("tpu-v5e-8", "tpu-v5litepod-8", 8, 8),
        ("tpu-v4-8", "tpu-v4-8", 4, 4),
        ("tpu-v5p-16", "tpu-v5p-16", 8, 4),
        ("tpu-v7x-8", "tpu-v7x-8", 4, 4),
        ("tpu7x-16", "tpu-v7x-16", 8, 4),
        ("h200", "H200:1", 1, 1),
        ("H100:8", "H100:8", 8, 8),
        ("a100-80gb:2", "A100-80GB:2", 2, 2),
    ],
)
def test_accelerators_are_read_as_people_write_them(name: str, spelled: str, chips: int, per_host: int) -> None:
    found = Accelerator.parse(name)
    assert (found.name, found.count, found.per_host) == (spelled, chips, per_host)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu-v6-8", r"--accelerator tpu-v6-8 is not known; did you mean tpu-v6e-8\?"),
        ("tpu-v7-8", r"--accelerator tpu-v7-8 is not known; did you mean tpu-v7x-8\?"),
        ("tpu-v6e-0", r"--accelerator tpu-v6e-0 is not known; did you mean tpu-v6e-8\?"),
        ("H1000:1", r"--accelerator H1000:1 is not known; did you mean H100:1\?"),
        ("H100:0", r"--accelerator H100:0 is not known; did you mean H100:1\?"),
        (
            "banana",
            r"--accelerator banana is not known; use a TPU \(tpu-v4-N, .*tpu-v7x-N.* or a GPU \(.*H100, .*a --template",
        ),
        (
            "tpu-v4-7",
            r"--accelerator tpu-v4-7 counts TensorCores, 2 per chip, and must be a multiple of 2; use tpu-v4-8",
        ),
        ("tpu-v7x-9", r"--accelerator tpu-v7x-9 counts TensorCores, 2 per chip, .*; use tpu-v7x-8"),
    ],
)
def test_an_unknown_accelerator_is_one_line_with_a_better_one(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accelerator.parse(name)


def test_every_chip_with_figures_can_be_rented() -> None:
    """The runners read the one table of chips."""
    for chip in CHIPS:
        if chip.platform != "cpu":
            name = f"tpu-{chip.name}-8" if chip.platform == "tpu" else chip.accelerator or ""
            assert Accelerator.parse(name).chip is chip


@pytest.mark.parametrize(
    ("name", "resources"),
    [
        ("H200:2", {"entrypoint_num_gpus": 2, "entrypoint_resources": {"accelerator_type:H200": 0.001}}),
        ("A100-80GB:1", {"entrypoint_num_gpus": 1, "entrypoint_resources": {"accelerator_type:A100": 0.001}}),
        ("tpu-v6e-8", {"entrypoint_resources": {"TPU": 8.0}}),
        ("tpu-v7x-8", {"entrypoint_resources": {"TPU": 4.0}}),
        ("tpu-v7x-16", {"entrypoint_resources": {"TPU": 4.0, "TPU-v7x-16-head": 1.0}}),
    ],
)
def test_what_a_ray_job_reserves(name: str, resources: dict) -> None:
    assert _resources(name) == resources


def test_names_are_fit_for_clusters() -> None:
    assert slug("My Run/2 (v6e)") == "my-run-2-v6e"
    assert slug("...") == "job"
