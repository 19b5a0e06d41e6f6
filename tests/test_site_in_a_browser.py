"""The site that make site built, in a browser, from the files alone: it reads well, and finds."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from tests.server.live import PATIENCE_S

sync_api = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser")) if p), None)
FLAGS = ["--no-sandbox", "--allow-file-access-from-files"]
THEIRS = {"landmark-unique"}
"""What axe-core finds in the theme's own frame."""

LOOKED_AT = ("index", "tour", "request", "deployment", "python/kvcellar.cellar")


def is_fresh() -> bool:
    sources = [ROOT / "mkdocs.yml", *ROOT.glob("docs/**/*"), *ROOT.glob("tools/site_*.py")]
    built = SITE / "index.html"
    return built.exists() and built.stat().st_mtime > max(s.stat().st_mtime for s in sources)


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed to look with"),
    pytest.mark.skipif(not is_fresh(), reason="make site has not built these pages"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def opened(browser, name: str, **how):
    page = browser.new_page(**how)
    page.set_default_timeout(PATIENCE_S * 1000)
    page.on("request", lambda sent: page.elsewhere.append(sent.url))
    page.elsewhere = []
    page.goto((SITE / f"{name}.html").as_uri())
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_reads_well_on_a_phone_and_on_a_desk(browser, name, scheme):
    page = opened(browser, name, color_scheme=scheme, viewport={"width": 1280, "height": 800})
    page.wait_for_load_state("networkidle")
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    wrong = {one["id"]: one["nodes"][0]["html"] for one in found if one["id"] not in THEIRS}
    assert wrong == {}
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [url for url in page.elsewhere if not url.startswith(("file:", "data:"))] == []
    page.close()


def test_the_search_finds_without_a_server(browser):
    page = opened(browser, "index", viewport={"width": 1280, "height": 800})
    page.fill("input.md-search__input", "undo")
    page.wait_for_selector(".md-search-result__item h1")
    titles = page.locator(".md-search-result__item h1").all_inner_texts()
    assert {"Agents", "kvcellar.cellar"} <= set(titles)
    page.close()
