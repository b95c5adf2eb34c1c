"""Calls of `decode_attention` and `paged_attention`."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.axes import Size
from tilewright.core.call import Call, array, option, power_of_two


class DecodeCall(Call):
    """Attention of the last T tokens of each sequence over a cache of S keys, of which `lengths` are in use.

    `window` is how many tokens before its own position a query attends to; None for all. `sinks` is one logit per head,
    for all sequences or for each.
    """

    independent = (("B",), ("H", "KV"))
    outputs = ("B T H Dv", "B T H")

    q: Float[Array, "B T H D"] = array(batch=True)
    k: Float[Array, "B S KV D"] = array(batch=True)
    v: Float[Array, "B S KV Dv"] = array(batch=True)
    page_table: Int[Array, "B pages"] | None = array(batch=True, differentiable=False)
    lengths: Int[Array, " B"] = array(batch=True, differentiable=False)
    sinks: Float[Array, "#B H"] | None = array(batch=True)
    window: int | None = option()
    scale: float = option()
    soft_cap: float | None = option()

    @property
    def page(self) -> Size | None:
        """Keys per page; None where the cache of a sequence is in one piece."""
        return None if self.page_table is None else self.k.shape[1]

    @property
    def room(self) -> Size:
        """Keys that the cache of a sequence has room for."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[2] // self.k.shape[2]

    def bucket(self) -> Mapping[str, Any]:
        (b, t, h, d), (kv, dv) = self.q.shape, self.v.shape[2:]
        return {
            "dtype": self.q.dtype.name,
            "B": power_of_two(b),
            "T": t,
            "S": power_of_two(self.room),
            "H": h,
            "KV": kv,
            "D": d,
            "Dv": dv,
            "page": self.page,
            "window": None if self.window is None else power_of_two(self.window),
            "soft_cap": self.soft_cap is not None,
            "sinks": self.sinks is not None,
        }


class PagedCall(DecodeCall):
    """`DecodeCall` over a pool of pages that the sequences share: key s is in page `page_table[b, s // page]`."""

    arguments: ClassVar[Mapping[str, str]] = {"k": "k_pages P page KV D", "v": "v_pages P page KV Dv"}

    k: Float[Array, "P page KV D"] = array()
    v: Float[Array, "P page KV Dv"] = array()

    def join_shared(self, batched: Any, size: int) -> tuple["PagedCall", Any]:
        """Joins the pools of the vmapped calls into one; the page tables then count on from pool to pool."""
        if not (batched.k or batched.v):
            return self, batched

        def of_each(name: str) -> Any:
            x = getattr(self, name)
            return x if getattr(batched, name) else jnp.broadcast_to(x[None], (size, *x.shape))

        k, v, table = of_each("k"), of_each("v"), of_each("page_table")
        pages = k.shape[1]
        table = jnp.clip(table, 0, pages - 1) + pages * jnp.arange(size, dtype=table.dtype)[:, None, None]
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        joined = self.with_arrays({"k": k, "v": v, "page_table": table})
        return joined, batched.with_arrays({"k": False, "v": False, "page_table": True})
