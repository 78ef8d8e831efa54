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


def test_modules_are_found_in_every_container_under_the_users_own_path():
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


def test_what_is_passed_over_and_what_does_no_harm():
    model = nn.Linear(1, 1)
    assert paths(model, [model], {"again": model}) == ["args[0]"]
    assert paths(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == ["args[0]"]
    assert paths({model}, Setup) == ["args[0].element0"]
    args = (Holder(weakref.proxy(nn.Linear(1, 1))), Holder(model))
    assert [found for _, found in reached_modules(print, args)] == [model]
    circle: list[Any] = [model]
    circle.append(circle)
    assert paths(circle) == ["args[0][0]"]
    assert paths(list(range(5000))) == []  # a data set, and a long list of models
    assert paths([None] * 2000 + [model]) == ["args[0][2000]"]
    setup = Setup(model)
    del setup.more
    assert paths(setup) == ["args[0].model"]


LOCK = threading.Lock()


def takes(*args: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((LOCK,), "args[0] (a _thread.lock)"),
        ((1, {"lock": LOCK}), "args[1]['lock'] (a _thread.lock)"),
        (([1, (2, LOCK)],), "args[0][1][1] (a _thread.lock)"),
        ((Holder({"gen": (i for i in range(3))}),), "args[0].held['gen'] (a generator)"),
        ((np.zeros(1_000_000), LOCK), "args[1] (a _thread.lock)"),
    ],
)
def test_the_innermost_culprit_is_named_as_the_user_would_write_it(args, path):
    assert find_culprit(takes, args) == path
    assert find_in({"a": [1, LOCK]}, "mine") == "mine['a'][1] (a _thread.lock)"


def test_what_a_function_closes_over_or_uses_is_named():
    lock = threading.Lock()

    def train() -> object:
        return lock, later

    assert find_culprit(train, ()) == "lock (which train closes over) (a _thread.lock)"
    assert find_culprit(takes, (train,)) == "lock (which args[0] closes over) (a _thread.lock)"
    later = 1  # unbound until now
    assert train()
    namespace = {"lock": lock, "__name__": "__main__"}
    exec("def train():\n    return lock.locked()", namespace)
    assert find_culprit(namespace["train"], ()) == (
        "lock (a global that train uses) (a _thread.lock)"
    )
