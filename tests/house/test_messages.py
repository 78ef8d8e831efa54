"""Errors show the value they refuse; nothing is asserted at users; broad catches give a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import SourceFile, package_files

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


def test_nothing_is_asserted_at_users():
    """`python -O` removes an assert, and its message names neither the value nor the remedy."""
    found = [
        file.at(node)
        for file in package_files()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found, f"raise an error of nbaccel.errors instead: {found}"


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
