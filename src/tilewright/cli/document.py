"""`--json` for any verb: one JSON document on stdout, and nothing else there.

    @prints_json
    def ops() -> None:
        ...
        tell(ops=rows)
        console().print(table)

adds `--json` to a verb. With it, what the verb tells is printed as one document when the verb ends, whatever its exit code:
a run that failed or was interrupted has the part that it got to. Tables are not printed, and everything else that the verb
prints goes to stderr. Times are in seconds and sizes in bytes; a figure that is not finite is null.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from tilewright.core.version import __version__

PARAMETER = "as_json"
_FLAG = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables; all else goes to stderr.")
]
_told: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("tilewright_document", default=None)


def wanted() -> bool:
    """Whether the verb that runs was given `--json`."""
    return _told.get() is not None


def tell(**parts: Any) -> None:
    """Puts parts into the document. Without `--json` they are dropped."""
    if (told := _told.get()) is not None:
        told |= parts


def prints_json(verb: Callable[..., None]) -> Callable[..., None]:
    """Adds `--json` to a verb; see the module."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def either(*args: Any, **given: Any) -> None:
        with _document() if given.pop(PARAMETER, False) else contextlib.nullcontext():
            verb(*args, **given)

    flag = inspect.Parameter(PARAMETER, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_FLAG)
    parameters = [*signature.parameters.values(), flag]
    # Typer reads a verb's options from its signature.
    vars(either)["__signature__"] = signature.replace(parameters=parameters)
    either.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return either


@contextlib.contextmanager
def _document() -> Iterator[None]:
    """A context that prints what is told inside of it, as JSON. A wrong argument leaves stdout empty."""
    told: dict[str, Any] = {}
    before = _told.set(told)
    stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _told.reset(before)
        if told:
            whole = {"version": __version__, **told}
            stdout.write(json.dumps(_plain(whole), indent=2, allow_nan=False) + "\n")
            stdout.flush()


def _plain(value: Any) -> Any:
    """A value of what JSON has: objects, lists, text, numbers, true, false and null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    item = getattr(value, "item", None)  # Of a scalar of numpy.
    return _plain(item()) if callable(item) else str(value)
