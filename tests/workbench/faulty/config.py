"""Nothing to choose."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NoConfig:
    """A kernel takes a launch only if it has a config."""
