"""What every op promises, tested on every implementation of it.

A family subclasses `OpContract` once for each of its ops, names the op, and adds what is its own:

    class TestRmsNorm(OpContract):
        op_name = "rms_norm"

TPU kernels run in the TPU interpreter with race detection and with NaN in uninitialised memory.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import tilewright
from tilewright.core.dispatch import Op, find_op
from tilewright.core.numerics import judge
from tilewright.core.target import finding_races
from tilewright.workbench.check import DTYPES, CaseCheck, call, call_with_gradients, dtypes_taken, needs_interpreter


@functools.cache
def held_case(op_name: str, case: str, dtype: str) -> CaseCheck:
    """The oracle's answers for a case, computed once for all implementations."""
    op = find_op(op_name)
    return CaseCheck(op, op.case(case), dtype)


@contextlib.contextmanager
def able_to_run(implementation: str, *, plain: bool = False) -> Iterator[None]:
    """Runs a kernel of another platform in its interpreter, and fails if a data race was found there.

    `plain` is for vmap and remat: jax's simulating interpreter does not take them.
    """
    if not needs_interpreter(implementation):
        yield
        return
    if plain:
        with tilewright.interpret(plain=True):
            yield
        return
    with finding_races():
        yield


def assert_close(got, plain, oracle, what: str) -> None:
    """The 2x rule of core.numerics."""
    verdict = judge(got, plain, oracle)
    assert verdict.ok, f"{what}: {verdict}"


class OpContract:
    """Subclass, and set `op_name`."""

    op_name: str
    has_kernels_of_another = False

    @classmethod
    def op(cls) -> Op:
        return find_op(cls.op_name)

    @classmethod
    def small_cases(cls) -> list[str]:
        return [case.name for case in cls.op().cases if case.small]

    @classmethod
    def dtypes(cls, implementation: str | None) -> tuple[str, ...]:
        """What an implementation takes: its module's `DTYPES`, where it does not take all."""
        return DTYPES if implementation is None else dtypes_taken(cls.op(), implementation)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every case, implementation and dtype that a test asks for.

        Interpreters are slow. In one, the cases take the dtypes in turn (`tilewright check` takes both for each), and the
        second case's values, which has more in it, are what runs by default; the rest is marked slow, and all of it for an
        op that has another's kernels. So is the reference, which is what the others are held to.
        """
        ranges = {"implementation": self.op().implementations, "case": self.small_cases(), "dtype": DTYPES}
        asked = [name for name in ranges if name in metafunc.fixturenames]
        if not asked:
            return
        chosen = []
        for values in itertools.product(*(ranges[name] for name in asked)):
            given = dict(zip(asked, values, strict=True))
            marks: list[Any] = [pytest.mark.slow] if given.get("implementation") == "reference" else []
            taken = self.dtypes(given.get("implementation"))
            if given.get("dtype", taken[0]) not in taken:
                continue
            if needs_interpreter(given.get("implementation", "")):
                place = self.small_cases().index(given["case"]) if "case" in given else 0
                if "dtype" in given and given["dtype"] != taken[place % len(taken)]:
                    continue
                transformed = metafunc.function.__name__ in ("test_vmap", "test_remat")
                by_default = place == 1 and not transformed and not self.has_kernels_of_another
                marks = [] if by_default else [pytest.mark.slow]
            chosen.append(pytest.param(*values, marks=marks))
        metafunc.parametrize(asked, chosen)

    def test_values_and_gradients_meet_the_oracle(self, implementation: str, case: str, dtype: str) -> None:
        """And the same call gives the same bits."""
        held = held_case(self.op_name, case, dtype)
        both = jax.jit(call_with_gradients(call(held.op, held.case, implementation), held.case))
        with able_to_run(implementation):
            first = both(held.arrays, held.cotangents)
            second = both(held.arrays, held.cotangents)
        assert first
        for quantity, got in first.items():
            assert_close(got, held.plain[quantity], held.oracle[quantity], quantity)
            np.testing.assert_array_equal(got, second[quantity], quantity)

    def test_vmap(self, implementation: str) -> None:
        """A batch of calls is the calls one by one, gradients too."""
        op, case = self.op(), self.op().case(self.small_cases()[0])
        checks = [CaseCheck(op, case, self.dtypes(implementation)[0], seed=seed) for seed in (1, 2)]
        both = call_with_gradients(call(op, case, implementation), case)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[(held.arrays, held.cotangents) for held in checks])
        with able_to_run(implementation, plain=True):
            got = jax.jit(jax.vmap(both))(*stacked)
        for position, held in enumerate(checks):
            for quantity, values in got.items():
                assert_close(values[position], held.plain[quantity], held.oracle[quantity], f"vmap {quantity}")

    def test_remat(self, implementation: str) -> None:
        if implementation == "pallas_gpu" and needs_interpreter(implementation):
            pytest.skip("jax.checkpoint does not take the callbacks of the only interpreter there is for GPU kernels")
        held = held_case(self.op_name, self.small_cases()[0], self.dtypes(implementation)[0])
        function = call(held.op, held.case, implementation)
        rematerialised = jax.checkpoint(lambda arrays: function(**arrays))
        both = call_with_gradients(lambda **arrays: rematerialised(arrays), held.case)
        with able_to_run(implementation, plain=True):
            got = jax.jit(both)(held.arrays, held.cotangents)
        for quantity, values in got.items():
            assert_close(values, held.plain[quantity], held.oracle[quantity], f"remat {quantity}")

    def test_without_jit(self, implementation: str) -> None:
        if needs_interpreter(implementation):
            pytest.skip("an interpreter is as it is under jit, and slow")
        held = held_case(self.op_name, self.small_cases()[0], self.dtypes(implementation)[0])
        both = call_with_gradients(call(held.op, held.case, implementation), held.case)
        with able_to_run(implementation):
            got = both(held.arrays, held.cotangents)
        for quantity, values in got.items():
            assert_close(values, held.plain[quantity], held.oracle[quantity], f"eager {quantity}")

    def test_a_named_kernel_never_falls_back(self, implementation: str) -> None:
        if not needs_interpreter(implementation):
            pytest.skip(f"this device runs {implementation}")
        held = held_case(self.op_name, self.small_cases()[0], "float32")
        told = rf"cannot run this call: it is a .* kernel .*implementation='{self.op().plain}'"
        with pytest.raises(tilewright.Unsupported, match=told):
            call(held.op, held.case, implementation)(**held.arrays)

    def test_an_unknown_implementation_is_named_with_the_known_ones(self) -> None:
        held = held_case(self.op_name, self.small_cases()[0], "float32")
        known = ", ".join(map(repr, self.op().implementations))
        with pytest.raises(ValueError, match=rf"implementation='cuda' is not .*use one of {known}, or None"):
            call(held.op, held.case, "cuda")(**held.arrays)

    def test_a_config_of_another_kind_is_refused(self) -> None:
        held = held_case(self.op_name, self.small_cases()[0], "float32")
        with pytest.raises(TypeError, match=r"config='fast' is not a config that .* takes; configs: "):
            call(held.op, held.case, None, config="fast")(**held.arrays)

    def test_explain_and_the_debug_log_say_what_ran(self, caplog: pytest.LogCaptureFixture) -> None:
        case = self.op().case(self.small_cases()[0])
        with caplog.at_level(logging.DEBUG, logger="tilewright"):
            told = tilewright.explain(self.op_name, **case.structs("float32"), **case.options)
        (decision,) = told.decisions
        assert decision.implementation in self.op().implementations
        assert str(decision) in caplog.text
        for name in self.op().implementations[: self.op().implementations.index(decision.implementation)]:
            assert f"not {name}: " in str(told)

    def test_each_tpu_is_served_by_the_tpu_kernel(self) -> None:
        """Tracing for a TPU on any machine takes the TPU kernel."""
        if "pallas_tpu" not in self.op().implementations:
            pytest.skip("no TPU kernel")
        case = self.op().case(self.small_cases()[0])
        for chip in ("v4", "v5e", "v5p", "v6e", "v7x"):
            with tilewright.target(chip):
                (decision,) = tilewright.explain(self.op_name, **case.structs("bfloat16"), **case.options).decisions
            assert (decision.implementation, decision.launch.chip.name) == ("pallas_tpu", chip)
