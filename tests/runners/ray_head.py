"""A real Ray head with token authentication, in its own network namespace, which nothing outside can reach."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PORT = 8265
TOKEN = "0123456789abcdef0123456789abcdef0123456789abcdef"
NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
_START_S = 180


def missing() -> str | None:
    """Why no head can be started here, or None."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: uv run --extra ray pytest"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    for command in ("unshare", "ip"):
        if shutil.which(command) is None:
            return f"{command} is not installed (Debian: util-linux, iproute2)"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        return "root may not create namespaces on this machine"
    return None


@dataclass
class Head:
    """A head: its directory and its network namespace."""

    directory: Path
    namespace: Path
    target: str = f"ray:127.0.0.1:{PORT}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Moves this thread, and the processes it starts, into the head's network namespace."""
        with open("/proc/thread-self/ns/net") as outside, self.namespace.open() as its:
            os.setns(its.fileno(), os.CLONE_NEWNET)
            try:
                yield
            finally:
                os.setns(outside.fileno(), os.CLONE_NEWNET)


@contextlib.contextmanager
def running() -> Iterator[Head]:
    directory = Path(tempfile.mkdtemp(prefix="twr", dir="/tmp"))  # Ray's sockets need a short path.
    (directory / "token").write_text(TOKEN)
    ray = Path(sys.executable).with_name("ray")
    resources = '{"TPU":8,"TPU-v6e-32-head":1,"accelerator_type:H200":1}'
    start = (
        f"ip link set lo up; exec {ray} start --head --block --port=6399 --node-ip-address=127.0.0.1 "
        f"--dashboard-host=127.0.0.1 --dashboard-port={PORT} --num-cpus=4 --num-gpus=1 --resources='{resources}' "
        f"--object-store-memory=80000000 --temp-dir={directory}/r --disable-usage-stats"
    )
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(directory / "token")}
    # The default of 30 s is too short on a busy machine.
    environment["RAY_agent_register_timeout_ms"] = str(_START_S * 1000)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*NAMESPACES, "sh", "-c", start], env=environment, stdout=log, stderr=log)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + _START_S
        head = None
        while head is None or not _answers(head):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the Ray head did not start:\n{(directory / 'log').read_text()}")
            time.sleep(0.5)
            if children.read_text().split():
                head = Head(directory, Path(f"/proc/{children.read_text().split()[0]}/ns/net"))
        yield head
    finally:
        process.kill()  # Its child is the first process of a pid namespace, so all others end too.
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _answers(head: Head) -> bool:
    with head.inside(), contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=2) as link:
        link.settimeout(5)
        link.sendall(f"GET /api/jobs/ HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        return b" 200 " in link.recv(64)
    return False


@contextlib.contextmanager
def breaking_proxy(head: Head) -> Iterator[tuple[str, list[socket.socket]]]:
    """A proxy to the head whose connections a test can break: its target, and its open sockets."""
    links: list[socket.socket] = []
    with head.inside():
        server = socket.create_server(("127.0.0.1", 0))

        def pump(source: socket.socket, to: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    to.sendall(data)
            for each in (source, to):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near = server.accept()[0]
                    far = socket.create_connection(("127.0.0.1", PORT))
                    links.append(near)
                    for source, to in ((near, far), (far, near)):
                        threading.Thread(target=pump, args=(source, to), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"ray:127.0.0.1:{server.getsockname()[1]}", links
        finally:
            server.close()
