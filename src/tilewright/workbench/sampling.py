"""How a steady state is timed, by the bench and in a peer's own process. It imports the standard library only."""

import time
from collections.abc import Callable
from typing import Any

_SAMPLE_SECONDS = 0.005
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 100


def samples(run: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> tuple[float, ...]:
    """Samples of the seconds per call, taken for about `seconds`; at least five.

    A sample is the mean over enough consecutive calls to exceed the clock's noise. The calls are queued without waiting,
    and `wait` on the result of the last one ends the sample.
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
