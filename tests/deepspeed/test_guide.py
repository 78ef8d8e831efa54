"""The DeepSpeed guide: its code runs and prints what it shows, and it has the table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.deepspeed import needs
from tests.guides import PAGES, printed_by, run_page
from tests.isolation import ROOT

pytestmark = pytest.mark.slow

PAGE = PAGES / "guides" / "deepspeed.md"
PRINTED = printed_by(PAGE)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that the code prints."""
    return run_page(PAGE, tmp_path_factory.mktemp("guide"))


@needs.DEEPSPEED
@needs.ENGINE[1]
@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_its_code_prints_what_it_shows(printed: str, number: int) -> None:
    for line in PRINTED[number].splitlines():
        assert line in printed


def test_figures_show_the_table_of_the_stored_result(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    benchmark = _module(folder / "zero_training.py")
    results = benchmark.Results(folder / "results" / "zero_training.json")
    table, holds = benchmark.render(results)
    text = (ROOT / "docs/pages/figures.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(benchmark.REPORT.begin)
    shown, _, _ = rest.partition(benchmark.REPORT.end)
    assert shown.strip() == table.strip()
    assert holds


def _module(path: Path) -> object:
    spec = importlib.util.spec_from_file_location("zero_training_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
