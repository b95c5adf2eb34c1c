"""A hash of the source of a kernel: whether an entry of a tuned table is of the kernel as it is now.

Docstrings, comments and blank lines are not in it: what a kernel was measured at is written into its docstring, and that
must not make the measurement stale.
"""

import ast
import functools
import hashlib
import importlib.util
import io
import tokenize
from pathlib import Path

from tilewright.core.dispatch import Op

_LAYOUT = (tokenize.INDENT, tokenize.DEDENT)
_LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
_SHARED = ("tilewright.pallas", "tilewright.masks", "tilewright.ops")


@functools.cache
def source_hash(op: Op, implementation: str) -> str:
    """A hash of an implementation's modules: its own, and what they import of op families and toolkits."""
    digest = hashlib.sha256()
    for name, path in sorted(_modules(op.family, f"{op.family}.{implementation}").items()):
        digest.update(f"{name}\n{code(path.read_text())}\n".encode())
    return digest.hexdigest()[:16]


def code(source: str) -> str:
    """The tokens of all statements that are not a string alone."""
    kept: list[str] = []
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT:
            # How deep a statement is, not by how many spaces.
            kept.append(tokenize.tok_name[token.type])
        elif token.type == tokenize.NEWLINE:
            if any(part.type != tokenize.STRING for part in statement):
                kept += [*(part.string for part in statement), ";"]
            statement = []
        elif token.type not in _LEFT_OUT:
            statement.append(token)
    return " ".join(kept)


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
