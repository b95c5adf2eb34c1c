"""Ctrl-C that is not lost: Python drops an exception that a signal raises inside a callback of the garbage collector."""

import signal
import threading
from typing import Any, NoReturn

_seen = False


def listen() -> None:
    """Notes every Ctrl-C from now on, besides raising KeyboardInterrupt."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note)


def _note(*_: Any) -> NoReturn:
    global _seen
    _seen = True
    raise KeyboardInterrupt


def seen() -> bool:
    """Whether there was a Ctrl-C that no verb has answered."""
    return _seen


def answered() -> None:
    """A verb has printed what there is, and ends."""
    global _seen
    _seen = False
