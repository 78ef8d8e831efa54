"""Weak references and bars: in a worker they can be used, or are gone as in the notebook."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from torch import nn
from tqdm import tqdm
from tqdm.notebook import tqdm_notebook

from nbaccel import Pool, notebook_launcher
from nbaccel.transfer.object_walk import reached_modules


class Holder:
    """Something of the notebook, with one thing in it."""

    def __init__(self, held: Any) -> None:
        self.held = held


def dead_proxy() -> Any:
    return weakref.proxy(nn.Linear(1, 1))


def is_gone(reference: Any) -> bool:
    try:
        reference.held.weight  # noqa: B018  # what is asked for does not matter
    except ReferenceError:
        return True
    return False


def ended_bar() -> Any:
    bar = tqdm(total=2, desc="done")
    bar.update(2)
    bar.close()
    return bar


def ended_notebook_bar() -> Any:
    bar = tqdm_notebook(total=1, display=False)
    bar.update(1)
    bar.close()
    return bar


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_a_reference_to_what_is_gone_is_one_in_a_worker(start_method: str) -> None:
    holder = Holder(dead_proxy())
    assert list(notebook_launcher(is_gone, (holder,), 2, start_method=start_method)) == [True] * 2


def test_a_reference_to_what_is_there_names_the_same_object() -> None:
    def look(pair: list[Any]) -> tuple[bool, bool, int]:
        owner, (proxy, reference, gone) = pair
        return reference() is owner, gone() is None, proxy.held

    owner = Holder(7)
    found = notebook_launcher(
        look, ([owner, (weakref.proxy(owner), weakref.ref(owner), weakref.ref(Holder(1)))],), 2
    )
    assert list(found) == [(True, True, 7)] * 2


@pytest.mark.parametrize("start_method", ["template", "fork"])
@pytest.mark.parametrize("make", [ended_bar, ended_notebook_bar])
def test_a_bar_that_has_ended_can_be_held(make: Any, start_method: str) -> None:
    def use(holder: Holder) -> int:
        holder.held.update(1)
        holder.held.close()
        return holder.held.n

    holder = Holder(make())
    numbers = list(notebook_launcher(use, (holder,), 2, start_method=start_method))
    assert len(set(numbers)) == 1


def test_cells_read_names_that_hold_such_things() -> None:
    names = {"proxy": Holder(dead_proxy()), "bar": Holder(ended_bar()), "is_gone": is_gone}
    with Pool(2, namespace=names) as pool:
        done = pool.run("gone, n = is_gone(proxy), bar.held.n", out=["gone", "n"])
    assert done.out == {"gone": [True, True], "n": [2, 2]}


def test_a_search_for_modules_passes_them_over() -> None:
    module = nn.Linear(1, 1)
    args = (Holder(dead_proxy()), Holder(module))
    assert [found for _, found in reached_modules(print, args)] == [module]
