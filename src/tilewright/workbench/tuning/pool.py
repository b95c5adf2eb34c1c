"""The other side of worker.py: starts workers, asks them, and ends those that hang or take too much memory."""

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.workbench.peers.beside import leave_room

_POLL_S = 0.1
_END_OF_LOG = 400
GIB = 2**30
_LEAST_MEMORY = 2 * GIB


class Stopped(Exception):
    """The tuner was interrupted, and its workers were ended: what they answer then says nothing of a config."""


class WorkerFailed(RuntimeError):
    """A worker did not answer, or answered with an error. `kind`: crashed, hung, out of memory, refused or failed."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def memory_share(workers: int) -> int:
    """The bytes that each of so many workers may have: together four fifths of what is free now."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 16 * GIB
    return max(_LEAST_MEMORY, int(0.8 * free) // max(1, workers))


class Worker:
    """One worker process. It starts with the first request, and again after it has ended.

    `about` is the request that every new process gets first. `stop` is set when the tuner is interrupted.
    """

    def __init__(
        self,
        about: Mapping[str, Any] | None,
        memory_bytes: int,
        *,
        environment: Mapping[str, str] | None = None,
        stop: threading.Event | None = None,
    ):
        self.about, self._memory_bytes = about, memory_bytes
        self._environment, self._stop = environment or {}, stop or threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._unread, self._owed, self._asked = b"", 0, 0.0
        self._waits = False
        """Whether it waits for the device, which another tuner may have for longer than a limit."""

    def turn_to(self, about: Mapping[str, Any]) -> None:
        """Makes everything that is asked from now on be about this; the process, if there is one, goes on."""
        if self.about != about:
            self.about = about
            if self._process is not None:
                self._send({"do": "open", **about})

    def ask(self, do: str, **request: Any) -> None:
        """Sends a request; `collect` has the answer."""
        self._asked = time.monotonic()
        self.start()
        self._send({"do": do, **request})

    def call(self, do: str, *, limit_s: float, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises `WorkerFailed`."""
        self.ask(do, **request)
        (answer,) = collect([self], limit_s)
        if isinstance(answer, WorkerFailed):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            if self._process.poll() is None:
                self._kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._log.close()
        self._process, self._unread, self._owed, self._waits = None, b"", 0, False

    def start(self) -> None:
        """Starts the process, if it does not run."""
        if self._process is not None:
            return
        self.check_stop()
        leave_room()
        self._log = tempfile.TemporaryFile(prefix="tilewright-tune-")  # noqa: SIM115, it is closed with the worker
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.workbench.tuning.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | self._environment | {"PYTHONPATH": paths},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the tuner, which ends the workers.
        )
        if self.about is not None:
            self._send({"do": "open", **self.about})

    def check_stop(self) -> None:
        """Raises `Stopped` where the tuner was interrupted."""
        if self._stop.is_set():
            raise Stopped

    def end(self) -> None:
        """Ends the process from another thread than the one that waits for it, which then reads the end of its output."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._owed += 1
        with contextlib.suppress(BrokenPipeError):  # It has ended; reading its answer says how.
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    @property
    def output(self) -> int:
        """What `collect` waits for."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> "dict[str, Any] | WorkerFailed | None":
        """The last answer that is owed, or how the process ended; None where there is more to come."""
        data = os.read(self.output, 2**16)
        if not data:
            return self._ended()
        self._unread += data
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            self._asked = time.monotonic()  # What is asked next has all its time, however long it took to start.
            answer = json.loads(line)
            if "waits" in answer:
                self._waits = answer["waits"]
                continue
            self._owed -= 1
            if not answer["ok"]:
                failed = WorkerFailed(answer["kind"], answer["error"])
                if self._owed or answer["restart"]:  # Where it could not be opened, what follows means nothing.
                    self.close()
                return failed
            if not self._owed:
                return answer
        return None

    def overdue(self, limit_s: float) -> "WorkerFailed | None":
        """Ends the process where it has hung or taken too much memory."""
        if not self._waits and time.monotonic() - self._asked > limit_s:
            self.close()
            return WorkerFailed("hung", f"it was ended after {limit_s:g} s")
        used = self._resident_bytes()
        if used > self._memory_bytes:
            self.close()
            limit = f"{self._memory_bytes / GIB:.1f}"
            text = f"it was ended with {used / GIB:.1f} GiB of the machine's memory, of which it may have {limit}"
            return WorkerFailed("out of memory", text)
        return None

    def _resident_bytes(self) -> int:
        assert self._process is not None
        try:
            resident, shared = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1:3]
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def _ended(self) -> WorkerFailed:
        assert self._process is not None
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.close()
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        last = f"; its last line: {lines[-1][-_END_OF_LOG:]}" if lines else ""
        return WorkerFailed("crashed", f"it ended with {how}{last}")

    def _kill(self) -> None:
        assert self._process is not None
        self.end()
        self._process.wait()


@contextlib.contextmanager
def on_device(
    lock: str | None, *, alone: bool = False, told: Callable[[bool], None] = lambda waits: None
) -> Iterator[None]:
    """A context for what runs on the device, in this process or in workers: with `alone` nothing else does, as for timing.

    It holds a lock of a file, which the system releases if the process is ended. Without a file, nothing is waited for.
    `told` is called where it has to wait: with True when that begins, and with False when it ends.
    """
    if lock is None:
        yield
        return
    with Path(lock).open("a") as file:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            told(True)
            fcntl.flock(file, kind)
            told(False)
        yield


def answered(workers: Sequence[Worker], limit_s: float) -> dict[Worker, dict[str, Any] | WorkerFailed]:
    """The answers that come within a moment, of workers that were asked. One that takes longer than `limit_s` is ended."""
    with selectors.DefaultSelector() as ready:
        for worker in workers:
            ready.register(worker.output, selectors.EVENT_READ, worker)
        speaking = [key.data for key, _ in ready.select(_POLL_S)]
    answers: dict[Worker, dict[str, Any] | WorkerFailed] = {}
    for worker in workers:
        answer = worker.read() if worker in speaking else worker.overdue(limit_s)
        worker.check_stop()
        if answer is not None:
            answers[worker] = answer
    return answers


def collect(workers: Sequence[Worker], limit_s: float) -> list[dict[str, Any] | WorkerFailed]:
    """The answer of each worker that was asked, in order."""
    answers: dict[Worker, dict[str, Any] | WorkerFailed] = {}
    while len(answers) < len(workers):
        answers |= answered([worker for worker in workers if worker not in answers], limit_s)
    return [answers[worker] for worker in workers]
