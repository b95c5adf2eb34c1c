"""Calls that update one layer's part of stacks of states in place, as decoding does."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.arguments import shown
from tilewright.core.call import Call

_C = TypeVar("_C", bound="StackedCall")


class StackedCall(Call):
    """Base of calls with an array x of one row per sequence, stacks of states [L, N, ...], and a `layer` that picks one.

    None is the first layer. The sequences are axis B of x, and N = B, but where `jax.vmap` has joined several calls: then
    the layers of all of them are in one stack, and B is a multiple of N.
    """

    stacks: ClassVar[tuple[str, ...]]
    """The names of the stacks."""

    @classmethod
    def independent_groups(cls, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Calls that `jax.vmap` has joined are not cut along the batch: equal parts of x and of a stack do not belong
        together there.
        """
        groups = super().independent_groups(sizes)
        return groups if sizes["B"] == sizes["N"] else tuple(group for group in groups if "B" not in group)

    def join_shared(self: _C, batched: Any, size: int) -> tuple[_C, Any]:  # noqa: PYI019
        """Joins the stacks of the vmapped calls into one, since each call returns stacks of its own."""

        def joined(name: str) -> Any:
            x = getattr(self, name)
            x = x if getattr(batched, name) else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        changed = {name: joined(name) for name in self.stacks}
        return self.with_arrays(changed), batched.with_arrays(dict.fromkeys(self.stacks, False))

    @property
    def joined(self) -> int:
        """The calls that `jax.vmap` has joined."""
        rows = getattr(self, self.stacks[0]).shape[1]
        return self.given()["x"].shape[0] // rows if rows else 1

    @property
    def layers(self) -> int:
        """The layers in the stack of each of them."""
        return getattr(self, self.stacks[0]).shape[0] // self.joined


def check_layer(layer: Any, name: str, array: jax.Array, stack: str, single: str) -> None:
    """Raises where `layer` does not pick one of a stack, whose axes are those of `stack` ("[L, B, S]"), or where there is
    none to pick. `single`: what is said of an array of one layer.
    """
    is_stack = array.ndim == stack.count(",") + 1
    is_index = layer is not None and jnp.ndim(layer) == 0 and jnp.issubdtype(jnp.result_type(layer), jnp.integer)
    if is_stack != (layer is not None) or (layer is not None and not is_index):
        raise ValueError(
            f"layer={layer!r} and {name} is {shown(array)}; a stack {stack} needs the number of a layer, and a {single}"
        )
    if isinstance(layer, int | np.integer) and not 0 <= layer < array.shape[0]:
        raise ValueError(f"layer={layer} is not a layer of {name} {shown(array)}; use 0 to {array.shape[0] - 1}")
