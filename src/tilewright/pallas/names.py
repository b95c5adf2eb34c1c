"""The names of the kernels that were traced in this process, so that a profile can tell them from those of XLA."""

_traced: set[str] = set()


def note(name: str) -> str:
    """Notes the name of a kernel that is being traced, and returns it."""
    _traced.add(name)
    return name


def traced() -> frozenset[str]:
    """The names of every kernel of this package that was traced so far."""
    return frozenset(_traced)
