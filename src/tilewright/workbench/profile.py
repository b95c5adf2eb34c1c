"""Profiles: a trace of the steady state of an op, a script or a training run, and what is in it.

Compilation and warm-up are outside of the trace. The files are those of `jax.profiler`, for XProf and Perfetto.
"""

import contextlib
import dataclasses
import math
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tilewright.core.case import Work
from tilewright.core.target import default_device
from tilewright.pallas import names
from tilewright.workbench.hlo_work import OperationWork, live_work
from tilewright.workbench.trace import Event, Gap, Platform, Trace, busy_s, gaps, read_trace, recording

WARM_UP_CALLS = 3
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_POLL_S = 0.02
_SIGNAL = signal.SIGURG
"""Between the thread that decides when a script is traced and the main thread, which runs it. A process that has no handler
ignores it; with libtpu loaded, SIGPROF came again once the handler was gone, and ended the process.
"""


class NothingTraced(Exception):
    """There was no steady state to trace, or no operation in it. The text is the reason and the remedy.

    `code`: the exit code of the script that ended too early, where that is an error's.
    """

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


class ScriptFailed(Exception):
    """A script raised an exception. The text is its traceback, from the script's own line on.

    `profile`: what had been traced by then, or None.
    """

    profile: "Profile | None" = None


@dataclass(frozen=True)
class Operation:
    """All executions of one operation in a trace."""

    name: str
    calls: int
    seconds: float
    """In total, without operations nested in it."""
    ours: bool
    """Whether it is a kernel of this package."""
    flops: float | None
    bytes: float | None
    """In total, where the trace or the compiled program has them."""


@dataclass(frozen=True)
class Profile:
    """What a trace of so many steps contains, on the device that worked longest."""

    folder: Path
    platform: Platform
    devices: int
    steps: int | None
    """None where steps are not known, as in a script."""
    span_s: float
    """From the beginning of the first operation to the end of the last one."""
    busy_s: float
    operations: tuple[Operation, ...]
    """The longest first."""
    gaps: tuple[Gap, ...]
    work: Work | None
    """What one step computes and moves at least, where that is known."""

    @property
    def total_s(self) -> float:
        """The time of all operations; longer than `busy_s` where they overlap."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def our_share(self) -> float:
        return sum(operation.seconds for operation in self.operations if operation.ours) / (self.total_s or math.nan)


def summarise(folder: Path, trace: Trace, *, steps: int | None, work: Work | None = None) -> Profile:
    """Sums up a trace. Raises `NothingTraced` where it has no operation."""
    events = trace.busiest
    if not events:
        raise NothingTraced(f"the trace in {folder} has no operation: nothing ran on the device while it was recorded")
    unknown = {event.module for event in events if event.module and event.flops is None and event.bytes is None}
    works = live_work(default_device().client, unknown)
    return Profile(
        folder=folder,
        platform=trace.platform,
        devices=len(trace.devices),
        steps=steps,
        span_s=max(event.end_s for event in events) - events[0].start_s,
        busy_s=busy_s(events),
        operations=_with_known_flops(_operations(events, names.traced(), works), steps, work),
        gaps=tuple(gaps(events)),
        work=work,
    )


def _with_known_flops(operations: tuple[Operation, ...], steps: int | None, work: Work | None) -> tuple[Operation, ...]:
    """Where one kernel of ours is all that runs of ours, once per step, the products of the step are its own."""
    ours = [operation for operation in operations if operation.ours]
    if work is None or len(ours) != 1 or ours[0].calls != steps or ours[0].flops is not None:
        return operations
    named = dataclasses.replace(ours[0], flops=work.flops * ours[0].calls)
    return tuple(named if operation is ours[0] else operation for operation in operations)


def _operations(
    events: Iterable[Event], kernels: Iterable[str], works: Mapping[tuple[str, str], OperationWork]
) -> tuple[Operation, ...]:
    def work(event: Event) -> OperationWork:
        """The trace's own figures, or else those of the compiled program."""
        if event.flops is not None or event.bytes is not None:
            return OperationWork(event.flops, event.bytes)
        return works.get((event.module or "", event.hlo_op or ""), OperationWork(None, None))

    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault(event.name, []).append(event)
    found = [
        Operation(
            name=name,
            calls=len(group),
            seconds=sum(event.own_s for event in group),
            ours=_is_one_of(group[0], kernels),
            flops=_sum(work(event).flops for event in group),
            bytes=_sum(work(event).bytes for event in group),
        )
        for name, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda operation: -operation.seconds))


def _is_one_of(event: Event, kernels: Iterable[str]) -> bool:
    """Whether an operation is one of these kernels: compilers add to a name in front of it and behind it."""
    return any(kernel in event.name or any(alias.startswith(kernel) for alias in event.aliases) for kernel in kernels)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def trace_calls(run: Callable[[], Any], folder: Path, steps: int, work: Work | None = None) -> Profile:
    """Traces so many calls of a compiled function, after a few that are not traced."""
    for _ in range(WARM_UP_CALLS):
        jax.block_until_ready(run())
    with recording(folder):
        out = None
        for step in range(steps):
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                out = run()
        jax.block_until_ready(out)
    return summarise(folder, read_trace(folder), steps=steps, work=work)


def trace_steps(made: Iterator[Any], folder: Path, steps: int, work: Work | None = None) -> Profile:
    """Traces so many steps of a loop that makes one each time that it is advanced, after a few that are not traced.

    Nothing is left running on the device when the trace begins and when it ends.
    """

    def advance(count: int) -> None:
        for _ in range(count):
            next(made)
        jax.block_until_ready(jax.live_arrays())

    advance(WARM_UP_CALLS)
    with recording(folder):
        advance(steps)
    return summarise(folder, read_trace(folder), steps=steps, work=work)


def trace_script(
    script: Path, words: list[str], folder: Path, *, settle_s: float, seconds: float, told: Callable[[str], None]
) -> tuple[Profile, int]:
    """Runs a Python script in this process, and traces `seconds` of it after `settle_s` in which it compiled nothing.

    Returns what was traced, and the script's exit code.

    `told` is called with a line when the trace is there. The script runs to its end, or to Ctrl-C; where it raises an
    exception, that is a `ScriptFailed` with what was traced. For the main thread, which alone gets signals.
    """
    code, failed = 0, None
    with _SteadyTrace(folder, settle_s, seconds, told) as steady, _as_main(script, words):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                told(f"the script ended with {ended.code}")
                code = ended.code if isinstance(ended.code, int) else 1  # As Python has it, of a text.
        except KeyboardInterrupt:
            if not steady.taken:
                raise
        except Exception as error:
            failed = ScriptFailed(_traceback_of(script, error))
    made = None if steady.taken is None else summarise(folder, steady.taken, steps=None)
    if failed is not None:
        failed.profile = made
        raise failed
    if made is None:
        raise NothingTraced(
            f"{script} ended before {settle_s:g} s had passed in which it compiled nothing and ran something; make it run "
            f"longer{', or pass --settle 0' if settle_s else ''}"
            if steady.compiled
            else f"{script} compiled nothing with JAX, and a trace begins after the first compilation; profile a "
            f"script that runs JAX",
            code or 1,
        )
    return made, code


def _traceback_of(script: Path, error: Exception) -> str:
    """What Python prints of an exception where it runs the script itself: without what has led to the script."""
    whole = traceback.TracebackException.from_exception(error)
    chain, left = list[traceback.TracebackException](), [whole]
    while left:
        chain.append(left.pop())
        left += [each for each in (chain[-1].__cause__, chain[-1].__context__) if each is not None]
    for one in chain:
        own = [place for place, frame in enumerate(one.stack) if frame.filename == str(script)]
        del one.stack[: own[0] if own else 0]
    compiled = any(frame.filename == str(script) for frame in whole.stack)
    return "".join(whole.format() if compiled else whole.format_exception_only())


@contextlib.contextmanager
def _as_main(script: Path, words: list[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as a script has them that Python was started with."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


class _SteadyTrace:
    """Records a trace of a program that is not known, which the main thread runs.

    A thread of its own decides when. The main thread begins and ends the trace itself, in the handler of a signal, when
    nothing runs on the device: on a GPU, a profiler that comes or goes while kernels run can make them fail.

    JAX reports a compilation when it ends, with its duration. So a trace is only a candidate until the program has ended:
    where a compilation turns out to overlap it, it is deleted, and another one is recorded.
    """

    def __init__(self, folder: Path, settle_s: float, seconds: float, told: Callable[[str], None]):
        self.taken: Trace | None = None
        self._folder, self._settle_s, self._seconds, self._told = folder, settle_s, seconds, told
        self._compiles: list[tuple[float, float]] = []
        """When each compilation began and ended."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._recording = contextlib.ExitStack()
        self._asked: Callable[[], Any] | None = None
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tilewright-profile", daemon=True)

    def __enter__(self) -> "_SteadyTrace":  # noqa: PYI034, as in core/call.py
        jax.monitoring.register_event_duration_secs_listener(self._note)
        self._handler = signal.signal(_SIGNAL, self._answer)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        signal.signal(_SIGNAL, self._handler)
        jax.monitoring.unregister_event_duration_listener(self._note)
        if self._error is not None:
            raise self._error

    @property
    def compiled(self) -> bool:
        """Whether the program has compiled anything."""
        return bool(self._compiles)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            now = time.monotonic()
            self._compiles.append((now - duration_secs, now))

    def _watch(self) -> None:
        try:
            while not self._ended.is_set():
                if self._compiles and time.monotonic() - self._compiles[-1][1] >= self._settle_s:
                    self._record()
                self._ended.wait(_POLL_S)
        except BaseException as error:  # Raised where the script's thread can see it.
            self._error = error

    def _on_main_thread(self, act: Callable[[], Any]) -> None:
        """Has the main thread do something as soon as it runs Python again, with nothing running on the device."""
        self._asked = act
        self._answered.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        self._answered.wait()
        if self._error is not None:
            raise self._error

    def _answer(self, *_: Any) -> None:
        act, self._asked = self._asked, None
        try:
            if act is not None:
                jax.block_until_ready(jax.live_arrays())
                act()
        except Exception as error:
            self._error = error
        finally:
            self._answered.set()

    def _record(self) -> None:
        """Records one trace, and waits until it is overlapped by a compilation or the program ends."""
        folder = self._folder / "trace"
        shutil.rmtree(folder, ignore_errors=True)
        self._on_main_thread(lambda: self._recording.enter_context(recording(folder)))
        began = time.monotonic()
        self._ended.wait(self._seconds)
        until = time.monotonic()
        self._on_main_thread(self._recording.close)
        trace = read_trace(folder)
        if not trace.busiest or self._overlapped(began, until):
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.taken = trace
        self._told(f"traced {until - began:.1f} s of the steady state; the script goes on, and Ctrl-C ends it")
        while not self._ended.wait(_POLL_S):
            if self._overlapped(began, until):
                self.taken = None
                self._told("a compilation overlapped the trace, which is not of the steady state: another one follows")
                shutil.rmtree(folder, ignore_errors=True)
                return

    def _overlapped(self, began: float, until: float) -> bool:
        return any(start < until and end > began for start, end in self._compiles)
