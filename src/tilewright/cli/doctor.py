"""`tilewright doctor`: the device, the driver, jax, which kernels can run here, and what each extra lacks."""

import collections
import platform
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import typer
from packaging.requirements import Requirement
from packaging.version import Version
from rich.markup import escape

from tilewright.aot import doctor as compilers
from tilewright.aot.toolchain import Finding
from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import console, new_table
from tilewright.core.chip import Chip
from tilewright.core.dispatch import explain, registered
from tilewright.core.target import default_device
from tilewright.core.version import __version__
from tilewright.workbench.figures import one_line

_CHECKOUT = Path(__file__).resolve().parents[3]
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DRIVER = Version("580")  # Of CUDA 13, which the extra `gpu` brings.
_KERNELS = {"pallas_tpu": "TPU", "pallas_gpu": "GPU"}


@prints_json
def doctor() -> None:
    """Report what this machine has and lacks, with the one command that mends each thing.

    The device that JAX sees and its driver; jax; which kernels can run here, and why not the others; what each extra of
    the package lacks; and the compilers for chips that are not attached. The exit code is 1 if something is broken: a jax
    that is too old or too new, or an accelerator that is there and that JAX does not use. An extra that is not installed is
    not an error.
    """
    sections = {
        "machine": ("This machine", [*_machine(), *_accelerators()]),
        "kernels": ("Kernels, for the first case of each op in bfloat16", list(_kernels())),
        "extras": ("Extras", list(_extras())),
        "compile_tpu": ("Compiling for TPUs that are not attached (docs/compile.md)", compilers("tpu")),
        "compile_gpu": ("Compiling for GPUs that are not attached", compilers("gpu")),
    }
    tell(**{name: findings for name, (_, findings) in sections.items()})
    for title, findings in sections.values():
        table = new_table(title, ("what", "", "found", "remedy"))
        for finding in findings:
            sign = "[green]ok[/]" if finding.ok else "[bold red]no[/]" if finding.needed else "[yellow]no[/]"
            table.add_row(finding.what, sign, escape(finding.found), "" if finding.ok else escape(finding.remedy))
        console().print(table)
    if any(finding.needed and not finding.ok for finding in sections["machine"][1]):
        raise typer.Exit(1)


def _install(extra: str) -> str:
    """The command that installs an extra: in a checkout with uv, else with pip."""
    in_checkout = (_CHECKOUT / "pyproject.toml").exists()
    return f"uv sync --inexact --extra {extra}" if in_checkout else f"pip install 'tilewright[{extra}]'"


def _requirements() -> list[Requirement]:
    """What the package asks for, in its extras too; from its metadata, or from pyproject.toml where it is not installed."""
    try:
        return [Requirement(line) for line in metadata.requires("tilewright") or ()]
    except metadata.PackageNotFoundError:
        path = _CHECKOUT / "pyproject.toml"
        project = tomllib.loads(path.read_text())["project"] if path.exists() else {}
    requirements = [Requirement(line) for line in project.get("dependencies", ())]
    for extra, lines in project.get("optional-dependencies", {}).items():
        for line in lines:
            name, _, marker = line.partition(";")
            condition = f"({marker}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            requirements.append(Requirement(f"{name}; {condition}"))
    return requirements


def _machine() -> Iterator[Finding]:
    yield Finding("tilewright", True, f"{__version__}, {Path(__file__).resolve().parents[1]}")
    yield Finding(
        "Python", sys.version_info >= (3, 12), f"{platform.python_version()}, {sys.executable}", "Python 3.12 or later"
    )
    yield Finding("system", sys.platform == "linux", f"{platform.system()} {platform.machine()}", "Linux")
    wanted = next((each for each in _requirements() if each.name == "jax" and each.marker is None), None)
    fits = wanted is None or wanted.specifier.contains(jax.__version__, prereleases=True)
    mend = f"pip install 'jax{'' if wanted is None else wanted.specifier}'"
    yield Finding(
        "jax",
        fits,
        f"{jax.__version__}" + ("" if fits or wanted is None else f"; tilewright takes {wanted.specifier}"),
        mend,
    )


def _accelerators() -> Iterator[Finding]:
    """The device that JAX sees, and the accelerators that are there without it."""
    try:
        device = default_device()
    except RuntimeError as error:  # JAX_PLATFORMS names one that is not there.
        yield Finding("device", False, one_line(error), "unset JAX_PLATFORMS, or set it to a platform that is here")
        return
    chip, count = Chip.of(device), len(jax.local_devices())
    kind = (
        device.device_kind
        if chip.known or chip.platform == "cpu"
        else f"{device.device_kind}, not in the table of chips"
    )
    yield Finding("device", True, f"{count} x {kind} (chip {chip.name})")
    driver = re.search(r"Kernel Module\D*([\d.]+)", _NVIDIA_DRIVER.read_text()) if _NVIDIA_DRIVER.exists() else None
    if driver is not None:
        new_enough = Version(driver[1]) >= _LEAST_DRIVER
        yield Finding("NVIDIA driver", new_enough, driver[1], f"install driver {_LEAST_DRIVER} or later (CUDA 13)")
        used = chip.platform == "gpu"
        said = "used by JAX" if used else "there, and JAX does not use it"
        yield Finding("NVIDIA GPU", used, said, _install("gpu"))
    if list(Path("/dev").glob("accel[0-9]*")):
        used = chip.platform == "tpu"
        said = "used by JAX" if used else "there, and JAX does not use it"
        yield Finding("TPU", used, said, _install("tpu"))


def _kernels() -> Iterator[Finding]:
    """For each kind of kernel how many ops have it, how many of them run here, and why the others do not."""
    try:
        default_device()
    except RuntimeError as error:
        yield Finding("kernels", False, one_line(error), "see the device above", needed=False)
        return
    for name, kind in _KERNELS.items():
        having = [op for op in registered().values() if name in op.implementations]
        reasons: collections.Counter[str] = collections.Counter()
        for op in having:
            case = op.cases[0]
            refusal = explain(op.name, **case.structs("bfloat16"), **case.options, implementation=name).refusal
            if refusal is not None:
                reasons[refusal.split("cannot run this call: ", 1)[-1].split(";")[0]] += 1
        said = f"{len(having) - reasons.total()} of {len(having)} ops run here"
        if reasons:
            some = reasons.total() < len(having)
            told = ", ".join(f"{reason} ({times})" for reason, times in reasons.most_common())
            said += f"; not the others: {told}" if some else f": {told}"
        remedy = f"none needed, plain JAX runs instead; on a machine with a {kind}: {_install(kind.lower())}"
        yield Finding(name, reasons.total() < len(having), said, remedy, needed=False)
    plain = len([op for op in registered().values() if op.plain])
    yield Finding("plain JAX", True, f"{plain} of {len(registered())} ops run on every device")


def _extras() -> Iterator[Finding]:
    requirements = _requirements()
    if not requirements:
        yield Finding(
            "extras",
            False,
            "not known: there is neither package metadata nor pyproject.toml",
            "install the package",
            needed=False,
        )
    extras = sorted(
        {match for each in requirements for match in re.findall(r"extra == [\"']([\w-]+)", str(each.marker))}
    )
    for extra in extras:
        asked = [each for each in requirements if each.marker is not None and extra in str(each.marker)]
        here = [each for each in asked if each.marker.evaluate({"extra": extra})]  # type: ignore[union-attr]
        if not here:
            yield Finding(extra, False, "has no package for this machine", f"see {_elsewhere(extra)}", needed=False)
            continue
        lacks = list(dict.fromkeys(text for each in here for text in _lacking(each)))
        found = f"lacks {', '.join(lacks)}" if lacks else ", ".join(_installed(each) for each in here)
        yield Finding(extra, not lacks, found, _install(extra), needed=False)


def _elsewhere(extra: str) -> str:
    return "scripts/setup_aot.sh, which sets up an emulator" if extra == "aot" else "docs/install.md"


def _installed(requirement: Requirement) -> str:
    return f"{requirement.name} {metadata.version(requirement.name)}"


def _lacking(requirement: Requirement, deeper: bool = True) -> Iterator[str]:
    """The packages of a requirement that are missing or too old, those that its own extras bring included."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        yield str(requirement.name)
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield f"{requirement.name}{requirement.specifier} (here: {version})"
    if not deeper:
        return
    for line in metadata.requires(requirement.name) or ():
        inner = Requirement(line)
        for extra in requirement.extras:
            if inner.marker is not None and "extra" in str(inner.marker) and inner.marker.evaluate({"extra": extra}):
                yield from _lacking(inner, deeper=False)
