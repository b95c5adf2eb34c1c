"""The code blocks of README, CONTRIBUTING and docs/: what each is, and what it says that it needs.

A block is Python, shell commands, TOML, or text (outputs, formulas, trees). Python and commands run in CI as they are
written, unless the page says what they need, such as a GPU, an account or minutes, where a reader sees it:

- a sentence of the paragraph above the block begins with "Needs": nothing of the block is run;
- the block's first line is a comment that begins with "Needs": nothing of the block is run;
- the comment behind a command says "needs": that command is not run.

A comment `<!-- with: CODE -->` of a page has what its Python takes for granted; the site shows it as a block that unfolds.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
_TOP = ("README.md", "CONTRIBUTING.md", "delta_attention_comparison/README.md")
PAGES = [*(ROOT / name for name in _TOP), *sorted(DOCS.rglob("*.md"))]
"""Every page with code that a reader may copy."""
KINDS = ("python", "sh", "toml", "text")

_FENCE = re.compile(
    r'(?ms)^(?P<indent> *)```(?P<kind>\w*)(?: title="(?P<title>[^"\n]+)")?(?P<rest>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$'
)
_GIVEN = re.compile(r"(?ms)^<!-- with: (?P<code>.*?) ?-->$")
_NEEDS = re.compile(r"(?m)(?:^|[.:;)]\s)(Needs [^\n]*)")
_COMMENT = re.compile(r"(?:^| )# (.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or the code of a `with` comment."""

    page: Path
    line: int
    """The line that its code begins after."""
    kind: str
    title: str | None
    code: str
    needs: str | None
    """What it needs, as its page says; nothing of it is run then."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a block of shell commands."""

    block: Block
    text: str
    needs: str | None

    @property
    def bare(self) -> str:
        """Without `uv run` and its options: the tests are in the environment that it would make."""
        return re.sub(r"\buv run (?:--(?:extra|group) \w+ )*", "", self.text)

    @property
    def where(self) -> str:
        return f"{self.block.where}: {self.text}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page and its `with` comments, in order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        code = match["code"].replace(f"\n{match['indent']}", "\n").removeprefix(match["indent"])
        above = re.split(r"\n\s*\n", text[: match.start()].rstrip())[-1]
        first = code.split("\n", 1)[0]
        said = _NEEDS.search(above) or re.match(r"# (Needs .*)", first)
        kind = f"{match['kind']}{match['rest']}"
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(page, line, kind, match["title"], code, said and said[1]))
    for match in _GIVEN.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(page, line, "given", None, match["code"], None))
    return sorted(found, key=lambda block: block.line)


def python_of(page: Path) -> list[tuple[int, str]]:
    """What is run of a page's Python: each part with the line that it begins after."""
    parts = [each for each in blocks_of(page) if each.kind in ("python", "given") and each.title is None]
    return [(each.line, each.code) for each in parts if each.needs is None]


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's blocks."""
    found = []
    for block in blocks_of(page):
        for line in block.code.splitlines() if block.kind == "sh" else ():
            comment = _COMMENT.search(line)
            text = line[: comment.start()].strip() if comment else line.strip()
            said = re.search(r"\bneeds (?!no\b|nothing\b).*", comment[1]) if comment else None
            if text:
                found.append(Command(block, text, said[0] if said else block.needs))
    return found
