"""A call of `decode_qkv`."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.call import Call, array, option, power_of_two
from tilewright.ops.rope.api import Scaling


class DecodeQkvCall(Call):
    """One token of each sequence, projected to queries, keys and values, and the caches that these are written into.

    The outputs are the queries and both caches. A cache is a stack of L layers' caches of R sequences each, and `layer`
    picks one; None is the first. B = R, but where `jax.vmap` has joined several calls: then the layers of all of them are
    in one stack, and B is a multiple of R.
    """

    independent = (("B", "R"), ("H", "KV"))
    outputs = ("B H C", "L R S KV C", "L R S KV C")
    arguments: ClassVar[Mapping[str, str]] = {"keys": "keys L B S KV C", "values": "values L B S KV C"}

    x: Float[Array, "B D"] = array(batch=True)
    q_proj: Float[Array, "D H C"] = array()
    k_proj: Float[Array, "D KV C"] = array()
    v_proj: Float[Array, "D KV C"] = array()
    keys: Float[Array, "L R S KV C"] = array()
    values: Float[Array, "L R S KV C"] = array()
    lengths: Int[Array, " B"] = array(batch=True, differentiable=False)
    q_norm: Float[Array, " C"] | None = array()
    k_norm: Float[Array, " C"] | None = array()
    layer: Int[Array, ""] | None = array(differentiable=False)
    eps: float = option()
    norm_offset: float = option()
    theta: float | None = option()
    scaling: Scaling | None = option()
    rotary_dim: int = option()

    @classmethod
    def independent_groups(cls, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Calls that `jax.vmap` has joined are not cut along the batch: equal parts of x and of a cache do not belong
        together there.
        """
        groups = super().independent_groups(sizes)
        return groups if sizes["B"] == sizes["R"] else groups[1:]

    def join_shared(self, batched: Any, size: int) -> tuple["DecodeQkvCall", Any]:
        """Joins the stacks of the vmapped calls into one, since each call returns caches of its own."""

        def joined(name: str) -> Any:
            x = getattr(self, name)
            x = x if getattr(batched, name) else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        caches = ("keys", "values")
        changed = {name: joined(name) for name in caches}
        return self.with_arrays(changed), batched.with_arrays(dict.fromkeys(caches, False))

    @property
    def joined(self) -> int:
        """The calls that `jax.vmap` has joined."""
        return self.x.shape[0] // self.keys.shape[1] if self.keys.shape[1] else 1

    @property
    def layers(self) -> int:
        """The layers in the stack of each of them."""
        return self.keys.shape[0] // self.joined

    def bucket(self) -> Mapping[str, Any]:
        (b, d), (_, h, c), kv = self.x.shape, self.q_proj.shape, self.k_proj.shape[1]
        return {"dtype": self.x.dtype.name, "B": power_of_two(b), "D": d, "H": h, "KV": kv, "C": c}
