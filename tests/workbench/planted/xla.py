"""2 x, by configs that are right and slow, right and fast, or fast and not to be taken."""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from tests.workbench.planted.call import TwiceCall
from tilewright.core.call import Static
from tilewright.core.config import Config, search_over
from tilewright.core.implementation import Implementation, Launch, Pass

_ROUNDS = 60
_STEP = 2**26


class TwiceXlaForward(Config):
    """A larger block takes less time, and more memory."""

    choices = search_over(
        block=(1, 8), fault=("none", "wrong", "wrong gradient", "crash", "hang", "out of memory", "refused")
    )
    memory_fields = ("block",)

    block: int = 1
    fault: str = "none"


def _forward(call: TwiceCall, launch: Launch, *, save: bool) -> tuple[jax.Array, Any]:
    config: TwiceXlaForward = launch.config
    if config.fault == "crash":
        os._exit(3)
    if config.fault == "hang":
        time.sleep(600)
    if config.fault == "out of memory":
        held = []
        for _ in range(80):
            held.append(bytearray(b"x" * _STEP))
            time.sleep(0.02)
    if config.fault.startswith("wrong"):  # Fast, too.
        return (2.01 if config.fault == "wrong" else 2) * call.x, Static(config.fault)

    def work(_: int, x: jax.Array) -> jax.Array:
        return jnp.linalg.qr(x)[0]

    waited = jax.lax.fori_loop(0, _ROUNDS // config.block, work, call.x.astype(jnp.float32) + jnp.eye(64))
    return 2 * call.x + (0.0 * jnp.clip(waited[0, 0], -1, 1)).astype(call.x.dtype), Static(config.fault)


def _backward(call: TwiceCall, saved: Any, cotangents: jax.Array, launch: Launch) -> TwiceCall:
    return call.gradients(x=(-2 if saved.value == "wrong gradient" else 2) * cotangents)


def _refusal(call: TwiceCall, launch: Launch) -> str | None:
    return "it is refused; use another" if launch.config.fault == "refused" else None


IMPLEMENTATION = Implementation(
    forward=Pass(
        _forward, TwiceXlaForward, lambda chip, call: TwiceXlaForward(), unsupported_reason=_refusal, saved=""
    ),
    backward=Pass(_backward, follows_forward=True),
)
