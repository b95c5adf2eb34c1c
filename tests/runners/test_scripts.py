"""The launch scripts, with a `uv` that prints its arguments: the CLI that does the work is tested elsewhere."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text('#!/bin/sh\necho "uv $*"\nls .cluster_name_*\n')
    uv.chmod(0o755)
    return tmp_path


def ran(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(["bash", *words], cwd="/", env=environment, capture_output=True, text=True)


def test_a_launch_names_the_cluster_before_it_rents(root: Path) -> None:
    done = ran(root, f"{root}/scripts/launch_tpu.sh", "tpu-v6e-8", "KDA blocks", "--spot", "--yes")
    assert done.stdout.splitlines() == [
        "sky:tw-kda-blocks-tpu-v6e-8",
        "uv run --extra sky tilewright remote launch --on sky:tw-kda-blocks-tpu-v6e-8 --accelerator tpu-v6e-8 "
        "--template scripts/tpu_resource.sky.yaml --spot --yes",
        ".cluster_name_tpu",
    ]
    assert (root / ".cluster_name_tpu").read_text() == "tw-kda-blocks-tpu-v6e-8\n"
    done = ran(root, f"{root}/scripts/launch_gpu.sh", "H200:1", "x" * 100)
    assert "--template scripts/gpu_resource.sky.yaml" in done.stdout
    assert len((root / ".cluster_name_gpu").read_text().strip()) == 60


def test_sync_defaults_to_the_newest_cluster(root: Path) -> None:
    ran(root, f"{root}/scripts/launch_tpu.sh", "tpu-v6e-1", "one")
    ran(root, f"{root}/scripts/launch_gpu.sh", "H100:1", "two")
    os.utime(root / ".cluster_name_tpu", (1, 1))
    sync = f"{root}/scripts/sync_code.sh"
    assert "tilewright remote sync --on sky:tw-two-h100-1\n" in ran(root, sync).stdout
    assert "tilewright remote sync --on sky:tw-one-tpu-v6e-1\n" in ran(root, sync, "tpu").stdout
    assert ran(root, sync, "cpu").stderr == "usage: scripts/sync_code.sh [tpu|gpu], not cpu\n"


def test_missing_arguments_are_errors(root: Path) -> None:
    done = ran(root, f"{root}/scripts/launch_gpu.sh", "H100:1")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: scripts/launch_gpu.sh ACCELERATOR EXPERIMENT [OPTIONS], such as scripts/")
    done = ran(root, f"{root}/scripts/sync_code.sh")
    assert done.returncode == 2
    assert done.stderr == "there is no .cluster_name_tpu or .cluster_name_gpu; scripts/launch_tpu.sh makes one\n"
