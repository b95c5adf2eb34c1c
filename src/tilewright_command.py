"""The `tilewright` command. It is outside of the package, whose import takes seconds: a Ctrl-C in them ends it quietly."""

import os
import signal
import sys
from typing import Any


def _end(*_: Any) -> None:
    """Nothing has begun that could be lost, and an exception would not always get out of an import."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


def main() -> None:
    """Imports the command line and runs it, which has an answer of its own to Ctrl-C."""
    signal.signal(signal.SIGINT, _end)
    from tilewright.cli.entry import main as run

    run()
