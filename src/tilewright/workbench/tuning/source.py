"""A hash of the source of a kernel: whether an entry of a tuned table is of the kernel as it is now."""

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path

from tilewright.core.dispatch import Op

_SHARED = ("tilewright.pallas", "tilewright.masks", "tilewright.ops")


@functools.cache
def source_hash(op: Op, implementation: str) -> str:
    """A hash of an implementation's modules: its own, and what they import of op families and toolkits."""
    digest = hashlib.sha256()
    for name, path in sorted(_modules(op.family, f"{op.family}.{implementation}").items()):
        digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _modules(family: str, first: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    left = [first]
    while left:
        name = left.pop()
        if name in found or not name.startswith((family, *_SHARED)) or name.endswith(".api"):
            continue
        path = _path(name)
        if path is None:
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _path(name: str) -> Path | None:
    """The file of a module; None for what is no module, such as a class."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and Path(spec.origin).is_file() else None
