from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import notebook_launcher
from nbaccel.base.trees import tensor_digest
from nbaccel.train.collectives import Collectives, find_differences
from nbaccel.train.distributed import init_process


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]
)
def test_one_changed_element_changes_the_digest(dtype: str) -> None:
    tensor = torch.zeros(3, 4).to(getattr(torch, dtype))
    changed = tensor.clone()
    changed[1, 2] = 1
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    assert tensor_digest(tensor) != tensor_digest(changed)


def test_the_digest_sees_order_and_signs_and_not_a_number() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert tensor_digest(tensor) != tensor_digest(tensor.flip(0))
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    bad = torch.tensor([float("nan")])
    assert tensor_digest(bad) == tensor_digest(bad.clone())
    turned = torch.arange(6.0).view(2, 3)
    assert tensor_digest(turned.t()) == tensor_digest(turned.t().contiguous())
    assert tensor_digest(torch.empty(0)) == tensor_digest(torch.empty(0))
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_differences_are_told_alike_everywhere_with_plain_values() -> None:
    def body() -> Any:
        place = init_process(cpu=True)
        facts: dict[str, Any] = {
            "same": 1,
            "rate": 0.1 * (1 + place.rank),
            "print": [place.rank // 2],
        }
        if place.rank != 1:
            facts["only some"] = "x"
        return find_differences(facts, Collectives(place))

    expected = [
        "rate differs from process 0's on process 1, 2: 0.1, 0.2, 0.30000000000000004 by process",
        "print differs from process 0's on process 2",
        "only some differs from process 0's on process 1: x, missing, x by process",
    ]
    assert list(notebook_launcher(body, num_processes=3)) == [expected] * 3
