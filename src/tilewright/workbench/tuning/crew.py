"""The worker processes that the cases of one `tilewright tune` share, and the results that the workers of a case expect."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tilewright.core.case import Case
from tilewright.core.dispatch import Op
from tilewright.workbench.tuning.pool import Stopped, Worker, WorkerFailed, memory_share

_EARLY_WORKERS = 8  # Workers that a case starts before there is work for them.
_LARGE_BYTES = 1e9  # What a case reads and writes: a worker has several times that of the device's memory.


class Pool:
    """Workers that prepare configs, `jobs` at a time, for `together` cases at a time. A context: they end with it.

    A worker goes from case to case, since importing JAX takes about as long as compiling a config. With `overlap`, other
    configs are compiled while one is timed, as on a GPU; without, nothing else runs then, as on a CPU, where compiling
    takes the cores that are timed.
    """

    def __init__(self, jobs: int, *, together: int = 1, overlap: bool = False):
        self.jobs, self.together, self.overlap = jobs, together, overlap
        self.lock: str | None = None
        """The file that `on_device` locks: one for all tuners of a user on this machine, which take turns."""
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._all: list[Worker] = []
        self._free: list[Worker] = []
        self._aside: set[Worker] = set()
        self._preparing = 0
        """Workers that prepare a config or wait to be timed."""
        self._memory = memory_share(jobs + together)
        # Programs that every worker needs, such as those that draw a case's inputs, are compiled once.
        self._environment = _program_cache() if overlap else {}

    def __enter__(self) -> "Pool":  # noqa: PYI034, as in core/call.py
        # In the temporary folder: a home folder may be shared with other machines.
        lock = Path(tempfile.gettempdir()) / f"tilewright-tune-{os.getuid()}.lock"
        lock.touch(mode=0o600)
        self.lock = str(lock)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for worker in self._all:
            worker.close()

    def stop(self) -> None:
        """Ends every process. Threads that wait for one get `Stopped`."""
        self._stop.set()
        with self._changed:
            for worker in self._all:
                worker.end()
            self._changed.notify_all()

    def new(self, about: Mapping[str, Any] | None, memory_bytes: int) -> Worker:
        """A worker of its own, which nobody else takes."""
        worker = Worker(about, memory_bytes, environment=self._environment, stop=self._stop)
        with self._changed:
            self._all.append(worker)
        return worker

    def start_early(self) -> None:
        """Starts processes that there will be work for."""
        with self._changed:
            there = len(self._free) + self._preparing
            for _ in range(min(self.jobs - there, _EARLY_WORKERS)):
                worker = self.new(None, self._memory)
                worker.start()
                self._free.append(worker)

    def take(self, about: Mapping[str, Any], most: int, *, wait: bool) -> list[Worker]:
        """Up to `most` workers for a case; none where all are busy, or with `wait`, at least one."""
        with self._changed:
            while wait and self._preparing >= self.jobs and not self._stop.is_set():
                self._changed.wait()
            if self._stop.is_set():
                raise Stopped
            count = max(0, min(most, self.jobs - self._preparing))
            self._preparing += count
            # Those that have the case's inputs first, then those that run.
            self._free.sort(key=lambda worker: (worker.about == about, worker.about is not None), reverse=True)
            taken, self._free = self._free[:count], self._free[count:]
        taken += [self.new(None, self._memory) for _ in range(count - len(taken))]
        for worker in taken:
            worker.turn_to(about)
        return taken

    def set_aside(self, worker: Worker) -> None:
        """Lets another worker take its turn while this one keeps what it has prepared."""
        with self._changed:
            self._aside.add(worker)
            self._preparing -= 1
            self._changed.notify_all()

    def give_back(self, worker: Worker) -> None:
        """Makes a worker that was taken free."""
        with self._changed:
            if worker in self._aside:
                self._aside.remove(worker)
            else:
                self._preparing -= 1
            self._free.append(worker)
            self._changed.notify_all()

    def end_idle(self, about: Mapping[str, Any]) -> None:
        """Ends the free workers of a case: JAX keeps the device's memory that it once had until its process ends."""
        with self._changed:
            for worker in self._free:
                if worker.about == about:
                    worker.close()


def _program_cache() -> dict[str, str]:
    """Makes JAX share compiled programs between processes and runs, in the folder that the user names if any."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewright" / "programs"
    return {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


class Crew:
    """What the workers are about in one case of one implementation, and its expected results. A context.

    Workers start while the expected results are computed. The oracle may take `oracle_s`, and everything else `limit_s`.
    """

    def __init__(
        self, pool: Pool, op: Op, case: Case, dtype: str, implementation: str, *, limit_s: float, oracle_s: float
    ):
        self.pool, self.name, self._limit_s, self._oracle_s = pool, f"{case.name} {dtype}", limit_s, oracle_s
        self.expected_from = ""
        self.about = {
            "op": [op.name, op.family, list(op.implementations)],
            "case": case.name,
            "dtype": dtype,
            "implementation": implementation,
            "lock": pool.lock,
        }
        self._is_large = case.work(jnp.dtype(dtype).itemsize).bytes > _LARGE_BYTES
        self._open = contextlib.ExitStack()
        self._aside: list[Worker] = []

    def __enter__(self) -> "Crew":  # noqa: PYI034, as in core/call.py
        self.folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-tune-"))
        self._open.callback(self.recall)
        try:
            self._expect()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._is_large:
            self.pool.end_idle(self.about)

    def set_aside(self, worker: Worker) -> None:
        self._aside.append(worker)
        self.pool.set_aside(worker)

    def give_back(self, worker: Worker) -> None:
        if worker in self._aside:
            self._aside.remove(worker)
        self.pool.give_back(worker)

    def recall(self) -> None:
        """Gives back what was set aside."""
        while self._aside:
            self.pool.give_back(self._aside.pop())

    def _expect(self) -> None:
        """Computes the expected results in a process that ends: the oracle may take most of the device's memory."""
        reasons: list[str] = []
        for exact in (True, False):
            worker = self.pool.new(self.about, memory_share(1))
            try:
                worker.start()
                self.pool.start_early()
                limit_s = self._oracle_s if exact else self._limit_s
                told = worker.call("expect", limit_s=limit_s, folder=self.folder, exact=exact)
                self.expected_from = told["against"]
                return
            except WorkerFailed as error:
                reasons.append(f"{error.kind}: {error}")
            finally:
                worker.close()
        raise RuntimeError(
            f"{self.name}: the expected results could not be computed ({'; then '.join(reasons)}); use a smaller case, or "
            "a larger --limit"
        )
