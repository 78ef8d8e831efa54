"""The page "Where is it?": what its walks name is in the code, and a walk stays short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.guides import PAGES
from tests.house.source import PACKAGE, package_files

PAGE = PAGES / "reference" / "where_is.md"
MOST_FILES = 8
WALK = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", re.MULTILINE | re.DOTALL)
FORM = re.compile(r"`([\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*): \w.*", re.DOTALL)
CLASS_IN_TEXT = re.compile(r"`_?([A-Z]+[a-z]\w*)(?:\.\w+)*`")


class Step(NamedTuple):
    """One line of a walk: `file.py`: `function`, `Class.method`: what happens there."""

    file: str
    names: list[str]


def steps(walk: str) -> list[Step]:
    """The steps of a walk.

    Raises:
        ValueError: One is not written as the others are.
    """
    found = []
    for number, text in STEP.findall(walk):
        form = FORM.fullmatch(text.strip())
        if form is None or int(number) != len(found) + 1:
            raise ValueError(f"no step `file.py`: `name`: what happens: {number}. {text[:60]}")
        found.append(Step(form[1], re.findall(r"`([\w.]+)`", form[2])))
    return found


def defined(body: list[ast.stmt], within: str = "") -> Iterator[str]:
    """Functions and classes at the top of a module, and those of its classes, by dotted name."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield within + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{within}{node.name}.")


def faults(walk: str) -> list[str]:
    """What is wrong with a walk."""
    trees = {str(file.path.relative_to(PACKAGE)): file.tree for file in package_files()}
    walked = steps(walk)
    files = [step.file for step in walked]
    wrong = [f"{file} is named twice" for file in sorted(set(files)) if files.count(file) > 1]
    if not 1 < len(files) <= MOST_FILES:
        wrong.append(f"{len(files)} files; a walk has at most {MOST_FILES}")
    for step in walked:
        if step.file not in trees:
            wrong.append(f"nbaccel/{step.file} does not exist")
            continue
        there = set(defined(trees[step.file].body))
        wrong += [f"nbaccel/{step.file} has no {name}" for name in step.names if name not in there]
    return wrong


WALKS = dict(WALK.findall(PAGE.read_text(encoding="utf-8")))


def test_there_are_thirteen_walks():
    assert len(WALKS) == 13


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_what_is_there(title):
    assert faults(WALKS[title]) == []


def test_classes_and_messages_in_the_text_are_those_of_the_package():
    names = {name for file in package_files() for name in defined(file.tree.body)}
    known = {name.rpartition(".")[2].lstrip("_") for name in names}
    assert set(CLASS_IN_TEXT.findall("".join(WALKS.values()))) - known == set()


def test_faults_of_a_walk_are_seen():
    line = "{}. `calls/launch.py`: `launch_plan`, `no_such_function`: runs it.\n"
    walk = line.format(1) + line.format(2) + "3. `calls/no_such_file.py`: `run`: runs it.\n"
    assert faults(walk) == [
        "calls/launch.py is named twice",
        "nbaccel/calls/launch.py has no no_such_function",
        "nbaccel/calls/launch.py has no no_such_function",
        "nbaccel/calls/no_such_file.py does not exist",
    ]
    many = "".join(f"{n}. `f{n}.py`: `run`: runs it.\n" for n in range(1, MOST_FILES + 2))
    assert "9 files; a walk has at most 8" in faults(many)
    with pytest.raises(ValueError, match="no step"):
        steps("1. `calls/launch.py`: runs it.\n")
    with pytest.raises(ValueError, match="no step"):
        steps("2. `calls/launch.py`: `launch_plan`: runs it.\n")
