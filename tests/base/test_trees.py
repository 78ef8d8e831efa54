from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.utils import ModelOutput

from nbaccel.base.trees import find_batch_size, map_tensors, send_to_device

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - what users have


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like transformers' BatchEncoding: a mapping that moves itself."""

    moved_to: Any = None

    def to(self, device: Any) -> Encoding:
        self.moved_to = device
        return self


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def test_containers_keep_their_type() -> None:
    tree = {
        "list": [torch.ones(2)],
        "pair": Pair(torch.ones(2), "text"),
        "ordered": OrderedDict(x=torch.ones(2)),
        "output": Output(loss=torch.ones(2), logits=torch.zeros(2)),
    }
    doubled = map_tensors(lambda t: t * 2, tree)
    assert [type(doubled[key]) for key in tree] == [type(value) for value in tree.values()]
    assert doubled["pair"].right == "text"
    assert doubled["output"].loss.tolist() == [2, 2]
    assert tree["list"][0].tolist() == [1, 1]  # type: ignore[attr-defined]


def test_what_can_move_itself_does_so_as_a_whole() -> None:
    encoding = Encoding(ids=torch.ones(2))
    assert send_to_device(encoding, "cpu") is encoding
    assert encoding.moved_to == "cpu"


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        (torch.ones(3, 2), 3),
        ({"label": 1, "x": [torch.tensor(0.0), torch.ones(5)]}, 5),
        (["a", "b"], None),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor_with_rows(tree: Any, size: int | None) -> None:
    assert find_batch_size(tree) == size
