"""Peers: what they cover, what they are handed, how their answers are judged, and how they fail."""

import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.core.dispatch import find_op, registered
from tilewright.workbench.bench import Timing, bench_case
from tilewright.workbench.check import call, call_with_gradients
from tilewright.workbench.peers import agreement
from tilewright.workbench.peers.agreement import Wanted
from tilewright.workbench.peers.beside import ask
from tilewright.workbench.peers.compare import bench_peer
from tilewright.workbench.peers.registry import Adapter, Failed, Peer, Refused, absent, peers
from tilewright.workbench.records import Record

HERE = Path(__file__).resolve().parent
TENSORS = HERE / "numpy_tensors.py"
QUICK = Timing(seconds=0.02)
ADAPTERS = [adapter for peer in peers().values() for adapter in peer.adapters]


def made_up(stem: str, *, tensors: Path | None = TENSORS) -> Peer:
    adapter = Adapter(stem.removeprefix("with_"), f"tests.workbench.peers.{stem}")
    return Peer(adapter.name, "numpy", "pip install numpy", (adapter,), tensors)


def bench(peer: Peer, wanted: Wanted) -> Record:
    return bench_peer(peer, peer.adapters[0], wanted, QUICK)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_an_adapter_speaks_the_ops_language(adapter: Adapter) -> None:
    module = adapter.load()
    assert module.OPS
    for op, function in module.OPS.items():
        ours = inspect.signature(registered()[op].function).parameters
        theirs = inspect.signature(function).parameters
        assert set(theirs) <= set(ours)
        made = find_op(op).cases[0].outputs
        assert set(getattr(module, "OUTPUTS", {}).get(op, made)) <= set(made)
        assert set(adapter.layouts(op)) <= set(theirs)
        assert set(adapter.instead(op)) <= set(theirs)
        covered = []
        for case in find_op(op).cases:
            try:
                covered.append(adapter.settle(case))
            except Refused:
                continue
        assert covered, f"no case of {op} is for {adapter.name}"


@pytest.mark.slow
def test_looking_at_the_peers_imports_none_of_them() -> None:
    code = """
import sys
from tilewright.workbench.peers.registry import absent, peers
absent(tuple(peers().values()), None)
[adapter.ops for peer in peers().values() for adapter in peer.adapters]
heavy = {"torch", "triton", "fla", "liger_kernel", "tokamax", "jax.experimental.pallas.ops.gpu.attention_mgpu"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "op", "case", "reason"),
    [
        ("fla", "kda", "packed", "it takes no segment_ids"),
        ("fla", "layer_norm", "odd", f"it has no layer_norm; it has {', '.join(peers()['fla'].ops)}"),
        ("cudnn", "flash_attention", "bias_sinks_cap", "it takes no bias, sinks, soft_cap"),
        ("jax", "flash_attention", "prefix_or_sparse", "it takes no mask"),
        ("torch", "flash_attention", "window_8k", "it takes no window"),
        ("torch", "linear_cross_entropy", "batched", "it takes no z_loss"),
        ("liger", "linear_cross_entropy", "batched", "it takes no weights"),
        ("tokamax", "matmul", "odd", "it has no matmul; it has grouped_matmul"),
    ],
)
def test_what_a_peer_does_not_do_is_told(name: str, op: str, case: str, reason: str) -> None:
    with pytest.raises(Refused) as error:
        peers()[name].adapters[0].settle(find_op(op).case(case))
    assert str(error.value) == reason


def test_absent_peers_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = peers()["fla"]
    nowhere = Peer("nowhere", "surely_not_a_package", "pip install surely-not", real.adapters, real.tensors)
    for python in (None, sys.executable):
        told = absent((nowhere, made_up("with_numpy"), peers()["jax"]), python)
        assert list(told) == ["nowhere"]
        assert told["nowhere"] == (
            f"surely_not_a_package is not installed for {sys.executable}; there: pip install surely-not"
        )
    with pytest.raises(ValueError, match=r"--peer-python /no/such cannot be run .*; pass the path of an interpreter"):
        absent((nowhere,), "/no/such")
    with pytest.raises(ValueError, match="--peer-python /bin/false is not a Python that works"):
        absent((nowhere,), "/bin/false")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_itself_agrees_on_attention(mode, dtype) -> None:
    """It makes no logsumexp: its gradients are those of `out` alone."""
    op = find_op("flash_attention")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        wanted = Wanted(op, op.case("large_logits"), dtype, mode)
        record = bench(peers()["jax"], wanted)
    assert (record.implementation, record.mode, record.dtype) == ("jax", mode, dtype)
    assert record.metrics["agrees"] is True
    assert 0 <= record.metrics["error"] < agreement.TOLERANCE[dtype]
    assert record.metrics["lacks"] == "logsumexp"
    assert record.metrics["peer"] is True
    assert record.metrics["error_against"] == "reference, float32"
    assert len(record.samples_s) >= 5
    assert record.metrics["first_step_s"] > 0
    assert Record.from_json(record.to_json()) == record


def test_what_a_peer_holds_otherwise_is_brought_there_and_back() -> None:
    op = find_op("rms_norm")
    wanted = Wanted(op, op.case("odd"), "bfloat16", "forward+backward")
    record = bench(made_up("with_doubled_weights", tensors=None), wanted)
    assert record.metrics["agrees"] is True
    assert record.provenance.versions["jax"] == jax.__version__


def test_kernels_for_a_gpu_say_that_there_is_none() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("here is a GPU: what is tested is said on a machine without one")
    op = find_op("flash_attention")
    wanted = Wanted(op, op.case("odd"), "bfloat16", "forward")
    with pytest.raises(Refused, match="it needs an NVIDIA GPU, and this is a cpu"):
        bench(peers()["cudnn"], wanted)
    with pytest.raises(Refused, match="it is made for Hopper GPUs, and this is a cpu"):
        bench_peer(peers()["jax"], peers()["jax"].adapters[1], wanted, QUICK)
    with tilewright.target("h200"):
        assert peers()["jax"].adapters[1].unavailable() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("matmul", "relu"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("grouped_matmul", "unequal"), ("grouped_matmul", "swiglu"), ("matmul", "swiglu"))
        ),
    ],
)
def test_jax_itself_agrees_on_products(op: str, case: str) -> None:
    """An epilogue, groups of unequal sizes, and rows past the last group, with their gradients."""
    found, peer = find_op(op), peers()["jax"]
    (adapter,) = (one for one in peer.adapters if one.name == "jax:dot")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        record = bench_peer(peer, adapter, Wanted(found, found.case(case), "bfloat16", "forward+backward"), QUICK)
    assert record.metrics["agrees"] is True
    wanted = Wanted(found, found.case("float8_float8"), "bfloat16", "forward")
    with pytest.raises(Refused, match="it has no product of quantised operands with a scale per block"):
        bench_peer(peer, adapter, wanted, QUICK)


def test_options_of_the_compiler_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name: value for adapter in ADAPTERS for name, value in adapter.compiler_options.items()}
    assert set(named) == {"xla_gpu_enable_triton_gemm", "xla_gpu_experimental_use_ragged_dot_fusion"}
    jax.jit(lambda x: x + 1).lower(1.0).compile(named)  # XLA knows them, on any platform.
    adapter = Adapter("jax:dot", "tilewright.workbench.peers.with_jax_dot")
    monkeypatch.setattr(adapter.load(), "COMPILER_OPTIONS", {"xla_no_such_option": True}, raising=False)
    op = find_op("matmul")
    with pytest.raises(Failed, match="xla_no_such_option"):
        bench_peer(peers()["jax"], adapter, Wanted(op, op.case("odd"), "bfloat16", "forward"), QUICK)


def test_quantised_arrays_reach_another_process() -> None:
    op = find_op("matmul")
    record = bench(made_up("with_numpy"), Wanted(op, op.case("int8"), "bfloat16", "forward"))
    assert record.metrics["agrees"] is True


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_a_peer_in_its_own_process(mode) -> None:
    op = find_op("rms_norm")
    wanted = Wanted(op, op.case("odd"), "bfloat16", mode)
    record = bench(made_up("with_numpy"), wanted)
    assert record.implementation == "numpy"
    assert record.metrics["agrees"] is True
    assert 0 < record.metrics["error"] < 2**-7
    assert len(record.samples_s) >= 5
    assert record.metrics["peer_device"] == "an abacus"
    # Its kernels are told apart by call: 2 ms and 3 ms, without the gap between them.
    assert record.device_samples_s == pytest.approx((5e-3,) * len(record.device_samples_s))
    assert record.kernels_s == pytest.approx({"wire": 3e-3, "bead": 2e-3})
    assert record.metrics["device_s"] == pytest.approx(5e-3)
    assert record.metrics["flops_per_s"] > 0
    assert record.provenance.versions["abacus"] == "1.0"
    assert record.provenance.versions["numpy"] == np.__version__
    assert record.provenance.versions["jax"] == jax.__version__
    assert "not-installed-anywhere" not in record.provenance.versions
    assert Record.from_json(record.to_json()) == record


def test_another_interpreter_is_the_one_that_runs(tmp_path: Path) -> None:
    """It is started by path with no tilewright to import: here, a Python that cannot find it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH= MARK=1\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    op = find_op("rms_norm")
    wanted = Wanted(op, op.case("odd"), "bfloat16", "forward")
    peer = made_up("with_numpy")
    assert bench_peer(peer, peer.adapters[0], wanted, QUICK, str(python)).metrics["agrees"] is True
    with pytest.raises(Failed, match=r"its process ended with code 1"):
        bench_peer(peer, peer.adapters[0], wanted, QUICK, "/bin/false")


def test_a_wrong_answer_keeps_its_time_and_is_marked() -> None:
    op = find_op("rms_norm")
    record = bench(made_up("with_a_mistake"), Wanted(op, op.case("odd"), "bfloat16", "forward"))
    assert record.samples_s
    assert record.metrics["agrees"] is False
    assert record.metrics["error"] > 0.1
    assert record.metrics["error_in"] == "y"


def test_a_peers_error_is_its_answer() -> None:
    peer = made_up("with_an_error")
    for name, text in (
        ("rms_norm", "RuntimeError: this compiler makes wrong gradients; take a newer one"),
        ("layer_norm", "its process ended with code 7: illegal memory access"),
    ):
        op = find_op(name)
        with pytest.raises(Failed) as error:
            bench(peer, Wanted(op, op.case("odd"), "bfloat16", "forward"))
        assert str(error.value) == text
    op, inside = find_op("rms_norm"), made_up("with_an_error", tensors=None)
    with pytest.raises(Failed, match=r"^RuntimeError: this compiler makes wrong gradients; take a newer one$"):
        bench(inside, Wanted(op, op.case("odd"), "bfloat16", "forward"))


def test_a_peer_that_does_not_answer_is_ended() -> None:
    op, peer = find_op("gated_rms_norm"), made_up("with_an_error")
    adapter, case = peer.adapters[0], op.case("odd")
    with pytest.raises(Failed, match="it had no answer after 1 s, and was ended"):
        ask(adapter, TENSORS, adapter.settle(case), case.draw("bfloat16"), None, 0.1, limit_s=1.0)


@pytest.mark.slow
def test_a_loss_that_is_summed_is_judged_as_a_sum() -> None:
    """Liger's version of the case: one loss, with a gradient of 1."""
    op = find_op("linear_cross_entropy")
    wanted = Wanted(op, op.case("soft_cap"), "float32", "forward+backward")
    theirs = peers()["liger"].adapters[0].settle(wanted.case)
    assert theirs.options == {"return_logsumexp": False, "soft_cap": 5.0, "reduction": "sum"}
    cotangents = wanted.cotangents(theirs)
    assert [(c.shape, float(c)) for c in cotangents] == [((), 1.0)]
    x, w, labels = wanted.arrays["x"], wanted.arrays["w"], wanted.arrays["labels"]

    def summed(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = 5.0 * jnp.tanh(jnp.dot(x, w, precision="highest") / 5.0)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))

    loss, (dx, dw) = jax.value_and_grad(summed, argnums=(0, 1))(x, w)
    assert wanted.judge({"loss": loss, "d x": dx, "d w": dw}, theirs).ok
    off = wanted.judge({"loss": loss, "d x": dx, "d w": dw * 1.01}, theirs)
    assert not off.ok
    assert off.quantity == "d w"
    assert off.error == pytest.approx(0.01, rel=0.01)


def test_nan_never_agrees_and_has_a_place_in_json() -> None:
    op = find_op("rms_norm")
    wanted = Wanted(op, op.case("odd"), "float32", "forward")
    y = np.array(tilewright.rms_norm(**wanted.arrays))
    assert wanted.judge({"y": y}).ok
    y[2, 3] = np.nan
    judged = wanted.judge({"y": y})
    assert not judged.ok
    assert judged.metrics()["error"] is None
    assert judged.metrics()["agrees"] is False


def test_an_error_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    want = np.random.default_rng(0).normal(size=(37, 11)).astype(np.float32)
    want[3, 4] = -np.inf
    got = want * np.float32(1.001)
    got[5, 6] += 0.5
    whole = agreement.relative_error(got, want)
    finite = np.isfinite(want)
    assert whole == pytest.approx(
        max(
            np.linalg.norm(got[finite] - want[finite]) / np.linalg.norm(want[finite]),
            np.abs(got[finite] - want[finite]).max() / np.abs(want[finite]).max(),
        )
    )
    monkeypatch.setattr(agreement, "_PART", 10)
    assert agreement.relative_error(got, want) == pytest.approx(whole, rel=1e-12)
    assert agreement.relative_error(want, np.zeros_like(want)) == float("inf")


def test_an_answer_of_another_shape_is_not_judged_and_keeps_its_time() -> None:
    op = find_op("rms_norm")
    record = bench(made_up("with_an_axis_too_many"), Wanted(op, op.case("odd"), "bfloat16", "forward"))
    assert record.metrics["not_judged"] == "ValueError: y has shape [5, 7, 1] and should have [5, 7]"
    assert "agrees" not in record.metrics
    assert record.samples_s


def test_where_the_reference_takes_too_much_memory_xla_is_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    op = find_op("rms_norm")
    case = op.case("odd")
    plain = Wanted(op, case, "bfloat16", "forward+backward")
    monkeypatch.setattr(agreement, "_SHARE_OF_MEMORY", 0.0)
    lean = Wanted(op, case, "bfloat16", "forward+backward")
    both = jax.jit(call_with_gradients(call(op, case, "xla"), case))
    results = both(plain.arrays, plain.cotangents(case))
    judged = lean.judge(results)
    assert judged.wanted_from == "xla, float32"
    assert judged.ok
    assert judged.error == pytest.approx(plain.judge(results).error, rel=0.05)


def test_ours_is_judged_beside_them() -> None:
    op = find_op("rms_norm")
    case = op.case("odd")
    wanted = Wanted(op, case, "bfloat16", "forward+backward")
    record = bench_case(
        op, case, "xla", "bfloat16", "forward+backward", QUICK, lambda results: wanted.judge(results).metrics()
    )
    assert record.metrics["agrees"] is True
    assert "peer" not in record.metrics
