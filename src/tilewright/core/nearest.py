"""The name that was meant: what errors about unknown names end with."""

import difflib
from collections.abc import Iterable

_LEAST_ALIKE = 0.6


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" with the known name that is most like `given`, or "" where none is like it.

    Upper and lower case count as the same letter, and so do hyphens and underscores.
    """
    by_plain = {_plain(name): name for name in known}
    close = difflib.get_close_matches(_plain(str(given)), by_plain, n=1, cutoff=_LEAST_ALIKE)
    return f"; did you mean {by_plain[close[0]]}?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
