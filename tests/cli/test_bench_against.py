"""`tilewright bench --against`, as a person runs it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import assert_refused, tilewright
from tilewright.workbench.records import read_records

# Two peers that are made up, of RMS norm, and one that raises.
_MADE_UP = """
import sys
from pathlib import Path
from tilewright.workbench.peers.registry import Adapter, Peer, register
tensors = Path(sys.argv[1]) / "numpy_tensors.py"
for name in ("numpy", "a_mistake", "an_error"):
    adapter = Adapter(name, f"tests.workbench.peers.with_{name}")
    register(Peer(name, "numpy", "pip install numpy", (adapter,), tensors))
sys.argv = ["tilewright", *sys.argv[2:]]
from tilewright.cli.main import main
main()
"""
_PEERS = Path(__file__).resolve().parent.parent / "workbench" / "peers"


def with_made_up_peers(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = str(_PEERS.parent.parent.parent)
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{_MADE_UP}", str(_PEERS), *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
    )


@pytest.mark.slow
def test_all_of_them_on_a_cpu(tmp_path: Path) -> None:
    done = tilewright(
        *("bench", "flash_attention", "--against", "all", "--implementation", "xla"),
        *("--case", "odd,packed", "--grad", "--seconds", "0.05"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flat = " ".join(done.stdout.split())
    for words in (
        "ours / it",
        "jax does not compute logsumexp.",
        "against reference, float32; up to 0.02 agrees",
        "not timed: cudnn odd bfloat16: it needs an NVIDIA GPU, and this is a cpu",
        "not timed: jax:mosaic_gpu odd bfloat16: it is made for Hopper GPUs, and this is a cpu",
        "not timed: cudnn packed bfloat16, jax packed bfloat16, jax:mosaic_gpu packed bfloat16: it takes no segment_ids",
        "not timed: fla, liger, cublas, tokamax, without flash_attention",
    ):
        assert words in flat
    torch_is_here = importlib.util.find_spec("torch") is not None
    assert ("absent: torch: torch is not installed for" in flat) is not torch_is_here
    assert ("there: pip install torch" in flat) is not torch_is_here
    records = [r for r in read_records(tmp_path / "results" / "bench.jsonl") if r.implementation != "torch"]
    assert [(r.case, r.implementation) for r in records] == [("odd", "xla"), ("odd", "jax"), ("packed", "xla")]
    assert all(record.metrics["agrees"] for record in records)
    assert [record.metrics.get("peer") for record in records] == [None, True, None]


@pytest.mark.slow
def test_a_ratio_is_for_those_that_agree(tmp_path: Path) -> None:
    done = with_made_up_peers(
        *("bench", "rms_norm", "--against", "numpy,a_mistake,an_error", "--implementation", "xla"),
        *("--case", "odd", "--seconds", "0.05", "--plot", "out.png"),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {line.split("│")[3].strip(): [cell.strip() for cell in line.split("│")] for line in _rows(done.stdout)}
    device, ratio, error = 7, 8, 9
    assert (rows["xla"][device], rows["numpy"][device]) == ("-", "5.00 ms")
    assert rows["xla"][ratio] == "ours"
    assert float(rows["numpy"][ratio].removeprefix("~")) > 0  # Where it is within the noise, a tilde stands before it.
    assert rows["a_mistake"][ratio] == "-"
    assert rows["a_mistake"][error].endswith("DIFFERS")
    flat = " ".join(done.stdout.split())
    assert "differs: a_mistake odd bfloat16: y, " in flat
    assert rows["an_error"][4] == "failed"
    assert "failed: an_error odd bfloat16: RuntimeError: this compiler makes wrong gradients; take a newer one" in flat
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    records = {record.implementation: record for record in read_records(tmp_path / "results" / "bench.jsonl")}
    assert list(records) == ["xla", "numpy", "a_mistake", "an_error"]
    assert records["a_mistake"].samples_s
    assert records["a_mistake"].metrics["agrees"] is False


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("│")]


@pytest.mark.slow
def test_it_is_shipped_like_the_other_options(tmp_path: Path) -> None:
    done = tilewright(
        *("bench", "flash_attention", "--against", "jax,fla", "--implementation", "xla", "--case", "odd"),
        *("--seconds", "0.05", "--on", "local"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours / it" in done.stdout
    assert "jax does not compute logsumexp." in done.stdout
    assert "not timed: fla, without flash_attention" in done.stderr
    records = list(read_records(tmp_path / "results" / "bench.jsonl"))
    assert [record.implementation for record in records] == ["xla", "jax"]


def test_a_wrong_word_is_one_line(tmp_path: Path) -> None:
    bench = ("bench", "flash_attention")
    assert_refused(
        ((*bench, "--against", "flash"), "--against flash is not known; use one of fla, cudnn, jax, torch, liger"),
        ((*bench, "--against", "jax", "--compile-only"), "--against times peers and --compile-only takes no times"),
        ((*bench, "--peer-python", "python3"), "--peer-python is where peers are installed; name them with --against"),
        ((*bench, "--against", "torch", "--peer-python", "/no/such"), "--peer-python /no/such cannot be run"),
        cwd=tmp_path,
    )
