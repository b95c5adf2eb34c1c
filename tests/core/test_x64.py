"""64-bit mode (`jax_enable_x64`): Python numbers are of 64 bits there, and programs for chips are of 32 all the same."""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.ops.composition import kernels_of
from tilewright.core.case import Case
from tilewright.core.dispatch import KERNEL_PLATFORM, registered
from tilewright.workbench.check import call, call_with_gradients

PLATFORM = {"h200": "gpu", "v6e": "tpu"}
FAST = {("gated_delta_rule", "h200"), ("matmul", "v6e")}
CALLS = [
    pytest.param(name, chip, marks=[] if (name, chip) in FAST else [pytest.mark.slow])
    for name, op in registered().items()
    for chip, platform in PLATFORM.items()
    if any(KERNEL_PLATFORM.get(one) == platform for one in op.implementations)
]


def traced(name: str, chip: str) -> Any:
    """The first small case that an op's kernel for a chip takes, forward and, where it has one, backward."""
    op = registered()[name]
    kernel = next(one for one in op.implementations if KERNEL_PLATFORM.get(one) == PLATFORM[chip])

    def both(case: Case, arrays: dict[str, Any]) -> Any:
        function = call(op, case, kernel)
        outputs = jax.eval_shape(function, **arrays)
        return call_with_gradients(function, case)(arrays, tuple(jnp.ones(out.shape, out.dtype) for out in outputs))

    with tilewright.target(chip):
        for case in (case for case in op.cases if case.small):
            with contextlib.suppress(tilewright.Unsupported):
                return jax.jit(functools.partial(both, case)).trace(case.structs("bfloat16")).jaxpr.jaxpr
    raise AssertionError(f"{kernel} takes no small case of {name}")


@pytest.mark.parametrize(("name", "chip"), CALLS)
def test_kernels_have_no_64_bit_values(name: str, chip: str) -> None:
    with jax.enable_x64(True):
        kernels = list(kernels_of(traced(name, chip)))
    assert kernels
    for kernel in kernels:
        assert not re.search(r"\b[fiu]64\[", str(kernel))


@pytest.mark.parametrize("rows", [1, 9])
def test_a_bias_has_a_gradient(rows: int) -> None:
    """Its block is written at indices of one dtype."""
    q, bias = jnp.ones((1, 9, 2, 8)), jnp.ones((1, 2, rows, 9))

    def loss(bias: jax.Array) -> jax.Array:
        return jnp.sum(jnp.asarray(tilewright.flash_attention(q, q, q, bias=bias, implementation="xla")))

    with jax.enable_x64(True):
        gradient = jax.eval_shape(jax.grad(loss), bias)
    assert (gradient.shape, gradient.dtype) == (bias.shape, jnp.float32)
