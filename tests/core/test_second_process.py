"""A second process compiles nothing: programs are the same from process to process, so compilation caches hit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = """
import sys, jax, jax.numpy as jnp, tilewright
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
q, g, x = jnp.ones((1, 40, 2, 16)), jnp.full((1, 40, 2), -0.5), jnp.ones((3, 64))
calls = [
    lambda q: tilewright.gated_delta_rule(q, q, q, g, -g, normalize_qk=True)[0],
    lambda q: tilewright.flash_attention(q, q, q, causal=True),
    lambda q: tilewright.linear_cross_entropy(q.reshape(-1, 64), jnp.ones((64, 32)), jnp.zeros(20, jnp.int32)),
]
for one in calls:
    jax.jit(jax.grad(lambda q: jnp.sum(one(q))))(q).block_until_ready()
print(sum(e.endswith("/cache_hits") for e in events), sum(e.endswith("/cache_misses") for e in events))
"""
LOWERED = """
import hashlib, jax, jax.numpy as jnp, tilewright
q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
g = jax.ShapeDtypeStruct((1, 128, 2), jnp.float32)
function = jax.jit(lambda q, g: jax.grad(lambda q: jnp.sum(
    tilewright.gated_delta_rule(q, q, q, g, g)[0] + tilewright.flash_attention(q, q, q, causal=True)
).astype(jnp.float32))(q))
for chip, platform in (("v6e", "tpu"), ("h200", "cuda")):
    with tilewright.target(chip):
        text = function.trace(q, g).lower(lowering_platforms=(platform,)).as_text()
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def run(code: str, *arguments: str, seed: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_the_persistent_cache_has_everything(tmp_path: Path) -> None:
    hits, misses = map(int, run(COMPILED, str(tmp_path), seed=1))
    assert (hits, misses > 0) == (0, True)
    again, missed = map(int, run(COMPILED, str(tmp_path), seed=2))
    assert (again, missed) == (misses, 0)


@pytest.mark.slow
def test_kernels_are_lowered_to_the_same_program() -> None:
    """Each chip's program, with its kernels, has the same text in two processes that hash differently."""
    assert run(LOWERED, seed=1) == run(LOWERED, seed=2)
