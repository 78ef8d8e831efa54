"""The code of a notebook file as plain Python: magics become comments, statements know their names.

A line of a magic or a shell command is kept as a comment, so that a reader sees what was there. The
first line of `%%accelerate`, `%%time` and the like is dropped and the cell's code stays; a cell in
another language (`%%bash`) becomes a comment as a whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.transfer.free_names import names_of

EXPORT_TAG = "export"
SKIP_TAG = "nbaccel-skip"
_PYTHON_CELL_MAGICS = ("accelerate", "time", "timeit", "capture", "prun")
_MAGIC_LINE = re.compile(r"^(?P<indent>\s*)(?P<magic>[%!?].*|[\w.]+\?{1,2}\s*|\w+\s*=\s*[%!].*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class NotebookCell:
    """A cell with code.

    Attributes:
        number: Its place among the cells with code, from 1.
        source: As it stands in the notebook.
        code: As plain Python.
        tags: Its tags.
        num_magics: How many lines became comments.
    """

    number: int
    source: str
    code: str
    tags: frozenset[str]
    num_magics: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A statement at the top level of a cell.

    Attributes:
        cell_number: The cell.
        node: Its syntax tree.
        text: Its lines, with the comments above it.
        binds: The names that it binds or changes.
        reads: The names that it reads, inside of functions, too.
    """

    cell_number: int
    node: ast.stmt
    text: str
    binds: frozenset[str]
    reads: frozenset[str]

    @property
    def is_definition(self) -> bool:
        """Whether it only says what something is, and computes nothing."""
        return isinstance(
            self.node,
            (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
        )


def read_notebook(notebook_path: Path) -> list[NotebookCell]:
    """Read the code of a notebook file; cells that are to be left out are."""
    all_cells = _code_cells(notebook_path)
    cells = [
        _plain_cell(number, _source_of(cell), frozenset(cell.get("metadata", {}).get("tags", ())))
        for number, cell in enumerate(all_cells, 1)
    ]
    kept_cells = [cell for cell in cells if SKIP_TAG not in cell.tags]
    mistakes = [mistake for cell in kept_cells if (mistake := _syntax_mistake(cell))]
    if mistakes:
        raise ConfigError(*mistakes)
    return kept_cells


def _code_cells(notebook_path: Path) -> list[dict[str, Any]]:
    try:
        notebook = json.loads(notebook_path.read_text(encoding="utf-8"))
        return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{str(notebook_path)!r} cannot be read as a notebook: {error!r}. There is nothing to "
            "export. Give the path of a saved .ipynb file (format 4)."
        ) from error


def _source_of(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _plain_cell(number: int, source: str, tags: frozenset[str]) -> NotebookCell:
    code, num_magics = _without_magics(source)
    return NotebookCell(number=number, source=source, code=code, tags=tags, num_magics=num_magics)


def _without_magics(source: str) -> tuple[str, int]:
    cell_magic = re.match(r"\s*%%(\w+)(.*)", source)
    if cell_magic and cell_magic[1] not in _PYTHON_CELL_MAGICS:
        return "\n".join(f"# {line}" for line in source.splitlines()), source.count("\n") + 1
    lines = source.splitlines()
    num_magics = 0
    # Only of a cell that is no Python as it stands: a text may have a line that begins with "!".
    if not _parses(source):
        goes_on = False
        for position, line in enumerate(lines):
            line_magic = _MAGIC_LINE.match(line)
            if line_magic or goes_on:
                # An indented magic may be all that its block has.
                indent = line_magic["indent"] if line_magic else ""
                block = f"{indent}pass  # " if indent else "# "
                lines[position] = f"{block}{line.strip()}"
                goes_on = line.rstrip().endswith("\\")
                num_magics += 1
    return "\n".join(lines), num_magics


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def _syntax_mistake(cell: NotebookCell) -> str:
    try:
        ast.parse(cell.code)
    except (SyntaxError, ValueError) as error:
        line_number = getattr(error, "lineno", None) or 1
        lines = cell.code.splitlines()
        text = lines[line_number - 1].strip() if line_number <= len(lines) else ""
        return (
            f"Code cell {cell.number}, line {line_number} is no Python: {error.args[0]}: got "
            f"{text[:60]!r}. The script would not run. Correct it, or give the cell the tag "
            f"{SKIP_TAG}."
        )
    return ""


# ---------------------------------------------------------------------- statements


def statements_of(cell: NotebookCell) -> list[Statement]:
    """The statements of a cell, in order."""
    lines = cell.code.splitlines()
    statements = []
    previous_end = 0
    for node in ast.parse(cell.code).body:
        first_line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        # Comments above a statement are about it. Two statements of one line stay together.
        text = "\n".join(lines[min(previous_end, first_line - 1) : node.end_lineno]).strip("\n")
        previous_end = node.end_lineno or previous_end
        names = names_of(ast.unparse(node))
        statements.append(
            Statement(
                cell_number=cell.number,
                node=node,
                text=text,
                binds=frozenset(_bound_names(node)),
                reads=names.needed | names.possible,
            )
        )
    return statements


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds, or whose value it changes, outside of functions."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    # `config.lr = 3` and `model.load_state_dict(...)` change what a name stands for.
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
        yield from _root_name(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from _root_name(node.value.func)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.Lambda, ast.expr_context)):
            yield from _bound_names(child)


def _root_name(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
