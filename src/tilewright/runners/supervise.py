"""The supervisor of one local job: `python -I supervise.py DIRECTORY COMMAND...`.

It runs in its own session, so that the job survives the terminal, and writes the job's log and exit code to the
journal. It is the subreaper of everything the command starts, daemons included, so that a cancelled job leaves no
process behind. It imports only the standard library, to start quickly.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # The exit codes of a shell.


def started_at(pid: int) -> int | None:
    """When a process started, in ticks since boot, or None if it is gone. A pid alone may have been reused."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def descendants(root: int) -> list[int]:
    """Every process below `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def stop_all(root: int, grace_s: float = GRACE_S) -> None:
    """Sends SIGTERM to every descendant of `root`, and SIGKILL after `grace_s`, until none is left."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while below := descendants(root):
        late = time.monotonic() > deadline
        for pid in below:
            if late or pid not in asked:
                asked.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                except ProcessLookupError:
                    continue
        time.sleep(0.02)


def main(directory: Path, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Blocked, and read with sigwait: a cancellation that arrives before the command has started is not lost.
    watched = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def keep(name: str, what: object) -> None:
        part = directory / f".{name}"
        part.write_text(json.dumps(what))
        part.replace(directory / name)

    keep("supervisor.json", {"pid": os.getpid(), "started_at": started_at(os.getpid())})
    with (directory / "log").open("ab", buffering=0) as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _as_usual(watched),
            )
        except OSError as error:
            log.write(f"tilewright: {command[0]}: {error.strerror}\n".encode())
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            keep("status.json", {"state": "failed", "exit_code": code, "note": ""})
            return
        keep("process.json", {"pid": process.pid, "started_at": started_at(process.pid)})
        cancelled = False
        while process.poll() is None and not cancelled:
            cancelled = signal.sigwait(watched) == signal.SIGTERM and process.poll() is None
        # A job ends with its command. A process it left running could block the accelerator for the next job.
        stop_all(os.getpid(), GRACE_S if cancelled else 1.0)
        code = process.wait()
        code = 128 - code if code < 0 else code
        state = "cancelled" if cancelled else "failed" if code else "succeeded"
        keep("status.json", {"state": state, "exit_code": code, "note": ""})


def _as_usual(blocked: set[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
