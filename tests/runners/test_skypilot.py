"""SkyPilot's validation and dry run over a small catalog with made-up prices, without account, server or network."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.runners.skypilot import _PREFIX, chosen_price

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "scripts"
needs_sky = pytest.mark.skipif(
    importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed: uv run --extra sky pytest"
)
PRICES = {
    "tpu-v4-8": 8.0,
    "tpu-v5litepod-1": 2.0,
    "tpu-v5litepod-8": 16.0,
    "tpu-v5p-8": 8.0,
    "tpu-v6e-1": 2.0,
    "tpu-v6e-8": 16.0,
    "tpu-v6e-32": 64.0,
    "H100:1": 10.0,
    "H100:8": 80.0,
    "H200:8": 80.0,
}


def plans(home: Path, clouds: list[str], rentals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One process for all of them, since most of the time is importing SkyPilot."""
    shutil.copytree(HERE / "catalog", home / ".sky" / "catalogs" / "v8")
    (home / ".sky" / "config.yaml").write_text(f"allowed_clouds: {clouds or ['gcp']}\n")
    environment = os.environ | {
        "HOME": str(home),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    ask = json.dumps({"clouds": clouds, "rentals": rentals})
    done = subprocess.run(
        [sys.executable, str(HERE / "sky_dry_run.py"), ask],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@needs_sky
def test_available_machines_are_priced_and_others_are_one_line(tmp_path: Path) -> None:
    rentals: list[dict[str, Any]] = [{"accelerator": name} for name in PRICES]
    rentals += [
        {"accelerator": "tpu-v6e-8", "spot": True},
        {"accelerator": "tpu-v6e-7"},
        {"accelerator": "tpu-v7x-8"},  # SkyPilot 0.14.1 offers none.
        {"accelerator": "H200:1"},
        {"accelerator": None, "template": str(SCRIPTS / "tpu_resource.sky.yaml")},
        {"accelerator": "tpu-v4-8", "template": str(SCRIPTS / "tpu_resource.sky.yaml"), "idle_minutes": 30},
        {"accelerator": "H100:8", "template": str(SCRIPTS / "gpu_resource.sky.yaml"), "idle_minutes": None},
        {"accelerator": "H100:8", "infra": "nowhere"},
        {"accelerator": "H100:8", "template": str(tmp_path / "missing.yaml")},
    ]
    answers = plans(tmp_path, ["gcp"], rentals)
    assert [answer.get("price") for answer in answers[: len(PRICES)]] == list(PRICES.values())
    assert answers[5]["lines"][-1] == "sky:test: $16.00 an hour; torn down after 10 idle minutes"
    assert any(re.search(r"GCP \(us-east5-b\).*tpu-v6e-8:1.*16\.00", line) for line in answers[5]["lines"])
    spot, seven, v7x, one_h200, tpus, v4, gpus, nowhere, no_file = answers[len(PRICES) :]
    assert spot["price"] == 8.0
    assert re.match(r"sky:test cannot be had: Catalog does not contain any instances .*tpu-v6e-7", seven["error"])
    assert re.match(r"sky:test cannot be had: .*tpu-v7x-8", v7x["error"])
    assert re.match(r"sky:test cannot be had: .*H200", one_h200["error"])
    assert tpus["price"] == 2.0
    assert tpus["stops"] == [True, True, 10]
    # A generation other than the template's has its own runtime.
    assert (v4["price"], tpus["runtime"], v4["runtime"]) == (8.0, "v2-alpha-tpuv6e", answers[0]["runtime"])
    assert v4["runtime"] != tpus["runtime"]
    assert v4["stops"] == [True, True, 30]
    assert gpus["stops"][0] is False
    assert gpus["lines"][-1] == "sky:test: $80.00 an hour; torn down NEVER by itself"
    assert re.match(r"sky:test: SkyPilot refuses: .*nowhere", nowhere["error"])
    assert re.fullmatch(r"--template \S+missing.yaml is not a file", no_file["error"])
    assert all("\n" not in answer.get("error", "") for answer in answers)


@needs_sky
def test_missing_credentials_are_an_error_with_the_remedy(tmp_path: Path) -> None:
    (answer,) = plans(tmp_path, [], [{"accelerator": "tpu-v6e-8"}])
    assert answer["error"].startswith(
        "sky:test: SkyPilot has no valid credentials for any cloud on this machine; `sky check`"
    )


def test_the_price_is_that_of_the_chosen_row() -> None:
    table = " A   x   1.00\n GCP (us)   a3   26   234   H100:1   3.50       \x1b[32m   ✔\x1b[0m  \n".replace(
        "\x1b[32m", ""
    )
    assert chosen_price(table) == 3.5
    assert chosen_price("nothing was chosen\n") is None


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[36m(bash-1115-081635-5db4, pid=4965)\x1b[0m out (pid=3) more",
        "(bash-1115-081635-5db4, pid=4965) out (pid=3) more",
        "\x1b[36m(head, rank=0, pid=12)\x1b[0m out (pid=3) more",
        "out (pid=3) more",
    ],
)
def test_only_skypilots_prefix_is_removed(line: str) -> None:
    assert _PREFIX.sub("", line, count=1) == "out (pid=3) more"
