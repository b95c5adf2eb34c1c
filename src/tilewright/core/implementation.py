"""What an implementation of an op is: a forward and a backward pass over one call, each with its config.

An op family is a folder with a file (or a package) per implementation, whose name is the implementation's. It has

    IMPLEMENTATION = Implementation(forward=Pass(_forward, NormTpuForward, ...), backward=Pass(...))

or a tuple of them, one per GPU architecture; or a mapping from the op's name, where the ops of a family differ.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tilewright.core import tuned
from tilewright.core.chip import MIB, Chip
from tilewright.core.config import Config
from tilewright.core.target import Interpret, interpreting_as, target

DTYPES = ("float32", "bfloat16")
# The implementations that are kernels, and their platforms. Everything else is plain JAX and runs anywhere.
KERNEL_PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}


@dataclass(frozen=True)
class Launch:
    """What was decided for one pass: its chip, its config, and the interpreter, if it runs in one. Hashable."""

    chip: Chip
    config: Any
    interpret: Interpret | None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the chip and the interpreter current: a backward may be traced after its forward's contexts closed."""
        with target(self.chip), interpreting_as(self.interpret):
            yield


@dataclass(frozen=True)
class Pass:
    """One direction of an implementation.

    A forward pass is `run(call, launch, save=) -> (outputs, saved)`: `saved` is a pytree for the backward pass, read
    only where `save` is True. The first axis of each array in it is the batch, as it is in the outputs.
    A backward pass is `run(call, saved, cotangents, launch) -> call.gradients(...)`; `cotangents` has the structure of
    `outputs`.
    """

    run: Callable[..., Any]
    config: type[Config] | None = None
    heuristic: Callable[[Chip, Any], Config] | None = None
    """The config for a chip and a call, where the caller names none."""
    unsupported_reason: Callable[[Any, Launch], str | None] | None = None
    """Why this pass cannot run a call, with the way out; or None."""
    memory: Callable[[Any, Launch], Mapping[str, int]] | None = None
    """On-chip memory in bytes (VMEM, or shared memory of a thread block) that each kernel of this pass needs, by
    name."""
    memory_fields: str = "smaller blocks"
    """What of the config to make smaller where a kernel does not fit, such as "a smaller block_q or block_k"."""
    reads: tuple[str, ...] | None = None
    """Backward: the arrays of the call that it reads; None for all. The others are shapes (`jax.ShapeDtypeStruct`), not
    kept."""
    saved: Any = None
    """Forward: the axes of the arrays in `saved`, as a pytree of its structure: "B H T", and "." for an axis that a call
    cannot be cut along."""
    follows_forward: bool = False
    """Backward: whether blocks of it are the forward's, so that a config of the forward is timed with both passes."""
    differentiable: bool = False
    """Backward: whether it and its forward pass are plain JAX that can be differentiated, and `saved` is of floating
    dtypes. Such an implementation has forward mode and second derivatives."""
    differentiated_as: "Pass | None" = None
    """Backward: for a kernel whose forward pass is plain JAX, the plain pass with the same results that is differentiated
    in its place. Such an implementation has forward mode and second derivatives, too."""
    note: str | Callable[[Any], str] = ""
    """What `explain` should say about this pass beside its config, such as whose gradient it is; a function where that
    depends on the call."""

    @property
    def has_derivatives(self) -> bool:
        """Whether JAX can differentiate its implementation in forward mode, and any number of times."""
        return self.differentiable or self.differentiated_as is not None

    def refusal(self, call: Any, launch: Launch) -> str | None:
        """Why this pass cannot run, by its own rules and by its memory."""
        if self.unsupported_reason is not None and (reason := self.unsupported_reason(call, launch)) is not None:
            return reason
        platform, chip = launch.chip.platform, launch.chip
        limit = {"tpu": chip.vmem_bytes, "gpu": chip.smem_bytes}.get(platform)
        if self.memory is None or limit is None:
            return None
        for kernel, needed in self.memory(call, launch).items():
            if needed > limit:
                unit, word = (MIB, "MiB of VMEM") if platform == "tpu" else (1024, "KiB of shared memory")
                return (
                    f"its {kernel} kernel needs about {-(-needed // unit)} {word} for {call.bucket_key} with "
                    f"{launch.config}, and a {chip.name} has {limit // unit}; use {self.memory_fields}, or "
                    f"implementation='xla'"
                )
        return None

    def config_for(
        self, chip: Chip, call: Any, given: tuple[Config, ...], known: Iterable[tuned.Found] = ()
    ) -> tuple[Config | None, str, str]:
        """The config of this pass, where it is from, and for one from a table which entry that is.

        It is from the "argument", "tuned" for the call's bucket, "tuned nearby", from the "heuristic", or "none" where the
        pass takes none. `known` is what the tables have, the best match first: the first that can run the call is taken.
        Where a search found nothing faster than the heuristic's config, and the heuristic chooses another one for this call
        than for the call that was timed, it is from the "heuristic", and the entry says that a search kept it.
        """
        if self.config is None:
            return None, "none", ""
        for config in given:
            if type(config) is self.config:
                return config, "argument", ""
        assert self.heuristic is not None
        heuristic = functools.partial(self.heuristic, chip, call)
        for found in known:
            config = found.config_with(heuristic)
            if config is not None and self.refusal(call, Launch(chip, config, None)) is None:
                if found.exact and config != found.config:
                    return config, "heuristic", f"a search found none faster for {found.as_timed}"
                return config, "tuned" if found.exact else "tuned nearby", str(found)
        return heuristic(), "heuristic", ""


def gradient_of(implementation: str, forward: Pass) -> Pass:
    """A backward pass that is JAX's gradient of another implementation's forward pass, which is plain JAX.

    For kernels that are seldom differentiated, such as those of decoding.
    """

    def run(call: Any, saved: Any, cotangents: Any, launch: Launch) -> Any:
        arrays = {name: value for name, value in call.given().items() if name in call.differentiable_arrays}
        _, pullback = jax.vjp(lambda arrays: forward.run(call.with_arrays(arrays), launch, save=False)[0], arrays)
        return call.gradients(**pullback(cotangents)[0])

    return Pass(run, note=f"the gradient of implementation={implementation!r}")


@dataclass(frozen=True)
class Implementation:
    """One implementation of an op, or of several that share their call."""

    forward: Pass
    backward: Pass | None = None
    """None: JAX differentiates the forward pass, whose code is plain JAX."""
    architecture: tuple[int, int] | None = None
    """The CUDA compute capability that the kernels are written for; None for plain JAX and TPU kernels."""
    dtypes: tuple[str, ...] = DTYPES
    """The dtypes of the inputs that it takes."""

    @property
    def passes(self) -> dict[str, Pass]:
        return {"forward": self.forward} | ({} if self.backward is None else {"backward": self.backward})

    @property
    def configs(self) -> tuple[type[Config], ...]:
        return tuple(one.config for one in self.passes.values() if one.config is not None)
