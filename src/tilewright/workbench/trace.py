"""Traces of `jax.profiler`: records one, and reads which operations ran on the device, when and for how long.

The profiler writes planes of lines of events. What stands for an operation depends on the platform:

- GPU: the plane "/device:GPU:0" has a line per stream, whose events are kernels and copies under the names of their
  symbols.
- TPU: the plane "/device:TPU:0" has a line "XLA Ops", whose events are HLO operations, nested where one is a loop.
- CPU: there is no device plane. XLA's threads have lines of their own in "/host:CPU", and the events with a statistic
  `hlo_op` are operations. They are times of the host, and no device time.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

Platform = Literal["gpu", "tpu", "cpu"]
_DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
_HOST = "/host:CPU"
_STREAM, _OPS = "Stream", "XLA Ops"
# A TPU's events have the whole instruction as their name: "%fusion.3 = f32[8,128]{1,0:T(8,128)} fusion(...)".
_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")
_SLACK_S = 1e-9
"""Times are stored in picoseconds and read as float nanoseconds: an event may seem to outlast the one around it."""


@dataclass(frozen=True)
class Event:
    """One execution of one operation. Times are in seconds from the beginning of the trace."""

    name: str
    start_s: float
    seconds: float
    own_s: float
    """Without the operations nested in it on the same line, as the body of a loop is."""
    module: str | None = None
    """The compiled program that it is part of, such as "jit_step"."""
    hlo_op: str | None = None
    aliases: tuple[str, ...] = ()
    """Further names that the trace has for it: the HLO operation, and the last part of the path of JAX functions."""
    flops: float | None = None
    bytes: float | None = None
    """What the trace says that it computes and moves, on platforms that do."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Trace:
    """The operations of each device, by the device's name and in the order in which they began."""

    platform: Platform
    devices: Mapping[str, tuple[Event, ...]]

    @property
    def busiest(self) -> tuple[Event, ...]:
        """The operations of the device that worked longest; none where the trace has no operation."""
        return max(self.devices.values(), key=busy_s, default=())


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Records a trace into `folder`, in the formats of XProf (xplane.pb) and Perfetto (trace.json.gz)."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Every Python call would be an event: slow, and far more than the operations.
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield


def files(folder: Path) -> tuple[Path, Path | None]:
    """The newest xplane.pb and trace.json.gz in a folder that `recording` wrote."""
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{folder} has no trace: no file in it ends in .xplane.pb")
    return found[-1], next(iter(found[-1].parent.glob("*.trace.json.gz")), None)


def read_trace(folder: Path) -> Trace:
    """Reads the newest trace in a folder."""
    return parse(jax.profiler.ProfileData.from_file(str(files(folder)[0])))


def parse(data: Any) -> Trace:
    """The operations in a `jax.profiler.ProfileData`."""
    planes = [(plane.name or "", plane) for plane in data.planes]
    platform: Platform = "cpu"
    devices: dict[str, tuple[Event, ...]] = {}
    for name, plane in planes:
        if kind := _DEVICE.fullmatch(name):
            lines = [(line.name or "", line) for line in plane.lines]
            streams = [line for line_name, line in lines if line_name.startswith(_STREAM)]
            events = _ordered(streams or [line for line_name, line in lines if line_name == _OPS])
            if events:
                platform = "gpu" if kind[1] == "GPU" else "tpu"
                devices[name] = events
    if not devices:
        host = _ordered([line for name, plane in planes if name == _HOST for line in plane.lines], host=True)
        devices = {_HOST: host} if host else {}
    return Trace(platform, devices)


def _ordered(lines: Iterable[Any], *, host: bool = False) -> tuple[Event, ...]:
    events = [event for line in lines for event in _line_events(line, host=host)]
    return tuple(sorted(events, key=lambda event: (event.start_s, -event.seconds)))


def _line_events(line: Any, *, host: bool) -> Iterator[Event]:
    """The operations of a line, each with the time that none nested in it takes."""
    read = []
    for event in line.events:
        stats = {key: value for key, value in event.stats if key is not None}
        if host and "hlo_op" not in stats:
            continue
        read.append((event.start_ns / 1e9, event.duration_ns / 1e9, event.name or "", stats))
    read.sort(key=lambda each: (each[0], -each[1]))
    own = [seconds for _, seconds, _, _ in read]
    open_: list[int] = []
    for place, (start, seconds, _, _) in enumerate(read):
        while open_ and read[open_[-1]][0] + read[open_[-1]][1] < start + seconds - _SLACK_S:
            open_.pop()
        if open_:
            own[open_[-1]] -= seconds
        open_.append(place)
    for (start, seconds, name, stats), alone in zip(read, own, strict=True):
        instruction = _INSTRUCTION.match(name)
        aliases = (str(stats[key]).rstrip(":").rpartition("/")[2] for key in ("hlo_op", "tf_op") if stats.get(key))
        yield Event(
            name=instruction[1] if instruction else name,
            start_s=start,
            seconds=seconds,
            own_s=max(alone, 0.0),
            module=_text(stats.get("hlo_module")),
            hlo_op=_text(stats.get("hlo_op")),
            aliases=tuple(aliases),
            flops=_number(stats.get("flops")),
            bytes=_number(stats.get("bytes_accessed")),
        )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


def busy_s(events: Iterable[Event]) -> float:
    """The time in which at least one operation runs."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_s):
        total += max(0.0, event.end_s - max(until, event.start_s))
        until = max(until, event.end_s)
    return total


@dataclass(frozen=True)
class Gap:
    """A time in which no operation runs, between two operations."""

    seconds: float
    after: str
    before: str


def gaps(events: Iterable[Event]) -> list[Gap]:
    """The gaps between the first and the last operation, the longest first."""
    found: list[Gap] = []
    last: Event | None = None  # The operation that ends last of those so far.
    for event in sorted(events, key=lambda event: event.start_s):
        if last is not None and event.start_s > last.end_s:
            found.append(Gap(event.start_s - last.end_s, last.name, event.name))
        if last is None or event.end_s > last.end_s:
            last = event
    return sorted(found, key=lambda gap: -gap.seconds)


def split_calls(events: tuple[Event, ...], calls: int) -> list[tuple[Event, ...]]:
    """The operations of each of so many calls of one program, or an empty list where they cannot be told apart.

    Every call runs the same operations in the same order. Where the number of operations is not a multiple of `calls`,
    because a loop has no fixed length or the profiler dropped some, or where two calls differ in their operations, nothing
    is guessed.
    """
    if not events or len(events) % calls:
        return []
    per_call = len(events) // calls
    split = [events[n : n + per_call] for n in range(0, len(events), per_call)]
    names = sorted(event.name for event in split[0])
    return split if all(sorted(event.name for event in each) == names for each in split) else []
