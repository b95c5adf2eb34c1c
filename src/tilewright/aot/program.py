"""Traces and lowers a JAX function, and reads what the grids of its TPU kernels say before the compiler runs."""

import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax._src import source_info_util
from jax.extend import core

from tilewright.aot.auto_axes import needs_partitioner, partitioned_here
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Unsupported
from tilewright.core.target import target

UNNAMED = "kernel"
"""The name of a kernel whose `pallas_call` has no name."""

# jax does not promise that these stay valid when they are serialized. They are compiled at once here.
_UNCHECKED = tuple(jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "ragged_all_to_all"))

# For grids with more steps than this, the fetched blocks are not counted.
_MOST_STEPS = 1_000_000


# Error locations inside of these folders are skipped: they are not in the code of a kernel.
_NOT_THE_CALLERS = tuple(f"{Path(file or '').parent}/" for file in (jax.__file__, jaxlib.__file__, __file__))


class NotTraceable(RuntimeError):
    """A function cannot be lowered for a chip. The text has the cause and its location in the kernel."""


@dataclass(frozen=True)
class Kernel:
    """A Pallas kernel of a program: its grid, and the bytes that its blocks move to and from HBM."""

    name: str
    grid: tuple[int, ...]
    parallel: bool
    """Whether an axis of the grid may be split over the cores of a device."""
    hbm_bytes: int | None
    """The bytes of all blocks that are fetched or written, once per change of index, in whole tiles; None if it depends on
    data."""
    why_unknown: str | None = None

    @property
    def steps(self) -> int:
        return math.prod(self.grid)


@dataclass(frozen=True)
class Program:
    """Serialized StableHLO, and its TPU kernels in order."""

    code: bytes
    kernels: tuple[Kernel, ...]
    num_devices: int
    gpu_names: tuple[str, ...] = ()
    """Words that end with Mosaic's names of GPU kernels, in order. Each may begin with a part of what stands before."""


def lower(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], chip: Chip) -> Program:
    """Traces `function` for `chip` and lowers it. Arguments may be arrays or `jax.ShapeDtypeStruct`s."""
    jitted: Any = function if hasattr(function, "trace") and hasattr(function, "lower") else jax.jit(function)
    calls: list[Any] = []
    platform = "tpu" if chip.platform == "tpu" else "cuda"

    def export() -> Any:
        if platform == "tpu":
            calls[:] = _equations(jitted.trace(*args, **kwargs).jaxpr.jaxpr, "pallas_call")
        return jax.export.export(jitted, platforms=[platform], disabled_checks=_UNCHECKED)(*args, **kwargs)

    try:
        with target(chip):
            try:
                exported = export()
            except Exception as error:
                if not needs_partitioner(error):
                    raise
                with partitioned_here(jitted, args, kwargs, platform):
                    exported = export()
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # Index maps are evaluated here.
                kernels = tuple(_kernel(equation) for equation in calls)
    except Unsupported as error:
        raise NotTraceable(str(error)) from error
    except Exception as error:
        raise NotTraceable(f"{_first_line(error)}{_in_kernel(error, calls) or _where(error)}") from error
    names = re.findall(r"\w+_mosaic_gpu\b", exported.mlir_module()) if platform == "cuda" else ()
    return Program(bytes(exported.mlir_module_serialized), kernels, exported.nr_devices, tuple(names))


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(" Please file an issue")[0]


def _in_kernel(error: BaseException, calls: list[Any]) -> str:
    """The line in a kernel of the primitive that the error names."""
    match = re.search(r"[Pp]rimitive in Pallas TPU lowering[^:]*: (\w+)", str(error))
    if match is None:
        return ""
    lines = (line for call in calls for line in _lines(call.params["jaxpr"], match[1]) if line)
    return next((f" (at {line})" for line in lines), "")


def _lines(jaxpr: core.Jaxpr, primitive: str, outer: str = "") -> Iterator[str]:
    """The line of each equation of a primitive; inside of a jax function, the line that calls it."""
    for equation in jaxpr.eqns:
        line = source_info_util.summarize(equation.source_info) or outer
        if equation.primitive.name == primitive:
            yield line
        for inner in _inner(equation):
            yield from _lines(inner, primitive, line)


def _where(error: BaseException) -> str:
    """The innermost line outside of jax in the traceback: the line in the kernel, where jax preserves it."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for cause in reversed(chain):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if not frame.filename.startswith(_NOT_THE_CALLERS) and frame.line:
                return f" (at {frame.filename}:{frame.lineno}: {frame.line.strip()})"
    return ""


def _equations(jaxpr: core.Jaxpr, primitive: str) -> Iterator[Any]:
    """Every equation of a primitive in a jaxpr, in order, including those inside of other calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
            continue
        for inner in _inner(equation):
            yield from _equations(inner, primitive)


def _inner(equation: Any) -> Iterator[core.Jaxpr]:
    """The jaxprs inside of an equation."""
    for parameter in equation.params.values():
        leaves = jax.tree.leaves(parameter, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"))
        for leaf in leaves:
            jaxpr = getattr(leaf, "jaxpr", leaf)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _kernel(equation: Any) -> Kernel:
    mapping, parameters = equation.params["grid_mapping"], equation.params["compiler_params"]
    semantics = getattr(parameters, "dimension_semantics", None) or ()
    parallel = any("parallel" in str(word).lower() for word in semantics)
    name = equation.params.get("name") or UNNAMED
    if not all(isinstance(size, int) for size in mapping.grid):
        return Kernel(name, (), parallel, None, "the size of its grid is known only at run time")
    grid = tuple(int(size) for size in mapping.grid)
    hbm_bytes, why = _traffic(mapping, grid)
    return Kernel(name, grid, parallel, hbm_bytes, why)


def _traffic(mapping: Any, grid: tuple[int, ...]) -> tuple[int | None, str | None]:
    if math.prod(grid) > _MOST_STEPS:
        return None, f"its grid has more than {_MOST_STEPS:,} steps to count blocks over"
    steps = np.indices(grid, np.int32).reshape(len(grid), -1) if grid else np.zeros((0, 1), np.int32)
    total = 0
    for block in mapping.block_mappings:
        space = str(getattr(block.block_aval, "memory_space", "")).lower()
        if "any" in space or "hbm" in space:
            return None, "it copies from HBM itself, which the grid does not show"
        if "smem" in space:
            continue
        index_map = block.index_map_jaxpr
        if len(index_map.jaxpr.invars) != len(grid):
            return None, "its block indices are data (prefetched scalars)"
        evaluate = jax.jit(jax.vmap(core.jaxpr_as_fun(index_map)))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            indices = np.stack([np.asarray(axis) for axis in evaluate(*steps)]) if grid else np.zeros((1, 1))
        fetches = 1 + int(np.any(indices[:, 1:] != indices[:, :-1], axis=0).sum())
        total += fetches * _tiled_bytes(block.block_aval.shape, block.block_aval.dtype)
    return total, None


def _tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """The bytes of a block in HBM, whose last two axes are stored in tiles of 8 sublanes and 128 lanes."""
    padded = [1] * max(0, 2 - len(shape)) + [int(size) for size in shape]
    padded[-1] = -(-padded[-1] // 128) * 128
    padded[-2] = -(-padded[-2] // 8) * 8
    return math.prod(padded) * np.dtype(dtype).itemsize
