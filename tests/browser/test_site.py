"""The documentation as it is built, opened from the disk: its search leads to what explains."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.isolation import ROOT

pytest.importorskip("mkdocs", reason="it comes with the extra docs")
pytestmark = [pytest.mark.slow, pytest.mark.browser]

FIRST = {
    "loss is nan": "recipes/nan.html",
    "faster": "recipes/faster.html",
    "resume": "recipes/resume.html",
    "out of memory": "guides/big_models.html",
    "report": "guides/launcher.html",
}


@pytest.fixture(scope="module")
def page(browser: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    settings = ["--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str(folder)]
    subprocess.run([*command, *settings], check=True, cwd=ROOT, timeout=600)
    found = browser.new_page()
    found.goto((folder / "guides" / "install.html").as_uri())
    found.keyboard.press("/")
    return found


@pytest.mark.parametrize("words", FIRST)
def test_a_search_from_the_disk_leads_to_what_explains(words, page):
    outside = []
    page.on("request", lambda one: outside.append(one.url))
    field = page.locator(".md-search__input")
    field.fill("")
    field.press_sequentially(words)
    results = page.locator(".md-search-result__item > a")
    expect(results.first).to_have_attribute("href", re.compile(re.escape(FIRST[words])))
    found = " ".join(link.get_attribute("href") or "" for link in results.all())
    assert not re.search(r"/(figures|benchmarks)\.html", found)
    assert not [address for address in outside if not address.startswith("file:")]
