"""Dispatch, targets, interpreters and `explain`, beyond what every op's contract covers."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.core import target
from tilewright.core.dispatch import find_op, registered
from tilewright.core.target import current_chip, current_interpret, current_target

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
LABELS = jax.ShapeDtypeStruct((8,), jnp.int32)


def test_contexts_nest_and_close() -> None:
    assert current_target() is None
    with tilewright.target("v6e"):
        with tilewright.target("v4") as inner, tilewright.interpret(detect_races=True):
            assert current_chip().name == inner.name == "v4"
            how = current_interpret()
            assert how is not None
            assert how.detect_races
        assert current_chip().name == "v6e"
        assert current_interpret() is None
    assert current_chip().name == "cpu"


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chip='tpu' is not known; use one of"), tilewright.target("tpu"):
        pass


def test_the_plain_interpreter_finds_no_races_and_says_so() -> None:
    with pytest.raises(ValueError, match=r"plain=True has no memory to find races in"):
        tilewright.interpret(plain=True, detect_races=True).__enter__()


def test_too_few_threads_for_the_interpreter_are_an_error_not_a_hang(monkeypatch) -> None:
    monkeypatch.setattr(target, "_INTERPRETER_THREADS", 1000)
    with pytest.raises(
        RuntimeError, match=r"would deadlock: .* JAX's CPU backend has \d+; set JAX_NUM_CPU_DEVICES=1000 before"
    ):
        target.gpu_interpret_params(target.Interpret())
    assert target.gpu_interpret_params(None) is None
    assert target.gpu_interpret_params(target.Interpret(), alone=True) is not None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken away here")
@pytest.mark.parametrize(("told", "devices"), [({}, 4), ({"JAX_NUM_CPU_DEVICES": "2"}, 2)])
def test_room_is_made_for_the_interpreter_unless_jax_was_told(told: dict[str, str], devices: int) -> None:
    program = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import jax; "
        "from tilewright.core.target import make_room_for_interpreters as make; "
        "make(); print(len(jax.devices('cpu'))); make()"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment | told, check=True
    )
    assert run.stdout.split() == [str(devices)]


def test_interpret_alone_does_not_change_the_choice() -> None:
    with tilewright.interpret():
        (decision,) = tilewright.explain("linear_cross_entropy", X, W, LABELS).decisions
        assert decision.implementation == "xla"
        (named,) = tilewright.explain("linear_cross_entropy", X, W, LABELS, implementation="pallas_tpu").decisions
    assert named.chip.name == "v6e"
    assert "in the interpreter" in str(named)
    with tilewright.target("v5e"), tilewright.interpret():
        (targeted,) = tilewright.explain("linear_cross_entropy", X, W, LABELS).decisions
    assert (targeted.implementation, targeted.chip.name) == ("pallas_tpu", "v5e")


def test_explain_reports_a_refusal_instead_of_raising() -> None:
    told = tilewright.explain(tilewright.linear_cross_entropy, X, W, LABELS, implementation="pallas_tpu")
    assert told.decisions == ()
    assert "it is a TPU kernel and this is a CPU; use implementation='xla'" in str(told)


def test_explain_sees_into_jitted_functions_again_and_again() -> None:
    @jax.jit
    def step(x, w, labels):
        first = tilewright.linear_cross_entropy(x, w, labels, reduction="sum")
        return first + tilewright.linear_cross_entropy(x, w, labels, reduction="mean", implementation="reference")

    for _ in range(2):
        names = [decision.implementation for decision in tilewright.explain(jax.grad(step), X, W, LABELS).decisions]
        assert names == ["xla", "reference"]


def test_explain_tells_what_runs_forward_and_backward() -> None:
    """With the configs, as expressions; given ones are named as arguments, in the direction that they are for."""
    forward = tilewright.configs.LinearCrossEntropyXlaForward(block_n=8, block_v=16)
    told = tilewright.explain("linear_cross_entropy", X, W, LABELS, config=forward)
    (decision,) = told.decisions
    assert decision.forward.config == decision.configs["forward"] == forward
    assert (decision.forward.config_source, decision.backward.config_source) == ("argument", "heuristic")
    assert f"forward: {forward!r} (argument)" in str(told)
    assert f"backward: {decision.configs['backward']!r} (heuristic)" in str(told)
    (plain,) = tilewright.explain("linear_cross_entropy", X, W, LABELS, implementation="reference").decisions
    assert plain.configs == {}
    assert "backward: JAX differentiates the forward pass" in str(plain)


def test_explain_of_a_function_without_ops() -> None:
    assert str(tilewright.explain(lambda x: x + 1, X)) == "no tilewright op was called"


def test_an_unknown_op_or_case_lists_the_known() -> None:
    with pytest.raises(
        ValueError, match=r"op='softmax' is not an op of tilewright; use one of flash_attention, decode"
    ):
        find_op("softmax")
    with pytest.raises(
        ValueError, match=r"op='moe_route' is a plain function .* tilewright profile SCRIPT, or use one"
    ):
        find_op("moe_route")
    with pytest.raises(ValueError, match=r"case='tiny' is not a case of linear_cross_entropy; use one of odd, batched"):
        find_op("linear_cross_entropy").case("tiny")


def test_every_op_is_registered_by_the_import_and_public() -> None:
    for name, op in registered().items():
        assert getattr(tilewright, name) is op.function
        assert op.cases
        assert any(case.small for case in op.cases)
        assert op.implementations[-1] == "reference"


def test_importing_tilewright_imports_no_kernel_and_no_tool() -> None:
    """It costs little beyond jax: no Pallas, no CLI, no plots."""
    code = (
        "import sys, time, jax; began = time.process_time(); import tilewright; "
        "took = time.process_time() - began; "
        "heavy = [m for m in ('jax.experimental.pallas', 'typer', 'rich', 'matplotlib', 'ray', 'sky') "
        "if m in sys.modules]; print(took, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took, heavy = done.stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    assert float(took) < 1.0


def lossy(**options: Any) -> Any:
    return jax.eval_shape(lambda *arrays: tilewright.linear_cross_entropy(*arrays, **options), X, W, LABELS)


def test_two_configs_of_one_kind_and_a_list_are_refused() -> None:
    forward = tilewright.configs.LinearCrossEntropyXlaForward(64, 512)
    with pytest.raises(TypeError, match="has two of one kind; pass a forward and a backward one at most"):
        lossy(config=(forward, forward))
    with pytest.raises(TypeError, match="is a list; pass one config, or a tuple of a forward and a backward one"):
        lossy(config=[forward])


def test_a_config_of_another_chips_kernel_is_refused_with_a_remedy_that_mends_it() -> None:
    config = tilewright.configs.LinearCrossEntropyTpuForward(16, 128)
    told = r"name implementation='pallas_tpu' .*; leave config out"
    with tilewright.target("cpu"), pytest.raises(tilewright.Unsupported, match=told):
        lossy(config=config)
