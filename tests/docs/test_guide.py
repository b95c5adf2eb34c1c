"""The guide runs: the Python blocks of a page, in order, in one namespace, in the interpreters; they assert."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import python_of

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guide"
PAGES = sorted(path.name for path in GUIDE.glob("*.md") if path.name != "index.md")
DEFAULT_TIER = ("02_grids.md",)


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow) for name in PAGES]
)
def test_the_code_of_a_chapter_runs(page: str) -> None:
    code = python_of(GUIDE / page)
    assert any("assert " in block for _, block in code)
    scope: dict = {"__name__": page}
    for line, block in code:
        exec(compile("\n" * line + block, str(GUIDE / page), "exec"), scope)  # Its lines are those of the page.


def test_the_contents_name_every_chapter_in_order() -> None:
    assert re.findall(r"\]\((\d\d_\w+\.md)\)", (GUIDE / "index.md").read_text()) == PAGES
