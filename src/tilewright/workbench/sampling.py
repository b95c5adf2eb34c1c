"""How a steady state is timed, by the bench and in a peer's own process. It imports the standard library only."""

import time
from collections.abc import Callable
from typing import Any

_SAMPLE_SECONDS = 0.005
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 100
_TRACED_SECONDS = 0.1
_LEAST_TRACED = 5
_MOST_TRACED = 50


def samples(run: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> tuple[float, ...]:
    """Samples of the seconds per call, taken for about `seconds`; at least five.

    A sample is the mean over enough consecutive calls to exceed the clock's noise. The calls are queued without waiting,
    and `wait` on the result of the last one ends the sample.
    """
    calls, one = calls_per_sample(run, wait)
    count = int(seconds / (calls * one))
    return tuple(sample(run, wait, calls) for _ in range(min(max(count, _LEAST_SAMPLES), _MOST_SAMPLES)))


def sample(run: Callable[[], Any], wait: Callable[[Any], Any], calls: int) -> float:
    """The seconds per call of so many consecutive calls."""
    began = time.perf_counter()
    out = None
    for _ in range(calls):
        out = run()
    wait(out)
    return (time.perf_counter() - began) / calls


def calls_per_sample(run: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[int, float]:
    """The number of calls that exceed the clock's noise, and the seconds of one, after a call to warm up."""
    sample(run, wait, 1)
    one = min(sample(run, wait, 1), sample(run, wait, 1))
    return max(1, round(_SAMPLE_SECONDS / one)), one


def calls_to_trace(seconds: float) -> int:
    """How many calls to trace, for the time on the device, of a program that takes so many seconds per call."""
    return min(max(round(_TRACED_SECONDS / max(seconds, 1e-9)), _LEAST_TRACED), _MOST_TRACED)
