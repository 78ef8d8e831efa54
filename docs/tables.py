"""Write the tables of the documentation that are made from the package's own data.

    python -m docs.tables      # after each change of the package: it counts lines, too

Tests compare the pages with the data. The tables of measurements are written by those that measure:
`benchmarks/*.py --render`, `python -m tests.chaos --render`, `python3 -m tests.lanes --render`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from docs import drawing
from docs.matrix import MATRIX_BEGIN, MATRIX_END, compatibility_tables, markdown_table
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.notebook.magic_line import kinds_of, words_of
from nbaccel.notebook.picker.choices import Setting, by_name
from tests.house import public_names, source
from tests.house.source import SourceFile, put_into

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "pages" / "reference"
GUIDES = ROOT / "docs" / "pages" / "guides"
CHOICES_BEGIN, CHOICES_END = "<!-- choices:begin -->", "<!-- choices:end -->"
FIELDS_BEGIN, FIELDS_END = "<!-- run_config:begin -->", "<!-- run_config:end -->"
FP8_BEGIN, FP8_END = "<!-- fp8_config:begin -->", "<!-- fp8_config:end -->"
PUBLIC_BEGIN, PUBLIC_END = "<!-- public:begin -->", "<!-- public:end -->"
STRUCTURE_BEGIN = "<!-- structure:begin (made by `python -m docs.tables`) -->"
STRUCTURE_END = "<!-- structure:end -->"
# What `structure_figures` gave of other packages.
PEERS = ROOT / "benchmarks" / "results" / "structure_peers.json"
INSTALL_BEGIN, INSTALL_END = "<!-- install:begin -->", "<!-- install:end -->"


def fields_table(model: type[BaseModel]) -> str:
    """The fields of a model: values, default, meaning."""
    rows = []
    for name, field in model.model_fields.items():
        kinds = [getattr(kind, "__name__", str(kind)) for kind in kinds_of(field.annotation)]
        values = words_of(field.annotation)
        told = ", ".join(f"`{value!r}`" for value in values) if values else ", ".join(kinds)
        rows.append((f"`{name}`", told, f"`{field.default!r}`", str(field.description)))
    return markdown_table(("Field", "Values", "Default", "Meaning"), rows)


def choices_tables() -> str:
    """The tables of `docs/pages/reference/choices.md`: each choice, and what it sets."""
    all_settings = list(by_name().values())
    common_settings = [setting for setting in all_settings if not setting.section]
    other_settings = [setting for setting in all_settings if setting.section]
    head = ("Choice", "Meaning", "`RunConfig` field", "DeepSpeed key")
    return "\n\n".join(
        [
            "## Shown first",
            markdown_table(head, [_table_row(setting) for setting in common_settings]),
            f"## In the list of all settings: {len(other_settings)} more",
            markdown_table(head, [_table_row(setting) for setting in other_settings]),
        ]
    )


def _table_row(setting: Setting) -> tuple[str, str, str, str]:
    unit_text = f" [{setting.unit}]" if setting.unit else ""
    strategy_keys = setting.strategy_key.split(", ") if setting.strategy_key else []
    section_text = f"{setting.section}: " if setting.section else ""
    return (
        f"{section_text}{setting.label}{unit_text}",
        setting.meaning.replace("|", "\\|"),
        f"`{setting.run_field}`",
        ", ".join(f"`{strategy_key}`" for strategy_key in strategy_keys),
    )


def public_table() -> str:
    """The public modules, each with its names."""
    rows = []
    for module in public_names.MODULES:
        told = ", ".join(f"`{name}`" for name in public_names.names_of(module))
        rows.append((f"`{module}`", told))
    return markdown_table(("Module", "Names"), rows)


def install_line(project: str = "") -> str:
    """What installs nbaccel, from the repository that pyproject.toml names."""
    address = _repository(project)
    command = f'    pip install "nbaccel[notebook] @ git+{address or "ADDRESS"}"'
    return command if address else f"{command}\n\nADDRESS is what you would clone."


def way_in(project: str = "") -> str:
    """The same, with a badge that opens the quickstart on Colab, which reads from GitHub alone."""
    name = _repository(project).removeprefix("https://github.com/")
    if not name or name.startswith("https:"):
        return install_line(project)
    page = (
        f"https://colab.research.google.com/github/{name}/blob/main/notebooks/01_quickstart.ipynb"
    )
    picture = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"{install_line(project)}\n\n[![Open the quickstart in Colab]({picture})]({page})"


def _repository(project: str) -> str:
    text = project or (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^Repository = "(.+?)(?:\.git)?/?"$', text, flags=re.MULTILINE)
    return found[1] if found else ""


def structure_figures(files: Iterable[SourceFile]) -> dict[str, str]:
    """The figures of one package, by what they are of: no blanks, comments and docstrings count."""
    files = list(files)
    code_lines = {file.path: _code_lines(file) for file in files}
    lengths = sorted(
        len(code_lines[file.path].intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
        for file in files
        for node in source.nodes(file.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return {
        "files": str(len(files)),
        "raw lines": f"{sum(len(file.lines) for file in files):,}",
        "code lines": f"{sum(map(len, code_lines.values())):,}",
        "function: median / p90 / p99 / longest": " / ".join(
            str(lengths[min(int(q * len(lengths)), len(lengths) - 1)]) for q in (0.5, 0.9, 0.99, 1)
        ),
    }


def _code_lines(file: SourceFile) -> set[int]:
    lines = {n for n, line in enumerate(file.lines, 1) if line.strip()[:1] not in ("", "#")}
    return lines.difference(_docstring_lines(file.tree))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in source.nodes(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            value = one.value if isinstance(one, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from range(one.lineno, (one.end_lineno or one.lineno) + 1)


def structure_table() -> str:
    """The figures of the package, beside those of others that were stored."""
    own, peers = (
        structure_figures(source.package_files()),
        json.loads(PEERS.read_text(encoding="utf-8")),
    )
    lines = [f"|  | nbaccel | {' | '.join(peers)} |", "|---" + "|--:" * (1 + len(peers)) + "|"]
    for name, value in own.items():
        lines.append(f"| {' | '.join([name, value, *(peer[name] for peer in peers.values())])} |")
    return "\n".join(lines)


TABLES = (
    (ROOT / "README.md", way_in, INSTALL_BEGIN, INSTALL_END),
    (GUIDES / "install.md", install_line, INSTALL_BEGIN, INSTALL_END),
    (REFERENCE / "compatibility.md", compatibility_tables, MATRIX_BEGIN, MATRIX_END),
    (REFERENCE / "choices.md", choices_tables, CHOICES_BEGIN, CHOICES_END),
    (REFERENCE / "settings.md", partial(fields_table, RunConfig), FIELDS_BEGIN, FIELDS_END),
    (REFERENCE / "settings.md", partial(fields_table, Fp8Config), FP8_BEGIN, FP8_END),
    (REFERENCE / "public.md", public_table, PUBLIC_BEGIN, PUBLIC_END),
    (ROOT / "ARCHITECTURE.md", structure_table, STRUCTURE_BEGIN, STRUCTURE_END),
    (drawing.PAGE, drawing.drawing, drawing.BEGIN, drawing.END),
)


if __name__ == "__main__":
    for page, table, begin, end in TABLES:
        text = page.read_text(encoding="utf-8")
        page.write_text(put_into(text, table(), begin, end), encoding="utf-8")
