"""What every op promises inside JAX's transformations and on meshes, as methods of the contract (tests/ops/contract.py).

All of it runs on the 4 virtual CPU devices of tests/conftest.py, a mesh of 2 x 2: axis "x" cuts batches and rows, axis "y"
heads, channels or a vocabulary. Kernels of other platforms are lowered for a chip of theirs, and their partitioning is
tested with stand-ins that return zeros of the kernels' shapes: what is compiled then is everything around the kernels.
"""

import collections
import contextlib
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tilewright.core.call import Call
from tilewright.core.case import Case
from tilewright.core.dispatch import KERNEL_PLATFORM, Op
from tilewright.core.target import finding_races
from tilewright.workbench.check import call, call_with_gradients, cotangents_like, dtypes_taken, needs_interpreter

# A chip that each platform's kernels are traced for, and JAX's name of the platform.
CHIP = {"tpu": "v6e", "gpu": "h200"}
LOWERED_AS = {"tpu": "tpu", "gpu": "cuda"}
MESH = (2, 2)
Scope = Literal["every", "compiled", "interpreted", "kernel"]
# Of the largest value of a result: float32 sums in another order, and one rounding of a bfloat16 result.
FLOAT_ERROR = {"float32": 2e-5, "bfloat16": 2**-7}


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh(MESH, ("x", "y"), axis_types=(kind,) * 2)


def over(scope: Scope, *, default: Literal["all", "first", "plain", "none"]) -> Callable[[Any], Any]:
    """Declares which implementations a test runs for, and what of it is in the default tier.

    `scope`: every implementation, those that this machine compiles, those that it interprets, or the kernels. `default`:
    all of it, the first case only, the op's plain implementation only, or none; the rest is marked slow.
    """

    def declared(function: Any) -> Any:
        function.scope, function.default = scope, default
        return function

    return declared


@contextlib.contextmanager
def able_to_run(implementation: str, *, plain: bool = False) -> Iterator[None]:
    """Runs a kernel of another platform in its interpreter, and fails if a data race was found there.

    `plain` leaves out the simulation of memories and the search for races. TPU kernels need it under vmap and remat.
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


def kernels_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr that are Pallas kernels, including those inside loops and transformations."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map", "core_map"):
            yield equation
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)  # A ClosedJaxpr has a Jaxpr.
            yield from kernels_of(inner) if hasattr(inner, "eqns") else ()


def kernels_in(jaxpr: Any) -> int:
    """The number of Pallas kernels in a jaxpr."""
    return len(list(kernels_of(jaxpr)))


def collectives(compiled: Any) -> dict[str, int]:
    """The number of each kind of collective of arrays in a compiled program; kinds that it has none of are left out.

    A collective of single bits is not counted: devices that take a branch together agree on it (the delta rule on a CPU).
    """
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    found = re.findall(rf"= (\(.*?\)|\S+) ({'|'.join(kinds)})(?:-start)?\(", compiled.as_text())
    return dict(
        collections.Counter(kind for shape, kind in found if not re.fullmatch(r"\(?(pred\[\](, )?)+\)?", shape))
    )


@contextlib.contextmanager
def kernels_that_return_zeros(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces what the toolkit runs by zeros of the declared shapes."""
    import tilewright.pallas.gpu.kernel as gpu
    import tilewright.pallas.tpu.kernel as tpu

    def zeros(outputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: None if x is None else jnp.zeros(x.shape, x.dtype) for name, x in outputs.items()}

    def run_tpu(self: Any, body: Any, arrays: Any, **_: Any) -> dict[str, Any]:
        shapes = {
            name: None if one is None else jax.ShapeDtypeStruct(one.shape, one.block.dtype)
            for name, one in self.outputs.items()
        }
        return zeros(shapes)

    def run_gpu(body: Any, *, outputs: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        return zeros(outputs)

    def run_in_place(body: Any, *, state: Any, outputs: Mapping[str, Any], **_: Any) -> tuple[dict[str, Any], Any]:
        return zeros(outputs), state

    monkeypatch.setattr(Op, "_refused_platforms", lambda self, decision: {})
    monkeypatch.setattr(tpu.Kernel, "run", run_tpu)
    for name, stand_in in (("run_kernel", run_gpu), ("run_in_place", run_in_place)):
        original = getattr(gpu, name)
        for module in [m for key, m in sys.modules.items() if key.startswith("tilewright.") and m is not None]:
            if getattr(module, name, None) is original:
                monkeypatch.setattr(module, name, stand_in)
    yield


class Composition:
    """The part of the contract about transformations and meshes. `OpContract` derives from it."""

    op_name: str
    call_type: type[Call]
    """The family's call, which says how outputs are cut."""
    shared: tuple[str, ...] = ()
    cuts: Mapping[str, Mapping[str, str]] = {"batch": {"B": "x"}, "heads": {"H": "y", "HV": "y", "KV": "y"}}
    """By name: the mesh axis of each letter of the public function's shapes that is cut."""
    only_compiler: tuple[str, ...] = ()
    """Cuts that need an exchange between devices, so that `shard_map` does not have them: a vocabulary."""
    whole_letter: str = "T"
    """An axis that cannot be cut."""
    mesh_case: Case | None = None
    """A case whose cut axes are even; None for the case of the properties."""

    op: Callable[..., Op]
    on_properties: Callable[..., Case]

    # Arrays, and where they are.

    @classmethod
    def composed(cls) -> Case:
        return cls.mesh_case or cls.on_properties()

    @classmethod
    def letters(cls, name: str, ndim: int) -> tuple[str, ...]:
        """The letters of an argument's axes, from the public function's annotation."""
        hint = typing.get_type_hints(cls.op().function)[name]
        texts = [one.dim_str for one in (hint, *getattr(hint, "__args__", ())) if hasattr(one, "dim_str")]
        for text in texts:
            fixed = [letter for letter in text.split() if not letter.startswith(("*", "..."))]
            leading = ndim - len(fixed)
            letters = []
            for letter in text.split():
                if letter.startswith("*tokens"):
                    letters += [f"tokens{n}" for n in range(leading)]
                elif letter.startswith("*"):
                    letters += [letter[1:]] * leading
                else:
                    letters.append(letter.removeprefix("#"))
            if len(letters) == ndim:
                return tuple(letters)
        return ("",) * ndim

    @classmethod
    def spec(cls, letters: tuple[str, ...], shape: tuple[int, ...], cut: Mapping[str, str]) -> P:
        return P(*(cut.get(letter) if size > 1 else None for letter, size in zip(letters, shape, strict=True)))

    @classmethod
    def specs(cls, arrays: Mapping[str, Any], cut: Mapping[str, str]) -> dict[str, P]:
        return {name: cls.spec(cls.letters(name, x.ndim), x.shape, cut) for name, x in arrays.items()}

    @classmethod
    def output_specs(cls, outputs: tuple[Any, ...], cut: Mapping[str, str]) -> tuple[P, ...]:
        def spelled(text: str, ndim: int) -> tuple[str, ...]:
            leading = [f"tokens{n}" for n in range(ndim - len(text.split()) + 1)]
            letters = [each for letter in text.split() for each in (leading if letter == "*tokens" else [letter])]
            return tuple(letters[:ndim])

        return tuple(
            cls.spec(spelled(text, x.ndim), x.shape, cut)
            for text, x in zip(cls.call_type.outputs, outputs, strict=False)
        )

    @classmethod
    def drawn(cls, implementation: str | None) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The arrays and the cotangents of the case."""
        dtype = dtypes_taken(cls.op(), implementation)[0] if implementation else "float32"
        arrays = cls.composed().draw(dtype)
        return arrays, cotangents_like(jax.eval_shape(call(cls.op(), cls.composed(), "reference"), **arrays), 0)

    @classmethod
    def function(cls, implementation: str | None) -> Callable[..., dict[str, Any]]:
        """(arrays, cotangents) -> outputs and gradients."""
        return call_with_gradients(call(cls.op(), cls.composed(), implementation), cls.composed())

    @classmethod
    def result_specs(cls, arrays: Mapping[str, Any], cotangents: tuple[Any, ...], cut: Mapping[str, str]) -> Any:
        case, specs = cls.composed(), cls.specs(arrays, cut)
        outputs = dict(zip(case.outputs, cls.output_specs(cotangents, cut), strict=True))
        return outputs | {f"d {name}": specs[name] for name in case.differentiable}

    def placed(self, mesh: Any, arrays: Any, specs: Any) -> Any:
        return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, specs)

    def assert_same(self, got: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
        """Equal within float error: sums over devices are in another order."""
        assert set(got) == set(expected)
        for name, value in expected.items():
            want, have = (np.asarray(x, np.float32) for x in (value, got[name]))
            assert want.shape == have.shape
            assert np.isfinite(have).all() or not np.isfinite(want).all(), f"{what} {name}"
            error, scale = np.max(np.abs(want - have), initial=0.0), np.max(np.abs(want), initial=1e-6)
            assert error <= FLOAT_ERROR[str(value.dtype)] * scale, f"{what} {name}: off by {error} of {scale}"

    def unsharded(self, implementation: str) -> dict[str, np.ndarray]:
        return _unsharded(type(self), implementation)

    @contextlib.contextmanager
    def traced_for(self, implementation: str) -> Iterator[str]:
        """The platform to lower for, with its chip as the target."""
        platform = KERNEL_PLATFORM[implementation]
        with tilewright.target(CHIP[platform]):
            yield LOWERED_AS[platform]

    def sharded_over(self, mesh: Any, implementation: str | None, cut: Mapping[str, str]) -> Callable[..., Any]:
        """Outputs and gradients inside `jax.shard_map`, with its check of varying axes on."""
        arrays, cotangents = self.drawn(implementation)
        specs = self.specs(arrays, cut), self.output_specs(cotangents, cut)
        results = self.result_specs(arrays, cotangents, cut)
        return jax.shard_map(self.function(implementation), mesh=mesh, in_specs=specs, out_specs=results)

    # Meshes.

    @over("every", default="none")
    def test_shard_map(self, implementation: str) -> None:
        """Values and gradients, the check of varying axes on, shared arrays replicated: the gradient is their sum."""
        arrays, cotangents = self.drawn(implementation)
        mesh = mesh_of(AxisType.Auto)
        for name, cut in self.cuts.items():
            if name in self.only_compiler:
                continue
            with able_to_run(implementation, plain=True):
                got = jax.jit(self.sharded_over(mesh, implementation, cut))(arrays, cotangents)
            self.assert_same(got, self.unsharded(implementation), f"shard_map over {name}")

    @over("kernel", default="none")
    def test_shard_map_lowers_the_kernel(self, implementation: str) -> None:
        """Traced for every cut, and lowered for one: what is lowered differs in sizes alone."""
        arrays, cotangents = self.drawn(implementation)
        mesh, first = mesh_of(AxisType.Auto), next(iter(self.cuts.values()))
        for name, cut in self.cuts.items():
            if name in self.only_compiler:
                continue
            with self.traced_for(implementation) as platform:
                traced = jax.jit(self.sharded_over(mesh, None, cut)).trace(arrays, cotangents)
                assert kernels_in(traced.jaxpr), name
                if cut is first:
                    traced.lower(lowering_platforms=(platform,))

    @over("compiled", default="none")
    def test_auto_axes(self, implementation: str) -> None:
        """`jax.jit` of sharded arrays: each device has its part, and what is summed is the gradient of shared arrays."""
        arrays, cotangents = self.drawn(implementation)
        for name, cut in self.cuts.items():
            placed = self._auto(arrays, cotangents, cut)
            compiled = jax.jit(self.function(implementation)).lower(*placed).compile()
            self.assert_same(compiled(*placed), self.unsharded(implementation), f"Auto axes, {name}")
            self._assert_stays(compiled, arrays, cut, name)

    @over("kernel", default="none")
    def test_auto_axes_of_the_kernel(self, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The partitioning rule of each pass: nothing is gathered, and only gradients of shared arrays are summed."""
        arrays, cotangents = self.drawn(implementation)
        with self.traced_for(implementation), kernels_that_return_zeros(monkeypatch):
            for name, cut in self.cuts.items():
                placed = self._auto(arrays, cotangents, cut)
                both = jax.jit(lambda *given: self.function(implementation)(*given))
                self._assert_stays(both.lower(*placed).compile(), arrays, cut, name)

    def _auto(self, arrays: Any, cotangents: Any, cut: Mapping[str, str]) -> Any:
        mesh = mesh_of(AxisType.Auto)
        specs = self.specs(arrays, cut), self.output_specs(cotangents, cut)
        return self.placed(mesh, (arrays, cotangents), specs)

    def _assert_stays(self, compiled: Any, arrays: Mapping[str, Any], cut: Mapping[str, str], name: str) -> None:
        found, specs = collectives(compiled), self.specs(arrays, cut)
        axes = set(cut.values())
        # The gradient of an array that is the same along a mesh axis is summed over it.
        replicated = any(axes - set(spec) for key, spec in specs.items() if key in self.composed().differentiable)
        allowed = {"all-reduce"} if replicated or name in self.only_compiler else set()
        assert set(found) <= allowed, f"{name}: {found}"

    @over("compiled", default="none")
    def test_explicit_axes(self, implementation: str) -> None:
        """Results carry the sharding of the arguments along the axes that they share."""
        arrays, cotangents = self.drawn(implementation)
        mesh = mesh_of(AxisType.Explicit)
        for name, cut in self.cuts.items():
            specs = self.specs(arrays, cut), self.output_specs(cotangents, cut)
            with jax.set_mesh(mesh):
                got = jax.jit(self.function(implementation))(*self.placed(mesh, (arrays, cotangents), specs))
            self.assert_same(got, self.unsharded(implementation), f"Explicit axes, {name}")
            for key, spec in self.result_specs(arrays, cotangents, cut).items():
                assert _same_spec(got[key].sharding.spec, spec), f"{name} {key}: {got[key].sharding.spec}, not {spec}"

    @over("kernel", default="none")
    def test_explicit_axes_lower_the_kernel(self, implementation: str) -> None:
        """Traced for every cut, and lowered for one: what is lowered differs in sizes alone."""
        arrays, cotangents = self.drawn(implementation)
        mesh, last = mesh_of(AxisType.Explicit), list(self.cuts.values())[-1]
        for name, cut in self.cuts.items():
            specs = self.specs(arrays, cut), self.output_specs(cotangents, cut)
            placed = self.placed(mesh, (arrays, cotangents), specs)
            with self.traced_for(implementation) as platform, jax.set_mesh(mesh):
                traced = jax.jit(self.function(None)).trace(*placed)
                assert kernels_in(traced.jaxpr), name
                if cut is last:
                    traced.lower(lowering_platforms=(platform,))

    @pytest.mark.slow
    def test_an_axis_that_cannot_be_cut_is_refused(self) -> None:
        """One sentence, with the op, the argument, the axis and the way out: `axis_name=`, where the op has it."""
        arrays, _ = self.drawn(None)
        mesh = mesh_of(AxisType.Explicit)
        for name, x in arrays.items():
            letters = self.letters(name, x.ndim)
            if self.whole_letter not in letters:
                continue
            axis = letters.index(self.whole_letter)
            spec = P(*("y" if n == axis else None for n in range(x.ndim)))
            given = {**self._even(arrays), name: jax.device_put(self._even(arrays)[name], NamedSharding(mesh, spec))}
            where = f"{name} is sharded over mesh axis 'y' along its axis {self.whole_letter}"
            exchanged = "axis_name" in inspect.signature(self.op().function).parameters
            way_out = rf"call {self.op_name}\(..., axis_name='y'\) inside jax" if exchanged else "use jax.shard_map"
            with (
                jax.set_mesh(mesh),
                pytest.raises(
                    ValueError,
                    match=rf"{self.op_name}: {where}, of \[.*\], and .* only; pass .*reshard\({name}, ...\).* {way_out}",
                ),
            ):
                call(self.op(), self.composed(), None)(**given)
            return
        raise AssertionError(f"no argument has the axis {self.whole_letter}")

    def _even(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays with one more element along `whole_letter` where its size is odd."""

        def shape(name: str, x: Any) -> tuple[int, ...]:
            letters = self.letters(name, x.ndim)
            return tuple(n + n % 2 * (letter == self.whole_letter) for letter, n in zip(letters, x.shape, strict=True))

        return {name: jnp.resize(x, shape(name, x)) for name, x in arrays.items()}

    # Transformations.

    @over("compiled", default="none")
    def test_nested_vmap_of_every_array(self, implementation: str) -> None:
        """Two axes of calls that differ in everything: weights, states and segments too."""
        arrays, cotangents = self.drawn(implementation)
        one = self.function(implementation)
        stacked = jax.tree.map(lambda x: jnp.stack([jnp.stack([x, x]), jnp.stack([x, x])]), (arrays, cotangents))
        got = jax.jit(jax.vmap(jax.vmap(one)))(*stacked)
        for i, j in ((0, 1), (1, 0)):
            self.assert_same({name: x[i, j] for name, x in got.items()}, self.unsharded(implementation), "nested vmap")

    @over("compiled", default="none")
    def test_scan_over_layers(self, implementation: str) -> None:
        """The op in the body of `jax.lax.scan`, differentiated through the loop, with and without remat."""
        arrays, cotangents = self.drawn(implementation)
        case = self.composed()
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
        body = call(self.op(), case, implementation)

        def layers(remat: bool) -> Callable[..., Any]:
            def step(carry: None, layer: Any) -> Any:
                return carry, (jax.checkpoint(lambda given: body(**given)) if remat else lambda given: body(**given))(
                    layer
                )

            return lambda **given: jax.lax.scan(step, None, given)[1]

        for remat in (False, True):
            both = call_with_gradients(layers(remat), case)
            got = jax.jit(both)(stacked, jax.tree.map(lambda x: jnp.stack([x, x]), cotangents))
            for n in range(2):
                self.assert_same({name: x[n] for name, x in got.items()}, self.unsharded(implementation), "scan")

    @over("kernel", default="none")
    def test_a_policy_keeps_what_the_backward_reads(self, implementation: str) -> None:
        """Saved by the op's name, the forward kernels run once; without, remat runs them again."""
        arrays, cotangents = self.drawn(implementation)
        case = self.composed()
        function = call(self.op(), case, implementation)

        def count(policy: Any) -> int:
            remat = jax.checkpoint(lambda given: function(**given), policy=policy)
            both = call_with_gradients(lambda **given: remat(given), case)
            with self.traced_for(implementation):
                return kernels_in(jax.make_jaxpr(both)(arrays, cotangents).jaxpr)

        with self.traced_for(implementation):
            plain = kernels_in(jax.make_jaxpr(self.function(implementation))(arrays, cotangents).jaxpr)
        kept = count(jax.checkpoint_policies.save_only_these_names(self.op_name))
        assert kept == plain
        assert count(jax.checkpoint_policies.nothing_saveable) >= kept

    @over("compiled", default="none")
    def test_forward_mode_and_second_order(self, implementation: str) -> None:
        """Right, or an error that names the op and the reference."""
        arrays, _ = self.drawn(implementation)
        case = self.composed()
        name = case.differentiable[0]
        rest = {key: x for key, x in arrays.items() if key != name}

        def scalar(x: Any, implementation: str) -> jax.Array:
            outputs = call(self.op(), case, implementation)(**rest, **{name: x})
            return sum((jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outputs), start=jnp.zeros(()))

        def second(x: Any, implementation: str) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(scalar)(x, implementation))))(x)

        def forward(x: Any, implementation: str) -> jax.Array:
            return jax.jvp(lambda x: scalar(x, implementation), (x,), (jnp.ones_like(x),))[1]

        for what, derivative in (("forward-mode", forward), ("second", second)):
            compute = jax.jit(derivative, static_argnums=1)
            if implementation not in ("reference", *self.plainly_differentiable):
                told = rf"^{self.op_name}: implementation='{implementation}' has no {what} derivative.*'reference'"
                with pytest.raises(tilewright.Unsupported, match=told):
                    compute(arrays[name], implementation)
                continue
            want, got = compute(arrays[name], "reference"), compute(arrays[name], implementation)
            scale = float(jnp.max(jnp.abs(want)))
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-3 * scale + 1e-6)

    plainly_differentiable: tuple[str, ...] = ()
    """Implementations beside the reference that are differentiable in forward mode and twice."""

    # Programs that outlive the process.

    @over("compiled", default="none")
    def test_a_serialised_program_with_donated_arrays_runs_again(self, implementation: str) -> None:
        arrays, cotangents = self.drawn(implementation)
        compiled = jax.jit(self.function(implementation), donate_argnums=0).lower(arrays, cotangents).compile()
        serialised = serialize_executable.serialize(compiled)
        again = serialize_executable.deserialize_and_load(*serialised, execution_devices=jax.devices()[:1])
        for program, what in ((compiled, "donated"), (again, "serialised")):
            copies = {name: jnp.array(x, copy=True) for name, x in arrays.items()}
            self.assert_same(program(copies, cotangents), self.unsharded(implementation), what)

    @over("compiled", default="none")
    def test_export_with_a_symbolic_batch_and_length(self, implementation: str) -> None:
        """Batches and rows are b, and the tokens of sequences t; a cache of another length is s."""
        arrays, _ = self.drawn(implementation)
        b, t, s = jax.export.symbolic_shape("b, t, s")
        sizes = {
            letter: size
            for name, x in arrays.items()
            for letter, size in zip(self.letters(name, x.ndim), x.shape, strict=True)
        }
        symbols = {
            "B": b,
            "M": b,
            "tokens0": b,
            "T": t,
            "tokens1": t,
            "S": t if sizes.get("S") == sizes.get("T") else s,
        }

        def symbolic(name: str, x: Any) -> jax.ShapeDtypeStruct:
            pairs = zip(self.letters(name, x.ndim), x.shape, strict=True)
            return jax.ShapeDtypeStruct(
                tuple(size if size == 1 else symbols.get(at, size) for at, size in pairs), x.dtype
            )

        shapes = {name: symbolic(name, x) for name, x in arrays.items()}
        function = call(self.op(), self.composed(), implementation)
        exported = jax.export.export(jax.jit(lambda given: function(**given)))(shapes)
        got = exported.call(arrays)
        want = self.unsharded(implementation)
        outputs = dict(zip(self.composed().outputs, got, strict=True))
        self.assert_same(outputs, {name: want[name] for name in outputs}, "exported")

    @pytest.mark.slow
    def test_export_takes_each_platform_s_kernel_or_refuses(self) -> None:
        """Never silently the plain implementation. Nothing is compiled."""
        kernels = [name for name in self.op().implementations if name in KERNEL_PLATFORM]
        arrays = self.composed().structs("bfloat16")
        function = jax.jit(lambda given: call(self.op(), self.composed(), None)(**given))
        chips = {LOWERED_AS[KERNEL_PLATFORM[name]]: CHIP[KERNEL_PLATFORM[name]] for name in kernels}
        for platform, chip in chips.items():
            told = rf"{self.op_name}: traced for cpu.* lowered for {platform}, .*tilewright.target\('{chip}'\)"
            with pytest.raises(tilewright.Unsupported, match=told):
                jax.jit(lambda given: function(given)).trace(arrays).lower(lowering_platforms=(platform,))
            with tilewright.target(chip):
                traced = function.trace(arrays)
                text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}[platform] in text
            with pytest.raises(tilewright.Unsupported, match=rf"{self.op_name}: .*; lower it once per platform"):
                traced.lower(lowering_platforms=(platform, "cpu"))


def _same_spec(got: Any, want: Any) -> bool:
    longest = max(len(got), len(want))
    padded = [(*spec, *(None,) * (longest - len(spec))) for spec in (got, want)]
    return padded[0] == padded[1]


@functools.cache
def _unsharded(contract: type[Composition], implementation: str) -> dict[str, np.ndarray]:
    arrays, cotangents = contract.drawn(implementation)
    with able_to_run(implementation, plain=True):
        return dict(jax.jit(contract.function(implementation))(arrays, cotangents).items())


def assert_the_kernel_refuses(op, arguments, text):
    """On an H200, and that the op then takes the reference, which the refusal names."""
    with tilewright.target("h200"):
        told = tilewright.explain(lambda x: op(**x, implementation="pallas_gpu"), arguments)
        (decision,) = tilewright.explain(lambda x: op(**x), arguments).decisions
    assert told.refusal is not None
    assert "use implementation='reference'" in told.refusal
    assert decision.implementation == "reference"
    assert re.search(text, told.refusal), told.refusal
