"""The devices that a step is planned for: how many, what each has, and how fast a mesh axis sends.

The devices of a slice are taken in their order, as `parallel.make_mesh` takes them: the last mesh axis lies along the last
axes of the torus. A device sends over one link along an axis of the torus, and over both at once where the axis is a ring:
on v5e and v6e where it has 16 chips, on the others where it has a multiple of four. How far apart the devices of a mesh
axis are, and that two mesh axes share a link, is not modelled: bandwidths are the most that there can be.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

from tilewright.core.chip import Chip
from tilewright.parallel.mesh import MESH_AXES

_NETWORK_BYTES_PER_S = 50e9
"""Between hosts of GPUs: one 400 Gbit/s port per GPU, as NVIDIA's DGX and HGX systems have them."""


@dataclass(frozen=True)
class Place:
    """A slice of one chip's devices."""

    chip: Chip
    shape: tuple[int, ...]
    """Of a TPU slice its torus; of GPUs slices, hosts and GPUs of a host."""
    usable_bytes: int
    """What a program can have of a device's memory."""

    @staticmethod
    def of(chip: Chip, topology: str | None, usable_bytes: int | None = None) -> "Place":
        """From "4x4", or for GPUs "1x1x8" or "8"; by default one chip."""
        text = topology or "x".join("1" * (chip.links // 2 if chip.platform == "tpu" else 1))
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) is None:
            example = "4x4" if chip.platform == "tpu" else "1x1x8"
            raise ValueError(f"--topology {text} must be sizes with x between them, such as {example}")
        shape = tuple(map(int, text.split("x")))
        if chip.platform == "gpu":
            shape = (1,) * (3 - len(shape)) + shape
        axes = chip.links // 2 if chip.platform == "tpu" else 3
        if len(shape) != axes:
            what = f"a torus of {axes} axes" if chip.platform == "tpu" else "slices, hosts and GPUs of a host"
            example = "x".join(["2"] * axes) if chip.platform == "tpu" else "1x1x8"
            raise ValueError(f"--topology {text} has {len(shape)} sizes; {chip.name} has {what}: use such as {example}")
        usable = usable_bytes or chip.usable_bytes
        if usable is None:
            raise ValueError(f"the memory of {chip.name} is not known; give --memory in GiB")
        return Place(chip, shape, usable)

    @property
    def num_devices(self) -> int:
        per_chip = self.chip.cores // self.chip.cores_per_device
        return math.prod(self.shape) * per_chip

    @property
    def topology(self) -> str | None:
        """As `aot.compile` takes it; None for one chip, which is compiled for the smallest slice."""
        return "x".join(map(str, self.shape)) if math.prod(self.shape) > 1 else None

    def with_memory(self, usable_bytes: int) -> "Place":
        return dataclasses.replace(self, usable_bytes=usable_bytes)

    def bytes_per_s(self, mesh: dict[str, int]) -> dict[str, float]:
        """The bytes that a device can send per second along each axis of a mesh, at most."""
        link = self.chip.link_bytes_per_s or math.inf
        found: dict[str, float] = {}
        if self.chip.platform != "tpu":
            host, stride = self.shape[-1], 1
            for axis in reversed([each for each in MESH_AXES if mesh.get(each, 1) > 1]):
                stride *= mesh[axis]
                found[axis] = link if stride <= host else min(link, _NETWORK_BYTES_PER_S)
            return found
        dimensions = [*self.shape, self.chip.cores // self.chip.cores_per_device]
        rings = [size % (16 if len(self.shape) == 2 else 4) == 0 for size in self.shape]
        left, at = dimensions[-1], len(dimensions) - 1
        for axis in reversed([each for each in MESH_AXES if mesh.get(each, 1) > 1]):
            needed, touched = mesh[axis], []
            while needed > 1 and at >= 0:
                if left == 1:
                    at -= 1
                    left = dimensions[at] if at >= 0 else 1
                    continue
                taken = math.gcd(needed, left)
                if taken == 1:
                    break
                if at < len(self.shape):  # The cores of one chip exchange inside of it.
                    touched.append(link * (2 if rings[at] and taken == self.shape[at] else 1))
                needed, left = needed // taken, left // taken
            found[axis] = sum(touched) or link
        return found
