"""Code keeps the name of the file that it comes from, by which errors show the line of a cell."""

from __future__ import annotations

import pickle
import types
from typing import Any

from nbaccel.transfer import pickling

CELL = "def outer():\n    def inner():\n        return 1\n    return inner\n"


def defined_in_a_cell() -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<ipython-input-7>", "exec"), names)
    return names["outer"]


def files_of(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {code.co_filename}.union(*map(files_of, inner))


def test_what_is_pickled_for_a_childs_process():
    function = defined_in_a_cell()
    function.__module__ = "__main__"
    read = pickle.loads(pickling.dumps_with_lines(function))
    assert files_of(read.__code__) == {"<ipython-input-7>"}
    assert read()() == 1


def test_equal_code_is_equal_bytes():
    first, second = (pickling.dumps_with_lines(defined_in_a_cell()) for _ in range(2))
    assert first == second
