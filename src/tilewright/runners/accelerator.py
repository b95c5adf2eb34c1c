"""Accelerators by the names they are rented under: tpu-v6e-8, H200:1. The chips are those of `core/chip.py`."""

import re
from dataclasses import dataclass

from tilewright.core.chip import RENTED, Chip
from tilewright.core.nearest import did_you_mean

_TPUS = {chip.accelerator: chip for chip in RENTED if chip.platform == "tpu"}
_GPUS = {chip.accelerator: chip for chip in RENTED if chip.platform == "gpu"}
_CHIPS_PER_HOST_OF_SEVERAL = 4


@dataclass(frozen=True)
class Accelerator:
    """A number of chips of one kind."""

    chip: Chip
    count: int
    """The number of chips, over all hosts."""

    @property
    def kind(self) -> str:
        """The chip's name without a count: v6e, H200."""
        assert self.chip.accelerator is not None
        return self.chip.accelerator

    @property
    def name(self) -> str:
        """The name as SkyPilot spells it. The number in a TPU's name counts its TensorCores."""
        if self.chip.platform == "gpu":
            return f"{self.kind}:{self.count}"
        return f"tpu-{self.kind}-{self.count * self.chip.cores}"

    @property
    def per_host(self) -> int:
        """Chips per host."""
        if self.chip.platform == "gpu" or self.count <= self.chip.chips_per_host:
            return self.count
        return _CHIPS_PER_HOST_OF_SEVERAL

    @property
    def extra(self) -> str:
        """The extra of this package that runs on it."""
        return self.chip.platform

    @staticmethod
    def parse(name: str) -> "Accelerator":
        """Reads names such as tpu-v6e-8, tpu7x-8, H200:1 and H200, which is H200:1."""
        if tpu := re.fullmatch(r"tpu-?v?(\d+[a-z]*)-(\d+)(?::1)?", name.lower()):
            generation, number = f"v{tpu[1]}", int(tpu[2])
            chip = _TPUS.get(generation) or next((chip for chip in _TPUS.values() if chip.name == generation), None)
            if chip is not None and number % chip.cores:
                cores, kind = chip.cores, chip.accelerator
                raise ValueError(
                    f"--accelerator {name} counts TensorCores, {cores} per chip, and must be a multiple of {cores}; use "
                    f"tpu-{kind}-{max(8, number // cores * cores)}"
                )
            if chip is not None and number > 0:
                return Accelerator(chip, number // chip.cores)
        gpu = re.fullmatch(r"([A-Za-z][\w-]*?)(?::(\d+))?", name)
        if gpu and int(gpu[2] or 1) > 0 and (chip := _GPUS.get(gpu[1].upper())) is not None:
            return Accelerator(chip, int(gpu[2] or 1))
        raise ValueError(f"--accelerator {name} is not known; {_remedy(name)}")


def _remedy(name: str) -> str:
    names = [*(f"tpu-{kind}-8" for kind in _TPUS), *(f"{kind}:1" for kind in _GPUS)]
    if hint := did_you_mean(name, names):
        return hint.removeprefix("; ")
    tpus, gpus = ", ".join(f"tpu-{kind}-N" for kind in _TPUS), ", ".join(map(str, _GPUS))
    return f"use a TPU ({tpus}) or a GPU ({gpus}, with :COUNT), or name it in a --template"
