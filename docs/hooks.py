"""What the site takes from outside `docs/pages`: notebooks, papers of the project, links to code.

Pages link as they do on disk, so that links work in a checkout too. A link to a notebook or to a
paper that the site has as a page becomes a link to that page; a link to any other file of the
repository becomes its text, because the site holds no source code. A link to nothing is a warning,
which `mkdocs build --strict` makes an error.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from markdown.extensions.toc import nest_toc_tokens
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "pages"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAPERS = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
ADDED = {path: f"notebooks/{path.name}" for path in NOTEBOOKS}
ADDED |= {path: f"project/{path.name.lower()}" for path in PAPERS}

# A search is to lead to what explains, and each word of the project is in these tables.
UNSEARCHED = {
    f"{name}.md" for name in ("benchmarks", "figures", "reliability", "upstream", "versions")
}
UNSEARCHED |= {"project/changelog.md", "reference/where_is.md"}

_FENCED = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
# nbconvert loads MathJax from a server; no notebook has formulas, and the site works offline.
_MATHJAX = re.compile(r"<script[^>]*mathjax[^>]*>\s*</script>", flags=re.IGNORECASE)
_HEADING = re.compile(r'<h([1-6]) id="([^"]+)"[^>]*>(.*?)</h[1-6]>', flags=re.DOTALL)
_NOTEBOOK_LINK = re.compile(r'href="(\w+)\.ipynb')  # links between notebooks
_TAG = re.compile(r"<[^>]+>")
# Docstrings are Markdown but for these two habits of reStructuredText: roles, and `::` before code.
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):(<code>)~?")
_log = logging.getLogger("mkdocs.hooks")


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside `docs/pages`."""
    for path in NOTEBOOKS:  # mkdocs-jupyter looks for them in a folder: that of the repository
        uri = ADDED[path]
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in PAPERS:
        files.append(File.generated(config, ADDED[path], abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at pages of the site, and leave figures out of its search."""
    source = Path(page.file.abs_src_path or "")
    if page.file.src_uri in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(("guides/", "recipes/")):
        page.meta["search"] = {"boost": 2}

    def rewritten(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link["path"]))
        if target in ADDED:
            uri = ADDED[target]
        elif target.is_relative_to(PAGES):
            uri = target.relative_to(PAGES).as_posix()
        elif target.exists():
            return link["text"]
        else:
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, link["path"])
            return link["text"]
        start = posixpath.dirname(page.file.src_uri)
        return f"[{link['text']}]({posixpath.relpath(uri, start)}{link['anchor'] or ''})"

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Leave out what a browser would fetch from elsewhere, and mend what plugins get wrong."""
    if page.file.src_uri.endswith(".ipynb"):
        headings = [
            {"level": int(level), "id": anchor, "name": _TAG.sub("", name).removesuffix("¶")}
            for level, anchor, name in _HEADING.findall(html)
        ]
        page.toc = get_toc(nest_toc_tokens(headings))  # mkdocs-jupyter's own lacks what is code
        return _NOTEBOOK_LINK.sub(r'href="\1.html', _MATHJAX.sub("", html))
    return _ROLE.sub(r"\1", html.replace("<p>::</p>", "").replace("::</p>", ":</p>"))
