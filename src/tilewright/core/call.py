"""A call of an op as one value.

A family's `call.py` declares what a call is made of, and its `api.py` builds and validates one. Everything behind the
api takes that value: choosing an implementation and its configs, refusing, running forward and running backward.

    class NormCall(Call):
        x: Float[Array, "*tokens D"] = array(batch=True)
        w: Float[Array, " D"] = array()
        eps: float = option()

How a call is cut over a mesh follows from letters. Annotations spell the axes of arrays, `outputs` those of the results,
and `independent` says which letters cut a call into smaller ones. For attention, `independent = (("B",), ("H", "KV"))`:
q [B, T, H, D] whose heads are sharded over mesh axis "y" asks for k [B, S, KV, D] cut over "y" along KV, and the output
"B T H Dv" then is cut over "y" along H. T is in no group: a call cannot be cut along it.

A call is a frozen dataclass and a JAX pytree: its arrays are the leaves, its options are static. An array that a caller
may leave out is None. The gradient of a call is a call whose arrays are gradients (`Call.gradients`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp

from tilewright.core.manual_axes import vary_alike

_STAND_IN_SIZE = 4096
# Not `typing.Self`: the tests check types method by method, where that has no meaning.
_C = TypeVar("_C", bound="Call")


def array(*, batch: bool = False, differentiable: bool = True) -> Any:
    """Declares an array of a call. `batch`: its first axis is the batch, of one size for all such arrays, or 1."""
    return dataclasses.field(metadata={"array": True, "batch": batch, "differentiable": differentiable})


def option() -> Any:
    """Declares a static option of a call: hashable, and known when the call is traced."""
    return dataclasses.field(metadata={"array": False})


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True, field_specifiers=(array, option))
class Call:
    """Base of the families' calls. Subclasses are frozen, keyword-only dataclasses, registered as pytrees."""

    arrays: ClassVar[tuple[str, ...]]
    """The names of the arrays, in order of declaration."""
    batch_arrays: ClassVar[frozenset[str]]
    differentiable_arrays: ClassVar[frozenset[str]]
    vmapped: ClassVar[Literal["merged", "stacked"]] = "merged"
    """How `jax.vmap` extends the arrays that have a batch: its axis is merged with their first axis, or, for calls
    whose arrays may have any number of leading axes, stacked in front."""

    independent: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The axes along which a call is several smaller ones, by their letters: batch, heads, rows. Axes of one tuple are cut
    together, such as ("H", "HV"). "*tokens" stands for each of the leading axes."""
    reduced: ClassVar[tuple[str, ...]] = ()
    """Axes that outputs are sums over, and that a call can be cut along too (`on_shard`): a vocabulary. Several are cut
    together."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """The axes of each output, by their letters: "B T HV V"."""
    arguments: ClassVar[Mapping[str, str]] = {}
    """The public function's name of an array and of its axes, where they differ: {"k": "k_pages P page KV D"}. Errors use
    them. An axis that is spelled as a number is left out where it has another size."""
    exchanged: ClassVar[tuple[str, ...]] = ()
    """The axes that the public function takes cut over a mesh axis inside `shard_map`, by its argument `axis_name`."""
    rows: ClassVar[bool] = False
    """Whether implementations with a backward pass see every leading axis of the arrays with a batch as one: [*tokens, H]
    as [N, H]."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, kw_only=True)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls.arrays = tuple(field.name for field in fields if field.metadata["array"])
        options = tuple(field.name for field in fields if not field.metadata["array"])
        cls.batch_arrays = frozenset(field.name for field in fields if field.metadata.get("batch"))
        cls.differentiable_arrays = frozenset(
            field.name for field in fields if field.metadata["array"] and field.metadata["differentiable"]
        )

        def flatten(call: Any) -> Any:
            leaves = tuple((jax.tree_util.GetAttrKey(name), getattr(call, name)) for name in cls.arrays)
            return leaves, tuple(getattr(call, name) for name in options)

        def unflatten(static: Any, leaves: Any) -> Any:
            # Leaves may be anything while JAX transforms a call, so neither `__init__` nor a type checker sees them.
            return _bare(cls, dict(zip((*cls.arrays, *options), (*leaves, *static), strict=True)))

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)

    def bucket(self) -> Mapping[str, Any]:
        """What configs are tuned for: sizes of this call, rounded (`power_of_two`) where nearby ones share a config."""
        raise NotImplementedError

    @classmethod
    def of_shapes(cls: type[_C], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> _C:  # noqa: PYI019
        """A call whose arrays are shapes, the others None, and that has no options: to ask what would run it."""
        return _bare(cls, dict.fromkeys(cls.arrays) | dict(shapes))

    @property
    def bucket_key(self) -> str:
        """The bucket as text, such as "dtype=bfloat16 B=1 T=8192 H=96": the key of a tuned table."""
        return bucket_text(self.bucket())

    @classmethod
    def letters(cls, name: str, ndim: int) -> tuple[str, ...]:
        """The letters of an array's axes, from its annotation; "tokens0", "tokens1" and so on for those of "*tokens"."""
        (annotation,) = (field.type for field in dataclasses.fields(cls) if field.name == name)  # type: ignore[arg-type]
        for kind in (annotation, *getattr(annotation, "__args__", ())):
            letters = getattr(kind, "dim_str", "?").replace("#", "").split()
            variadic = [n for n, letter in enumerate(letters) if letter.startswith("*")]
            if variadic and ndim >= len(letters) - 1:
                count, at = ndim - len(letters) + 1, variadic[0]
                leading = [f"{letters[at][1:]}{n}" for n in range(count)]
                return (*letters[:at], *leading, *letters[at + 1 :])
            if letters != ["?"] and len(letters) == ndim:
                return tuple(letters)
        raise TypeError(f"{name} of {cls.__name__} has {ndim} axes, and its annotation {annotation} says otherwise")

    @classmethod
    def argument(cls, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[str, ...]]:
        """The public function's name of an array, and a letter of that function for each axis."""
        own = cls.letters(name, len(shape))
        argument, *public = cls.arguments.get(name, name).split()
        leading = tuple(letter for letter in own if letter.startswith("tokens"))
        return argument, (*leading, *(letter for letter in public if letter != "*tokens")) if public else own

    @classmethod
    def cut_along(cls) -> str:
        """The axes that a call can be cut along, as an error names them."""
        own = dict.fromkeys(letter for group in (*cls.independent, cls.reduced) for letter in group)
        hidden = {
            letter
            for name, text in cls.arguments.items()
            for letter, public in zip(cls.letters(name, len(text.split()) - 1), text.split()[1:], strict=True)
            if letter != public
        }
        words = ["its leading axes" if letter[0] == "*" else letter for letter in own if letter not in hidden]
        return ", ".join(words) or "no axis"

    @classmethod
    def independent_groups(cls, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """`independent`, with "*tokens" spelled out for the letters of a call."""
        every: list[tuple[str, ...]] = []
        for group in cls.independent:
            stem = group[0].removeprefix("*")
            every += [(letter,) for letter in sizes if letter[: len(stem)] == stem] if group[0][0] == "*" else [group]
        return tuple(every)

    def given(self) -> dict[str, Any]:
        """The arrays that are not None, by name."""
        return {name: value for name in self.arrays if (value := getattr(self, name)) is not None}

    def gradients(self: _C, **gradients: Any) -> _C:  # noqa: PYI019
        """The gradient of this call: each array's gradient, cast to its dtype, and None for those that have none."""
        unknown = set(gradients) - self.differentiable_arrays
        if unknown:
            raise TypeError(f"{sorted(unknown)} are not differentiable arrays of {type(self).__name__}")
        cast = {
            name: value.astype(getattr(self, name).dtype)
            if getattr(self, name) is not None and value is not None
            else None
            for name, value in gradients.items()
        }
        return self.with_arrays({name: cast.get(name) for name in self.arrays})

    def varying_alike(self: _C) -> _C:  # noqa: PYI019
        """This call with every array cast to vary over each mesh axis that any of them varies over (`shard_map`)."""
        names = tuple(self.given())
        return self.with_arrays(dict(zip(names, vary_alike(*(getattr(self, name) for name in names)), strict=True)))

    def flattened(self: _C) -> _C:  # noqa: PYI019
        """This call as implementations see it: with `rows`, the leading axes are one."""
        return self.with_arrays(self.flattened_leaves(self._batched())) if self.rows else self

    def flattened_leaves(self, tree: Any) -> Any:
        """Arrays with the leading axes of this call, such as cotangents, as implementations see them."""
        count = self._leading()
        return tree if count is None else jax.tree.map(lambda x: _reshaped(x, (-1,), count), tree)

    def unflattened(self, results: Any) -> Any:
        """Results of an implementation, or the gradient of a call, with the leading axes of this call."""
        count = self._leading()
        if count is None:
            return results
        tokens = next(iter(self._batched().values())).shape[:count]
        if isinstance(results, Call):
            return results.with_arrays({name: _reshaped(x, tokens, 1) for name, x in results._batched().items()})
        return jax.tree.map(lambda x: _reshaped(x, tokens, 1), results)

    def _batched(self) -> dict[str, Any]:
        return {name: x for name, x in self.given().items() if name in self.batch_arrays}

    def _leading(self) -> int | None:
        """The number of leading axes that implementations see as one; None where they see the axes as they are."""
        if not self.rows:
            return None
        name, x = next(iter(self._batched().items()))
        return sum(letter.startswith("tokens") for letter in self.letters(name, len(x.shape)))

    def on_shard(self, axes: tuple[str, ...]) -> "Shard":
        """This call on the shard of its `reduced` axis that a device has, inside `shard_map` over the mesh axes `axes`."""
        raise NotImplementedError

    def join_shared(self: _C, batched: Any, size: int) -> "tuple[_C, Any]":  # noqa: PYI019
        """Under `jax.vmap`: joins arrays without a batch that differ from element to element, where a family can.

        Takes and returns a call and its flags (True for an array with the mapped axis in front). A paged cache has a
        pool of pages per element, for example: these are one larger pool.
        """
        return self, batched

    def symbolic_sizes(self) -> tuple[str, ...]:
        """The sizes of arrays that are not known when the call is traced (`jax.export.symbolic_shape`)."""
        sizes = (size for x in self.given().values() for size in x.shape if not isinstance(size, int))
        return tuple(dict.fromkeys(str(size) for size in sizes))

    def with_known_sizes(self: _C) -> _C:  # noqa: PYI019
        """The shapes of this call, with a large number for each symbolic size: to choose block sizes with."""
        if not self.symbolic_sizes():
            return self

        def known(x: Any) -> jax.ShapeDtypeStruct:
            shape = tuple(size if isinstance(size, int) else _STAND_IN_SIZE for size in x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return self.with_arrays({name: known(x) for name, x in self.given().items()})

    def with_arrays(self: _C, changed: Mapping[str, Any]) -> _C:  # noqa: PYI019
        """This call with some of its arrays replaced, by anything: shapes, flags and shardings, too."""
        return _bare(type(self), {**vars(self), **changed})


@runtime_checkable
class Shard(Protocol):
    """One device's part of a call that is cut along its `reduced` axis."""

    @property
    def call(self) -> Call:
        """The part, as a call of its own."""
        ...

    @property
    def compiled_call(self) -> Call:
        """The part where the compiler cuts the call, whose saved arrays have the shapes that the whole call saves."""
        ...

    def combine(self, outputs: Any, saved: Any) -> tuple[Any, Any]:
        """The whole call's outputs, and what its forward pass saves, from those of every part."""
        ...

    def cotangents(self, cotangents: Any) -> Any:
        """The cotangents of this part, for a backward pass with what the whole call saved."""
        ...


def _reshaped(x: Any, leading: tuple[Any, ...], count: int) -> Any:
    """`x` with its first `count` axes replaced by `leading`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        leading = (math.prod(x.shape[:count]),) if leading == (-1,) else leading
        return jax.ShapeDtypeStruct((*leading, *x.shape[count:]), x.dtype)
    return x.reshape(*leading, *x.shape[count:])


def _bare(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance with these attributes, made without `__init__`."""
    instance = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


class CallShapes:
    """A call of which only shapes, dtypes and options count: hashable, and equal to another of the same."""

    def __init__(self, call: Call):
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.given().items()}
        self.call = call.with_arrays(shapes)
        options = tuple(value for name, value in vars(call).items() if name not in call.arrays)
        self._key = type(call), tuple((name, x.shape, x.dtype) for name, x in shapes.items()), options

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallShapes) and self._key == other._key


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A hashable value as a leafless pytree: for what a forward pass saves that is not an array."""

    value: Any


def bucket_text(bucket: Mapping[str, Any]) -> str:
    """A bucket as text. What is None or False is left out."""
    return " ".join(f"{name}={value}" for name, value in bucket.items() if value is not None and value is not False)


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`: how buckets round batch, tokens and rows."""
    return 1 if size < 1 else 1 << (size - 1).bit_length()


def batch_size(call: Call) -> int:
    """The size of the batch axis: the largest, since an array may have 1 there for all."""
    sizes = [value.shape[0] for name, value in call.given().items() if name in call.batch_arrays]
    return max(sizes, default=1)


def element_of(call: Call, batched: Call) -> Call:
    """One element of a vmapped call: the arrays that differ from element to element are shapes."""
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for name, x in call.given().items()
        if getattr(batched, name) and not isinstance(x, jax.ShapeDtypeStruct)
    }
    return call.with_arrays(shapes)


def can_merge(call: Call, batched: Call, *, backward: bool) -> bool:
    """Whether a vmapped call, of which `call` is one element, is one call with a larger batch.

    It is not where an array without a batch axis differs from element to element. Nor is a backward pass where such an
    array is differentiable: each element needs a gradient of its own, and the larger call would return their sum.
    """
    batch = batch_size(call)
    for name in call.given():
        shared = name not in call.batch_arrays
        if shared and getattr(batched, name):
            return False
        broadcast = call.vmapped == "merged" and not shared and getattr(call, name).shape[0] != batch
        if backward and (shared or broadcast) and name in call.differentiable_arrays:
            return False
    return True


def merge_array(x: Any, is_batched: bool, size: int, how: str, batch: int | None = None) -> Any:
    """One array of a vmapped call, as that of the larger call. `batch`: what its first axis is broadcast to before."""
    if isinstance(x, jax.ShapeDtypeStruct):  # Not read by the backward pass; its shape is.
        shape = (size, *x.shape) if how == "stacked" else (size * (batch or x.shape[0]), *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if not is_batched:
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    if how == "stacked":
        return x
    if batch is not None and x.shape[1] != batch:
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def merge(call: Call, batched: Call, size: int) -> Call:
    """A vmapped call as one call with a larger batch."""
    batch, changed = batch_size(element_of(call, batched)), {}
    for name, x in call.given().items():
        if name not in call.batch_arrays:
            continue
        is_batched = bool(getattr(batched, name))
        if call.vmapped == "merged" and not is_batched and x.shape[0] == 1 != batch:
            continue  # One for the whole batch stays one.
        changed[name] = merge_array(x, is_batched, size, call.vmapped, batch)
    return call.with_arrays(changed)


def split_array(x: Any, size: int, how: str) -> Any:
    """The inverse of `merge_array`, for results: [size * batch, ...] as [size, batch, ...]."""
    return x if how == "stacked" else x.reshape(size, x.shape[0] // size, *x.shape[1:])
