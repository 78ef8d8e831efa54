"""Functions stay short; the trouble of a code base is always in the tail."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

from tests.house.source import SourceFile, package_files

MEDIAN, P90, LONGEST_FUNCTION = 8, 25, 60


def functions(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Each function's number of lines, from its `def` on and without its docstring."""
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0]
                lines -= docstring.end_lineno - docstring.lineno + 1
            yield lines, f"{file.at(node)} {node.name}: {lines} lines"


def all_functions() -> list[tuple[int, str]]:
    return sorted(f for file in package_files() for f in functions(file))


def test_no_function_is_long():
    long = [where for lines, where in all_functions() if lines > LONGEST_FUNCTION]
    assert not long, f"over {LONGEST_FUNCTION} lines:\n" + "\n".join(long)


def test_most_functions_are_short():
    found = all_functions()
    if len(found) < 10:
        return  # a distribution of nine says nothing
    lines = [n for n, _ in found]
    median, p90 = statistics.median(lines), statistics.quantiles(lines, n=10)[-1]
    longest = "\n".join(where for _, where in found[-20:])
    assert median <= MEDIAN, f"the median function has {median} lines"
    assert p90 <= P90, f"a tenth of the functions has over {p90} lines; the longest:\n{longest}"


def test_a_function_is_measured_without_its_docstring():
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    file = SourceFile(package_files()[0].path, text, ast.parse(text))
    assert [lines for lines, _ in functions(file)] == [2]
