"""The papers agree with the package: versions, code, tables, names and links."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import nbaccel
from nbaccel import errors
from tests.guides import PAGES, python_of
from tests.house.source import PACKAGE, ROOT, package_files, tracked_files

README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CODE = [
    (page, number)
    for page in (README, *sorted(PAGES.rglob("*.md")))
    for number in range(len(python_of(page)))
]


def declared_version() -> str:
    """The version in pyproject.toml (tomllib came with Python 3.11; one line needs no parser)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.+)"$', text, flags=re.MULTILINE)[1]


@pytest.mark.parametrize(("page", "number"), CODE, ids=lambda part: getattr(part, "stem", part))
def test_code_in_the_papers_compiles(page, number):
    compile(python_of(page)[number], f"{page.name}, block {number}", "exec")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_speaks_to_its_reader_alone(path):
    """What tests compare is said by tags."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        code = "".join(cell["source"])
        assert not re.search(r"NBVAL|^\s*assert\b", code, flags=re.MULTILINE), code


def test_the_readme_shows_the_stored_comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    comparison = import_module("harness.comparison")
    samples = import_module("harness.samples")
    results = samples.Results(ROOT / "benchmarks" / "results" / "launch.json")
    _, _, rest = README.read_text(encoding="utf-8").partition(comparison.BEGIN)
    shown, _, _ = rest.partition(comparison.END)
    assert shown.strip() == comparison.render(results).strip()


def test_the_tables_are_made_from_the_package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = import_module("tables")
    for page, table, begin, end in tables.TABLES:
        text = page.read_text(encoding="utf-8")
        assert tables.put_into(text, table(), begin, end) == text, "run python -m docs.tables"


def test_a_published_address_is_in_the_line_to_install_and_in_the_badge(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    told = import_module("tables").way_in('Repository = "https://github.com/someone/nbaccel"')
    assert '"nbaccel[notebook] @ git+https://github.com/someone/nbaccel"' in told
    assert "/github/someone/nbaccel/blob/main/notebooks/01_quickstart.ipynb" in told


def test_the_reference_has_every_public_name():
    pages = {page: page.read_text(encoding="utf-8") for page in (PAGES / "reference").glob("*.md")}
    described = re.findall(r"^::: nbaccel\.(\w+)$", "\n".join(pages.values()), flags=re.MULTILINE)
    listed = re.findall(r"`(\w+)`", pages[PAGES / "reference" / "not_implemented.md"])
    known = {*described, *listed, *errors.__all__, "__version__"}
    assert set(nbaccel.__all__) <= known
    assert len(described) == len(set(described))


def test_package_and_changelog_have_the_declared_version():
    assert nbaccel.__version__ == declared_version()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)[1]
    assert newest == declared_version()


def test_the_tests_that_make_quick_names_are_there():
    named = re.findall(r"\btests/[\w/]+(?:\.py)?", (ROOT / "Makefile").read_text())
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


# The brackets keep this line from being its own finding.
MACHINE_PATH = re.compile(r"(?<![\w.$}~])/(?:[w]ork|[r]oot|opt/[w]heels)(?=/|\b)")


def test_modules_that_the_architecture_names_are_there():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "nbaccel"
    files = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text)
    lost = [name for name in files if not ((package / name).is_file() or (ROOT / name).is_file())]
    # DeepSpeed's own function, in a drawing, is no module of the folder of that name.
    for name in {*re.findall(r"(?<![\w.])[a-z_]+(?:\.\w+)+", text)} - {"deepspeed.initialize"}:
        folder, *path = name.split(".")
        if (package / folder).is_dir():
            while path and (package / folder / path[0]).is_dir():
                folder = f"{folder}/{path.pop(0)}"
            file = package / folder / f"{path[0]}.py" if path else package / folder / "__init__.py"
            if not file.is_file():  # what the folder offers under its own name
                file, path = package / folder / "__init__.py", ["", *path]
            words = set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
            if not words.issuperset(path[1:]):
                lost.append(name)
    assert lost == []


def test_no_file_names_a_path_of_one_machine():
    files = tracked_files()
    if files is None:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


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


WHERE_IS = (PAGES / "reference" / "where_is.md").read_text(encoding="utf-8")
# `file.py`: `function`, `Class.method`: what happens there
STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*): ", re.MULTILINE)
CLASS_IN_TEXT = re.compile(r"`_?([A-Z]+[a-z]\w*)(?:\.\w+)*`")


def defined(body: list[ast.stmt], within: str = "") -> Iterator[str]:
    """Functions and classes at the top of a module, and those of its classes, by dotted name."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield within + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{within}{node.name}.")


def test_where_is_names_what_is_there():
    there = {
        str(file.path.relative_to(PACKAGE)): {*defined(file.tree.body)} for file in package_files()
    }
    steps = STEP.findall(WHERE_IS)
    assert len(steps) == len(re.findall(r"^\d+\. ", WHERE_IS, flags=re.MULTILINE))
    for file, names in steps:
        assert set(re.findall(r"[\w.]+", names)) <= there[file], file
    classes = {name.rpartition(".")[2].lstrip("_") for names in there.values() for name in names}
    assert set(CLASS_IN_TEXT.findall(WHERE_IS)) <= classes
