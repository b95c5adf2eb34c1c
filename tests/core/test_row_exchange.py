"""`core/row_exchange.py`: rows that go to some devices of a mesh axis, and come back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tilewright.core.row_exchange import exchange_sizes, return_rows, send_rows
from tilewright.core.target import target
from tilewright.parallel import make_mesh

# Rows that each of four devices (outer) sends to each. Device 2 sends nothing, and nobody sends to device 3.
SIZES = np.array([[1, 0, 3, 0], [2, 2, 0, 0], [0, 0, 0, 0], [4, 0, 1, 0]], np.int32)
TOTAL, MOST, D = 6, 4, 3


def test_rows_arrive_in_blocks_and_return_to_their_places() -> None:
    rows = np.random.default_rng(0).standard_normal((4, TOTAL, D), np.float32)
    blocks = np.zeros((4, 4, MOST, D), np.float32)  # [receiver, sender, ...]
    back = np.zeros_like(rows)
    for source, sizes in enumerate(SIZES):
        for device, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
            blocks[device, source, :size] = rows[source, end - size : end]
            back[source, end - size : end] = 2 * rows[source, end - size : end]

    def run(rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        exchange = exchange_sizes(sizes, ("data",), total=TOTAL, most=MOST)
        sent = send_rows(rows, exchange)
        return sent, return_rows(2 * sent, exchange)

    def loss(rows: jax.Array) -> Any:
        sent, returned = sharded(rows, jnp.asarray(SIZES.reshape(-1)))
        return jnp.sum(jnp.sin(sent)) + jnp.sum(jnp.cos(returned)), (sent, returned)

    mesh = make_mesh(data=4, axis_type=AxisType.Auto)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P("data"), P("data")))
    with jax.set_mesh(mesh):
        gradient, (sent, returned) = jax.jit(jax.grad(loss, has_aux=True))(rows.reshape(-1, D))
    np.testing.assert_array_equal(sent, blocks.reshape(-1, D))
    np.testing.assert_array_equal(returned, back.reshape(-1, D))
    was_sent = np.arange(TOTAL)[None, :, None] < SIZES.sum(1)[:, None, None]
    want = np.where(was_sent, np.cos(rows) - 2 * np.sin(2 * rows), 0.0)
    np.testing.assert_allclose(gradient, want.reshape(-1, D), rtol=1e-5, atol=1e-6)


def test_accelerators_send_what_the_sizes_say() -> None:
    """Traced for a TPU: one ragged exchange each way, each the other's gradient, and no padded one."""

    def run(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        exchange = exchange_sizes(sizes, ("data",), total=TOTAL, most=MOST)
        return return_rows(jnp.sin(send_rows(rows, exchange)), exchange)

    mesh = make_mesh(data=4, axis_type=AxisType.Auto)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    with target("v6e"), jax.set_mesh(mesh):
        text = str(
            jax.make_jaxpr(jax.grad(lambda *given: jnp.sum(sharded(*given))))(jnp.ones((24, D)), SIZES.reshape(-1))
        )
    assert text.count(" ragged_all_to_all[") == 4
    assert text.count(" all_to_all[") == 1  # The sizes.
