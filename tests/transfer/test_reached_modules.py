"""Modules that a function reaches otherwise than by its arguments are shared, and copied back."""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Pool, notebook_launcher

"""Runs code, and gives the names that it has then."""


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Nothing is to be told of models that were all trained alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


DEFINE = """
import torch
from torch import nn
from tests.transfer.test_reached_modules import fill
model = nn.Linear(4, 4)
class Trainer:
    def __init__(self, model):
        self.model, self.parts = model, {'head': nn.Linear(2, 2)}
    def fit(self, value):
        fill(self.model, value)
        fill(self.parts['head'], value)
trainer = Trainer(nn.Linear(4, 4))
def by_global(): fill(model, 3.0)
def by_helper(): by_global()
def by_nested(): return [fill(m, 3.0) for m in (lambda: [model])()]
class Owner:
    @staticmethod
    def run(): fill(model, 3.0)
def by_class(): Owner.run()
"""


def cell(text: str) -> dict[str, Any]:
    """Run code as a cell of a notebook: what it defines has the namespace as its globals."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), namespace)
    return namespace


def fill(module: nn.Module, value: float) -> None:
    """Give every weight this value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def means(*modules: nn.Module) -> list[float]:
    return [m.weight.mean().item() for m in modules]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("by_global", "template"),
        ("by_helper", "template"),
        ("by_nested", "template"),
        ("by_class", "template"),
        ("by_helper", "fork"),  # where nothing is pickled, one way stands for all
    ],
)
def test_a_global_model_comes_home(name, start):
    found = cell(DEFINE)
    notebook_launcher(found[name], num_processes=2, start_method=start)
    assert means(found["model"]) == [3.0]


@pytest.mark.parametrize("start", ["template", "fork"])
def test_models_of_an_object_closures_defaults_and_partials_come_home(start):
    found = cell(DEFINE)
    method, trainer = found["trainer"].fit, found["Trainer"](nn.Linear(4, 4))
    model, by_global = found["model"], found["by_global"]
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def train(given: Any, c: nn.Module, m: nn.Module, *, b: nn.Module = b) -> None:
        given.fit(5.0)
        for module in (a, b, c):
            fill(module, 2.0)
        by_global()
        assert m is by_global.__globals__["model"]
        fill(m, 4.0)

    work = functools.partial(train, trainer, c)
    notebook_launcher(work, (model,), num_processes=2, start_method=start)
    assert means(trainer.model, trainer.parts["head"]) == [5.0, 5.0]
    assert means(a, b, c) == [2.0, 2.0, 2.0]
    assert means(model) == [4.0], "an argument and a global is one"
    notebook_launcher(method, (5.0,), num_processes=2, start_method=start)
    assert means(found["trainer"].model, found["trainer"].parts["head"]) == [5.0, 5.0]


def test_models_reached_in_odd_ways_come_home_and_what_cannot_is_told(capsys):
    found = cell(DEFINE)
    with Pool(2, namespace={}) as pool:
        pool.call(found["by_global"])
        pool.call(found["trainer"].fit, 6.0)
    assert means(found["model"], found["trainer"].model) == [3.0, 6.0]

    model = nn.Linear(2, 2)

    class Sly:
        def __reduce__(self) -> Any:
            return types.SimpleNamespace, (), {"model": model}

    sly = Sly()
    notebook_launcher(lambda: fill(sly.model, 7.0), num_processes=2)  # type: ignore[attr-defined]
    assert means(model) == [7.0]

    found = cell(DEFINE + "def grow(): model.weight = nn.Parameter(torch.ones(9, 4))")
    with pytest.warns(UserWarning, match=r"The trained weights of model do not fit"):
        results = notebook_launcher(found["grow"], num_processes=2)
    assert results.state_dicts["model"]["weight"].shape == (9, 4)

    found = cell(DEFINE + "meta = nn.Linear(2, 2, device='meta')\ndef look(): return str(meta)")
    assert notebook_launcher(found["look"], num_processes=2)[1].startswith("Linear")
    told = capsys.readouterr().err
    assert "each worker gets a copy of meta, and its weights will not come back" in told
    assert "meta device" in told

    def look(pair: list[Any]) -> tuple[bool, bool]:
        owner, (reference, gone) = pair
        return reference() is owner, gone() is None

    owner = {7}
    references = weakref.ref(owner), weakref.ref(set())
    found = notebook_launcher(look, ([owner, references],), num_processes=2)
    assert list(found) == [(True, True)] * 2
