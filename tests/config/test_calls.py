"""Calls that cannot work are refused before any process, and told how they are written."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from nbaccel import Accelerator, ConfigError, Pool, debug_launcher, notebook_launcher
from nbaccel.config.call_arguments import check_call


def train(model: nn.Module, epochs: int, lr: float = 0.1) -> None:
    """What a user has written."""


def demo_basic(rank: int, world_size: int) -> None:
    """PyTorch's tutorial."""


def by_name(model: nn.Module, *, lr: float) -> None:
    """A parameter that only goes by its name."""


def nothing() -> None:
    """No parameters at all."""


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "args", "told"),
    [
        (train, (), "missing a required argument: 'model'"),
        (train, (1,), "args=(1,): missing a required argument: 'epochs'"),
        (train, (1, 2, 3, 4), "args=(1, 2, 3, 4): too many positional arguments"),
        (nothing, (1,), "nothing() -> 'None' cannot be called with args=(1,)"),
        (demo_basic, (2,), 'Leave rank out, and write rank = int(os.environ["RANK"])'),
        (by_name, (1,), "by functools.partial(by_name, name=…)"),
        ((1,), train, "function=(1,) is not callable: each worker calls it."),
        (nn.Linear(1, 1), train, "is no tuple"),
        (train, nn.Linear(1, 1), "is no tuple"),
    ],
)
def test_arguments_that_do_not_fit(function: Any, args: Any, told: str) -> None:
    assert told in refused(function, args, num_processes=2)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"num_proceses": 2}, "got num_proceses=2. Did you mean 'num_processes'?"),
        ({"epochs": 2}, "an argument of train(): these go into a tuple, in their order."),
        ({"zero_stage": 2}, "a setting of RunConfig. Write config=RunConfig(zero_stage=…)."),
        ({"colour": 2}, "The arguments are: function, args, num_processes"),
    ],
)
def test_keywords_that_the_launcher_does_not_have(keywords: dict[str, Any], told: str) -> None:
    assert told in refused(train, **keywords)


def test_calls_without_a_function_with_an_argument_twice_and_of_others_are_told() -> None:
    assert "missing a required argument: 'function'" in refused(num_processes=2)
    assert "multiple values for argument 'args'" in refused(train, (1, 2), args=(1, 2))
    with pytest.raises(ConfigError, match="Did you mean 'num_processes'"):
        debug_launcher(nothing, nproceses=2)  # type: ignore[call-arg]
    with (
        Pool(2, namespace={}) as pool,
        pytest.raises(ConfigError, match="required argument: 'model'"),
    ):
        pool.call(train)

    def work(rank: int) -> None: ...

    assert "write rank = int(os.environ" in refused(work, num_processes=2)


class Adder:
    def __call__(self, one: int, two: int = 2) -> None: ...


def decorated() -> Callable[..., Any]:
    """Its decorator brings the argument that the function needs."""

    @functools.wraps(train)
    def wrapper(*args: Any) -> None:
        train(nn.Linear(1, 1), *args)

    return wrapper


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (train, (1, 2)),
        (train, [1, 2, 3]),
        (functools.partial(train, epochs=2), (1,)),
        (decorated(), (1,)),
        (Adder(), (1,)),
        (nn.Linear(1, 1).forward, (1,)),
        (nn.Linear(1, 1), (1,)),
        (print, (1, 2, 3)),
        (max, (1, 2)),  # written in C: nobody can read what it takes
        (lambda *args: args, ()),
        (dict, ()),
    ],
)
def test_calls_that_can_work_are_let_through(function: Any, args: Any) -> None:
    check_call(function, args)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"mixed_precison": "bf16"}, "got mixed_precison='bf16'. Did you mean 'mixed_precision'?"),
        ({"zero_stage": 2}, "a setting of RunConfig. Write config=RunConfig(zero_stage=…)."),
        ({"colour": 2}, "The arguments are: device_placement, split_batches, mixed_precision"),
        ({"log_wiht": "all", "cpus": True}, "2 settings are wrong"),
    ],
)
def test_keywords_that_the_accelerator_does_not_have(keywords: dict[str, Any], told: str) -> None:
    for accelerator_class in (Accelerator, MyAccelerator):
        with pytest.raises(ConfigError, match=re.escape(told)):
            accelerator_class(**keywords)


class MyAccelerator(Accelerator):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


def test_arguments_of_an_accelerator_are_those_that_its_signature_shows() -> None:
    with pytest.raises(ConfigError, match=r"Accelerator\(\) cannot be called: too many positional"):
        Accelerator(*range(40))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="multiple values for argument 'device_placement'"):
        Accelerator(True, device_placement=True)  # type: ignore[misc]
    names = [*inspect.signature(Accelerator).parameters]
    assert names[:3] == ["device_placement", "split_batches", "mixed_precision"]
    own = [*inspect.signature(Accelerator.__init__).parameters]
    assert own == ["self", *names]
    assert Accelerator.__init__.__annotations__["mixed_precision"] == "str | None"
