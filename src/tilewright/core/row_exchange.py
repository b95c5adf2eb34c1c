"""An exchange of rows over mesh axes in which each device gets only the rows that are meant for it.

Inside `jax.shard_map`, each of n devices has rows that are sorted by the device that they go to. How many rows go where is
data, and nothing is dropped: sizes are exchanged first, and then the rows, with `jax.lax.ragged_all_to_all`, which sends
what the sizes say. What a device receives lies in n blocks of a fixed number of rows, one block per sender, filled up with
zeros, so that the shapes are known when the program is compiled. XLA has no such collective for CPUs: there whole blocks
are exchanged, to the same places.

The way back takes the same rows in the opposite direction. Each way is the other's transpose, which is its gradient.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from tilewright.core.manual_axes import vary_over, varying_axes
from tilewright.core.target import current_chip, current_interpret

MeshAxes = tuple[str, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sizes", "offsets", "received", "source_offsets"),
    meta_fields=("axes", "total", "most"),
)
@dataclass(frozen=True)
class RowExchange:
    """How many rows each pair of devices exchanges, as one device knows it: arrays int32 [n]."""

    sizes: Any
    """The rows that this device sends to each device."""
    offsets: Any
    """Where they begin among the rows of this device."""
    received: Any
    """The rows that this device gets from each device."""
    source_offsets: Any
    """Where those begin among the rows of the device that sends them."""
    axes: MeshAxes
    """The mesh axes of the exchange."""
    total: int
    """M, the rows of a device before the exchange. Those after the ones that `sizes` counts are sent nowhere."""
    most: int
    """The rows of a block: the most that a device sends to another one."""


def exchange_sizes(sizes: Int[Array, " n"], axes: MeshAxes, *, total: int, most: int) -> RowExchange:
    """The exchange in which this device sends `sizes[d]` of its rows to device d, those for device 0 first."""
    offsets = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    both = jax.lax.all_to_all(jnp.stack([sizes, offsets], axis=1), axes, 0, 0, tiled=True)  # [n, 2], from each device
    return RowExchange(sizes, offsets, both[:, 0], both[:, 1], axes, total, most)


@jax.custom_vjp
def send_rows(rows: Num[Array, "M D"], exchange: RowExchange) -> Num[Array, "R D"]:
    """What this device gets of the rows of all devices, [n most, D]: those of device s from s most on, then zeros."""
    count, most = exchange.sizes.shape[0], exchange.most
    if _is_ragged(rows):
        return jax.lax.ragged_all_to_all(
            rows,
            _zeros(count * most, rows),
            exchange.offsets,
            exchange.sizes,
            jnp.full_like(exchange.sizes, most) * jax.lax.axis_index(exchange.axes),
            exchange.received,
            axis_name=exchange.axes,
        )
    place = jax.lax.broadcasted_iota(jnp.int32, (count, most), 1)
    wanted = jnp.where(place < exchange.sizes[:, None], exchange.offsets[:, None] + place, exchange.total)
    blocks = rows.at[wanted].get(mode="fill", fill_value=0)  # [n, most, D]
    return jax.lax.all_to_all(blocks, exchange.axes, 0, 0, tiled=True).reshape(count * most, rows.shape[1])


@jax.custom_vjp
def return_rows(blocks: Num[Array, "R D"], exchange: RowExchange) -> Num[Array, "M D"]:
    """What became of the rows that this device sent, at the places that they had: `send_rows` backwards.

    `blocks` [n most, D] are where `send_rows` put them. Rows that were sent nowhere are zeros.
    """
    count, most = exchange.sizes.shape[0], exchange.most
    first = jax.lax.iota(jnp.int32, count) * most
    if _is_ragged(blocks):
        return jax.lax.ragged_all_to_all(
            blocks,
            _zeros(exchange.total, blocks),
            vary_over(first, varying_axes(exchange.sizes)),
            exchange.received,
            exchange.source_offsets,
            exchange.sizes,
            axis_name=exchange.axes,
        )
    found = jax.lax.all_to_all(blocks.reshape(count, most, blocks.shape[1]), exchange.axes, 0, 0, tiled=True)
    place, ends = jax.lax.iota(jnp.int32, exchange.total), exchange.offsets + exchange.sizes
    device = jnp.minimum(jnp.sum(place[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), count - 1)  # [M]
    at = jnp.where(place < ends[-1], first[device] + place - exchange.offsets[device], count * most)
    return found.reshape(blocks.shape).at[at].get(mode="fill", fill_value=0)


def _is_ragged(rows: jax.Array) -> bool:
    """Whether the device that this is traced for has `ragged_all_to_all`."""
    return current_interpret() is None and current_chip((rows,)).platform != "cpu"


def _zeros(count: int, like: jax.Array) -> jax.Array:
    return vary_over(jnp.zeros((count, like.shape[1]), like.dtype), varying_axes(like))


send_rows.defvjp(
    lambda rows, exchange: (send_rows(rows, exchange), exchange),
    lambda exchange, d_blocks: (return_rows(d_blocks, exchange), None),
)
return_rows.defvjp(
    lambda blocks, exchange: (return_rows(blocks, exchange), exchange),
    lambda exchange, d_rows: (send_rows(d_rows, exchange), None),
)
