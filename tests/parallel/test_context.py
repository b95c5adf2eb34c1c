"""Ops over a sequence that is cut over a mesh axis: values, states and gradients as of the whole, and the bytes sent.

An error is measured against the reference in float64, and may be twice that of the same op on the whole sequence.
"""

import collections
import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilewright

AXIS = "context"
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Case:
    """An op, the shards, and the tokens of each."""

    op: str
    shards: int
    tokens: int
    segments: str = ""
    """"edge": segments end on the edges of shards; "odd": anywhere; "": none."""
    gates: float = 1.0
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def ids(self) -> np.ndarray | None:
        if not self.segments:
            return None
        length = self.tokens if self.segments == "edge" else self.tokens + 2
        at = np.arange(self.shards * self.tokens)
        return np.broadcast_to(at // length, (2, at.size)).astype(np.int32)

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        b, t, h, hv, k, v, width = 2, self.shards * self.tokens, 2, 4, 16, 24, 4

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape)

        if self.op == "flash_attention":
            return {"q": normal(b, t, hv, k), "k": normal(b, t, h, k), "v": normal(b, t, h, v)}
        if self.op == "short_conv":
            return {"x": normal(b, t, k), "w": normal(width, k), "initial_state": normal(b, width - 1, k)}
        keys = {name: normal(b, t, h, k) for name in ("q", "k")}
        keys = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in keys.items()}
        shapes = {"gated_delta_rule": (b, t, hv), "kda": (b, t, hv, k)}
        gate = {"g": -self.gates * np.abs(normal(*shapes[self.op]))} if self.op in shapes else {}
        beta = 1.0 / (1.0 + np.exp(-normal(b, t, hv)))
        return {**keys, "v": normal(b, t, hv, v), **gate, "beta": beta, "initial_state": normal(b, hv, k, v)}

    def function(self, axis_name: str | None, **more: Any) -> Callable[..., tuple[jax.Array, ...]]:
        options = dict(self.options) | more
        if self.op == "flash_attention":
            options |= {"return_logsumexp": True}
            options = {name: value for name, value in options.items() if axis_name or name != "exchange"}

        def run(arrays: dict[str, Any], ids: Any) -> Any:
            return getattr(tilewright, self.op)(**arrays, segment_ids=ids, axis_name=axis_name, **options)

        return run

    def on_shards(self) -> Callable[..., tuple[jax.Array, ...]]:
        devices = jax.devices()[: self.shards]
        mesh = jax.make_mesh((self.shards,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
        whole = ("initial_state", "w")
        specs = {name: P() if name in whole else P(None, AXIS) for name in self.arrays()}
        second = P(None, AXIS) if self.op == "flash_attention" else P()
        return jax.shard_map(
            self.function(AXIS),
            mesh=mesh,
            in_specs=(specs, P(None, AXIS)),
            out_specs=(P(None, AXIS), second),
        )

    def results(self, function: Callable[..., Any], dtype: str) -> dict[str, np.ndarray]:
        """Outputs and gradients, by name."""
        states = () if self.op == "short_conv" else ("initial_state", "g", "beta")
        given = {
            name: jnp.asarray(x, "float32" if name in states and dtype != "float64" else dtype)
            for name, x in self.arrays().items()
        }
        ids = None if self.ids is None else jnp.asarray(self.ids)

        def both(given: Any) -> Any:
            outputs, pullback = jax.vjp(lambda given: function(given, ids), given)
            rng = np.random.default_rng(1)
            cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in outputs)
            return outputs, pullback(cotangents)[0]

        outputs, gradients = jax.jit(both)(given)
        named = {f"output {n}": x for n, x in enumerate(outputs)} | gradients
        return {name: np.asarray(x, np.float64) for name, x in named.items()}


def check(case: Case) -> None:
    with jax.enable_x64(True):
        plain = {"implementation": "reference"}
        oracle = case.results(case.function(None, **plain), "float64")
    whole = case.results(case.function(None), case.dtype)
    cut = case.results(case.on_shards(), case.dtype)
    for name, want in oracle.items():
        floor = 4 * float(jnp.finfo(case.dtype).eps) * max(1.0, float(np.abs(want).max()))
        allowed = 2 * np.abs(whole[name] - want).max() + floor
        assert np.abs(cut[name] - want).max() <= allowed, (case, name)


PLAIN = (("implementation", "reference"),)
RING = (("causal", True), ("exchange", "ring"), *PLAIN)
QUICK = [
    Case("short_conv", 4, 3, "odd", options=(("activation", "silu"),)),
]
SLOW = [
    Case("kda", 4, 5, "odd", options=PLAIN),
    Case("flash_attention", 4, 6, "odd", options=RING),
    Case("kda", 2, 9, gates=200.0, options=PLAIN),
    Case("gated_delta_rule", 3, 6, "edge", dtype="bfloat16", options=PLAIN),
    Case("flash_attention", 3, 5, "odd", dtype="bfloat16", options=RING),  # Shards without halves.
    Case("flash_attention", 2, 5, "odd", options=(("causal", True), ("window", (6, 0)), *PLAIN)),  # Over heads.
    Case("short_conv", 2, 6, "edge", dtype="bfloat16"),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_results_are_those_of_the_whole_sequence(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_eight_shards() -> None:
    """In a process of its own, since this one has four devices."""
    code = (
        "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
        "from tests.parallel.test_context import PLAIN, RING, Case, check\n"
        "check(Case('delta_rule', 8, 3, 'odd', options=PLAIN))\n"
        "check(Case('flash_attention', 8, 4, 'odd', options=RING))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def sent(compiled: Any) -> dict[str, int]:
    """The bytes of each kind of collective in a compiled program without loops around them, per device."""
    sizes = {"f32": 4, "bf16": 2, "s32": 4}
    found: dict[str, int] = collections.Counter()
    for shapes, kind in re.findall(r"= (\(.*?\)|\S+) (collective-permute|all-to-all|all-gather)\(", compiled.as_text()):
        for dtype, axes in re.findall(r"(f32|bf16|s32)\[([\d,]*)\]", shapes):
            found[kind] += sizes[dtype] * math.prod(int(size) for size in axes.split(",") if size)
    return dict(found)


@functools.cache
def compiled_forward(case: Case) -> Any:
    ids = None if case.ids is None else jnp.asarray(case.ids)
    arrays = {name: jnp.asarray(x, case.dtype) for name, x in case.arrays().items()}
    # The outputs alone: what nobody reads is not sent.
    return jax.jit(lambda arrays: case.on_shards()(arrays, ids)[0]).lower(arrays).compile()


@pytest.mark.slow
def test_bytes_are_those_of_the_formulas() -> None:
    """docs/parallel.md. B=2, HV=4, K=16, V=24, W=4, and KV=2 in attention."""
    for n in (2, 4):
        rounds = math.ceil(math.log2(n))
        delta = sent(compiled_forward(Case("gated_delta_rule", n, 3 * n, "odd", options=PLAIN)))
        numbers = 2 * 4 * 16 * (24 * (rounds + 1) + 16 * (rounds - 1))  # Without T.
        assert delta == {"collective-permute": 4 * numbers + 4 * 2}
        conv = sent(compiled_forward(Case("short_conv", n, 6, "odd")))
        assert conv == {"collective-permute": 4 * (2 * 3 * 16) + 4 * 2}
    ring = sent(compiled_forward(Case("flash_attention", 2, 6, options=RING)))
    hops, dealt, back = 1 * 2 * 6 * 2 * (16 + 24), 2 * 6 * (4 * 16 + 2 * (16 + 24)), 2 * 6 * 4 * 24
    assert ring == {"collective-permute": 4 * (hops + dealt + back)}
    heads = sent(compiled_forward(Case("flash_attention", 2, 6, options=(("causal", True), *PLAIN))))
    assert heads == {"all-to-all": 4 * 2 * 6 * (4 * (16 + 24) + 2 * (16 + 24))}


def test_what_cannot_be_cut_is_an_error_with_its_remedy() -> None:
    def inside(function: Callable[..., Any], *arrays: jax.Array, shards: int = 4) -> Any:
        mesh = jax.make_mesh((shards,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
        cut = P(None, AXIS)
        run = jax.shard_map(function, mesh=mesh, in_specs=(cut,) * len(arrays), out_specs=cut)
        return jax.eval_shape(run, *arrays)

    def attend(q: jax.Array, **options: Any) -> Any:
        return tilewright.flash_attention(q, q, q, axis_name=AXIS, **options)

    x = jnp.zeros((1, 8, 2, 16))
    w = jnp.ones((4, 16))
    cases: list[tuple[str, Callable[[], Any]]] = [
        (
            r"^flash_attention: axis_name='context' is no axis of a jax.shard_map around this call; call flash_attention ",
            lambda: attend(x),
        ),
        (
            r"^exchange='heads' with KV=2 heads over 4 shards of 'context'; KV must be a multiple of the shards: use "
            r"exchange='ring'",
            lambda: inside(lambda q: attend(q, exchange="heads"), x),
        ),
        (
            r"^window with axis_name='context' and exchange='ring' \(KV=2, 4 shards\) is not supported; leave it out, or "
            r"use exchange='heads' on a mesh where KV is a multiple of the shards",
            lambda: inside(lambda q: attend(q, window=(3, 0)), x),
        ),
        (
            r"^q_offset with axis_name='context' and exchange='heads' \(KV=2, 2 shards\) is not supported; leave it out",
            lambda: inside(lambda q: attend(q, q_offset=3), x, shards=2),
        ),
        (
            r"^exchange='ring' without axis_name; give the mesh axis that T is cut over, or neither$",
            lambda: tilewright.flash_attention(x, x, x, exchange="ring"),
        ),
        (
            r"^short_conv: a shard over axis_name='context' has T=2 tokens, and needs W-1=3 or more, which the next ",
            lambda: inside(lambda x: tilewright.short_conv(x, w, axis_name=AXIS)[0], jnp.zeros((1, 8, 16))),
        ),
    ]
    for message, function in cases:
        with pytest.raises(ValueError, match=message):
            function()
