"""Programs whose kernels are sharded over Auto mesh axes, for a compiler in another process, which cannot ask about them.

Which shardings the operands of a kernel have is the compiler's choice, and how the kernel is cut follows from it
(core/partitioning.py). Here Shardy makes that choice in this process: the program is traced with a stand-in for each
kernel that has its partitioning rule, Shardy propagates the shardings of the arguments through it, and the program is
traced again with each kernel inside `jax.shard_map`, cut as its stand-in was.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir, str_to_sdy_sharding_rule
from jax._src.interpreters.mlir import make_ir_context
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy as _sdy
from jaxlib.mlir.passmanager import PassManager

from tilewright.core.partitioning import Partitioned, partitioned_by

sdy: Any = _sdy  # The stubs of its attributes lack their constructors.
_STAND_IN = "tilewright_pass"
_NUMBER = "number"


def needs_partitioner(error: Exception) -> bool:
    """Whether a program could not be exported because the compiler would have to ask about its kernels."""
    # JAX's words: without devices for a mesh, and with them.
    words = ("require devices to be present during lowering", "CustomSPMDPartitioning")
    return any(word in str(error) for word in words)


@contextlib.contextmanager
def partitioned_here(
    jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], platform: str = "tpu"
) -> Iterator[None]:
    """Inside of it, `jitted` is traced for these arguments with its kernels cut as Shardy chooses."""
    numbers: dict[Hashable, int] = {}
    rules: dict[int, Any] = {}

    def stand_in(asked: Partitioned) -> Sequence[Any]:
        """Has copies of its operands as further results: their shardings are to be read there."""
        number = numbers.setdefault(asked.key, len(numbers))
        rules[number] = _with_copies(*asked.rule())
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*asked.results, *asked.operands)]
        return jax.ffi.ffi_call(_STAND_IN, shapes)(*asked.operands, number=np.int32(number))[: len(asked.results)]

    unchecked = [jax.export.DisabledSafetyCheck.custom_call(_STAND_IN)]
    with partitioned_by(stand_in):
        exported = jax.export.export(jitted, platforms=[platform], disabled_checks=unchecked)(*args, **kwargs)
    mesh, specs = _propagated(exported.mlir_module(), rules)

    def cut(asked: Partitioned) -> Sequence[Any]:
        # A pass whose results nothing reads is not in the program, and may be anywhere.
        placements = specs.get(numbers.get(asked.key, -1), [P()] * (len(asked.results) + len(asked.operands)))
        chosen = placements[len(asked.results) :]
        given = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(asked.operands, chosen, strict=True)
        ]
        _, run, results, operands = asked.partition(mesh, given, None)
        return jax.shard_map(
            run,
            mesh=None if jax.sharding.get_abstract_mesh().axis_names else mesh,
            in_specs=tuple(each.spec for each in operands),
            out_specs=tuple(each.spec for each in results),
            check_vma=False,
        )(*asked.operands)

    with partitioned_by(cut):
        yield


def _with_copies(rule: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return f"{rule}, {rule.partition(' -> ')[0]}", options


def _propagated(module: str, rules: dict[int, Any]) -> tuple[AbstractMesh, dict[int, list[P]]]:
    """The mesh of a program, and how Shardy places the results of each stand-in, by its number."""
    with make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        for operation, number in _stand_ins(parsed.operation):
            rule = str_to_sdy_sharding_rule(rules[number][0], **rules[number][1])
            types = [value.type for value in operation.operands], [value.type for value in operation.results]
            operation.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(rule, *types)
        PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(parsed.operation)
        mesh = _mesh(parsed.operation)
        # A function that is called twice has one stand-in: the first of its placements counts.
        specs: dict[int, list[P]] = {}
        for operation, number in _stand_ins(parsed.operation):
            specs.setdefault(number, _specs(operation))
    return mesh, specs


def _operations(operation: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if wanted(inner.operation):
                    yield inner.operation
                yield from _operations(inner.operation, wanted)


def _stand_ins(module: Any) -> Iterator[tuple[Any, int]]:
    def wanted(operation: Any) -> bool:
        return operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == _STAND_IN

    for operation in _operations(module, wanted):
        yield operation, ir.IntegerAttr(ir.DictAttr(operation.attributes["mhlo.backend_config"])[_NUMBER]).value


def _mesh(module: Any) -> AbstractMesh:
    """The mesh of a program. Beside it there may be one without axes."""
    found = [sdy.MeshAttr(each.attributes["mesh"]) for each in _operations(module, lambda one: one.name == "sdy.mesh")]
    sizes = max(({axis.name: axis.size for axis in map(sdy.MeshAxisAttr, mesh.axes)} for mesh in found), key=len)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _specs(operation: Any) -> list[P]:
    """The placement of each result of an operation; whole along an axis that is cut over a part of a mesh axis."""

    def entry(dimension: Any) -> tuple[str, ...]:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        return () if any(axis.sub_axis_info for axis in axes) else tuple(axis.name for axis in axes)

    if "sdy.sharding" not in operation.attributes:
        return [P()] * len(operation.results)
    every = sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"]).shardings
    return [P(*map(entry, sdy.TensorShardingAttr(each).dimension_shardings)) for each in every]
