"""Writes a new op family from templates: a small op that works, to be replaced by the author's own math.

The new family passes its tests, the linters and `tilewright check`. Two existing files get lines: an import in
`tilewright/__init__.py` makes the op public and registers it, and two in `tilewright/configs.py` make its configs public.
"""

import ast
import keyword
import re
import string
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates") / "op"

# Template -> what it becomes, from the root of a checkout.
_FILES = {
    "package/__init__.py.tmpl": "src/tilewright/ops/{name}/__init__.py",
    "package/call.py.tmpl": "src/tilewright/ops/{name}/call.py",
    "package/api.py.tmpl": "src/tilewright/ops/{name}/api.py",
    "package/reference.py.tmpl": "src/tilewright/ops/{name}/reference.py",
    "package/xla.py.tmpl": "src/tilewright/ops/{name}/xla.py",
    "package/pallas_tpu.py.tmpl": "src/tilewright/ops/{name}/pallas_tpu.py",
    "package/config.py.tmpl": "src/tilewright/ops/{name}/config.py",
    "package/cases.py.tmpl": "src/tilewright/ops/{name}/cases.py",
    "tests/__init__.py.tmpl": "tests/ops/{name}/__init__.py",
    "tests/test_op.py.tmpl": "tests/ops/{name}/test_{name}.py",
    "docs/op.md.tmpl": "docs/ops/{name}.md",
}
_PUBLIC = "src/tilewright/__init__.py"
_CONFIGS = "src/tilewright/configs.py"
# Existing file -> the imports that it gets.
_IMPORTS = {
    _PUBLIC: ("from tilewright.ops.{name}.api import {name} as {name}",),
    _CONFIGS: (
        "from tilewright.ops.{name}.config import {camel}TpuBackward as {camel}TpuBackward",
        "from tilewright.ops.{name}.config import {camel}TpuForward as {camel}TpuForward",
    ),
}
_LINE = 120
# The registration stays on one line, as the formatter writes it.
MAX_NAME = (_LINE - len(_IMPORTS[_PUBLIC][0].format(name=""))) // 3


def scaffold_op(name: str, root: Path) -> tuple[list[Path], dict[Path, int]]:
    """Writes the family of an op called `name` into the checkout at `root`.

    Returns the new files, and the number of lines added to each changed one. Nothing is written unless everything can be.
    """
    _check_name(name)
    if not (root / _PUBLIC).is_file() or not (root / _CONFIGS).is_file() or not (root / "src/tilewright/ops").is_dir():
        raise FileNotFoundError(
            f"root={str(root.resolve())!r} must be a checkout of tilewright, and it has no src/tilewright/ops; "
            f"run it from the top of a checkout, or pass --root"
        )
    _check_free(name, root)
    texts = {root / target.format(name=name): _filled(template, name) for template, target in _FILES.items()}
    changed = {root / path: (root / path).read_text() for path in _IMPORTS}
    for path, lines in _IMPORTS.items():
        for line in lines:
            changed[root / path] = _with_import(changed[root / path], line.format(name=name, camel=_camel_case(name)))
    for path, text in (texts | changed).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(texts), {root / path: len(lines) for path, lines in _IMPORTS.items()}


def _check_name(name: str) -> None:
    """The name is that of a folder, a module and a function, and part of a test's name."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(
            f"name={name!r} must be in snake_case (a-z, 0-9 and single _ between them, a letter first); "
            f"use {_snake_case(name)!r}"
        )
    if len(name) > MAX_NAME:
        raise ValueError(
            f"name={name!r} has {len(name)} characters and must have at most {MAX_NAME}, so that its import stays on "
            f"one line; use a shorter one, such as {name[:MAX_NAME].rstrip('_')!r}"
        )
    if keyword.iskeyword(name):
        raise ValueError(f"name={name!r} must not be a Python keyword, since it names a function; use '{name}_op'")
    if name in _names_in_templates():
        raise ValueError(
            f"name={name!r} must not be a name that the generated files use for something else; use '{name}_op'"
        )


def _snake_case(name: str) -> str:
    """The nearest valid name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    nearest = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return nearest if nearest[:1].isalpha() else f"op_{nearest}".rstrip("_")


def _names_in_templates() -> set[str]:
    """Every variable, argument and import of the generated modules, such as `jax`, `x` and `tuple`."""
    names: set[str] = set()
    for template in _FILES:
        if template.endswith(".py.tmpl"):
            for node in ast.walk(ast.parse(_filled(template, "the_op_itself"))):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node, ast.arg):
                    names.add(node.arg)
                elif isinstance(node, ast.alias):
                    names.add(node.asname or node.name.partition(".")[0])
    return names


def _check_free(name: str, root: Path) -> None:
    """Raises where the op would overwrite or hide something."""
    package = root / "src/tilewright"
    taken = [package / "ops" / name, root / "tests/ops" / name, root / "docs/ops" / f"{name}.md"]
    taken += [package / name, package / f"{name}.py"]  # `tilewright.core` must stay the package.
    for path in taken:
        if path.exists():
            raise FileExistsError(
                f"name={name!r} must be free, and {path.relative_to(root)} exists; use another name, or remove that first"
            )
    for node in ast.walk(ast.parse((root / _PUBLIC).read_text())):
        if isinstance(node, ast.alias) and name in (node.asname, node.name):
            raise FileExistsError(f"name={name!r} must be free, and tilewright.{name} exists; use another name")


def _camel_case(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _filled(template: str, name: str) -> str:
    return string.Template((TEMPLATES / template).read_text()).substitute(name=name, camel=_camel_case(name))


def _with_import(text: str, line: str) -> str:
    """A module's text with an import from an op family in it, where the import sorter puts it."""
    key = _sort_key(line)
    if len(line) > _LINE:
        head, _, members = line.partition(" import ")
        line = f"{head} import (\n    {members},\n)"
    lines = text.splitlines(keepends=True)
    position = len(lines)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilewright.ops."):
            if key < _sort_key(ast.unparse(node)):
                position = node.lineno - 1
                break
            position = node.end_lineno or node.lineno
    return "".join([*lines[:position], f"{line}\n", *lines[position:]])


def _sort_key(line: str) -> list[list[tuple[str, int]]]:
    """By module, then by member. Ruff sorts naturally: a run of digits is a number, so that op2 comes before op10."""
    words = line.split()[1:4:2]  # from MODULE import MEMBER as MEMBER
    return [
        [("0", int(token)) if token.isdigit() else (token, 0) for token in re.findall(r"\d+|\D", word)]
        for word in words
    ]
