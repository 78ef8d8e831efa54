from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nbaccel.transfer.object_walk import find_culprit, find_in

LOCK = threading.Lock()


@dataclass
class Holder:
    inner: dict[str, Any]


def takes(*args: Any) -> None:
    pass


def uses_a_global() -> object:
    return LOCK


def blamed(*args: Any) -> str:
    return find_culprit(takes, args)


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((threading.Lock(),), "args[0] (a _thread.lock)"),
        ((1, {"lock": threading.Lock()}), "args[1]['lock'] (a _thread.lock)"),
        (([1, (2, threading.Lock())],), "args[0][1][1] (a _thread.lock)"),
        ((Holder({"gen": (i for i in range(3))}),), "args[0].inner['gen'] (a generator)"),
    ],
)
def test_the_innermost_culprit_is_named_as_the_user_would_write_it(
    args: tuple[Any, ...], path: str
) -> None:
    assert find_culprit(takes, args) == path


def test_what_a_function_closes_over_is_named() -> None:
    lock = threading.Lock()

    def train() -> object:
        return lock

    assert find_culprit(train, ()) == "lock (which train closes over) (a _thread.lock)"
    assert blamed(train) == "lock (which args[0] closes over) (a _thread.lock)"


def test_a_global_that_a_cells_function_uses_is_named() -> None:
    namespace = {"lock": threading.Lock(), "__name__": "__main__"}
    exec("def train():\n    return lock.locked()", namespace)
    assert find_culprit(namespace["train"], ()) == (
        "lock (a global that train uses) (a _thread.lock)"
    )


def test_an_unbound_closure_variable_does_no_harm() -> None:
    def outer() -> Any:
        def train() -> object:
            return later, lock  # type: ignore[has-type]

        lock = threading.Lock()
        if LOCK is None:
            later = 1
        return train

    assert "lock (which train closes over)" in find_culprit(outer(), ())


def test_innocent_large_arguments_are_passed_over() -> None:
    assert blamed(np.zeros(1_000_000), threading.Lock()) == "args[1] (a _thread.lock)"


def test_a_value_is_searched_under_the_name_it_has() -> None:
    assert find_in({"a": [1, LOCK]}, "mine") == "mine['a'][1] (a _thread.lock)"
