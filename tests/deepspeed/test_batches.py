"""Batches of every form, cut and repeated, and models called on them."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nbaccel.errors import ConfigError
from nbaccel.memory.activations import call, loss_of, mapped, num_samples, resized

Pair = namedtuple("Pair", "inputs targets")  # noqa: PYI024 - as users write it


def test_a_batch_is_cut_and_repeated_along_its_samples():
    batch = {
        "x": torch.arange(6).view(3, 2),
        "mask": torch.ones(2),
        "n": 7,
        "scale": torch.ones(()),
    }
    assert num_samples(batch) == 3
    assert resized(batch, 2)["x"].tolist() == [[0, 1], [2, 3]]
    more = resized(batch, 7)
    assert more["x"].shape == (7, 2)
    assert more["x"][3:5].tolist() == [[0, 1], [2, 3]]
    assert (more["mask"].shape, more["n"], more["scale"].shape) == ((2,), 7, ())


def test_the_form_stays():
    pair = Pair(torch.ones(4), [torch.ones(4), (torch.ones(4), None)])
    found = resized(pair, 2)
    assert isinstance(found, Pair)
    assert found.targets[1][0].shape == (2,)
    assert found.targets[1][1] is None
    assert mapped(UserDict(a=torch.ones(1)), lambda t: t + 1)["a"].item() == 2


def test_what_was_cut_does_not_hold_the_whole():
    whole = torch.ones(1000)
    assert resized(whole, 2).untyped_storage().nbytes() == 8


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(ConfigError, match=r"is a dict without tensors.*what your loader gives"):
        num_samples({"text": "words"})


def test_a_model_takes_as_many_of_a_tuple_as_it_has_arguments_for():
    one, two = nn.Linear(2, 1), nn.Bilinear(2, 2, 1)
    x = torch.ones(3, 2)
    assert call(one, (x, torch.zeros(3))).shape == (3, 1)
    assert call(two, [x, x, torch.zeros(3)]).shape == (3, 1)
    assert call(one, {"input": x}).shape == (3, 1)
    assert call(one, x).shape == (3, 1)


def test_a_loss_is_the_models_own_or_the_sum_of_its_outputs():
    x = torch.ones(3, requires_grad=True)
    assert loss_of({"loss": x[0], "logits": x}).item() == 1
    assert loss_of(SimpleNamespace(loss=x[0] * 2, logits=x)).item() == 2
    assert loss_of((x, {"more": x * 2, "count": torch.tensor(3)})).item() == 9
    assert loss_of(SimpleNamespace(loss=None, logits=x)).item() == 3
    with pytest.raises(ConfigError, match=r"returned a Tensor without a tensor that has grad"):
        loss_of(torch.ones(2))
