"""The configs that may be tried for a pass: what their class declares, as far as the pass takes it for this call."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tilewright.core.config import Config

# A product of choices that is larger is not enumerated.
_MOST_ENUMERATED = 20_000


class Space:
    """The configs around `start`, whose class declares the choices of each field.

    `refusal` says why a config cannot run the call, by the rules of the kernel and by its memory model, or returns None.
    """

    def __init__(self, start: Config, refusal: Callable[[Config], str | None]):
        self.start, self._refusal = start, refusal
        known = [field.name for field in dataclasses.fields(start)]  # type: ignore[arg-type]
        self.choices = {
            name: _with(values, getattr(start, name)) for name, values in type(start).choices.items() if name in known
        }

    def fits(self, config: Config) -> bool:
        return self._refusal(config) is None

    def changed(self, config: Config, **fields: Any) -> Config | None:
        """The config with other values of some fields, or None where that is not a config, or cannot run the call."""
        try:
            other: Config = dataclasses.replace(config, **fields)  # type: ignore[type-var]
        except (TypeError, ValueError):
            return None
        return other if self.fits(other) else None

    def every(self, most: int) -> list[Config] | None:
        """Every config that fits, the nearest to `start` first; None where there are more than `most`."""
        if math.prod(len(values) for values in self.choices.values()) > _MOST_ENUMERATED:
            return None
        found: list[Config] = []
        for values in itertools.product(*self.choices.values()):
            config = self.changed(self.start, **dict(zip(self.choices, values, strict=True)))
            if config is not None:
                found.append(config)
            if len(found) > most:
                return None
        return sorted(found, key=lambda config: self._steps_between(config, self.start))

    def size(self) -> int | None:
        """How many configs fit; None where there are too many to count."""
        every = self.every(_MOST_ENUMERATED)
        return None if every is None else len(every)

    def line(self, config: Config, name: str) -> list[Config]:
        """The configs that differ from this one in one field, the nearest first."""
        others = (self.changed(config, **{name: value}) for value in self.choices[name])
        found = [other for other in others if other is not None and other != config]
        return sorted(found, key=lambda other: self._steps_between(other, config))

    def neighbours(self, config: Config, fields: int = 2) -> Iterator[Config]:
        """The configs that are one step away in one field, or in up to so many; those in one field first."""
        steps = {
            name: [values[at] for at in self._around(values, getattr(config, name))]
            for name, values in self.choices.items()
        }
        for count in range(1, fields + 1):
            for names in itertools.combinations(steps, count):
                for values in itertools.product(*(steps[name] for name in names)):
                    other = self.changed(config, **dict(zip(names, values, strict=True)))
                    if other is not None and other != config:
                        yield other

    def _around(self, values: tuple[Any, ...], value: Any) -> list[int]:
        at = values.index(value) if value in values else 0
        return [place for place in (at - 1, at + 1) if 0 <= place < len(values)]

    def _steps_between(self, one: Config, other: Config) -> int:
        steps = 0
        for name, values in self.choices.items():
            places = [values.index(value) if (value := getattr(each, name)) in values else 0 for each in (one, other)]
            steps += abs(places[0] - places[1])
        return steps


def _with(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """The choices of a field with the one that the search starts from, in order where they can be ordered."""
    if value in values:
        return values
    joined = (*values, value)
    return joined if any(each is None for each in joined) else tuple(sorted(joined))


def dominates(larger: Config, failed: Config) -> bool:
    """Whether a config needs at least the memory of one that failed: larger or equal in the fields that take memory, and
    equal in all others.
    """
    if type(larger) is not type(failed):
        return False
    for field in dataclasses.fields(larger):  # type: ignore[arg-type]
        one, other = getattr(larger, field.name), getattr(failed, field.name)
        if field.name in type(larger).memory_fields and None not in (one, other):
            if one < other:
                return False
        elif one != other:
            return False
    return True
