"""The site: its links lead somewhere, it asks no other host for anything, and it works in a browser."""

import http.server
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests.workbench.browser import NAMES, browser, find_browser

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("mkdocs", reason="mkdocs is in the group docs: uv sync --group docs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_broken_in_a_built_site_is_named(hook: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="ops/a.html#here"></a><a href="#top"></a><a href="https://example.org"></a>'
        '<img src="data:image/png;base64,AA"><script src="https://cdn.example.org/x.js"></script><a href="b.html"></a>'
    )
    (tmp_path / "ops" / "a.html").write_text(
        '<a href="../index.html#top"></a><a href="../index.html#gone"></a><img src="c.png">'
    )
    (tmp_path / "x.css").write_text("a { background: url('//fonts.example.org/f') }")
    assert hook.problems(tmp_path) == [
        "index.html loads https://cdn.example.org/x.js, which another host has; put the file into docs/",
        "index.html links to ops/a.html#here, and there is no such heading",
        "index.html links to b.html, which is not there",
        "ops/a.html loads c.png, which is not there",
        "ops/a.html links to ../index.html#gone, and there is no such heading",
        "x.css loads //fonts.example.org/f, which another host has",
    ]


def test_links_between_files_become_links_between_pages(hook: ModuleType) -> None:
    known = {"index.md", "contributing.md", "compile.md", "ops/matmul.md"}
    text = "[a](docs/ops/matmul.md#x) [b](CONTRIBUTING.md) [c](pyproject.toml) [d](https://example.org) [e](gone.md)"
    assert hook.linked(text, "README.md", "index.md", known) == (
        "[a](ops/matmul.md#x) [b](contributing.md) c [d](https://example.org) [e](gone.md)"
    )
    text = "[a](../compile.md) [b](../../CONTRIBUTING.md)\n```md\n[a](x.md)\n```\n"
    assert hook.linked(text, "docs/ops/matmul.md", "ops/matmul.md", known) == (
        "[a](../compile.md) [b](../contributing.md)\n```md\n[a](x.md)\n```\n"
    )


def test_the_columns_that_a_page_names_are_drawn_as_bars(hook: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    table = (
        "| case | first | `ours` | fla |\n|---|---|---|---|\n| a | 3 s | **1.5** ms (1 to 2) | 3 |\n| b | | | 9 us |\n"
    )
    drawn = hook.plotted(f"<!-- plot: ours | fla -->\n\n{table}", "x.md")
    assert drawn.endswith(table)  # The figures stay.
    assert drawn.count('class="bars-row"') == 1  # Nothing is beside b's.
    assert '<div class="bars-name">a</div>' in drawn
    assert re.findall(r"width: ([\d.]+)%.*?<b>(.*?)</b>", drawn) == [("40.0", "1.5 ms"), ("80.0", "3 ms")]
    assert hook.plotted(f"<!-- plot: theirs -->\n{table}", "x.md") == table
    assert "'theirs' is of no column of the next table" in caplog.text


def test_what_examples_take_for_granted_is_shown(hook: ModuleType) -> None:
    page = "# x\n\n<!-- with: import jax\n\nx = 1 -->\n\n```python\nx\n```\n"
    assert hook.unfolding(page) == (
        '# x\n\n??? note "What the code below takes for granted"\n\n'
        "    ```python\n    import jax\n\n    x = 1\n    ```\n\n\n```python\nx\n```\n"
    )


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of these files on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_the_site_builds_strictly_and_works_in_a_browser(hook: ModuleType, tmp_path: Path) -> None:
    """Every page is found by the navigation, search finds an op, dark colours work, and nothing comes from elsewhere."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "tilewright.flash_attention" in (site / "ops" / "attention.html").read_text()
    assert "--against" in (site / "verbs" / "bench.html").read_text()
    assert "num_kv_heads" in (site / "layers" / "Attention.html").read_text()
    assert "config.json" in (site / "models" / "kimi_linear.html").read_text()
    path = find_browser()
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium")
    paper = "getComputedStyle(document.body).backgroundColor"
    with served(site) as address, browser(path) as tab:
        tab.size(1400, 900, dark=True)
        tab.open(f"{address}index.html")
        dark = tab.evaluate(paper)
        tab.evaluate("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
        tab.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert tab.evaluate(paper) != dark
        found = tab.evaluate(
            """(async () => { document.querySelector('label[for=__search]').click();
            const box = document.querySelector('.md-search__input');
            box.focus(); box.value = 'linear_cross_entropy'; box.dispatchEvent(new Event('keyup'));
            for (let i = 0; i < 100; i++) { await new Promise((done) => setTimeout(done, 100));
                const first = document.querySelector('.md-search-result__link');
                if (first) return first.href; } return null; })()"""
        )
        assert found
        for page in (
            "ops/attention.html",
            "verbs/bench.html",
            "measurements/index.html",
            "frontier.html",
            "guide/07_flash_attention.html",
            "layers/MoE.html",
        ):
            tab.size(390, 800)
            tab.open(f"{address}{page}")
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, page
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith((address, "data:"))] == []
