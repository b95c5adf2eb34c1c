"""Which functions of the package check their arguments and results in tests, and how.

beartype checks those of modules and classes. Functions inside functions are left out: each is made anew with each call of
the outer one, and to decorate one takes milliseconds. A kernel's body has dozens.
"""

import ast
from collections.abc import Sequence
from typing import override

import jaxtyping._import_hook as import_hook
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # An int is a fine float, as in the rest of Python.


class _OutsideFunctions(import_hook.JaxtypingTransformer):
    @override
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        is_inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        return node if is_inside else super().visit_FunctionDef(node)


def install(modules: Sequence[str]) -> None:
    """Checks these modules for the whole run: the hook takes effect when one is imported, and kernels are imported late."""
    import_hook.JaxtypingTransformer = _OutsideFunctions
    import_hook.install_import_hook(modules, "tests.typechecker.checked").__enter__()
