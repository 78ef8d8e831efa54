"""Modules are found in what is sent, and so is what cannot be sent."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch import nn

from nbaccel.transfer.object_walk import find_culprit, find_in, find_modules, reached_modules


@dataclass
class Setup:
    model: nn.Module
    more: dict[str, Any] = field(default_factory=dict)


def paths(*args: Any) -> list[str]:
    return [path for path, _ in find_modules(args)]


class Holder:
    """Something of the notebook, with one thing in it."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_modules_are_found_in_every_container_under_the_users_own_path() -> None:
    a, b, c, d, e = (nn.Linear(1, 1) for _ in range(5))
    found = find_modules(
        (a, [1, (b,)], {"teacher": c, 3: "x"}, Setup(d, {"ema": e}), "text", None, 1.5)
    )
    assert found == [
        ("args[0]", a),
        ("args[1][1][0]", b),
        ("args[2]['teacher']", c),
        ("args[3].model", d),
        ("args[3].more['ema']", e),
    ]


def test_a_module_is_found_once_by_its_first_path() -> None:
    model = nn.Linear(1, 1)
    assert paths(model, [model], {"again": model}) == ["args[0]"]


def test_a_part_of_a_model_belongs_to_the_model() -> None:
    assert paths(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == ["args[0]"]


def test_sets_and_dataclass_types_do_no_harm() -> None:
    model = nn.Linear(1, 1)
    assert paths({model}, Setup) == ["args[0].element0"]


def test_weak_references_are_passed_over() -> None:
    module = nn.Linear(1, 1)
    args = (Holder(weakref.proxy(nn.Linear(1, 1))), Holder(module))
    assert [found for _, found in reached_modules(print, args)] == [module]


def test_a_cycle_ends() -> None:
    model = nn.Linear(1, 1)
    circle: list[Any] = [model]
    circle.append(circle)
    assert paths(circle) == ["args[0][0]"]


def test_a_data_set_is_not_searched_but_a_long_list_of_models_is() -> None:
    model = nn.Linear(1, 1)
    assert paths(list(range(5000))) == []
    assert paths([None] * 2000 + [model]) == ["args[0][2000]"]


def test_a_dataclass_with_an_unset_field_does_no_harm() -> None:
    setup = Setup(nn.Linear(1, 1))
    del setup.more
    assert paths(setup) == ["args[0].model"]


# ------------------------------------------------------------------------- what cannot be sent


LOCK = threading.Lock()


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
        ((Holder({"gen": (i for i in range(3))}),), "args[0].held['gen'] (a generator)"),
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
