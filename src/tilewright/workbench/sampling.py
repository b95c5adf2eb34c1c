"""How a steady state is timed: ours by the bench, and a peer's in a process of its own. Standard library only."""

import time
from collections.abc import Callable
from typing import Any

_SAMPLE_SECONDS = 0.005
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 100


def samples(run: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> tuple[float, ...]:
    """Seconds of one call, again and again for about `seconds`; at least five figures.

    A sample is the mean of enough calls in a row to outlast the clock's noise. They are queued one behind the other, and
    `wait` on the last one's result ends the sample.
    """

    def sample(calls: int) -> float:
        began = time.perf_counter()
        out = None
        for _ in range(calls):
            out = run()
        wait(out)
        return (time.perf_counter() - began) / calls

    sample(1)
    one = min(sample(1), sample(1))
    calls = max(1, round(_SAMPLE_SECONDS / one))
    count = int(seconds / (calls * one))
    return tuple(sample(calls) for _ in range(min(max(count, _LEAST_SAMPLES), _MOST_SAMPLES)))
