"""Links between the papers lead somewhere, and say where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.source import ROOT

PAPERS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs" / "pages").rglob("*.md")),
]
FENCED = re.compile(r"^```.*?^```$|^<!-- chaos:begin.*?chaos:end -->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
SOURCE_OF_IMAGE = re.compile(r'(?:src|srcset)="([^"]+)"')


def links(text: str) -> list[tuple[str, str]]:
    """Text and target of each link and picture outside of code blocks."""
    plain = FENCED.sub("", text)
    return LINK.findall(plain) + [("", target) for target in SOURCE_OF_IMAGE.findall(plain)]


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as GitHub and MkDocs make them."""
    found = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text("utf-8")), flags=re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()) for heading in found)
    return {re.sub(r"[\s-]+", "-", slug.strip()) for slug in slugs}


def fault(page: Path, text: str, target: str) -> str:
    """What is wrong with a link; empty if nothing is."""
    if target.startswith(("https://", "http://")):
        return ""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return "does not exist"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return "has no such heading"
    name = text.strip("`")
    if name.endswith((".py", ".md")) and not str(file).endswith(f"/{name}"):
        return f"is not what its text says, {name}"
    return ""


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_they_say(page: Path) -> None:
    found = links(page.read_text("utf-8"))
    faults = [f"{target} {wrong}" for text, target in found if (wrong := fault(page, text, target))]
    assert not faults, "\n".join(faults)


def test_a_wrong_link_is_seen() -> None:
    page = ROOT / "README.md"
    assert fault(page, "Guide", "docs/pages/guides/no_such_guide.md")
    assert fault(page, "Guide", "docs/pages/guides/launcher.md#no-such-heading")
    assert fault(page, "`nbaccel/pool.py`", "nbaccel/launchers.py")
    assert not fault(page, "Guide", "docs/pages/guides/launcher.md#several-machines")
