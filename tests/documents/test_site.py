"""The sites that ``make docs`` makes: what readers look for is found, and a Chinese page is Chinese all around."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

from tests.conftest import REPO

DOCS = REPO / "docs"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def build(source: Path, target: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", DOCS, *options]
    done = subprocess.run(
        [*command, source, target], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


class Links(HTMLParser):
    """The language of a page, where it leads, and where its switch of languages does."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.language, self.others, self.links = "", set[str](), set[str]()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "html":
            self.language = found["lang"] or ""
        if tag == "a" and found.get("href"):
            (self.others if "hreflang" in found else self.links).add(found["href"] or "")


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(DOCS / "zh", tmp_path_factory.mktemp("site") / "zh", "-D", "language=zh_CN")


def pages() -> list[str]:
    return [path.relative_to(DOCS / "zh").with_suffix("").as_posix() for path in (DOCS / "zh").rglob("*.md")]


@pytest.mark.parametrize("page", pages())
def test_a_chinese_page_is_chinese_all_around_and_leads_to_the_same_page_in_english(
    page: str, chinese: Path
) -> None:
    path = chinese / f"{page}.html"
    found = Links(path)
    assert found.language == "zh-CN"
    assert {Path(os.path.normpath(path.parent / other)) for other in found.others} == {
        chinese.parent / f"{page}.html"
    }
    assert "搜索" in path.read_text("utf-8")
    own = {link.split("#")[0] for link in found.links if not link.startswith(("http", "#"))} - {""}
    for link in own:
        to = Path(os.path.normpath(path.parent / link))
        english = DOCS / to.relative_to(chinese.parent).with_suffix(".md")
        assert to.exists() or (english.exists() and not to.is_relative_to(chinese)), link


# ------------------------------------------------------------------------------------------------- the search


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def search(chinese: Path) -> Iterator[Any]:
    """Opens the search of a site, and returns the pages that it finds, best first."""
    from playwright.sync_api import sync_playwright

    build(DOCS, chinese.parent / "en")
    handler = partial(Quiet, directory=str(chinese.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])

        def look(site: str, words: str) -> list[str]:
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/{site}/search.html?q={quote(words)}")
            page.wait_for_function("document.querySelector('.search-summary')?.textContent.trim()")
            links = "[...document.querySelectorAll('#search-results ul.search > li > a')]"
            hrefs = page.evaluate(f"{links}.map((one) => one.getAttribute('href'))")
            page.close()
            return [href.split(".html")[0] for href in hrefs]

        yield look
        browser.close()
    server.shutdown()
    server.server_close()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("site", "words", "page"),
    [
        ("en", "fewer cards", "guides/fewer-cards"),
        ("en", "断点续训", "guides/fewer-cards"),
        ("en", "卡数", "guides/fewer-cards"),
        ("en", "vllm", "guides/export"),
        ("en", "error messages", "guides/troubleshooting"),
        ("zh", "断点续训", "guides/fewer-cards"),
        ("zh", "卡数", "guides/fewer-cards"),
        ("zh", "四张卡", "guides/fewer-cards"),
        ("zh", "滑动平均", "guides/average"),
        ("zh", "fewer cards", "guides/fewer-cards"),
    ],
)
def test_the_search_finds_the_page(site: str, words: str, page: str, search: Any) -> None:
    assert search(site, words)[0] == page


@pytest.mark.browser
def test_every_kind_of_error_is_found_and_decisions_come_last(search: Any) -> None:
    assert "guides/troubleshooting" in search("en", "MemoryBudgetError")[:3]
    found = [page.startswith("decisions/") for page in search("en", "memory")]
    assert any(found)
    assert found == sorted(found)
