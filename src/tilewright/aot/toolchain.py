"""What compiling for a TPU or GPU without one requires, and which of it this machine has.

libtpu, a pip package, contains the whole TPU compiler. It is built for x86-64 Linux only. There any Python loads it;
elsewhere qemu-user or box64 runs an x86-64 Python that loads it, from a small x86-64 root file system.

For GPUs it is jax's CUDA plugin, which contains XLA and Mosaic's compiler, with NVIDIA's ptxas and nvdisasm. All of them
are in wheels for Linux on x86-64 and aarch64, and none needs a GPU, a driver or the CUDA libraries.

`scripts/setup_aot.sh` installs what is missing under `home()`; `doctor()` says what that is.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from tilewright.core.chip import Platform

SETUP = "bash scripts/setup_aot.sh"
SETUP_GPU = f"{SETUP} gpu"
CUDA_PLUGIN = "jax-cuda13-plugin"
QEMU = "qemu-x86_64-static"
BOX64 = "box64"  # Preferred where it is installed: it takes a sixth of the time (decode_attention for a v5e).
ROOT_PYTHON = "usr/bin/python3.11"


class NotSetUp(RuntimeError):
    """This machine lacks something. The text says what, and the command that installs it."""


def home() -> Path:
    """Where the set-up script installs things, and where results are cached."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tilewright" / "aot"


def is_native() -> bool:
    return platform.system() == "Linux" and platform.machine() == "x86_64"


@functools.cache
def libtpu_wanted() -> str:
    """The libtpu series that the installed jax is released with, such as "0.0.50"."""
    for requirement in importlib.metadata.requires("jax") or []:
        if match := re.match(r"libtpu==([\d.]+?)(\.\*)?\s*(;|$)", requirement):
            return match.group(1)
    raise NotSetUp(f"jax {jax.__version__} does not say which libtpu it is released with")


def find_libtpu() -> tuple[Path, str] | None:
    """The compiler's library and its version: from the installed package on x86-64, or from the set-up script."""
    laid_out = home() / "libtpu" / "libtpu.so"
    if is_native() and (spec := importlib.util.find_spec("libtpu")) and spec.submodule_search_locations:
        library = Path(next(iter(spec.submodule_search_locations))) / "libtpu.so"
        if library.exists():
            return library, importlib.metadata.version("libtpu")
    version = home() / "libtpu" / "VERSION"
    if laid_out.exists() and version.exists():
        return laid_out, version.read_text().strip()
    return None


@functools.cache
def cuda_wanted() -> str:
    """The version of the CUDA plugin that the installed jax is released with, such as "0.12.0.1"."""
    for requirement in importlib.metadata.requires("jax") or []:
        if match := re.match(rf"{CUDA_PLUGIN}\S*?<=([\d.]+)", requirement):
            return match.group(1)
    raise NotSetUp(f"jax {jax.__version__} does not say which {CUDA_PLUGIN} it is released with")


def cuda_home() -> Path:
    """Where the set-up script installs the compiler for GPUs."""
    return home() / "cuda"


# The compiler, what Mosaic's host code is linked with, the assembler and the disassembler.
_CUDA_FILES = ("xla_cuda_plugin.so", "libmosaic_gpu_runtime.so", "bin/ptxas", "bin/nvdisasm")


def find_cuda() -> tuple[Path, str] | None:
    """The folder of the compiler for GPUs, and the versions of plugin and ptxas, if all of it is there."""
    folder = cuda_home()
    if all((folder / name).exists() for name in (*_CUDA_FILES, "VERSION")):
        return folder, (folder / "VERSION").read_text().strip()
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def too_old(version: str, platform: Platform = "tpu") -> str | None:
    """Why this compiler is older than the one that jax is released with, or None."""
    name, wanted, setup = ("libtpu", libtpu_wanted(), SETUP)
    if platform == "gpu":
        name, wanted, setup = (CUDA_PLUGIN, cuda_wanted(), SETUP_GPU)
    if _numbers(version)[: len(_numbers(wanted))] < _numbers(wanted):
        return (
            f"{name} {version} is older than the {wanted} that jax {jax.__version__} is released with, and may not read "
            f"its kernels; run {setup}"
        )
    return None


@dataclass(frozen=True)
class Toolchain:
    """How to start a worker: the command in front of the worker's file, its environment, and the library to load."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    library: Path
    version: str
    name: str = "libtpu"

    @property
    def compiler(self) -> str:
        """Its name and version, such as "libtpu 0.0.50.1"."""
        return f"{self.name} {self.version}"

    @staticmethod
    def here(platform: Platform = "tpu") -> "Toolchain":
        """This machine's toolchain. Raises `NotSetUp`, with the command that installs it, where there is none."""
        for finding in doctor(platform):
            if not finding.ok and finding.needed:
                raise NotSetUp(f"{finding.what}: {finding.found}; run {finding.remedy}")
        if platform == "gpu":
            return _cuda_toolchain()
        found = find_libtpu()
        assert found is not None
        if is_native():
            return Toolchain((sys.executable, "-S"), (), *found)
        root = home() / "root"
        libraries = ":".join(str(root / folder) for folder in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
        python, environment = str(root / ROOT_PYTHON), (("PYTHONHOME", str(root / "usr")),)
        if box64 := shutil.which(BOX64):
            quiet = (("BOX64_NOBANNER", "1"), ("BOX64_LOG", "0"))
            environment = (*environment, *quiet, ("BOX64_LD_LIBRARY_PATH", libraries))
            return Toolchain((box64, python, "-S"), environment, *found)
        command = (QEMU, "-cpu", "max", "-L", str(root), "-E", f"LD_LIBRARY_PATH={libraries}", python, "-S")
        return Toolchain(command, environment, *found)


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`'s report."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def _cuda_toolchain() -> Toolchain:
    found = find_cuda()
    assert found is not None
    folder, version = found
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "MOSAIC_GPU_CUDA_ROOT": str(folder),
        "MOSAIC_GPU_RUNTIME_LIB_PATH": str(folder / "libmosaic_gpu_runtime.so"),
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}",
    }
    command = (sys.executable, "-S")
    return Toolchain(command, tuple(environment.items()), folder / "xla_cuda_plugin.so", version, CUDA_PLUGIN)


def doctor(platform: Platform = "tpu") -> list[Finding]:
    """What this machine has and lacks for compiling for TPUs or for GPUs, and the command that installs each."""
    return _doctor_gpu() if platform == "gpu" else _doctor_tpu()


def _doctor_gpu() -> list[Finding]:
    machine = f"{platform.system()} {platform.machine()}"
    runs = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    elsewhere = "this on Linux, x86-64 or aarch64: jax has no CUDA wheels for other machines"
    findings = [Finding("machine", runs, machine, elsewhere)]
    folder = cuda_home()
    for name in _CUDA_FILES:
        there = (folder / name).exists()
        findings.append(Finding(name, there, str(folder / name) if there else "none found", SETUP_GPU))
    if (found := find_cuda()) is None:
        findings.append(Finding("set-up", False, "not finished", SETUP_GPU))
    else:
        old = too_old(found[1], "gpu")
        said = f"{found[1]}; jax {jax.__version__} is released with {cuda_wanted()}"
        findings.append(Finding(f"{CUDA_PLUGIN} for this jax", old is None, old or said, SETUP_GPU, needed=False))
    return findings


def _doctor_tpu() -> list[Finding]:
    findings = [Finding("machine", True, f"{platform.system()} {platform.machine()}")]
    found = find_libtpu()
    if found is None:
        findings.append(Finding("libtpu", False, "none found", SETUP))
    else:
        path, version = found
        findings.append(Finding("libtpu", True, f"{version} at {path}"))
        old = too_old(version)
        wanted = f"jax {jax.__version__} is released with libtpu {libtpu_wanted()}"
        findings.append(Finding("libtpu for this jax", old is None, old or wanted, SETUP, needed=False))
    if is_native():
        findings.append(Finding("emulation", True, "not needed on x86-64"))
        return findings
    emulator = shutil.which(BOX64) or shutil.which(QEMU)
    findings.append(Finding("emulator", emulator is not None, emulator or f"no {QEMU} on the PATH", SETUP))
    python = home() / "root" / ROOT_PYTHON
    findings.append(Finding("x86-64 root", python.exists(), str(python) if python.exists() else f"no {python}", SETUP))
    return findings
