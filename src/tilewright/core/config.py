"""Block sizes and the like of one implementation and direction: what a tuner searches and a caller may override.

A family's `config.py` declares its configs; `tilewright.configs` has all of them. A config is frozen, validates itself
when it is built, prints as an expression that can be pasted back, and goes to JSON and back (`to_json`,
`tilewright.configs.from_json`).
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, dataclass_transform


def search_over(**choices: tuple[Any, ...]) -> Mapping[str, tuple[Any, ...]]:
    """The `choices` of a config: for each field, the values that `tilewright tune` tries."""
    return MappingProxyType(choices)


@dataclass_transform(frozen_default=True)
class Config:
    """Base of the configs. Subclasses are frozen dataclasses; they validate in `__post_init__`."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The values of each field that `tilewright tune` tries, in order of size. A field that is not here keeps the value
    that the search starts from. Combinations that the config or the kernel refuses are left out."""
    memory_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that take more memory the larger they are. Where a config runs out of memory, crashes or hangs, those
    that are as large or larger in these fields, and equal in all others, are not tried."""
    one_size_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that divide the work of one size over the chip, such as `splits`. A table lends them to no other size."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, repr=False)(cls)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"tilewright.configs.{type(self).__name__}({values})"

    def to_json(self) -> dict[str, Any]:
        """This config as a JSON object: its class by name, then its fields."""
        return {"config": type(self).__name__, **self._values()}

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def check_integers(self, *names: str, least: int = 1, multiple: int = 1, why: str = "", use: Any = None) -> None:
        """Raises where a field is not an integer of at least `least` and a multiple of `multiple`.

        `why` is the reason for the rule, such as "TPU lanes". The remedy is `use`, or the nearest value that is allowed.
        """
        for name in names:
            value = getattr(self, name)
            integer = isinstance(value, int) and not isinstance(value, bool)
            if integer and value >= least and value % multiple == 0:
                continue
            if multiple > 1:
                rule = f"a positive multiple of {multiple}"
            elif least == 1:
                rule = "a positive integer"
            else:
                rule = f"{least} or more" if integer else f"an integer, {least} or more"
            nearest = max(least, multiple, round(value / multiple) * multiple) if integer else max(least, multiple)
            because = f" ({why})" if why else ""
            raise ValueError(f"{name}={value!r} must be {rule}{because}; use {use or nearest}")
