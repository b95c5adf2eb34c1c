"""Chips by name: what each can do at most, for rooflines, block sizes and dispatch.

Every figure is the vendor's ceiling for one chip, dense, without sparsity; VMEM and MXUs are per TensorCore. None means
that the figure is not known, and nothing here guesses: a device that is not in the table gets a `Chip` named "unknown"
whose figures are all None, and a roofline against it is not printed.

A JAX device is not always a chip: on v7x each of the two TensorCores is a device of its own, so a kernel on one device
has half of the chip's ceiling. `flops_per_s` and `bytes_per_s` are of a device.
"""

from dataclasses import dataclass
from typing import Any, Literal

Device = Any  # A jax.Device, which type checkers take for a variable.
MIB = 2**20
GIB = 2**30
# A TPU's registers and tiles, of every generation so far.
LANES = 128
SUBLANES = 8  # Of a float32 tile.
ROW_TILE = 16  # Sublanes of a bfloat16 tile, the larger of the two dtypes' tiles.
Platform = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip and its ceilings. `Chip.named("v6e")`, `Chip.of(jax.devices()[0])`."""

    name: str
    platform: Platform
    device_kinds: tuple[str, ...] = ()
    """How JAX names a device of this chip (`device.device_kind`)."""

    peak_flops: tuple[tuple[str, float], ...] = ()
    """(dtype, FLOP/s) of the whole chip's matrix units."""
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None

    # TPU, per TensorCore.
    cores: int = 1
    cores_per_device: int = 1
    clock_hz: float | None = None
    mxus: int | None = None
    mxu_size: int | None = None
    mxu_rows_per_cycle: int | None = None
    """Rows of bfloat16 that an MXU takes in a cycle. FLOP/s = 2 cores mxus mxu_size^2 rows_per_cycle clock."""
    lanes: int | None = None
    sublanes: int | None = None
    vmem_bytes: int | None = None

    # GPU.
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    smem_bytes: int | None = None
    """Shared memory that one block may take."""

    @property
    def known(self) -> bool:
        return bool(self.peak_flops)

    @property
    def device_share(self) -> float:
        """The part of the chip that one JAX device is."""
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
        """The chip called `name`; an unknown name is an error that lists the known ones."""
        chip = _BY_NAME.get(name.lower())
        if chip is None:
            raise ValueError(f"chip={name!r} is not known; use one of {', '.join(_BY_NAME)}")
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


def _tpu(
    name: str,
    device_kinds: tuple[str, ...],
    *,
    bf16: float,
    int8: float | None = None,
    fp8: float | None = None,
    hbm_gib: int,
    hbm_gb_per_s: float,
    cores: int,
    cores_per_device: int,
    mxus: int,
    mxu_size: int,
    vmem_mib: int,
) -> Chip:
    peaks = {"bfloat16": bf16, "int8": int8, "float8": fp8}
    # As libtpu schedules them: the 256-wide MXUs of v6e and v7x take two rows a cycle, the 128-wide ones a single row.
    rows = 2 if mxu_size == 256 else 1
    return Chip(
        name=name,
        platform="tpu",
        device_kinds=device_kinds,
        peak_flops=tuple((dtype, tera * 1e12) for dtype, tera in peaks.items() if tera is not None),
        memory_bytes=hbm_gib * GIB,
        memory_bytes_per_s=hbm_gb_per_s * 1e9,
        cores=cores,
        cores_per_device=cores_per_device,
        clock_hz=bf16 * 1e12 / (2 * cores * mxus * mxu_size**2 * rows),
        mxus=mxus,
        mxu_size=mxu_size,
        mxu_rows_per_cycle=rows,
        lanes=128,
        sublanes=8,
        vmem_bytes=vmem_mib * MIB,
    )


def _gpu(
    name: str,
    device_kinds: tuple[str, ...],
    *,
    bf16: float,
    tf32: float,
    float32: float,
    int8: float,
    fp8: float | None = None,
    memory_gb: float,
    gb_per_s: float,
    capability: tuple[int, int],
    multiprocessors: int,
    smem_kib: int,
) -> Chip:
    peaks = {"bfloat16": bf16, "tfloat32": tf32, "float32": float32, "int8": int8, "float8": fp8}
    return Chip(
        name=name,
        platform="gpu",
        device_kinds=device_kinds,
        peak_flops=tuple((dtype, tera * 1e12) for dtype, tera in peaks.items() if tera is not None),
        memory_bytes=int(memory_gb * 1e9),
        memory_bytes_per_s=gb_per_s * 1e9,
        compute_capability=capability,
        multiprocessors=multiprocessors,
        smem_bytes=smem_kib * 1024,
    )


CHIPS: tuple[Chip, ...] = (
    _tpu(
        "v4",
        ("TPU v4",),
        bf16=275,
        int8=275,
        hbm_gib=32,
        hbm_gb_per_s=1200,
        cores=2,
        cores_per_device=2,
        mxus=4,
        mxu_size=128,
        vmem_mib=16,
    ),
    _tpu(
        "v5e",
        ("TPU v5e", "TPU v5 lite"),
        bf16=197,
        int8=393,
        hbm_gib=16,
        hbm_gb_per_s=819,
        cores=1,
        cores_per_device=1,
        mxus=4,
        mxu_size=128,
        vmem_mib=128,
    ),
    _tpu(
        "v5p",
        ("TPU v5p", "TPU v5"),
        bf16=459,
        int8=918,
        hbm_gib=95,
        hbm_gb_per_s=2765,
        cores=2,
        cores_per_device=2,
        mxus=4,
        mxu_size=128,
        vmem_mib=64,
    ),
    _tpu(
        "v6e",
        ("TPU v6e", "TPU v6 lite"),
        bf16=918,
        int8=1836,
        fp8=918,
        hbm_gib=32,
        hbm_gb_per_s=1638,
        cores=1,
        cores_per_device=1,
        mxus=2,
        mxu_size=256,
        vmem_mib=128,
    ),
    _tpu(
        "v7x",
        ("TPU7x", "TPU v7x"),
        bf16=2307,
        fp8=4614,
        hbm_gib=192,
        hbm_gb_per_s=7380,
        cores=2,
        cores_per_device=1,
        mxus=2,
        mxu_size=256,
        vmem_mib=64,
    ),
    # SXM parts, except L4. An H100 PCIe or NVL has other clocks and memory, so it is unknown, not an H100.
    _gpu(
        "a100",
        ("NVIDIA A100-SXM4-80GB",),
        bf16=312,
        tf32=156,
        float32=19.5,
        int8=624,
        memory_gb=80,
        gb_per_s=2039,
        capability=(8, 0),
        multiprocessors=108,
        smem_kib=163,
    ),
    _gpu(
        "a100-40gb",
        ("NVIDIA A100-SXM4-40GB",),
        bf16=312,
        tf32=156,
        float32=19.5,
        int8=624,
        memory_gb=40,
        gb_per_s=1555,
        capability=(8, 0),
        multiprocessors=108,
        smem_kib=163,
    ),
    _gpu(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        bf16=989,
        tf32=494.5,
        float32=67,
        int8=1979,
        fp8=1979,
        memory_gb=80,
        gb_per_s=3350,
        capability=(9, 0),
        multiprocessors=132,
        smem_kib=227,
    ),
    _gpu(
        "h200",
        ("NVIDIA H200",),
        bf16=989,
        tf32=494.5,
        float32=67,
        int8=1979,
        fp8=1979,
        memory_gb=141,
        gb_per_s=4800,
        capability=(9, 0),
        multiprocessors=132,
        smem_kib=227,
    ),
    _gpu(
        "b200",
        ("NVIDIA B200",),
        bf16=2250,
        tf32=1125,
        float32=75,
        int8=4500,
        fp8=4500,
        memory_gb=180,
        gb_per_s=7700,
        capability=(10, 0),
        multiprocessors=148,
        smem_kib=227,
    ),
    _gpu(
        "l4",
        ("NVIDIA L4",),
        bf16=121,
        tf32=60,
        float32=30.3,
        int8=242,
        fp8=242,
        memory_gb=24,
        gb_per_s=300,
        capability=(8, 9),
        multiprocessors=58,
        smem_kib=99,
    ),
    Chip(name="cpu", platform="cpu", device_kinds=("cpu",)),
)
_BY_NAME = {chip.name: chip for chip in CHIPS}
