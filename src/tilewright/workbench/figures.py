"""Figures as a person reads them: times, sizes and rates with their units; and errors in one line."""

import math
from collections.abc import Sequence

_LONGEST_ERROR = 700


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, trailing zeros included; all of its digits before the point."""
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e" in text else text.rstrip(".")


def seconds(value: float, digits: int = 3) -> str:
    """A time in s, ms or us, with so many significant digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{significant(value * factor, digits)} {unit}"
    raise AssertionError


def memory(value: float | None) -> str:
    """A size in GiB, MiB, KiB or bytes; "-" where it is not known."""
    if value is None:
        return "-"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{significant(value / factor)} {unit}"
    return f"{value:.0f} B"


def ratio(value: float, *spreads: float | None) -> str:
    """A ratio of two times, with "~" in front where it is no further from 1 than the relative spreads of both together."""
    noise = math.hypot(*(spread for spread in spreads if spread is not None and not math.isnan(spread)))
    return f"{'~' if noise and 1 / (1 + noise) <= value <= 1 + noise else ''}{value:.2f}"


def listed(words: Sequence[str], most: int = 6) -> str:
    """Words with commas: the first of them, and how many more there are."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def one_line(error: BaseException) -> str:
    """An error as one line: its type, unless it is one of ours, whose text is a sentence; and the first of its text."""
    kind, text = type(error), " ".join(str(error).split())[:_LONGEST_ERROR]
    return text if kind.__module__.startswith("tilewright.") else ": ".join(filter(None, (kind.__name__, text)))


def rate(value: float | None, unit: str, fraction: float | None) -> str:
    """A rate in tera- or giga-units, with its fraction of the device's peak where that is known."""
    if value is None:
        return "-"
    prefix, factor = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    share = "" if fraction is None else f" ({fraction:.0%})"
    return f"{value / factor:.3g} {prefix}{unit}{share}"
