"""Accelerators by the names people rent them under: tpu-v6e-8, H200:1."""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

# A name's last number counts TensorCores on v2 to v4 and v5p, and chips on the others: (how many a chip, chips a host).
_TPUS: dict[str, tuple[int, int]] = {
    "v2": (2, 4),
    "v3": (2, 4),
    "v4": (2, 4),
    "v5litepod": (1, 8),
    "v5p": (2, 4),
    "v6e": (1, 8),
}
# A slice beyond one host of these is built from hosts of four.
_PARTS_OF_FOUR = ("v5litepod", "v6e")
_ALIASES = {"v5e": "v5litepod"}
_GPUS = "H100 H200 B200 B300 GH200 GB200 GB300 A100 A100-80GB L4 L40 L40S A10 A10G A40 V100 T4 RTXPRO6000".split()


@dataclass(frozen=True)
class Accelerator:
    """One kind of chip, and how many."""

    platform: Literal["tpu", "gpu"]
    kind: str
    """v6e, H200: without the count."""
    count: int
    """Chips in all."""
    per_host: int

    @property
    def name(self) -> str:
        """As SkyPilot spells it."""
        if self.platform == "gpu":
            return f"{self.kind}:{self.count}"
        cores = _TPUS[self.kind][0]
        return f"tpu-{self.kind}-{self.count * cores}"

    @property
    def extra(self) -> str:
        """The extra of this package that runs on it."""
        return self.platform

    @staticmethod
    def parse(name: str) -> "Accelerator":
        """Read tpu-v6e-8 or H200:1; a count of 1 may be left out."""
        tpu = re.fullmatch(r"tpu-?(v\d+[a-z]*)-(\d+)(?::1)?", name.lower())
        if tpu:
            kind = _ALIASES.get(tpu[1], tpu[1])
            number = int(tpu[2])
            if kind in _TPUS:
                cores, per_host = _TPUS[kind]
                if number == 0 or number % cores:
                    raise ValueError(
                        f"--accelerator {name} counts TensorCores, {cores} a chip, and must be a multiple of {cores}; use "
                        f"tpu-{kind}-{max(8, number // cores * cores)}"
                    )
                chips = number // cores
                if kind in _PARTS_OF_FOUR and chips > per_host:
                    per_host = 4
                return Accelerator("tpu", kind, chips, min(chips, per_host))
        gpu = re.fullmatch(r"([A-Za-z][\w-]*?)(?::(\d+))?", name)
        if gpu and int(gpu[2] or 1) > 0:
            known = {kind.upper(): kind for kind in _GPUS}
            if kind := known.get(gpu[1].upper()):
                count = int(gpu[2] or 1)
                return Accelerator("gpu", kind, count, count)
        raise ValueError(f"--accelerator {name} is not known; {_remedy(name)}")


def _remedy(name: str) -> str:
    names = [*(f"tpu-{kind}-8" for kind in _TPUS), *(f"{kind}:1" for kind in _GPUS)]
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in names], n=1, cutoff=0.6)
    if close:
        return f"did you mean {next(each for each in names if each.lower() == close[0])}?"
    tpus = ", ".join(f"tpu-{kind}-N" for kind in _TPUS)
    return f"use a TPU ({tpus}) or a GPU ({', '.join(_GPUS)}, with :COUNT), or name it in a --template"
