from __future__ import annotations

import json

from tests.chaos.__main__ import PAGE, RECORD, put_into, render


def test_the_page_has_the_figures_that_were_measured():
    record, page = json.loads(RECORD.read_text()), PAGE.read_text()
    assert put_into(page, render(record)) == page
    scenes = record["scenes"].values()
    assert sum(figures["moments"] for figures in scenes) >= 300
    assert sum(figures["torn"] + figures["silent"] for figures in scenes) == 0
