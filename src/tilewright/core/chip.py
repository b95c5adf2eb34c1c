"""The table of chips: peak rates for rooflines, memory sizes for block sizes, and the names they are rented under.

Every figure is the vendor's peak for one chip, dense, without sparsity; VMEM and MXUs are per TensorCore. None means
that the figure is not known, and nothing here guesses: a device that is not in the table gets a `Chip` named "unknown"
whose figures are all None, and no roofline is printed for it.

A JAX device is not always a chip. On v7x each of the two TensorCores is a device, so a kernel on one device has half of
the chip's peak. `flops_per_s` and `bytes_per_s` are per device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tilewright.core.nearest import did_you_mean

Device = Any  # A jax.Device, which type checkers take for a variable.
MIB = 2**20
GIB = 2**30
# Registers and tiles are the same on every TPU generation so far.
LANES = 128
SUBLANES = 8  # Rows of a float32 tile.
ROW_TILE = 16  # Rows of a bfloat16 tile, the larger of the two dtypes' tiles.
# The same on every GPU of the table.
SM_REGISTERS = 65536  # 32-bit registers of a multiprocessor, a quarter of them in each of its four partitions.
WARP_THREADS = 32
BLOCK_RESERVED_SMEM = 1024
Platform = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip. `Chip.named("v6e")`, `Chip.of(jax.devices()[0])`."""

    name: str
    platform: Platform
    device_kinds: tuple[str, ...] = ()
    """How JAX names a device of this chip (`device.device_kind`)."""
    accelerator: str | None = None
    """How SkyPilot and Ray name it, without the count: "H200" in "H200:1", "v6e" in "tpu-v6e-8"; None for a CPU."""

    peak_flops: tuple[tuple[str, float], ...] = ()
    """(dtype, FLOP/s) of the matrix units of the whole chip."""
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    usable_bytes: int | None = None
    """The memory that a program can have of one JAX device: what libtpu leaves of a TPU's, and on a GPU the three quarters
    that JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION changes it)."""
    links: int = 0
    """Ports to other chips: of a TPU two per axis of the torus; of a GPU one, to the switch or bus of its host."""
    link_bytes_per_s: float | None = None
    """Of one link, in one direction."""
    clock_hz: float | None = None
    """Of a TPU's cores, or a GPU's multiprocessors at their highest. It follows from the peak FLOP/s."""

    # TPU. What follows `chips_per_host` is per TensorCore.
    cores: int = 1
    cores_per_device: int = 1
    chips_per_host: int = 4
    """The most chips that a slice of one host has. Every slice of several hosts has four chips per host."""
    mxus: int | None = None
    mxu_size: int | None = None
    mxu_rows_per_cycle: int | None = None
    """bfloat16 rows that an MXU takes per cycle. FLOP/s = 2 cores mxus mxu_size^2 rows_per_cycle clock."""
    lanes: int | None = None
    sublanes: int | None = None
    vmem_bytes: int | None = None

    # GPU.
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    float32_units: int | None = None
    """Of a multiprocessor; each multiplies and adds once per cycle. float32 FLOP/s = 2 multiprocessors units clock."""
    l2_bytes: int | None = None
    smem_bytes: int | None = None
    """The most shared memory that one thread block can have."""
    sm_smem_bytes: int | None = None
    """The shared memory of a multiprocessor. Every resident block takes `BLOCK_RESERVED_SMEM` of it beside its own."""
    sm_threads: int | None = None
    sm_blocks: int | None = None
    """The most threads and the most blocks that are resident on a multiprocessor."""

    @property
    def known(self) -> bool:
        return bool(self.peak_flops)

    @property
    def device_share(self) -> float:
        """The fraction of the chip that one JAX device has."""
        return self.cores_per_device / self.cores

    def flops_per_s(self, dtype: str) -> float | None:
        """Peak FLOP/s of one device for matrix products of `dtype`, or None where it is not known."""
        peak = dict(self.peak_flops).get(dtype)
        return None if peak is None else peak * self.device_share

    @property
    def bytes_per_s(self) -> float | None:
        """Peak memory bandwidth of one device, or None where it is not known."""
        return None if self.memory_bytes_per_s is None else self.memory_bytes_per_s * self.device_share

    @staticmethod
    def named(name: str) -> "Chip":
        """The chip called `name`. An unknown name is an error that lists the known ones."""
        chip = _BY_NAME.get(name.lower())
        if chip is None:
            raise ValueError(
                f"chip={name!r} is not known; use one of {', '.join(_BY_NAME)}{did_you_mean(name, _BY_NAME)}"
            )
        return chip

    @staticmethod
    def of(device: Device) -> "Chip":
        """The chip of a JAX device. A device that is not in the table is "unknown", with no figures."""
        for chip in CHIPS:
            if device.device_kind in chip.device_kinds:
                return chip
        platform: Platform = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}.get(device.platform, "cpu")  # type: ignore[assignment]
        if platform == "cpu":
            return Chip.named("cpu")
        capability = getattr(device, "compute_capability", None)
        parts = str(capability).split(".") if capability else []
        return Chip(
            name="unknown",
            platform=platform,
            device_kinds=(device.device_kind,),
            compute_capability=(int(parts[0]), int(parts[1])) if len(parts) == 2 else None,
        )


# TFLOP/s by dtype; HBM in GiB and GB/s; TensorCores, and those of one JAX device; MXUs of a core and their width; VMEM
# of a core in MiB; chips of a host; ICI ports, and GB/s of one of them in one direction; the GiB of a device that a program
# can have; and how the chip is called where it is rented.
# ICI: the bidirectional bandwidth per chip of the Cloud TPU documentation (v5e 400, v5p 1200, v6e 800, TPU7x 1200 GB/s)
# divided by the ports and by two; of v4, 50 GB/s per link from "TPU v4: An Optically Reconfigurable Supercomputer".
# GiB for programs: "available HBM" in the errors of libtpu 0.0.50.1 about programs that are too large. For v4 it compiles
# for one of two cores, 15.25 GiB.
_TPUS = """
name device kinds           bf16 int8 fp8  HBM GB/s cores device MXUs width VMEM host ports link usable rented
v4   TPU v4                 275  275  -    32  1200 2     2      4    128   16   4    6     50   30.5   v4
v5e  TPU v5e, TPU v5 lite   197  393  -    16  819  1     1      4    128   128  8    4     50   15.75  v5litepod
v5p  TPU v5p, TPU v5        459  918  -    95  2765 2     2      4    128   64   4    6     100  95.73  v5p
v6e  TPU v6e, TPU v6 lite   918  1836 918  32  1638 1     1      2    256   128  8    4     100  31.24  v6e
v7x  TPU7x, TPU v7x         2307 -    4614 192 7380 2     1      2    256   64   4    6     100  94.74  v7x
"""
# TFLOP/s by dtype; memory in GB and GB/s; compute capability; multiprocessors, and the float32 units of each; L2 cache in
# MiB; of a multiprocessor the shared memory in KiB, the threads and the blocks; and GB/s to other GPUs of its host in one
# direction, half of the total that NVIDIA's data sheets give for NVLink (L4: PCIe 4 x16).
# SXM parts, except L4: an H100 PCIe or NVL has other clocks and memory, so it is "unknown" and not an H100.
_GPUS = """
name      device kinds          bf16 tf32  f32  int8 fp8  GB  GB/s cc   SMs units L2  KiB threads blocks link rented
a100      NVIDIA A100-SXM4-80GB 312  156   19.5 624  -    80  2039 8.0  108 64    40  164 2048    32     300  A100-80GB
a100-40gb NVIDIA A100-SXM4-40GB 312  156   19.5 624  -    40  1555 8.0  108 64    40  164 2048    32     300  A100
h100      NVIDIA H100 80GB HBM3 989  494.5 67   1979 1979 80  3350 9.0  132 128   50  228 2048    32     450  H100
h200      NVIDIA H200           989  494.5 67   1979 1979 141 4800 9.0  132 128   50  228 2048    32     450  H200
b200      NVIDIA B200           2250 1125  75   4500 4500 180 7700 10.0 148 128   126 228 2048    32     900  B200
l4        NVIDIA L4             121  60    30.3 242  242  24  300  8.9  58  128   48  100 1536    24     32   L4
"""


def _rows(table: str) -> Iterator[tuple[str, tuple[str, ...], list[str]]]:
    """The name, the device kinds and the other columns of each row."""
    header, *rows = table.strip().splitlines()
    start, end = header.index("device kinds"), header.index("bf16")
    for row in rows:
        yield row[:start].strip(), tuple(row[start:end].strip().split(", ")), row[end:].split()


def _peaks(**tera: str) -> tuple[tuple[str, float], ...]:
    return tuple((dtype, float(value) * 1e12) for dtype, value in tera.items() if value != "-")


def _tpus() -> Iterator[Chip]:
    for name, kinds, (bf16, int8, fp8, *numbers, usable, rented) in _rows(_TPUS):
        hbm, bandwidth, cores, per_device, mxus, width, vmem, host, ports, link = map(int, numbers)
        # As libtpu schedules them: the 256-wide MXUs of v6e and v7x take two rows per cycle, the 128-wide ones take
        # one.
        rows = 2 if width == 256 else 1
        yield Chip(
            name=name,
            platform="tpu",
            device_kinds=kinds,
            accelerator=rented,
            peak_flops=_peaks(bfloat16=bf16, int8=int8, float8=fp8),
            memory_bytes=hbm * GIB,
            memory_bytes_per_s=bandwidth * 1e9,
            usable_bytes=int(float(usable) * GIB),
            links=ports,
            link_bytes_per_s=link * 1e9,
            cores=cores,
            cores_per_device=per_device,
            chips_per_host=host,
            clock_hz=float(bf16) * 1e12 / (2 * cores * mxus * width**2 * rows),
            mxus=mxus,
            mxu_size=width,
            mxu_rows_per_cycle=rows,
            lanes=LANES,
            sublanes=SUBLANES,
            vmem_bytes=vmem * MIB,
        )


def _gpus() -> Iterator[Chip]:
    for name, kinds, (bf16, tf32, float32, int8, fp8, memory, bandwidth, capability, *numbers, rented) in _rows(_GPUS):
        major, minor = capability.split(".")
        sms, units, l2, smem, threads, blocks, link = map(int, numbers)
        yield Chip(
            name=name,
            platform="gpu",
            device_kinds=kinds,
            accelerator=rented,
            peak_flops=_peaks(bfloat16=bf16, tfloat32=tf32, float32=float32, int8=int8, float8=fp8),
            memory_bytes=int(float(memory) * 1e9),
            memory_bytes_per_s=float(bandwidth) * 1e9,
            usable_bytes=int(float(memory) * 0.75e9),
            links=1,
            link_bytes_per_s=link * 1e9,
            compute_capability=(int(major), int(minor)),
            clock_hz=float(float32) * 1e12 / (2 * sms * units),
            multiprocessors=sms,
            float32_units=units,
            l2_bytes=l2 * MIB,
            smem_bytes=smem * 1024 - BLOCK_RESERVED_SMEM,
            sm_smem_bytes=smem * 1024,
            sm_threads=threads,
            sm_blocks=blocks,
        )


CHIPS: tuple[Chip, ...] = (*_tpus(), *_gpus(), Chip(name="cpu", platform="cpu", device_kinds=("cpu",)))
_BY_NAME = {chip.name: chip for chip in CHIPS}

# Chips that can be rented, and whose figures are not in the table: no op can be traced for them by name.
_WITHOUT_FIGURES = (
    *(Chip(name=name, platform="tpu", accelerator=name, cores=2) for name in ("v2", "v3")),
    *(
        Chip(name=name.lower(), platform="gpu", accelerator=name)
        for name in "B300 GH200 GB200 GB300 L40 L40S A10 A10G A40 V100 T4 RTXPRO6000".split()
    ),
)
RENTED: tuple[Chip, ...] = tuple(chip for chip in (*CHIPS, *_WITHOUT_FIGURES) if chip.accelerator is not None)
"""Every chip that a runner can be asked for."""
