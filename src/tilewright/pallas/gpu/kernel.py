"""Mosaic GPU kernels whose arguments are declared once and received by name.

    outputs = run_kernel(
        functools.partial(_scale_kernel, factor=2.0),
        name="scale",
        inputs={"x": x},
        outputs={"y": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        scratch={"x_smem": tile(64, 64, dtype=x.dtype), "full": plgpu.Barrier(num_arrivals=1)},
        grid={"row": x.shape[0] // 64},
    )
    y = outputs["y"]

`_scale_kernel(*, x_ref, y_ref, x_smem, full, factor)` takes each of them as a ref: inputs and outputs with `_ref`
behind their names, scratch as it is named. One that is None is not passed to the kernel, and the body receives None.
`smem_bytes` adds up the shared memory of the same `scratch`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.boundary import Unsupported
from tilewright.core.chip import Chip
from tilewright.core.manual_axes import output_like
from tilewright.core.target import current_interpret, gpu_interpret_params, kernel_bodies_traced
from tilewright.pallas.arrays import padded
from tilewright.pallas.names import note

_SWIZZLE_BYTES = 128
_TILE_ROWS = 8
_BARRIER_BYTES = 8
_ALIGNMENT = 1024  # Of each buffer in shared memory.
_REDUCTION_BYTES = 2048  # The default of Pallas (`reduction_scratch_bytes`).


# Whether Pallas' interpreter takes buffers that share memory, and finds races between them.
_INTERPRETS_UNIONS = jax.__version_info__ >= (0, 12)


def interpreted() -> bool:
    """Whether kernels that are traced now run in Pallas' interpreter. For the toolkit: kernel bodies need not ask."""
    return current_interpret() is not None


def processors(chip: Chip) -> int:
    """Thread blocks of a persistent kernel. The interpreter runs them in turn: two show everything that many would."""
    return 2 if interpreted() else chip.multiprocessors or 1


def aligned(array: jax.Array, rows: int = -2) -> jax.Array:
    """The array with zeros behind it, as copies of swizzled tiles need it: its last axis to 128 bytes, and the axis
    `rows` to 8.
    """
    columns = _SWIZZLE_BYTES // jnp.dtype(array.dtype).itemsize
    return padded(padded(array, array.ndim - 1, columns), rows % array.ndim, _TILE_ROWS)


def aligned_size(rows: int, columns: int, dtype: Any) -> tuple[int, int]:
    """The rows and columns of an output that is copied from swizzled tiles."""
    width = _SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-columns // width) * width


def whole(array: jax.Array, *blocks: int) -> jax.Array:
    """The array as the interpreter needs it: with zeros behind the last axes, to whole blocks.

    On a GPU the copies fill what a block has past the end of an array with zeros, and do not write there.
    """
    if interpreted():
        for axis, block in enumerate(blocks, array.ndim - len(blocks)):
            array = padded(array, axis, block)
    return array


def with_rows_past_end(array: jax.Array, rows: int) -> jax.Array:
    """The array as the interpreter needs it where blocks begin at any row: with rows of zeros behind the last one."""
    if not interpreted():
        return array
    return jnp.pad(array, [(0, rows), *[(0, 0)] * (array.ndim - 1)])


def whole_shape(shape: tuple[int, ...], *blocks: int) -> tuple[int, ...]:
    """The shape of an output that a kernel writes in blocks: as `whole` has it."""
    if not interpreted():
        return shape
    outer = len(shape) - len(blocks)
    return (*shape[:outer], *(-(-size // block) * block for size, block in zip(shape[outer:], blocks, strict=True)))


def compiler_params(
    *, automatic_barriers: bool = False, approximate_math: bool = True, inferred_layouts: bool = False
) -> plgpu.CompilerParams:
    """Lane-level semantics: layouts follow from the operands, where inferring them takes minutes for long kernels.

    With `automatic_barriers` Pallas puts a barrier before and after every store to shared memory. Without them, either
    the warps that store a tile are those that read it, or the kernel calls `commit_smem` in between.
    With `inferred_layouts` Pallas infers the layouts after all (its default, warpgroup-level semantics).
    """
    default = plgpu.CompilerParams()
    return plgpu.CompilerParams(
        approx_math=approximate_math,
        lowering_semantics=default.lowering_semantics if inferred_layouts else plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=not automatic_barriers,
    )


@dataclass(frozen=True)
class InTurns:
    """Scratch: buffers in the same shared memory, of which a warpgroup uses one at a time. A body receives a tuple.

    Their first axis is that of warpgroups, each of which has a part of its own.
    """

    buffers: tuple[Any, ...]

    @property
    def declared(self) -> Any:
        """The interpreter finds races between buffers that share memory, but takes all of a buffer for used: there, those
        of several warpgroups are apart.
        """
        if interpreted() and not (_INTERPRETS_UNIONS and self.buffers[0].shape[0] == 1):
            return self.buffers
        return plgpu.RefUnion(*self.buffers)


def run_kernel(
    body: Callable[..., None],
    *,
    name: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
    cluster: Mapping[str, int] | None = None,
    warpgroups: int | None = None,
    warpgroup_axis: str = "warpgroup",
    params: plgpu.CompilerParams | None = None,
) -> dict[str, Any]:
    """Runs a kernel and returns its outputs by name; None for those declared as None.

    `grid` and `cluster` map axis names to sizes. `warpgroups`, where it is given, are the warpgroups of a thread block,
    along the axis `warpgroup_axis`. Outputs vary over the mesh axes that the inputs vary over.
    """
    given = {key: value for key, value in inputs.items() if value is not None}
    made = {key: value for key, value in outputs.items() if value is not None}
    names = [f"{key}_ref" for key in (*given, *made)]
    absent = dict.fromkeys(f"{key}_ref" for key in (*inputs, *outputs))
    not_made = dict.fromkeys(key for key in outputs if outputs[key] is None)
    if not kernel_bodies_traced():
        return {key: jax.lax.empty(value.shape, value.dtype) for key, value in made.items()} | not_made
    declared = jax.tree.map(lambda each: each.declared if isinstance(each, InTurns) else each, tuple(scratch.values()))
    # Those that are None are no leaves; a pipeline has several.
    buffers, structure = jax.tree.flatten(declared)
    like = next(iter(given.values()))

    def by_name(*refs: Any) -> None:
        # A union is iterated over where the kernel is traced: it is one ref until then.
        each = zip(buffers, refs[len(names) :], strict=True)
        own = jax.tree.unflatten(
            structure, [tuple(ref) if isinstance(buffer, plgpu.RefUnion) else ref for buffer, ref in each]
        )
        body(**absent | dict(zip(names, refs, strict=False)), **dict(zip(scratch, own, strict=True)))

    kernel = plgpu.kernel(
        by_name,
        out_type=[output_like(value.shape, value.dtype, like) for value in made.values()],
        scratch_types=buffers,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        **({"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)} if cluster else {}),
        **({} if warpgroups is None else {"num_threads": warpgroups, "thread_name": warpgroup_axis}),
        compiler_params=params or compiler_params(),
        interpret=_interpret(name, alone=warpgroups is None),
        kernel_name=note(name),
    )
    # A kernel is the same program in 64-bit mode, where a Python number would be of 64 bits.
    with jax.enable_x64(False):
        results = kernel(*given.values())
    return dict(zip(made, results, strict=True)) | not_made


def _interpret(name: str, *, alone: bool) -> Any:
    """How a kernel is interpreted, if it is. Several devices, inside `shard_map`, would wait for each other."""
    mode, mesh = current_interpret(), jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    if mode is not None and devices > 1:
        raise Unsupported(
            f"{name}: the interpreter of GPU kernels has one device, and this is inside jax.shard_map over {devices}; use "
            f"implementation='xla', or a mesh of one device (an op that has no 'xla' has 'reference')"
        )
    return gpu_interpret_params(mode, alone=alone)


def smem_bytes(scratch: Mapping[str, Any], *, reductions: bool = False) -> int:
    """The shared memory that a kernel's scratch takes: each buffer aligned, barriers of 8 bytes each.

    `reductions`: the kernel reduces tiles in registers, for which Pallas takes scratch of its own.
    """
    total = _REDUCTION_BYTES if reductions else 0
    for buffer in jax.tree.leaves(tuple(scratch.values())):
        if isinstance(buffer, InTurns):
            total += max(smem_bytes({"": each}) for each in buffer.buffers)
            continue
        if isinstance(buffer, plgpu.Barrier | plgpu.ClusterBarrier):
            count = buffer.num_barriers
            total += _BARRIER_BYTES * (count if isinstance(count, int) else math.prod(count))
            continue
        aval = buffer.inner_aval
        total += -(-math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return total


def tile(*shape: int, dtype: Any) -> Any:
    """Shared memory for operands of the tensor cores, [..., rows, columns], swizzled. A row is whole 32 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(_SWIZZLE_BYTES, shape[-1] * itemsize)
    transforms = (
        plgpu.TilingTransform((_TILE_ROWS, swizzle // itemsize)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(swizzle),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def run_in_place(
    body: Callable[..., None],
    *,
    name: str,
    state: jax.Array,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, Any],
    grid: Mapping[str, int],
) -> tuple[dict[str, Any], jax.Array]:
    """Runs a kernel of one warpgroup per block that updates `state` in place; returns its outputs by name, and the new
    state.

    `body` takes refs by name: `state_ref`, `new_state_ref`, and the inputs and outputs as in `run_kernel`; an input may
    be None. The two states are one buffer: XLA copies it first unless it is used nowhere else, because it is donated or
    a loop carries it. `plgpu.kernel` cannot express that, and `pl.kernel` can.
    """
    given = {key: value for key, value in inputs.items() if value is not None}
    names = [f"{key}_ref" for key in (*given, *outputs)]
    absent = dict.fromkeys(f"{key}_ref" for key in inputs)
    if not kernel_bodies_traced():
        return {key: jax.lax.empty(value.shape, value.dtype) for key, value in outputs.items()}, state

    def in_place(state_ref: Any, *refs: Any) -> None:
        body(state_ref=state_ref, new_state_ref=state_ref, **absent | dict(zip(names, refs, strict=True)))

    kernel: Any = pl.kernel(
        in_place,
        out_type=tuple(output_like(value.shape, value.dtype, state) for value in outputs.values()),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        name=note(name),
        compiler_params=compiler_params(approximate_math=False),
        interpret=_interpret(name, alone=True),
    )
    ref = jax.new_ref(state)
    with jax.enable_x64(False):  # As in `run_kernel`.
        results = kernel(ref, *given.values())
    return dict(zip(outputs, results, strict=True)), jax.freeze(ref)
