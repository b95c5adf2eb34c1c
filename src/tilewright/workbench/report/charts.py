"""Charts as SVG: axes, lines and marks. Colours are classes, for a page with light and dark ones.

A filled mark is a measurement, a hollow one an estimate; a square is another library's.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = 8
"""Classes c0 to c7 of the style sheet."""
_FIXED = {"pallas_gpu": 0, "pallas_tpu": 0, "xla": 1, "reference": 2}
_BEGIN_OTHERS = 3
_LEAST_RANGE = 2.5
_FEW_TICKS = 3


@dataclass(frozen=True)
class Mark:
    """One point. `facets` are what the page filters by, and `title` is shown beside the pointer."""

    x: float
    y: float
    colour: int
    title: str
    estimate: bool = False
    peer: bool = False
    facets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A line through points, in data units."""

    points: tuple[tuple[float, float], ...]
    colour: int | None = None
    """None is the colour of ceilings."""
    label: str = ""
    dashed: bool = False
    steps: bool = False
    """Whether it changes in steps, as the best time so far does."""


@dataclass(frozen=True)
class Axis:
    """An axis: logarithmic with ticks at powers of `base`, or linear from 0 where that is None."""

    label: str
    format: Callable[[float], str]
    base: int | None = 10

    def scaled(self, value: float) -> float:
        return value if self.base is None else math.log(value)


def colours_of(names: Iterable[str]) -> dict[str, int]:
    """A colour for each name; implementations of this package have the same ones in every chart."""
    found: dict[str, int] = {}
    for name in dict.fromkeys(names):
        others = sum(each not in _FIXED for each in found)
        found[name] = _FIXED.get(name, _BEGIN_OTHERS + others % (COLOURS - _BEGIN_OTHERS))
    return found


def draw(
    marks: Sequence[Mark],
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    label: str,
    width: int = 600,
    height: int = 370,
) -> str:
    """An SVG of marks and lines; `label` says what it is to those who do not see it."""
    points = [(mark.x, mark.y) for mark in marks] + [point for line in lines for point in line.points]
    low_x, high_x = _range([px for px, _ in points], x.base)
    low_y, high_y = _range([py for _, py in points], y.base)
    left, right, top, bottom = 62, 14, 12, 44

    def at(px: float, py: float) -> tuple[float, float]:
        across = (x.scaled(px) - x.scaled(low_x)) / (x.scaled(high_x) - x.scaled(low_x))
        up = (y.scaled(py) - y.scaled(low_y)) / (y.scaled(high_y) - y.scaled(low_y))
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" class="chart">']
    for value in _ticks(low_x, high_x, x.base, (width - left - right) / 64):
        px, _ = at(value, low_y)
        parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(
            f'<text class="tick" x="{px:.1f}" y="{height - bottom + 16}" text-anchor="middle">{x.format(value)}</text>'
        )
    for value in _ticks(low_y, high_y, y.base, (height - top - bottom) / 26):
        _, py = at(low_x, value)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 7}" y="{py + 4:.1f}" text-anchor="end">{y.format(value)}</text>')
    parts.append(f'<text class="axis" x="{(left + width - right) / 2:.0f}" y="{height - 8}" text-anchor="middle">')
    parts.append(f"{escape(x.label)}</text>")
    parts.append(f'<text class="axis" transform="translate(13 {(top + height - bottom) / 2:.0f}) rotate(-90)" ')
    parts.append(f'text-anchor="middle">{escape(y.label)}</text>')
    for line in lines:
        drawn = [at(*point) for point in line.points]
        if line.steps:
            corners = (((px, before), (px, py)) for (_, before), (px, py) in itertools.pairwise(drawn))
            drawn = [drawn[0], *itertools.chain.from_iterable(corners)]
        colour = "ceiling" if line.colour is None else f"c{line.colour}"
        dashed = " dashed" if line.dashed else ""
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in drawn)
        parts.append(f'<polyline class="line {colour}{dashed}" points="{path}"/>')
        if line.label:
            px, py = drawn[-1]
            end = min(px, width - right) - 4
            parts.append(
                f'<text class="note" x="{end:.1f}" y="{py - 6:.1f}" text-anchor="end">{escape(line.label)}</text>'
            )
    for mark in marks:
        parts.append(_mark(mark, *at(mark.x, mark.y)))
    return "".join([*parts, "</svg>"])


def _mark(mark: Mark, px: float, py: float) -> str:
    kind = "hollow" if mark.estimate else "filled"
    facets = "".join(f' data-{name}="{escape(value)}"' for name, value in mark.facets.items())
    head = f'class="mark {kind} c{mark.colour}"{facets}'
    title = f"<title>{escape(mark.title)}</title>"
    if mark.peer:
        return f'<rect {head} x="{px - 4:.1f}" y="{py - 4:.1f}" width="8" height="8">{title}</rect>'
    return f'<circle {head} cx="{px:.1f}" cy="{py:.1f}" r="4.5">{title}</circle>'


def _range(values: Sequence[float], base: int | None) -> tuple[float, float]:
    """A range with some room around the values."""
    low, high = min(values), max(values)
    if base is None:
        return 0.0, high * 1.05
    room = 1.25 if high / low < 1e3 else 1.6
    low, high = low / room, high * room
    if high / low < _LEAST_RANGE:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(_LEAST_RANGE), middle * math.sqrt(_LEAST_RANGE)
    return low, high


def _ticks(low: float, high: float, base: int | None, most: float) -> list[float]:
    """Round values in a range, at most about so many."""
    if base is None:
        step = 10 ** math.floor(math.log10(high / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if high / (step * factor) <= most)
        return [step * n for n in range(int(high / step) + 1)]
    powers = [float(base) ** n for n in range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)]
    inside = [value for value in powers if low <= value <= high]
    for factors in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        if base == 10 and len(inside) < _FEW_TICKS:
            inside = [value for power in powers for factor in factors if low <= (value := power * factor) <= high]
    every = max(1, math.ceil(len(inside) / max(most, 2)))
    return inside[::every]


def legend(names: Mapping[str, int], *, estimates: bool = False, peers: Iterable[str] = ()) -> str:
    """What the colours and marks of a chart mean, as HTML."""
    squares = set(peers)
    items = [
        f'<span class="key"><i class="swatch c{colour}{" square" if name in squares else ""}"></i>{escape(name)}</span>'
        for name, colour in names.items()
    ]
    if estimates:
        items.append('<span class="key"><i class="swatch open"></i>hollow: estimate</span>')
    return f'<p class="legend">{"".join(items)}</p>'
