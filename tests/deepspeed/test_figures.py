"""The figures of DeepSpeed beside Accelerate: the page has the table of the stored result."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.guides import PAGES
from tests.isolation import ROOT


@pytest.mark.slow
def test_figures_show_the_table_of_the_stored_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = import_module("zero_training")
    table, holds = benchmark.render(
        benchmark.Results(ROOT / "benchmarks" / "results" / "zero_training.json")
    )
    page = (PAGES / "figures.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(benchmark.REPORT.begin)
    assert rest.partition(benchmark.REPORT.end)[0].strip() == table.strip()
    assert holds
