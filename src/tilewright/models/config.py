"""A model's config.json: its values by key, with errors that name what is missing or unknown."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.models.checkpoint import CheckpointError
from tilewright.ops.rope.api import Linear, Llama3, Yarn

_MISSING = object()
_MISSPELT = 0.9  # Of 1: key heads and value heads are not taken for each other.


class Config:
    """The values of a config.json."""

    def __init__(self, values: Mapping[str, Any], path: str = "config.json"):
        self.values, self.path = dict(values), path

    @staticmethod
    def read(folder: Path) -> "Config":
        path = folder / "config.json"
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; pass the one that has config.json and safetensors")
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; pass a folder that has config.json and safetensors"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must be an object, and is a {type(values).__name__}")
        return Config(values, str(path))

    def get(self, *keys: str, default: Any = _MISSING) -> Any:
        """The value of the first of these keys that is there, which may be null only if the default is None."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                return value
        if default is not _MISSING:
            return default
        alike = difflib.get_close_matches(keys[0], self.values, n=1, cutoff=_MISSPELT)
        hint = f"; is {alike[0]!r} a misspelling of it?" if alike else ""
        raise CheckpointError(f"{self.path} has no {keys[0]!r}; a model of type {self.model_type!r} needs it{hint}")

    def count(self, *keys: str) -> int:
        """A positive integer."""
        value = self.get(*keys)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: {keys[0]}={value!r} must be a positive integer")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{self.path}: {key}={value!r} must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where the key is not there."""
        value = self.get(key, default=False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key}={value!r} must be true or false")
        return value

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", "unknown"))

    def within(self, key: str) -> "Config":
        """A nested config, such as "text_config"; this one where there is none."""
        inner = self.values.get(key)
        return self if not isinstance(inner, dict) else Config(inner, f"{self.path}, {key}")

    def refuse(self, key: str, *allowed: Any) -> None:
        """Raises where a key is there with another value than these, or null."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            known = " or ".join(map(repr, allowed)) or "null"
            raise CheckpointError(f"{self.path}: {key}={value!r} is not supported; only {known} is")

    def rope(self) -> dict[str, Any]:
        """`rope_theta`, `rope_fraction` and `rope_scaling` of an `Attention` layer."""
        values = dict(self.values)
        for key in ("rope_parameters", "rope_scaling"):  # Where both are there, the latter counts, as in transformers.
            given = self.get(key, default={})
            if not isinstance(given, dict):
                raise CheckpointError(f"{self.path}: {key}={given!r} must be an object")
            values |= {"rope_type": given["type"]} | given if "type" in given else given
        inner = Config(values, self.path)
        kind = inner.get("rope_type", default="default")
        theta = float(inner.get("rope_theta", default=10_000.0))
        fraction = float(inner.get("partial_rotary_factor", default=1.0))
        return {"rope_theta": theta, "rope_fraction": fraction, "rope_scaling": _scaling(kind, inner)}


def _scaling(kind: str, config: Config) -> Linear | Llama3 | Yarn | None:
    if kind in ("default", "mrope"):  # For text alone all sections of mrope have the same position.
        return None
    if kind == "linear":
        return Linear(float(config.get("factor")))
    original = config.get("original_max_position_embeddings", "max_position_embeddings", default=None)
    if kind == "yarn":
        optional = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor"}
        given = {
            name: float(config.values[key]) for name, key in optional.items() if config.values.get(key) is not None
        }
        return Yarn(float(config.get("factor")), int(original), **given)
    if kind == "llama3":
        return Llama3(
            float(config.get("factor")),
            float(config.get("low_freq_factor")),
            float(config.get("high_freq_factor")),
            int(original),
        )
    raise CheckpointError(f"{config.path}: rope_type={kind!r} is not known; use default, linear, yarn or llama3")
