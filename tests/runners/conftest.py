"""Every test gets its own journal, and a checkout to upload."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tilewright" / "jobs"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with a tracked file, a new one, and a secret that git ignores."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / ".gitignore").write_text("results/\nsecret.txt\n")
    (root / "secret.txt").write_text("swordfish")
    (root / "code.txt").write_text("one\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "-A"], check=True)
    (root / "new.txt").write_text("new\n")
    return root
