"""`tilewright doctor`: what it says of this machine, and of one that lacks something; and completion in a shell."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cli.test_cli import ran
from tilewright.cli import doctor as verb
from tilewright.core.version import __version__


def test_it_says_what_is_here_and_what_mends_the_rest(tmp_path: Path) -> None:
    done = ran("doctor", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    machine = {each["what"]: each for each in told["machine"]}
    assert done.code == (0 if all(each["ok"] for each in machine.values()) else 1)
    assert told["version"] == __version__
    assert machine["jax"]["ok"]
    assert metadata.version("jax") in machine["jax"]["found"]
    kernels = {each["what"]: each["found"] for each in told["kernels"]}
    assert "ops run here" in kernels["pallas_tpu"]
    extras = {each["what"]: each for each in told["extras"]}
    assert set(extras) == {"aot", "bench", "gpu", "models", "ray", "sky", "tpu", "wandb"}
    assert extras["bench"]["ok"]
    assert "matplotlib" in extras["bench"]["found"]
    lacking = [each for each in extras.values() if not each["ok"] and "lacks" in each["found"]]
    for each in lacking:
        assert each["remedy"].endswith(f"--extra {each['what']}")


def test_an_extra_lacks_what_is_missing_too_old_or_behind_another_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"jax": "0.12.0", "rich": "13.0"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(verb.metadata, "version", version)
    monkeypatch.setattr(verb.metadata, "requires", lambda name: ['libtpu==0.1; extra == "tpu"', "numpy"])
    assert list(verb._lacking(Requirement("typer>=0.20"))) == ["typer"]
    assert list(verb._lacking(Requirement("rich>=14"))) == ["rich>=14 (here: 13.0)"]
    assert list(verb._lacking(Requirement("jax[tpu]"))) == ["libtpu"]
    assert list(verb._lacking(Requirement("jax>=0.11"))) == []


def test_a_jax_that_does_not_fit_and_a_gpu_that_jax_does_not_use_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n")
    monkeypatch.setattr(verb, "_NVIDIA_DRIVER", driver)
    monkeypatch.setattr(verb.jax, "__version__", "0.9.0")
    found = {finding.what: finding for finding in (*verb._machine(), *verb._accelerators())}
    assert "0.9.0; tilewright takes" in found["jax"].found
    assert not found["jax"].ok
    assert not found["NVIDIA driver"].ok
    assert "580 or later" in found["NVIDIA driver"].remedy
    assert not found["NVIDIA GPU"].ok
    assert "extra gpu" in found["NVIDIA GPU"].remedy


def test_the_shell_can_complete() -> None:
    assert "--install-completion" in ran("--help").stdout
