"""A saved report in a real browser: nothing is fetched, nothing overflows, both themes are read."""

from __future__ import annotations

import re

import pytest

from nbaccel.output.report import RunReport
from tests.browser.page import CONTRAST
from tests.output.test_report import facts

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def test_a_saved_report_is_readable_in_both_themes_and_windows_of_any_width(browser, tmp_path):
    saved = RunReport(facts()).save(tmp_path / "run.html")
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(saved.as_uri())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.locator("body").evaluate(CONTRAST) == []
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128
        assert is_dark == (scheme == "dark")

    # The bars of time are as wide as they say.
    bars = page.locator("[aria-hidden] [title]")
    widths = {
        bar.get_attribute("title"): box["width"]
        for bar in bars.all()
        if (box := bar.bounding_box()) is not None
    }
    assert widths["computing: 8.0 s"] / widths["computing: 3.0 s"] == pytest.approx(8 / 3, rel=0.02)
    assert widths["waiting for others: 5.0 s"] > widths["computing: 3.0 s"]

    # A screen reader meets headings, tables and charts.
    for heading in ("Time by rank", "Curves", "Steps and memory", "Warnings", "Plan"):
        assert page.get_by_role("heading", name=heading).count() == 1
    assert page.get_by_role("table").count() == 2
    assert page.get_by_role("img", name=re.compile(r"lr: from 0.001 at step 0")).count() == 1

    for width in (1180, 420):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Charts shrink with their column, and keep their shape.
        for box in [chart.bounding_box() for chart in page.locator("svg").all()]:
            assert box is not None
            assert box["width"] <= width - 48
            assert box["width"] / box["height"] == pytest.approx(480 / 160, rel=0.02)
    page.close()
    assert complaints == [saved.as_uri()], "it asked for more, or complained"
