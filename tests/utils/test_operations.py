from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from transformers.utils import ModelOutput

from nbaccel import notebook_launcher
from nbaccel.utils import (
    CannotPadNestedTensorWarning,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    copy_tensor_to_devices,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    initialize_tensors,
    is_namedtuple,
    listify,
    pad_across_processes,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)


class Pair(NamedTuple):
    a: Any
    b: Any


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like transformers' BatchEncoding: a mapping that moves itself."""

    moved_to: Any = None

    def to(self, device: Any) -> Encoding:
        self.moved_to = device
        return self


@dataclass
class Output(ModelOutput):
    logits: torch.Tensor | None = None


def test_a_function_reaches_all_tensors_and_containers_keep_their_type() -> None:
    data = Pair(torch.ones(2), [OrderedDict(x=torch.ones(1)), "text", Output(torch.ones(1))])
    found = recursively_apply(lambda t, by, plus=0: t * by + plus, data, 2, plus=1)
    assert listify(found) == Pair([3.0, 3.0], [OrderedDict(x=[3.0]), "text", Output([3.0])])
    assert isinstance(found, Pair)
    assert [type(part) for part in found.b] == [OrderedDict, str, Output]
    assert data.a.tolist() == [1, 1]
    assert recursively_apply(str, [1, "a"], test_type=lambda o: isinstance(o, int)) == ["1", "a"]
    with pytest.raises(TypeError, match="abs cannot be applied to a str"):
        recursively_apply(abs, ["text"], error_on_other_type=True)
    assert honor_type(data, (n for n in (1, 2))) == Pair(1, 2)
    assert is_namedtuple(data)
    assert not is_namedtuple((1, 2))


def test_keys_may_be_left_where_they_are() -> None:
    batch = {"x": torch.ones(1), "stay": torch.ones(1), "inner": [{"stay": torch.ones(1)}]}
    moved = send_to_device(batch, "meta", skip_keys="stay")
    assert moved["x"].device.type == "meta"
    assert moved["stay"] is batch["stay"]
    assert moved["inner"][0]["stay"].device.type == "cpu"
    both = send_to_device(tensor=batch, device="meta", skip_keys=["stay", "x"])
    assert both["x"] is batch["x"]
    encoding = Encoding(ids=torch.ones(2))
    assert send_to_device(encoding, "cpu") is encoding
    assert encoding.moved_to == "cpu"


def test_numbers_cut_padded_and_described() -> None:
    data = {"x": torch.arange(5.0).bfloat16(), "name": "n"}
    assert listify(data) == {"x": [0.0, 1.0, 2.0, 3.0, 4.0], "name": "n"}
    assert listify(slice_tensors(data, slice(1, 3)))["x"] == [1.0, 2.0]
    assert pad_input_tensors(torch.ones(3, 4, 4), 3, 4).shape == (4, 4, 4)
    assert pad_input_tensors({"x": torch.ones(5)}, 5, 2)["x"].tolist() == [1, 1, 1, 1, 1, 0]
    like = initialize_tensors(get_data_structure(data))["x"]
    assert (like.shape, like.dtype) == ((5,), torch.bfloat16)
    assert find_device(["text", {"x": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert find_device("text") is None
    # That of the first tensor with rows.
    assert find_batch_size({"label": 1, "x": [torch.tensor(0.0), torch.ones(5)]}) == 5
    assert find_batch_size(["a", "b"]) is None


def test_half_precision_becomes_float32_and_only_tensors_are_joined() -> None:
    half, whole = torch.ones(1).half(), torch.ones(1, dtype=torch.int8)
    assert convert_to_fp32([half, whole])[0].dtype is torch.float32
    assert convert_to_fp32([half, whole])[1] is whole

    @convert_outputs_to_fp32
    def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x.bfloat16()}

    assert forward(torch.ones(1))["y"].dtype is torch.float32
    batch = {"inputs": [torch.ones(2, 3)], "name": "one"}
    assert concatenate([batch]) is batch
    with pytest.raises(TypeError, match=r"got str among the tensors of 2 batches.*Take the others"):
        concatenate([batch, batch])
    joined = concatenate([{"x": (torch.ones(2, 3),)}, {"x": (torch.zeros(2, 3),)}], dim=1)
    assert joined["x"][0].shape == (2, 6)


def test_one_process_gives_its_tensor_to_all() -> None:
    def copied() -> list[float]:
        import os

        mine = torch.tensor([1.5, 2.5]) if os.environ["RANK"] == "1" else None
        return copy_tensor_to_devices(mine).tolist()

    assert notebook_launcher(copied, num_processes=2) == [[1.5, 2.5]] * 2


def test_a_nested_tensor_is_not_padded_and_that_is_said() -> None:
    nested = torch.nested.nested_tensor([[1, 2, 3], [1], [1, 2]], layout=torch.jagged)
    plain = torch.ones(2)
    with pytest.warns(CannotPadNestedTensorWarning, match=r"stays as it is.*to_padded_tensor"):
        assert pad_across_processes(nested) is nested
    with pytest.warns(CannotPadNestedTensorWarning):
        found = pad_across_processes({"a": plain, "b": [nested]})
    assert found["a"] is plain
    assert found["b"][0] is nested
