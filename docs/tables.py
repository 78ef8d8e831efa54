"""Write the tables of the documentation that are made from the package's own data.

    python -m docs.tables      # after each change of the package: it counts lines, too

Tests compare the pages with the data. The tables of measurements are written by those that measure:
`benchmarks/*.py --render`, `python -m tests.chaos --render`, `python3 -m tests.lanes --render`.
"""

from __future__ import annotations

from pathlib import Path

from docs import drawing
from nbaccel.config import RunConfig
from nbaccel.notebook.options import kinds_of, words_of
from nbaccel.notebook.picker.choices import CHOICES_BEGIN, CHOICES_END, choices_tables
from nbaccel.plan.matrix import MATRIX_BEGIN, MATRIX_END, compatibility_tables, markdown_table
from tests.house import public_names, row
from tests.house.markers import put_into

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "pages" / "reference"
FIELDS_BEGIN, FIELDS_END = "<!-- run_config:begin -->", "<!-- run_config:end -->"
PUBLIC_BEGIN, PUBLIC_END = "<!-- public:begin -->", "<!-- public:end -->"


def run_config_table() -> str:
    """The fields of `RunConfig`: values, default, meaning."""
    rows = []
    for name, field in RunConfig.model_fields.items():
        kinds = [getattr(kind, "__name__", str(kind)) for kind in kinds_of(field.annotation)]
        values = words_of(field.annotation)
        told = ", ".join(f"`{value!r}`" for value in values) if values else ", ".join(kinds)
        rows.append((f"`{name}`", told, f"`{field.default!r}`", str(field.description)))
    return markdown_table(("Field", "Values", "Default", "Meaning"), rows)


def public_table() -> str:
    """The public modules, each with its names."""
    rows = []
    for module in public_names.MODULES:
        told = ", ".join(f"`{name}`" for name in public_names.names_of(module))
        rows.append((f"`{module}`", told))
    return markdown_table(("Module", "Names"), rows)


TABLES = (
    (REFERENCE / "compatibility.md", compatibility_tables, MATRIX_BEGIN, MATRIX_END),
    (REFERENCE / "choices.md", choices_tables, CHOICES_BEGIN, CHOICES_END),
    (REFERENCE / "settings.md", run_config_table, FIELDS_BEGIN, FIELDS_END),
    (REFERENCE / "public.md", public_table, PUBLIC_BEGIN, PUBLIC_END),
    (ROOT / "ARCHITECTURE.md", row.table, row.BEGIN, row.END),
    (drawing.PAGE, drawing.drawing, drawing.BEGIN, drawing.END),
)


if __name__ == "__main__":
    for page, table, begin, end in TABLES:
        text = page.read_text(encoding="utf-8")
        page.write_text(put_into(text, table(), begin, end), encoding="utf-8")
