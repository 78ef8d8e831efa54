"""The package's structure: no circles of imports, short functions, messages that show a value."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

import pytest

from tests.house import row
from tests.house.source import SourceFile, package_files


@pytest.mark.parametrize("level", ["module", "lazy", "typing"])
@pytest.mark.parametrize("find", [row.cycles, row.folder_cycles])
def test_imports_make_no_circle(find, level):
    assert find(row.nbaccel(), level) == []


def test_a_class_has_a_name_of_its_own():
    places = row.defined(row.nbaccel())
    several = [name for name, where in places.items() if len(where) > 1]
    assert [name for name in several if name.lstrip("_")[0].isupper() and not name.isupper()] == []


def test_a_circle_would_be_found(tmp_path):
    """Of each kind: at the top of a module, inside a function, and for types."""
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from made import b\n")
    lazy = "def f():\n    from made.a import x\n"
    (package / "b.py").write_text(lazy)
    modules = row.read(package)
    assert row.cycles(modules, "module") == []
    assert row.cycles(modules, "lazy") == [["made.a", "made.b"]]
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.a import x\n"
    (package / "b.py").write_text(typed)
    assert row.cycles(row.read(package), "lazy") == []
    assert row.cycles(row.read(package), "typing") == [["made.a", "made.b"]]


def test_a_circle_of_folders_would_be_found(tmp_path):
    """Where no two modules import each other, too."""
    package = tmp_path / "made"
    for name, text in {
        "one/a.py": "from made.two import b\n",
        "one/c.py": "",
        "two/b.py": "",
        "two/d.py": "from made.one.c import x\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
        (package / name).with_name("__init__.py").touch()
    (package / "__init__.py").touch()
    assert row.cycles(row.read(package), "typing") == []
    assert row.folder_cycles(row.read(package), "typing") == [["one", "two"]]


# ------------------------------------------------------------------------- sizes


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
    lines = [n for n, _ in found]
    median, p90 = statistics.median(lines), statistics.quantiles(lines, n=10)[-1]
    longest = "\n".join(where for _, where in found[-20:])
    assert median <= MEDIAN, f"the median function has {median} lines"
    assert p90 <= P90, f"a tenth of the functions has over {p90} lines; the longest:\n{longest}"


def test_a_function_is_measured_without_its_docstring():
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    file = SourceFile(package_files()[0].path, text, ast.parse(text))
    assert [lines for lines, _ in functions(file)] == [2]


# ------------------------------------------------------------------------- messages


# Messages that have no value to show: the text, and why it has none.
CONSTANT_MESSAGES: dict[str, str] = {
    "a truth value is not a number": "pydantic puts the setting and its value in front",
    "None is neither true nor false": "as above",
    "the other process closed its end": "an end of file is all that is known",
}

BROAD = {"Exception", "BaseException"}


def constant_messages(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Each `raise X("text")` whose text is the same whatever happened."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, file.at(node)


def test_a_message_shows_the_value_it_is_about():
    found = {text: where for file in package_files() for text, where in constant_messages(file)}
    silent = [f"{where}: {text}" for text, where in found.items() if text not in CONSTANT_MESSAGES]
    assert not silent, (
        "say what was asked, why it cannot be, what to do (or list the text here with a reason):\n"
        + "\n".join(silent)
    )
    gone = CONSTANT_MESSAGES.keys() - found.keys()
    assert not gone, f"allowed here, but raised nowhere: {gone}"


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(k is None or (isinstance(k, ast.Name) and k.id in BROAD) for k in kinds)


def unexplained(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler) and is_broad(node):
            reason = file.lines[node.lineno - 1].partition("#")[2]
            reason = reason.rpartition("BLE001")[2].strip(" -:")
            if len(reason.split()) < 2:
                yield f"{file.at(node)}: {file.lines[node.lineno - 1].strip()}"


def test_a_broad_except_says_why_on_its_line():
    found = [where for file in package_files() for where in unexplained(file)]
    assert not found, "name the exceptions, or say why all are meant:\n" + "\n".join(found)


def test_the_searches_see_what_they_should():
    text = (
        "try:\n    pass\nexcept (OSError, Exception):\n    raise ValueError('fixed ' 'text')\n"
        "try:\n    pass\nexcept BaseException:  # whatever it is goes home\n"
        "    raise ValueError(f'{text}')\n"
        "try:\n    pass\nexcept:\n    pass\n"
    )
    file = SourceFile(package_files()[0].path, text, ast.parse(text))
    assert [message for message, _ in constant_messages(file)] == ["fixed text"]
    assert [where.split(":")[1] for where in unexplained(file)] == ["3", "11"]
