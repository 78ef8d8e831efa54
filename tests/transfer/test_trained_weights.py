"""What is told of weights that are copied back otherwise than the user may think."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel import Pool, notebook_launcher


class Tied(nn.Module):
    """Two names for one tensor, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight


def train(
    model: nn.Module, *, wrap: bool, ranks: tuple[int, ...] = (0, 1), **options: bool
) -> None:
    """One step on data of this rank's own."""
    rank = int(os.environ["RANK"])
    if wrap:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model, **options)
    if rank in ranks:
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((4, 8), float(rank + 1))).sum().backward()
        stepper.step()
    if wrap:
        torch.distributed.destroy_process_group()


def test_ranks_that_trained_different_models_are_told_with_the_remedy():
    model = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match="The ranks trained different models: rank 1") as told:
        notebook_launcher(lambda m: train(m, wrap=False), (model,), num_processes=2)
    assert len(told) == 1
    text = str(told[0].message)
    assert "args[0]" in text
    assert "DistributedDataParallel, or pass it through Accelerator.prepare" in text
    with pytest.warns(UserWarning, match=r"rank 1 trained args\[0\] and rank 0 did not"):
        notebook_launcher(lambda m: train(m, wrap=False, ranks=(1,)), (model,), num_processes=2)


@pytest.mark.parametrize(
    "how", [{"wrap": True}, {"wrap": False, "ranks": (0,)}], ids=["DDP", "rank 0 alone"]
)
def test_ddp_and_a_rank_0_that_trains_alone_are_not_told(how):
    """Although statistics of batches differ."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notebook_launcher(lambda m: train(m, **how), (model,), num_processes=2)
    assert model[1].num_batches_tracked.item() == 1
    assert not torch.equal(model[1].bias, torch.zeros(8))


def test_tied_weights_that_came_apart_do_not_come_home_by_halves():
    model = Tied()
    before = model.a.weight.detach().clone()

    def untie(m: Tied) -> None:
        m.b.weight = nn.Parameter(torch.full((8, 8), 5.0))
        with torch.no_grad():
            m.a.weight.fill_(4.0)

    with pytest.warns(UserWarning, match=r"a.weight and b.weight were tied, and now have diff"):
        results = notebook_launcher(untie, (model,), num_processes=2)
    state = results.state_dicts["args[0]"]
    assert (state["a.weight"].mean(), state["b.weight"].mean()) == (4.0, 5.0)
    assert torch.equal(model.a.weight, before)
    assert model.a.weight is model.b.weight


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.double(), "weight, bias came as float64 and were cast to float32"),
        (lambda m: setattr(m, "bias", nn.Parameter(torch.ones(8))), "bias was replaced"),
    ],
    ids=["dtype", "replaced"],
)
def test_another_dtype_and_a_replaced_parameter_are_told(change, told):
    model = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match=told):
        results = notebook_launcher(change, (model,), num_processes=1, start_method="template")
    assert torch.equal(results.state_dicts["args[0]"]["bias"].float(), model.bias.detach())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_cells_tell_it_once_and_of_rank_1_alone_that_nothing_comes_home(capsys):
    names: dict[str, Any] = {"model": nn.Linear(8, 8), "train": train}
    with Pool(2, namespace=names) as pool:
        pool.run("train(model, wrap=False)", ranks=[1])
        assert "rank 1 trained model and rank 0 did not" in capsys.readouterr().err
        names["model"] = nn.Linear(8, 8)
        pool.run("train(model, wrap=False)")
        assert "The ranks trained different models: rank 1" in capsys.readouterr().err
        pool.run("train(model, wrap=False)")
        assert "different models" not in capsys.readouterr().err
    names.clear()


class Dummy(nn.Module):
    """With the well-known parameter that only tells the device."""

    def __init__(self) -> None:
        super().__init__()
        self.dummy_param = nn.Parameter(torch.empty(0))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.dummy_param.device))


def test_a_model_with_an_empty_parameter_trains_and_comes_home():
    model = Dummy()
    before = model.layer.weight.detach().clone()

    def work(m: nn.Module, **options: bool) -> None:
        train(m, wrap=True, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = functools.partial(work, find_unused_parameters=True)
        notebook_launcher(found, (model,), num_processes=2)
    assert not torch.equal(model.layer.weight, before)
    # One without part in the loss keeps DDP from averaging, otherwise.
    with pytest.warns(UserWarning, match="find_unused_parameters=True"):
        notebook_launcher(work, (Dummy(),), num_processes=2)
