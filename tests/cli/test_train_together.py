"""`tilewright train` in several processes: the losses of one, one checkpoint together, and a process that is killed."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("grain")
pytest.importorskip("orbax.checkpoint")

from tests.cli.test_cli import assert_refused
from tests.cli.test_train import steps_of, written
from tilewright.models.train_config import TrainConfig
from tilewright.models.training import Training

TIMEOUT_S = 240.0
STEPS, EVERY = 100_000, 10


def started(folder: Path, process: int, port: int) -> subprocess.Popen[str]:
    """A process of two, with one device."""
    words = [
        "train",
        str(folder / "run.toml"),
        "--out",
        "run",
        "--steps",
        str(STEPS),
        "--coordinator",
        f"localhost:{port}",
    ]
    words += ["--processes", "2", "--process", str(process)]
    code = f"import sys; sys.argv[1:] = {words}; from tilewright.cli.entry import main; main()"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    with (folder / f"errors{process}.txt").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
        )


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_and_a_killed_one_ends_both(tmp_path: Path) -> None:
    tables = {"optimizer": {"schedule": "constant"}, "checkpoint": {"every": EVERY}}
    written(tmp_path, mesh={"fsdp": 2}, **tables)
    records = tmp_path / "run" / "records.jsonl"
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    first, second = (started(tmp_path, process, port) for process in (0, 1))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not records.exists() or not any(record["step"] > EVERY + 2 for record in steps_of(records)):
            assert first.poll() is None, (tmp_path / "errors0.txt").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second.send_signal(signal.SIGKILL)
        assert first.wait(TIMEOUT_S) == 2
    finally:
        first.kill()
        second.kill()
    told = (tmp_path / "errors0.txt").read_text()
    assert "error: process 0: another of the 2 processes has ended; start all of them again" in told
    assert "Traceback" not in told

    made = {record["step"]: record["loss"] for record in steps_of(records)}
    config = TrainConfig.read(tmp_path / "run.toml")
    config = TrainConfig(**{**vars(config), "mesh": None})
    config = config.with_steps(STEPS)
    resumed = Training(config, tmp_path / "run")
    at = resumed.step
    assert at == EVERY
    after = next(resumed.steps()).loss
    straight = Training(config, tmp_path / "straight").steps()
    losses = [metrics.loss for metrics in itertools.islice(straight, at + 1)]
    np.testing.assert_allclose([made[step] for step in range(1, at + 1)], losses[:at], rtol=1e-4)
    np.testing.assert_allclose(after, losses[at], rtol=1e-4)


def test_processes_that_cannot_join(tmp_path: Path) -> None:
    written(tmp_path)
    command = ("train", "run.toml", "--processes", "2")
    assert_refused(
        (command, "--processes 2 needs --coordinator, the host and port of process 0"),
        (
            (*command, "--process", "2", "--coordinator", "localhost:1"),
            "process 2 of 2 cannot join at localhost:1: process=2 of processes=2; it must be from 0 to 1",
        ),
        cwd=tmp_path,
    )
