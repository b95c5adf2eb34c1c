"""Mosaic TPU kernels whose arguments are declared once: received by name, and added up for a VMEM estimate.

    kernel = Kernel(
        name="scale",
        grid={"row": Axis(pl.cdiv(n, block_n), "parallel")},
        inputs={"x": Block((block_n, d), x.dtype, lambda i: (i, 0))},
        outputs={"y": Output((n, d), Block((block_n, d), x.dtype, lambda i: (i, 0)))},
    )
    kernel.vmem_bytes()
    y = kernel.run(functools.partial(_scale_kernel, factor=2.0), {"x": x}, chip=chip)["y"]

`_scale_kernel(*, x_ref, y_ref, factor)` takes each of them as a ref: inputs and outputs with `_ref` behind their names,
scratch as it is named. An argument that is declared as None is not passed to the kernel, and the body receives None.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, SUBLANES, Chip
from tilewright.core.config import Config
from tilewright.core.implementation import Launch, Pass
from tilewright.core.manual_axes import output_like
from tilewright.core.target import current_interpret, kernel_bodies_traced, tpu_interpret_params
from tilewright.pallas.names import note

_PIPELINE_BUFFERS = 2  # Pallas fetches the next block while this one is used.
_WORD_BYTES = 4
VMEM_SHARE = 0.75  # The compiler needs VMEM for spills and for values that live between passes.


def not_float64(array: Any) -> str | None:
    """Why a TPU kernel cannot take an array of float64, or None."""
    if array.dtype != jnp.float64:
        return None
    return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"


def block_pass(
    run: Callable[..., Any],
    config: Any,
    direction: Literal["forward", "backward"],
    kernel: "Callable[[Any, Launch], Kernel]",
    candidates: Callable[[Any, Chip, Any], Iterable[Config]],
    *,
    temporaries: Callable[[Any, Launch], int] = lambda call, launch: 0,
    unsupported_reason: Callable[[Any, Launch], str | None] = lambda call, launch: not_float64(call.x),
    **options: Any,
) -> Pass:
    """A pass of one kernel, `kernel(call, launch)`, whose blocks are chosen by what fits the chip's VMEM.

    Its config is the first of `candidates(config, chip, call)` that fits, or the last one. `temporaries` are the bytes
    that the kernel keeps in VMEM beside blocks and scratch.
    """

    def memory(call: Any, launch: Launch) -> dict[str, int]:
        return {direction: kernel(call, launch).vmem_bytes(temporaries(call, launch))}

    def heuristic(chip: Chip, call: Any) -> Config:
        chosen = None
        for chosen in candidates(config, chip, call):
            if memory(call, Launch(chip, chosen, None))[direction] <= VMEM_SHARE * (chip.vmem_bytes or 0):
                break
        assert chosen is not None
        return chosen

    return Pass(run, config, heuristic, unsupported_reason, memory, **options)


@dataclass(frozen=True)
class Axis:
    """An axis of the grid: its size, and whether its steps may run in any order and on either TensorCore."""

    size: int
    semantics: Literal["parallel", "arbitrary"] = "arbitrary"


@dataclass(frozen=True)
class Block:
    """The block of an argument that a grid step sees. `index`: from grid indices (and prefetched refs) to its own."""

    shape: tuple[int | None, ...]
    """An axis of None is an axis of the array that the block has one element of, and the ref does not have."""
    dtype: Any
    index: Callable[..., Any] | None = None
    """None: the whole array, as one block that is fetched once."""
    buffers: int = _PIPELINE_BUFFERS
    memory: Any = None
    """A memory space other than VMEM, such as `pl.ANY` for an argument that the kernel copies by itself."""

    @property
    def spec(self) -> pl.BlockSpec:
        if self.memory is not None and self.index is None:
            return pl.BlockSpec(memory_space=self.memory)
        return pl.BlockSpec(self.shape, self.index, memory_space=self.memory)

    def bytes(self) -> int:
        return 0 if self.memory is not None else self.buffers * padded_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Output:
    """An output: the shape of the whole array, and its block."""

    shape: tuple[int, ...]
    block: Block


def padded_bytes(shape: tuple[int | None, ...], dtype: Any) -> int:
    """The VMEM of an array: its last axis in whole lanes, the one before it in whole tiles of its dtype."""
    sizes = [size for size in shape if size is not None]
    itemsize = jnp.dtype(dtype).itemsize
    rows = SUBLANES * max(1, _WORD_BYTES // itemsize)
    *outer, second, last = [1, 1, *sizes]
    return math.prod(outer) * (-(-second // rows) * rows) * (-(-last // LANES) * LANES) * itemsize


@dataclass(frozen=True)
class Kernel:
    """A kernel's declaration."""

    name: str
    grid: Mapping[str, Axis]
    inputs: Mapping[str, Block | None]
    outputs: Mapping[str, Output | None]
    scratch: Mapping[str, Any] = field(default_factory=dict)
    """`pltpu.VMEM(...)`, `pltpu.SMEM(...)`, semaphores."""
    prefetched: tuple[str, ...] = ()
    """Arrays that are in scalar memory before the first step; index maps take their refs after the grid indices."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Inputs whose buffers outputs reuse: {input: output}."""

    def vmem_bytes(self, temporaries: int = 0) -> int:
        """An estimate of the VMEM that the kernel needs: its blocks with their buffers, its scratch, `temporaries`."""
        blocks = [block for block in self.inputs.values() if block is not None]
        blocks += [output.block for output in self.outputs.values() if output is not None]
        total = sum(block.bytes() for block in blocks) + temporaries
        for buffer in self.scratch.values():
            if buffer is not None and getattr(buffer, "memory_space", None) == pltpu.VMEM:
                total += padded_bytes(tuple(buffer.inner_aval.shape), buffer.inner_aval.dtype)
        return total

    def run(
        self,
        body: Callable[..., None],
        arrays: Mapping[str, Any],
        *,
        chip: Chip,
        cost: pl.CostEstimate | None = None,
        vmem_limit_bytes: int | None = None,
        **compiler_options: Any,
    ) -> dict[str, Any]:
        """Runs the kernel on arrays given by name, prefetched ones too, and returns its outputs by name (None where
        declared so).

        Outputs vary over the mesh axes that the inputs vary over. The kernel may use all of the chip's VMEM.
        """
        inputs = {name: block for name, block in self.inputs.items() if block is not None}
        outputs = {name: output for name, output in self.outputs.items() if output is not None}
        scratch = {name: buffer for name, buffer in self.scratch.items() if buffer is not None}
        names = (*(f"{name}_ref" for name in (*self.prefetched, *inputs, *outputs)), *scratch)
        every = (*(f"{name}_ref" for name in (*self.inputs, *self.outputs)), *self.scratch)
        absent = dict.fromkeys(name for name, output in self.outputs.items() if output is None)
        if not kernel_bodies_traced():
            return {name: jax.lax.empty(output.shape, output.block.dtype) for name, output in outputs.items()} | absent
        like = arrays[next(iter(inputs))]

        def by_name(*refs: Any) -> None:
            body(**dict.fromkeys(every) | dict(zip(names, refs, strict=True)))

        position = {name: n for n, name in enumerate((*self.prefetched, *inputs))}
        kernel = pl.pallas_call(
            by_name,
            out_shape=tuple(output_like(output.shape, output.block.dtype, like) for output in outputs.values()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.prefetched),
                grid=tuple(axis.size for axis in self.grid.values()),
                in_specs=[block.spec for block in inputs.values()],
                out_specs=tuple(output.block.spec for output in outputs.values()),
                scratch_shapes=list(scratch.values()),
            ),
            input_output_aliases={position[name]: list(outputs).index(output) for name, output in self.aliases.items()},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=tuple(axis.semantics for axis in self.grid.values()),
                vmem_limit_bytes=vmem_limit_bytes or chip.vmem_bytes,
                **compiler_options,
            ),
            cost_estimate=cost,
            interpret=tpu_interpret_params(current_interpret()),
            name=note(self.name),
        )
        # A kernel is the same program in 64-bit mode, where a Python number would be of 64 bits.
        with jax.enable_x64(False):
            results = kernel(*(arrays[name] for name in (*self.prefetched, *inputs)))
        made: dict[str, jax.Array | None] = dict(zip(outputs, results, strict=True))
        return made | absent
