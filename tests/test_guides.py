"""The code of the README and of the guides runs as it stands, and prints what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides import PAGES, printed_by, python_of, run_page
from tests.isolation import ROOT

pytestmark = pytest.mark.slow

# The DeepSpeed guide has a test of its own, which needs a compiler: tests/deepspeed/test_guide.py
GUIDES = [
    page
    for page in (
        *(ROOT / "README.md", PAGES / "index.md"),
        *sorted((PAGES / "guides").glob("*.md")),
        *sorted((PAGES / "recipes").glob("*.md")),
    )
    if python_of(page) and page.stem != "deepspeed"
]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_its_code_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path)
    for block in printed_by(page):
        for line in block.splitlines():
            assert line in printed
