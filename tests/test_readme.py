"""The README is true: its code runs, its commands are the ones that CI runs, its links lead somewhere."""

import re
from pathlib import Path

from tilewright.core.version import __version__

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_five_lines_run(capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line]) == 5
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert 0 < float(scope["loss"]) < 1
    assert scope["dk"].shape == (1, 512, 4, 64)
    assert "gated_delta_rule: xla" in capsys.readouterr().out


def test_both_commands_begin_from_a_bare_machine() -> None:
    commands = [line for line in README.splitlines() if line.startswith("pip install uv && uv run ")]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text()
    for command in commands:
        words = " ".join(command.removeprefix("pip install uv && uv run ").split()[:2])
        assert f'readme "{words.split(" -")[0]}"' in ci


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + list(
        (ROOT / "docs").rglob("*.md")
    )
    for page in pages:
        prose = re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]*\]\([^`\n]*`", "", page.read_text())
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
