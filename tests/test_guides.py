"""The code of the README and of the guides runs as it stands, and prints what the pages show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.guides import PAGES, printed_by, python_of, run_page
from tests.isolation import ROOT

pytestmark = pytest.mark.slow

GUIDES = [
    page
    for page in (
        *(ROOT / "README.md", PAGES / "index.md"),
        *sorted((PAGES / "guides").glob("*.md")),
        *sorted((PAGES / "recipes").glob("*.md")),
    )
    if python_of(page)
]


def as_parameter(page: Path) -> Any:
    """With the marks of a page that needs a compiler."""
    if page.stem != "deepspeed":
        return pytest.param(page, id=page.stem)
    from tests.deepspeed import needs

    return pytest.param(page, id=page.stem, marks=needs.ENGINE)


@pytest.mark.parametrize("page", [as_parameter(page) for page in GUIDES])
def test_its_code_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path)
    for block in printed_by(page):
        for line in block.splitlines():
            assert line in printed
