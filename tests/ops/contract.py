"""What every op promises, as tests that run for every implementation of it.

A family subclasses `OpContract` once per op, names the op, and says which notions the op has:

    class TestGatedDeltaRule(OpContract):
        op_name = "gated_delta_rule"
        property_case = _case("gated_delta_rule", "properties", 2, 75, 1, 16, 16, hv=2, state=True, segments=4)
        tokens = ("q", "k", "v", "g", "beta", "segment_ids", "o")
        state = ("initial_state", "final_state")
        segments = "segment_ids"

A test of a notion that the op does not have (a norm has no sequence) is not collected at all. The default tier runs each
implementation on one small case, values and gradients, and the properties of one op's plain implementation. The slow tier
(`pytest -m slow`) runs every small case, TPU and GPU kernels with race detection and with NaN in uninitialised memory, and
every property on every implementation.
"""

import contextlib
import functools
import itertools
import logging
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import CHIP as CHIP
from tests.ops.composition import Composition, kernels_in
from tests.ops.composition import able_to_run as able_to_run
from tests.ops.composition import over as over
from tilewright import configs
from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.dispatch import KERNEL_PLATFORM, Decision, ImplementationName, Op, find_op
from tilewright.core.numerics import judge
from tilewright.workbench.check import DTYPES, CaseCheck, call, call_with_gradients, dtypes_taken, needs_interpreter

# tests/conftest.py turns XLA's optimisations off; this turns them on for one function.
OPTIMISED = {"xla_backend_optimization_level": 3}

Arrays = Mapping[str, Any]
Results = Mapping[str, Any]
KERNEL_SCOPES = ("interpreted", "kernel")


@functools.cache
def held_case(op_name: str, case: str, dtype: str) -> CaseCheck:
    """The oracle's results for a named case, computed once for all implementations."""
    op = find_op(op_name)
    return CaseCheck(op, op.case(case), dtype)


def assert_close(got: Any, plain: Any, oracle: Any, what: str) -> None:
    """Asserts the 2x rule of core.numerics."""
    verdict = judge(got, plain, oracle)
    assert verdict.ok, f"{what}: {verdict}"


def assert_meets(held: CaseCheck, got: Results, what: str = "") -> None:
    """Asserts that every output and every gradient is within the 2x rule of the oracle's."""
    assert set(got) == set(held.oracle)
    for quantity, values in got.items():
        assert_close(values, held.plain[quantity], held.oracle[quantity], f"{what} {quantity}".strip())


def implementations(*names: str) -> pytest.MarkDecorator:
    """Parametrizes a test beyond the contract over implementations. Those that this machine interprets are slow."""
    marks = {name: [pytest.mark.slow] if needs_interpreter(name) else [] for name in names}
    return pytest.mark.parametrize("implementation", [pytest.param(name, marks=marks[name]) for name in names])


class OpContract(Composition):
    """Subclass, set `op_name`, and set the attributes of the notions that the op has."""

    op_name: str
    shares_code_with: str | None = None
    """Another op with the same kernels and plain code."""
    wrapper_is_interpreted = False
    """Whether `SLOW_WRAPPER` runs in interpreters, too: a few ops show that kernels are wrapped as plain code is."""
    is_a_special_case = False
    """Whether kernels run this op as a special case of the one that it shares code with, so that interpreters run the
    properties of that one only, and its values in the slow tier."""
    interpreted_slowly: frozenset[str] = frozenset()
    """Implementations whose values are in the slow tier where they are interpreted: an op that shares their kernels has
    them in the default one."""
    values_are_slow = False
    """Whether programs of this op take so long, to compile and in interpreters, that values are those of `test_no_races`
    alone, and tests of the wrapper are left to other ops."""
    properties_in_default_tier = False
    """Whether the properties of the plain implementation are in the default tier: of one op, which has all of them, and of
    a new one."""
    default_case: str | None = None
    """The small case that each implementation runs in the default tier; None for the first."""
    not_taken: frozenset[tuple[str, str]] = frozenset()
    """Pairs (implementation, small case) that the implementation refuses."""

    not_interpreted: frozenset[str] = frozenset({"cpu_bench"})
    """Small cases that interpreters leave out: those to time on a CPU, and those that show no more of a kernel than others
    do."""

    property_case: Case | None = None
    """The case that properties are tested on: a batch of two or more, several blocks, taken by every implementation.
    None for the first small case that has such a batch."""
    shared: tuple[str, ...] = ("w", "bias", "sinks")
    """Arrays without a batch. The first axis of every other array and of every output is the batch."""
    any_leading_axes = False
    """Whether arrays may have any number of leading axes, all of them batches."""
    batched = True
    """Whether arrays have a batch at all. Groups of rows, for example, are parts of one call."""
    tokens: tuple[str, ...] = ()
    """Arrays and outputs whose second axis is a sequence that is causal: no output depends on a later token."""
    state: tuple[str, str] | None = None
    """The array and the output through which a call continues an earlier one."""
    segments: str | None = None
    """The array of segment ids."""
    segments_end_where_ids_change = False
    """Whether an id that comes again later is another segment; where False, ids of segments are unique."""

    def extreme(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays with extreme gates or logits. Override where the op has such a thing."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "op_name"):
            return  # What several ops share.
        has = {
            "test_causality": bool(cls.tokens) or cls.replace_later is not OpContract.replace_later,
            "test_chaining": cls.state is not None or cls.chained is not OpContract.chained,
            "test_packing": cls.segments is not None,
            "test_extremes": cls.extreme is not OpContract.extreme,
            "test_batch_independence": cls.batched,
            "test_nested_vmap_of_shared_arrays": cls.batched,
            "test_vmapped_calls_are_decided_once_for_the_larger_call": cls.batched,
            "test_export_with_a_symbolic_batch": cls.batched,
        }
        if not set(cls.op().implementations) & set(KERNEL_PLATFORM):
            has |= {name: False for name in dir(cls) if getattr(getattr(cls, name), "scope", "") in KERNEL_SCOPES}
        for name, exists in has.items():
            if not exists:
                setattr(cls, name, None)  # pytest does not collect it.

    # The op, its cases and the tests' parameters.

    @classmethod
    def op(cls) -> Op:
        return find_op(cls.op_name)

    @classmethod
    def small_cases(cls) -> list[str]:
        return [case.name for case in cls.op().cases if case.small]

    @classmethod
    def first_case(cls) -> str:
        return cls.default_case or cls.small_cases()[0]

    @classmethod
    def dtypes(cls, implementation: str | None) -> tuple[str, ...]:
        """The dtypes of inputs that an implementation takes."""
        return DTYPES if implementation is None else dtypes_taken(cls.op(), implementation)

    @classmethod
    def on_properties(cls) -> Case:
        """The case that properties are tested on."""
        if cls.property_case is not None:
            return cls.property_case
        small = [case for case in cls.op().cases if case.small]
        return next(case for case in small if not cls.batched or cls._batch(case.structs("float32")) > 1)

    @classmethod
    def _batch(cls, arrays: Arrays) -> int:
        return next(array.shape[0] for name, array in arrays.items() if name not in cls.shared)

    def _is_all_rows(self) -> bool:
        """Whether every array of the property case has a batch, so that every gradient does."""
        return self.batched and not set(self.shared) & set(self.on_properties().structs("float32"))

    def _wrapped_elsewhere(self, implementation: str) -> bool:
        """Whether another implementation, or an op that shares its code, goes through the wrapper in the same way."""
        return self.shares_code_with is not None or (implementation == "reference" and self.op().plain != "reference")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every implementation, case and dtype that a test asks for, each in its tier.

        The first case takes every dtype, but in an interpreter, which is slow; the others take the dtypes in turn.
        `tilewright check` takes all of them.
        """
        asked = [name for name in ("implementation", "case", "dtype") if name in metafunc.fixturenames]
        if not asked:
            return
        declared = getattr(OpContract, metafunc.function.__name__, metafunc.function)  # A subclass may override a test.
        scope, default = declared.scope, declared.default
        chosen = []
        for implementation in self.op().implementations:
            interpreted = needs_interpreter(implementation)
            included = {
                "every": True,
                "compiled": not interpreted,
                "interpreted": interpreted,
                "kernel": implementation in KERNEL_PLATFORM,
            }[scope]
            name = metafunc.function.__name__
            if not included or (name in NOT_INTERPRETED and _by_callbacks(implementation)):
                continue
            if interpreted and not self.wrapper_is_interpreted and name in SLOW_WRAPPER:
                continue
            if interpreted and self.is_a_special_case and name in PROPERTIES:
                continue
            if self.values_are_slow and name in (*PROPERTIES, VALUES):
                continue
            if interpreted and name == "test_determinism" and self._is_all_rows():
                continue  # test_batch_independence shows the same bits of a row in two runs.
            if name in WRAPPER and (self.values_are_slow or self._wrapped_elsewhere(implementation)):
                continue
            if name in HELD_TO_THE_REFERENCE and implementation == "reference" != self.op().plain:
                continue
            taken = self.dtypes(implementation)
            for number, case in enumerate(self.small_cases() if "case" in asked else [self.first_case()]):
                if (implementation, case) in self.not_taken or (interpreted and case in self.not_interpreted):
                    continue
                if (interpreted or implementation == "reference") and scope == "every" and case != self.first_case():
                    continue  # test_no_races runs all of them; the reference is what the others are held to.
                in_turn = (taken[number % len(taken)],)
                every_dtype = "dtype" in asked and not interpreted and case == self.first_case()
                for dtype in taken if every_dtype else in_turn:
                    first = case == self.first_case() and dtype == in_turn[0]
                    in_default = {
                        "all": True,
                        "first": first
                        and not (interpreted and (self.is_a_special_case or implementation in self.interpreted_slowly)),
                        "plain": first and implementation == self.op().plain and self.properties_in_default_tier,
                        "none": False,
                    }[default]
                    values = {"implementation": implementation, "case": case, "dtype": dtype}
                    if interpreted and name == VALUES and not in_default:
                        continue  # test_no_races asserts the same of it.
                    marks = [] if in_default else [pytest.mark.slow]
                    chosen.append(pytest.param(*(values[name] for name in asked), marks=marks))
        metafunc.parametrize(asked, chosen)

    # Values and gradients.

    @over("every", default="first")
    def test_values_and_gradients_meet_the_oracle(self, implementation: str, case: str, dtype: str) -> None:
        held = held_case(self.op_name, case, dtype)
        both = jax.jit(call_with_gradients(call(held.op, held.case, implementation), held.case))
        with able_to_run(implementation, plain=True):
            assert_meets(held, both(held.arrays, held.cotangents))

    @over("interpreted", default="none")
    def test_no_races(self, implementation: str, case: str, dtype: str) -> None:
        """Values and gradients in the interpreter that simulates memories: no race, no use of what was not written."""
        held = held_case(self.op_name, case, dtype)
        both = jax.jit(call_with_gradients(call(held.op, held.case, implementation), held.case))
        with able_to_run(implementation):
            assert_meets(held, both(held.arrays, held.cotangents))

    @over("compiled", default="none")
    def test_values_with_optimisations(self, implementation: str) -> None:
        """XLA's optimisations, which all other tests run without, change no result by more than roundings."""
        held = held_case(self.op_name, self.first_case(), self.dtypes(implementation)[-1])
        both = call_with_gradients(call(held.op, held.case, implementation), held.case)
        got = jax.jit(both, compiler_options=OPTIMISED)(held.arrays, held.cotangents)
        assert_meets(held, got, "optimised")

    # Properties. All of them run the same jitted function, on arrays of the same shapes.

    def draw(self, dtype: str, seed: int = 0) -> dict[str, Any]:
        """Arrays of the property case, with segments of one token and of many, within a block and across blocks."""
        arrays = self.on_properties().draw(dtype, seed)
        if self.segments is not None:
            ids = np.zeros_like(arrays[self.segments])
            for number, (start, end) in enumerate(self._segment_bounds(ids.shape[1])):
                ids[:, start:end] = number % 2 if self.segments_end_where_ids_change else number
            arrays[self.segments] = jnp.asarray(ids)
        return arrays

    @staticmethod
    def _segment_bounds(t: int) -> list[tuple[int, int]]:
        """The (start, end) of each segment of a sequence of t tokens. Its middle is inside a segment."""
        return list(itertools.pairwise(sorted({0, 1, t // 4, t // 4 + 1, t - t // 3, t})))

    @classmethod
    def properties_of(cls, implementation: str) -> Callable[[Arrays, tuple[Any, ...]], dict[str, np.ndarray]]:
        """(arrays, cotangents) -> outputs and gradients of the property case, compiled once."""
        return _compiled(cls, implementation)

    @classmethod
    def property_results(cls, implementation: str) -> dict[str, np.ndarray]:
        """Outputs and gradients of the property case as it is drawn, computed once."""
        return _property_results(cls, implementation)

    def held(self, implementation: str, kind: Literal["drawn", "extreme", "separate"] = "drawn") -> CaseCheck:
        return _held_property(type(self), self.dtypes(implementation)[0], kind)

    @over("every", default="plain")
    def test_determinism(self, implementation: str) -> None:
        """The same call gives the same bits, and they meet the oracle."""
        held, first = self.held(implementation), self.property_results(implementation)
        second = self.properties_of(implementation)(held.arrays, held.cotangents)
        assert_meets(held, first)
        for quantity, values in first.items():
            np.testing.assert_array_equal(values, second[quantity], quantity)

    @over("every", default="plain")
    def test_batch_independence(self, implementation: str) -> None:
        """The first row's outputs and gradients keep their bits whatever the other rows are: other values, or NaN."""
        held, run = self.held(implementation), self.properties_of(implementation)
        whole = self.property_results(implementation)
        assert_meets(held, whole)
        alone = self._first_row(whole)
        others = [self.draw(held.dtype, 1)]
        others += [self.extreme(dict(others[0]))] if type(self).extreme is not OpContract.extreme else []
        others += [{name: jnp.full_like(x, jnp.nan) if _floating(x) else x for name, x in others[0].items()}]
        # In an interpreter NaN alone: what reaches another row is NaN there.
        for other in others[-1:] if needs_interpreter(implementation) else others:
            mixed = {
                name: x if name in self.shared else jnp.concatenate([x[:1], other[name][1:]])
                for name, x in held.arrays.items()
            }
            for quantity, values in self._first_row(run(mixed, held.cotangents)).items():
                np.testing.assert_array_equal(values, alone[quantity], quantity)

    def _first_row(self, results: Results) -> dict[str, np.ndarray]:
        """The first row of each output and gradient; arrays without a batch have the sum of all rows' gradients."""
        return {name: values[:1] for name, values in results.items() if name.removeprefix("d ") not in self.shared}

    @over("every", default="plain")
    def test_causality(self, implementation: str) -> None:
        """To the bit: no output depends on later tokens, and no gradient of an output reaches a later token."""
        held, run = self.held(implementation), self.properties_of(implementation)
        t = self._split(held.arrays)
        cotangents = tuple(
            x.at[:, t:].set(0.0) if name in self.tokens else jnp.zeros_like(x) if self._is_final(name) else x
            for name, x in zip(held.case.outputs, held.cotangents, strict=True)
        )
        results = run(held.arrays, cotangents)
        changed = run(self.replace_later(held.arrays, self.draw(held.dtype, 1), t), cotangents)
        assert any(np.any(self.earlier(name, values, t)) for name, values in results.items())
        for name, values in results.items():
            np.testing.assert_array_equal(self.earlier(name, values, t), self.earlier(name, changed[name], t), name)
            if name.removeprefix("d ") in self.tokens and name.startswith("d "):
                assert not np.any(values[:, t:]), f"{name} is not zero after the last token that has a cotangent"

    def replace_later(self, arrays: Arrays, other: Arrays, t: int) -> dict[str, Any]:
        """The arrays with the tokens from t on taken from `other`."""
        return {
            name: jnp.concatenate([x[:, :t], other[name][:, t:]], axis=1) if name in self.tokens else x
            for name, x in arrays.items()
        }

    def earlier(self, name: str, values: Any, t: int) -> Any:
        """The part of an output or gradient that may not depend on tokens from t on."""
        name = name.removeprefix("d ")
        if name in self.tokens:
            return values[:, :t]
        return values[:0] if self._is_final(name) else values

    def _is_final(self, name: str) -> bool:
        return self.state is not None and name == self.state[1]

    def _split(self, arrays: Arrays) -> int:
        """A token in the middle of the sequence."""
        return next((x.shape[1] // 2 for name, x in arrays.items() if name in self.tokens), 0)

    @over("every", default="plain")
    def test_chaining(self, implementation: str) -> None:
        """A long call is two shorter ones, the second of which continues the first: values and gradients."""
        held = self.held(implementation)

        def run(arrays: Arrays, **options: Any) -> tuple[Any, ...]:
            out = held.op.function(**arrays, **{**held.case.options, **options}, implementation=implementation)
            return out if isinstance(out, tuple) else (out,)

        both = call_with_gradients(lambda **arrays: self.chained(run, arrays), held.case)
        with able_to_run(implementation, plain=True):
            assert_meets(held, jax.jit(both)(held.arrays, held.cotangents), "chained")

    def chained(self, run: Callable[..., tuple[Any, ...]], arrays: Arrays) -> tuple[Any, ...]:
        """The outputs of the call on `arrays`, by two calls `run(arrays, **options)` on parts of them."""
        assert self.state is not None
        t = self._split(arrays)
        first = self.named(run(self.cut(arrays, slice(0, t))))
        second = self.named(run(self.cut(arrays, slice(t, None)) | {self.state[0]: first[self.state[1]]}))
        return self.joined([first, second])

    def cut(self, arrays: Arrays, part: slice) -> dict[str, Any]:
        return {name: x[:, part] if name in self.tokens else x for name, x in arrays.items()}

    def named(self, outputs: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.on_properties().outputs, outputs, strict=True))

    def joined(self, parts: list[dict[str, Any]]) -> tuple[Any, ...]:
        """Outputs of parts of a sequence as those of the whole: tokens in a row, and the last of the states."""
        return tuple(
            jnp.concatenate([part[name] for part in parts], axis=1) if name in self.tokens else parts[-1][name]
            for name in self.on_properties().outputs
        )

    @over("every", default="plain")
    def test_packing(self, implementation: str) -> None:
        """Packed segments are separate calls: values and gradients. The initial state is the first segment's."""
        assert_meets(self.held(implementation, "separate"), self.property_results(implementation), "packed")

    def separate(self, **arrays: Any) -> tuple[Any, ...]:
        """The outputs of the packed call by one call of the reference per segment."""
        assert self.segments is not None
        case, parts = self.on_properties(), []
        for start, end in self._segment_bounds(arrays[self.segments].shape[1]):
            cut = self.cut(arrays, slice(start, end))
            cut.pop(self.segments)
            if self.state is not None and start > 0:
                cut.pop(self.state[0], None)
            parts.append(self.named(call(self.op(), case, "reference")(**cut)))
        return self.joined(parts)

    @over("every", default="plain")
    def test_extremes(self, implementation: str) -> None:
        """With extreme gates or logits, results are finite where the oracle's are, and within the same bounds."""
        held = self.held(implementation, "extreme")
        assert_meets(held, self.properties_of(implementation)(held.arrays, held.cotangents), "extreme")

    # Transformations.

    @over("every", default="none")
    def test_vmap(self, implementation: str) -> None:
        """A batch of calls is the calls one by one, gradients too. Every array differs from call to call."""
        held = self.held(implementation)
        checks = [held.redrawn(seed, self.draw(held.dtype, seed)) for seed in (1, 2)]
        both = call_with_gradients(call(held.op, held.case, implementation), held.case)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[(held.arrays, held.cotangents) for held in checks])
        with able_to_run(implementation, plain=True):
            got = jax.jit(jax.vmap(both))(*stacked)
        for position, held in enumerate(checks):
            assert_meets(held, {quantity: values[position] for quantity, values in got.items()}, "vmap")

    @over("compiled", default="none")
    def test_nested_vmap_of_shared_arrays(self, implementation: str) -> None:
        """Two axes of calls become one larger call, whose weights are the same for all."""
        first = self.held(implementation)
        case, other = first.case, self.draw(first.dtype, 1)
        held = [
            first,
            first.redrawn(1, {name: first.arrays[name] if name in self.shared else other[name] for name in other}),
        ]
        axes = {name: None if name in self.shared else 0 for name in case.inputs}
        both = call_with_gradients(call(first.op, case, implementation), case)
        both = jax.vmap(jax.vmap(both, (axes, 0)), (axes, 0))

        def nested(*values: Any) -> Any:
            return np.stack([np.stack(values), np.stack(values[::-1])])

        stacked = {
            name: held[0].arrays[name] if axis is None else nested(*(one.arrays[name] for one in held))
            for name, axis in axes.items()
        }
        cotangents = jax.tree.map(nested, *(one.cotangents for one in held))
        got = jax.jit(both)(stacked, cotangents)
        for i, j in itertools.product(range(2), range(2)):
            assert_meets(held[(i + j) % 2], {quantity: values[i, j] for quantity, values in got.items()}, "nested vmap")

    @over("compiled", default="none")
    def test_without_jit(self, implementation: str) -> None:
        held = held_case(self.op_name, self.first_case(), self.dtypes(implementation)[0])
        both = call_with_gradients(call(held.op, held.case, implementation), held.case)
        assert_meets(held, both(held.arrays, held.cotangents), "eager")

    # What is decided, and what is said of it. Nothing of this runs a kernel.

    @over("interpreted", default="all")
    def test_a_named_kernel_never_falls_back(self, implementation: str) -> None:
        case = self.op().case(self.first_case())
        told = rf"cannot run this call: it is a .* kernel .*implementation='{self.op().plain}'"
        with pytest.raises(tilewright.Unsupported, match=told):
            call(self.op(), case, implementation)(**case.draw("float32"))

    def test_a_case_that_is_not_taken_is_refused_with_the_way_out(self) -> None:
        for implementation, name in self.not_taken:
            told = self.explained(implementation, self.op().case(name))
            assert told.refusal is not None
            assert f"use implementation='{self.op().plain}'" in told.refusal

    def test_an_unknown_implementation_is_named_with_the_known_ones(self) -> None:
        case = self.op().case(self.first_case())
        known = ", ".join(map(repr, self.op().implementations))
        with pytest.raises(ValueError, match=rf"implementation='cuda' is not .*use one of {known}, or None"):
            call(self.op(), case, "cuda")(**case.draw("float32"))

    def test_implementations_are_literals(self) -> None:
        annotation = typing.get_type_hints(self.op().function)["implementation"]
        assert annotation == (ImplementationName | None)
        assert set(self.op().implementations) <= set(typing.get_args(ImplementationName))

    def test_a_config_of_another_kind_is_refused(self) -> None:
        case = self.op().case(self.first_case())
        with pytest.raises(TypeError, match=r"config='fast' is not a config that .* takes; configs: "):
            call(self.op(), case, None, config="fast")(**case.draw("float32"))

    def explained(self, implementation: str | None, case: Case, config: Any = None) -> Any:
        """`tilewright.explain` of a case on a chip that the implementation is for."""
        platform = KERNEL_PLATFORM.get(implementation or "", "cpu")
        dtype = self.dtypes(implementation)[-1]
        with tilewright.target(CHIP[platform]) if platform in CHIP else contextlib.nullcontext():
            return tilewright.explain(call(self.op(), case, implementation, config), **case.structs(dtype))

    @over("every", default="all")
    def test_configs_are_shown_and_can_be_pasted_back(self, implementation: str) -> None:
        """Forward and backward have configs of their own. Each prints as an expression and goes through JSON."""
        case = self.op().case(self.first_case())
        told = self.explained(implementation, case)
        (decision,) = told.decisions
        of_chip, _ = self.op()._for_architecture(implementation, decision.chip)
        assert of_chip is not None
        for direction, one in of_chip.passes.items():
            config = decision.configs.get(direction)
            if one.config is None:
                assert config is None
                continue
            assert type(config) is one.config is getattr(configs, one.config.__name__)
            assert one.config.__name__.endswith(direction.title())
            assert f"{direction}: {config!r} (heuristic)" in str(told)
            assert eval(repr(config), {"tilewright": tilewright}) == config
            assert configs.from_json(configs.to_json(config)) == config
        if decision.configs:
            (again,) = self.explained(implementation, case, tuple(decision.configs.values())).decisions
            assert again.configs == decision.configs
            assert str(again).count("(argument)") == len(decision.configs)

    @over("kernel", default="none")
    def test_a_kernel_has_its_own_backward_or_says_so(self, implementation: str) -> None:
        """No kernel's gradient is another implementation's in silence: it has kernels, or refuses, or a note says whose."""
        case = self.op().case(self.first_case())
        arrays, function = case.structs(self.dtypes(implementation)[-1]), call(self.op(), case, implementation)
        (decision,) = self.explained(implementation, case).decisions

        def count(differentiated: bool) -> int:
            def traced(arrays: Arrays) -> Any:
                if not differentiated:
                    return function(**arrays)
                cotangents = jax.tree.map(jnp.ones_like, jax.eval_shape(function, **arrays))
                return call_with_gradients(function, case)(arrays, cotangents)

            with tilewright.target(CHIP[KERNEL_PLATFORM[implementation]]):
                return kernels_in(jax.make_jaxpr(traced)(arrays).jaxpr)

        if decision.backward.refusal is not None:
            with pytest.raises(tilewright.Unsupported, match="cannot differentiate this call"):
                count(differentiated=True)
        elif count(differentiated=True) <= count(differentiated=False):
            assert any(name in decision.backward.note for name in (*self.op().implementations, "JAX"))

    @pytest.mark.slow
    def test_vmapped_calls_are_decided_once_for_the_larger_call(self) -> None:
        """One call of 4 x 8 times the batch: the config is chosen for the shape that runs."""
        case = self.on_properties()
        arrays, function = case.structs("bfloat16"), call(self.op(), case, None)
        axes = ({name: None if name in self.shared else 0 for name in arrays},)
        vmapped = jax.vmap(jax.vmap(lambda given: function(**given), axes), axes)

        def larger(*, stacked: bool) -> dict[str, Any]:
            leading = {name: (4, 8, x.shape[0]) if stacked else (4 * 8 * x.shape[0],) for name, x in arrays.items()}
            return {
                name: x if name in self.shared else jax.ShapeDtypeStruct((*leading[name], *x.shape[1:]), x.dtype)
                for name, x in arrays.items()
            }

        for chip in CHIP.values():
            with tilewright.target(chip):
                decided = tilewright.explain(vmapped, larger(stacked=True)).decisions
                expected = tilewright.explain(function, **larger(stacked=self.any_leading_axes)).decisions
            assert len(decided) == len(expected) == 1
            assert str(decided[0]) == str(expected[0])

    def test_explain_and_the_debug_log_say_what_ran(self, caplog: pytest.LogCaptureFixture) -> None:
        case = self.op().case(self.first_case())
        with caplog.at_level(logging.DEBUG, logger="tilewright"):
            told = tilewright.explain(self.op_name, **case.structs("float32"), **case.options)
        (decision,) = told.decisions
        assert isinstance(decision, Decision)
        assert decision.implementation in self.op().implementations
        assert str(decision) in caplog.text
        assert "\n  forward: " in str(told)
        assert "\n  backward: " in str(told)
        for name in self.op().implementations[: self.op().implementations.index(decision.implementation)]:
            assert f"not {name}: " in str(told)

    def test_each_tpu_is_served_by_the_tpu_kernel(self) -> None:
        """Tracing for a TPU on any machine takes the TPU kernel."""
        case = self.op().case(self.first_case())
        for chip in ("v4", "v5e", "v5p", "v6e", "v7x"):
            with tilewright.target(chip):
                (decision,) = tilewright.explain(self.op_name, **case.structs("bfloat16"), **case.options).decisions
            expected = "pallas_tpu" if "pallas_tpu" in self.op().implementations else self.op().plain
            assert (decision.implementation, decision.chip.name) == (expected, chip)

    def test_kernels_are_refused_on_gpus_they_are_not_written_for(self) -> None:
        """Another architecture is served by the plain implementation, and says so."""
        case = self.op().case(self.first_case())
        for chip in ("a100", "b200"):
            with tilewright.target(chip):
                told = tilewright.explain(self.op_name, **case.structs("bfloat16"), **case.options)
            assert told.decisions[0].implementation == self.op().plain
            if "pallas_gpu" in self.op().implementations:
                has = ".".join(map(str, Chip.named(chip).compute_capability or ()))
                reason = (
                    rf"not pallas_gpu: it is written for .* and the chip is {chip}, with compute capability {has}; use"
                )
                assert re.search(reason, str(told))


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# Tests that the only interpreter there is for GPU kernels cannot run: its callbacks on several devices wait for each other.
NOT_INTERPRETED = ("test_shard_map",)


# Tests of the wrapper (core/differentiable.py) rather than of what it wraps.
WRAPPER = (
    "test_a_policy_keeps_what_the_backward_reads",
    "test_a_serialised_program_with_donated_arrays_runs_again",
    "test_export_with_a_symbolic_batch",
    "test_nested_vmap_of_every_array",
    "test_nested_vmap_of_shared_arrays",
    "test_scan_over_layers",
    "test_values_with_optimisations",
    "test_vmap",
    "test_without_jit",
)
# Tests that hold an implementation to the reference.
HELD_TO_THE_REFERENCE = ("test_forward_mode_and_second_order",)
# Tests of the wrapper rather than of a kernel that are slow in an interpreter.
SLOW_WRAPPER = ("test_shard_map", "test_vmap")
VALUES = "test_values_and_gradients_meet_the_oracle"
PROPERTIES = (
    "test_determinism",
    "test_batch_independence",
    "test_causality",
    "test_chaining",
    "test_packing",
    "test_extremes",
)


def _by_callbacks(implementation: str) -> bool:
    return KERNEL_PLATFORM.get(implementation) == "gpu" and needs_interpreter(implementation)


@functools.cache
def _compiled(contract: type[OpContract], implementation: str) -> Callable[..., dict[str, np.ndarray]]:
    case = contract.on_properties()
    both = jax.jit(call_with_gradients(call(contract.op(), case, implementation), case))

    def run(arrays: Arrays, cotangents: tuple[Any, ...]) -> dict[str, np.ndarray]:
        with able_to_run(implementation, plain=True):
            return {name: np.asarray(values) for name, values in both(dict(arrays), cotangents).items()}

    return run


@functools.cache
def _property_results(contract: type[OpContract], implementation: str) -> dict[str, np.ndarray]:
    held = _held_property(contract, contract.dtypes(implementation)[0], "drawn")
    return _compiled(contract, implementation)(held.arrays, held.cotangents)


@functools.cache
def _held_property(contract: type[OpContract], dtype: str, kind: Literal["drawn", "extreme", "separate"]) -> CaseCheck:
    """The property case as it is drawn, with extreme values, or with the oracle of separate calls per segment."""
    this = contract()
    if kind == "drawn":
        return CaseCheck(this.op(), this.on_properties(), dtype, arrays=this.draw(dtype))
    drawn = _held_property(contract, dtype, "drawn")
    if kind == "extreme":
        return drawn.redrawn(0, this.extreme(dict(drawn.arrays)))
    return drawn.against(this.separate)
