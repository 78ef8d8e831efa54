from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from nbaccel.transfer.object_walk import find_modules


@dataclass
class Setup:
    model: nn.Module
    more: dict[str, Any] = field(default_factory=dict)


def paths(*args: Any) -> list[str]:
    return [path for path, _ in find_modules(args)]


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
