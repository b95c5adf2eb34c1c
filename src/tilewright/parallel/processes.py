"""Several processes that run one program over the devices of all of them, with `jax.distributed`.

Every process runs the same steps in the same order. The first one writes what is for people; checkpoints are written by all
together.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tilewright.parallel.mesh import MeshError

_HEARTBEAT_SECONDS = 60
"""Without a sign of life for so long, a process counts as ended, and JAX ends the others, too."""
_CONNECT_SECONDS = 60.0
_ENDED = b"."


def join_processes(coordinator: str, count: int, index: int) -> None:
    """Joins the other processes; returns when all of them are there.

    Args:
      coordinator: host and port of the first process, "10.0.0.1:8476". It listens there; the others connect.
      count: the number of processes.
      index: this process, from 0.
    """
    if not re.fullmatch(r"\S+:\d+", coordinator):
        raise MeshError(f"coordinator={coordinator!r} must be the host and port of process 0, such as 10.0.0.1:8476")
    if count < 1 or not 0 <= index < count:
        raise MeshError(f"process={index} of processes={count}; it must be from 0 to {max(count, 1) - 1}")
    jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)


class Watch:
    """Connections between the first process and every other one, over which the end of a process shows at once.

    JAX itself notices a lost process by missing heartbeats, and then ends the others by a signal.
    """

    def __init__(self, coordinator: str, on_loss: Callable[[], None]):
        """After `join_processes`, in all of them. `on_loss` is called in a thread, where another process has ended without
        `close`.
        """
        self._on_loss, self._closed = on_loss, False
        with socket.create_server(("", 0)) as server:
            port = int(multihost_utils.broadcast_one_to_all(np.int32(server.getsockname()[1])))
            server.settimeout(_CONNECT_SECONDS)
            if is_first():
                self._peers = [server.accept()[0] for _ in range(jax.process_count() - 1)]
            else:
                host = coordinator.rpartition(":")[0]
                self._peers = [socket.create_connection((host, port), _CONNECT_SECONDS)]
        for peer in self._peers:
            peer.settimeout(None)
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    def _listen(self, peer: socket.socket) -> None:
        try:
            ended = peer.recv(1) == _ENDED
        except OSError:
            ended = False
        if not ended and not self._closed:
            self._on_loss()

    def close(self) -> None:
        """Says that this process ends as it should."""
        self._closed = True
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.sendall(_ENDED)


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process is here. `what` must be the same in all of them."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def is_lost_process(error: BaseException) -> bool:
    """Whether an error came of another process that ended."""
    return jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError)


def global_array(x: Any, sharding: Any) -> jax.Array:
    """An array that every process has as a whole, as one that each has its part of."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    held = np.asarray(x)
    return jax.make_array_from_callback(held.shape, sharding, lambda part: held[part])
