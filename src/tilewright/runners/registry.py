"""The runner for a target: `local`, `sky:CLUSTER` or `ray:ADDRESS`."""

from tilewright.runners.base import Runner
from tilewright.runners.local import LocalRunner
from tilewright.runners.ray import RayRunner
from tilewright.runners.skypilot import SkyRunner


def open_runner(target: str) -> Runner:
    """Opens the runner for a target. SkyPilot and Ray themselves are imported when the runner first needs them."""
    kind, colon, place = target.partition(":")
    if target == "local":
        return LocalRunner()
    if kind == "sky" and colon:
        return SkyRunner(place)
    if kind == "ray" and colon:
        return RayRunner(place)
    hint = f"; did you mean {kind}:NAME?" if kind in ("sky", "ray") else ""
    raise ValueError(f"--on {target} is not a place to run at; use local, sky:CLUSTER or ray:ADDRESS{hint}")
