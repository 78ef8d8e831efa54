"""Weak references: in a worker they name the same object, or are gone as in the notebook."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from nbaccel import notebook_launcher
from nbaccel.transfer.object_walk import reached_modules


class Holder:
    """Something of the notebook, with one thing in it."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_reference_to_what_is_there_names_the_same_object() -> None:
    def look(pair: list[Any]) -> tuple[bool, bool]:
        owner, (reference, gone) = pair
        return reference() is owner, gone() is None

    owner = Holder(7)
    found = notebook_launcher(
        look, ([owner, (weakref.ref(owner), weakref.ref(Holder(1)))],), num_processes=2
    )
    assert list(found) == [(True, True)] * 2


def test_a_search_for_modules_passes_them_over() -> None:
    module = nn.Linear(1, 1)
    args = (Holder(weakref.proxy(nn.Linear(1, 1))), Holder(module))
    assert [found for _, found in reached_modules(print, args)] == [module]
