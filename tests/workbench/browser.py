"""A headless Chromium, driven by the DevTools protocol over a pipe."""

import base64
import itertools
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. It notes every request, and every error that the page reports."""

    def __init__(self, reading: int, writing: int):
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._reading, self._writing, self._rest, self._loaded = reading, writing, b"", False
        self._numbers, self._session = itertools.count(1), None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Loads a page, and waits until it is there."""
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the window's size, and the colours that the system prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command, and returns its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (told := self._receive()).get("id") != number:
            pass
        assert "error" not in told, told
        return told["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._reading, 1 << 16)
            assert data, "the browser ended"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        told = json.loads(line)
        method, params = told.get("method"), told.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        self._loaded |= method == "Page.loadEventFired"
        return told


@contextmanager
def browser(path: str) -> Iterator[Page]:
    """Starts a browser with a profile of its own, and ends it."""
    theirs, writing = os.pipe()
    reading, theirs_too = os.pipe()
    with tempfile.TemporaryDirectory(prefix="tilewright-browser-", ignore_cleanup_errors=True) as profile:
        words = shlex.join([path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"])
        process = subprocess.Popen(
            ["bash", "-c", f"exec {words} 3<&{theirs} 4>&{theirs_too}"],
            pass_fds=(theirs, theirs_too),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_too)
        try:
            yield Page(reading, writing)
        finally:
            process.kill()
            process.wait()
            os.close(reading)
            os.close(writing)
