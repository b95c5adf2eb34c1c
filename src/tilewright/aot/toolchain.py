"""What compiling for a TPU without one requires, and which of it this machine has.

libtpu, a pip package, contains the whole TPU compiler. It is built for x86-64 Linux only. There any Python loads it;
elsewhere qemu-user or box64 runs an x86-64 Python that loads it, from a small x86-64 root file system.
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

SETUP = "bash scripts/setup_aot.sh"
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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def too_old(version: str) -> str | None:
    """Why this libtpu is older than what jax is released with, or None."""
    wanted = libtpu_wanted()
    if _numbers(version)[: len(_numbers(wanted))] < _numbers(wanted):
        return (
            f"libtpu {version} is older than the {wanted} that jax {jax.__version__} is released with, and may not read "
            f"its kernels; run {SETUP}"
        )
    return None


@dataclass(frozen=True)
class Toolchain:
    """How to start a worker: the command in front of the worker's file, its environment, and the library to load."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    libtpu: Path
    libtpu_version: str

    @staticmethod
    def here() -> "Toolchain":
        """This machine's toolchain. Raises `NotSetUp`, with the command that installs it, where there is none."""
        for finding in doctor():
            if not finding.ok and finding.needed:
                raise NotSetUp(f"{finding.what}: {finding.found}; run {finding.remedy}")
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


def doctor() -> list[Finding]:
    """What this machine has and lacks, and the command that installs each."""
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
