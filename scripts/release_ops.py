"""Runs every op of the installed package once on this device, and lowers its gradient: a part of scripts/release_check.sh.

Gradients are not compiled, which would take twice the time; what another jax does not take is seen before that.
"""

import sys
import time

import jax
import jax.numpy as jnp

import tilewright
from tilewright.core.dispatch import registered
from tilewright.workbench.check import call, call_with_gradients, draw_cotangents


def main() -> int:
    """Prints a line per op. The status is 1 where a result is not finite."""
    print(f"tilewright {tilewright.__version__} from {tilewright.__file__}, jax {jax.__version__}")
    wrong = 0
    for op in registered().values():
        began = time.monotonic()
        case = next(each for each in op.cases if each.small)
        function, arrays = call(op, case, None), case.draw("float32")
        cotangents = draw_cotangents(function, arrays, seed=0)
        results = jax.jit(function)(**arrays)
        jax.jit(call_with_gradients(function, case)).lower(arrays, cotangents)
        finite = all(
            bool(jnp.isfinite(leaf).all())
            for leaf in jax.tree.leaves(results)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        )
        wrong += not finite
        print(
            f"{op.name} {case.name}: {'ok' if finite else 'NOT FINITE'} ({time.monotonic() - began:.1f} s)", flush=True
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
