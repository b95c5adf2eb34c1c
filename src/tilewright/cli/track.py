"""`--track`: the trackers that results are sent to, which are imported only where one is named."""

from typing import Any, Literal

from tilewright.cli.screen import Mistake
from tilewright.core.nearest import did_you_mean

TRACKERS = ("wandb", "wandb-offline")


def check_tracker(track: str | None) -> None:
    """Raises where an option names a tracker that is not known."""
    if track is not None and track not in TRACKERS:
        raise Mistake(f"--track {track} is not known; use {' or '.join(TRACKERS)}{did_you_mean(track, TRACKERS)}")


def import_tracker(track: str) -> Any:
    """The library of Weights & Biases."""
    try:
        import wandb
    except ImportError as error:
        raise Mistake(f"--track {track} needs wandb: pip install 'tilewright[wandb]'") from error
    return wandb


def tracking_mode(track: str) -> Literal["offline"] | None:
    """The mode of `wandb.init`: offline sends nothing, and leaves a run that `wandb sync` sends later."""
    return "offline" if track == "wandb-offline" else None
