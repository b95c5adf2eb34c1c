"""The `tilewright` command: checks that the libraries of the command line are installed, and runs it."""

import sys


def main() -> None:
    """Runs the command line, or prints the one command that installs what it needs."""
    try:
        import packaging  # noqa: F401
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print(
            "tilewright's command line needs typer, rich and packaging: pip install 'tilewright[bench]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from tilewright.cli import interrupt

    interrupt.listen()
    try:
        from tilewright.cli.main import main as run

        run()
    except KeyboardInterrupt:  # Before a verb has begun to work; verbs have their own answer.
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as ended:
        if interrupt.seen() and not ended.code:
            sys.exit(130)
        raise
