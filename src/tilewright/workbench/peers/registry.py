"""The peers, where each of them is found, and which cases it takes."""

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.core.case import Case
from tilewright.core.dispatch import Unsupported

_TORCH = Path(__file__).resolve().parent / "on_torch.py"
_PROBE = "import importlib.util as u, json, sys; print(json.dumps([u.find_spec(m) is not None for m in sys.argv[1:]]))"


class Refused(Unsupported):
    """A peer does not take a case, or not on this machine. The text is the reason."""


class Failed(Exception):
    """A peer raised, crashed or did not answer. The text is its own message where there is one."""


@dataclass(frozen=True)
class Adapter:
    """One way to call a peer; `name` is its name in tables and records. The package's docstring says what a module has."""

    name: str
    module: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    @property
    def ops(self) -> Mapping[str, Callable[..., tuple[Any, ...]]]:
        return self.load().OPS

    def unavailable(self) -> str | None:
        """Why it cannot run on this device. An adapter that runs in a process of its own finds out there."""
        ask = getattr(self.load(), "unavailable", None)
        return None if ask is None else ask()

    def layouts(self, op: str) -> Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any] | None]]:
        return getattr(self.load(), "LAYOUTS", {}).get(op, {})

    def instead(self, op: str) -> Mapping[str, Any]:
        return getattr(self.load(), "INSTEAD", {}).get(op, {})

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        return getattr(self.load(), "COMPILER_OPTIONS", {})

    def settle(self, case: Case) -> Case:
        """The case as this adapter runs it, with its outputs and options. Raises `Refused` where it does not take it."""
        function = self.ops.get(case.op)
        if function is None:
            raise Refused(f"it has no {case.op}; it has {', '.join(self.ops)}")
        instead = self.instead(case.op)
        options = {**case.options, **instead}
        lacks = [name for name in (*case.inputs, *options) if name not in inspect.signature(function).parameters]
        if lacks:
            raise Refused(f"it takes no {', '.join(lacks)}")
        outputs = getattr(self.load(), "OUTPUTS", {}).get(case.op, case.outputs)
        return replace(case, options=options, outputs=tuple(outputs))


@dataclass(frozen=True)
class Peer:
    """A library that has some of our ops."""

    name: str
    package: str
    """The package that is imported."""
    install: str
    """The command that installs it."""
    adapters: tuple[Adapter, ...]
    tensors: Path | None = None
    """The module for its arrays, such as on_torch.py, for a peer in a process of its own; None for JAX, in this process."""

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op for adapter in self.adapters for op in adapter.ops))


_registry: dict[str, Peer] = {}


def register(peer: Peer) -> Peer:
    _registry[peer.name] = peer
    return peer


def peers() -> Mapping[str, Peer]:
    """Every peer, by the name that `--against` takes."""
    return dict(_registry)


_OF_JAX = {
    "jax": "with_jax_nn",
    "jax:mosaic_gpu": "with_jax_mosaic_gpu",
    "jax:dot": "with_jax_dot",
    "jax:ragged_dot_fusion": "with_jax_ragged_dot_fusion",
}
_OF_TOKAMAX = {"tokamax:triton": "with_tokamax_triton", "tokamax:mosaic": "with_tokamax_mosaic"}
# Name, package, what installs it, its adapters by their names, and whether it runs in torch.
for _name, _package, _install, _adapters, _in_torch in (
    ("fla", "fla", "pip install flash-linear-attention torch", {"fla": "with_fla"}, True),
    ("cudnn", "jax", "pip install 'jax[cuda13]'", {"cudnn": "with_cudnn"}, False),
    ("jax", "jax", "pip install jax", _OF_JAX, False),
    ("torch", "torch", "pip install torch", {"torch": "with_torch"}, True),
    ("liger", "liger_kernel", "pip install liger-kernel torch", {"liger": "with_liger"}, True),
    ("cublas", "jax", "pip install 'jax[cuda13]'", {"cublas": "with_cublas"}, False),
    ("tokamax", "tokamax", "pip install tokamax", _OF_TOKAMAX, False),
):
    _those = tuple(Adapter(name, f"{__package__}.{stem}") for name, stem in _adapters.items())
    register(Peer(_name, _package, _install, _those, tensors=_TORCH if _in_torch else None))


def absent(chosen: tuple[Peer, ...], python: str | None) -> dict[str, str]:
    """Those that are not installed, each with the command that installs it. None of them is imported.

    `python` is the interpreter in which to look for those that run in a process of their own; None is this one.
    """
    beside = [peer for peer in chosen if peer.tensors is not None]
    if python is None:
        found = {peer.name: importlib.util.find_spec(peer.package) is not None for peer in beside}
    else:
        packages = [peer.package for peer in beside]
        try:
            done = subprocess.run([python, "-c", _PROBE, *packages], capture_output=True, text=True, timeout=60)
        except OSError as error:
            raise ValueError(
                f"--peer-python {python} cannot be run ({error}); pass the path of an interpreter"
            ) from error
        if done.returncode:
            raise ValueError(f"--peer-python {python} is not a Python that works: {done.stderr.strip()[-300:]}")
        found = dict(zip((peer.name for peer in beside), json.loads(done.stdout), strict=True))
    where = python or sys.executable
    return {
        peer.name: f"{peer.package} is not installed for {where}; there: {peer.install}"
        for peer in beside
        if not found[peer.name]
    }
