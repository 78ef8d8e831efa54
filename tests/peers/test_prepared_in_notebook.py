"""What was prepared in the notebook, by one process, and then goes to the ranks of a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, ConfigError, Pool, notebook_launcher
from tests.isolation import isolated


def ten() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)


def gather_again(loader: Any) -> list[float]:
    accelerator = Accelerator()
    loader = accelerator.prepare(loader)
    found = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
    return sorted(torch.cat(found).tolist())


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_a_loader_is_shared_out_anew(start_method: str) -> None:
    prepared = Accelerator(cpu=True).prepare(ten())
    found = notebook_launcher(gather_again, (prepared,), 2, start_method=start_method)
    assert list(found) == [[float(i) for i in range(10)]] * 2
    # In the notebook it is what it was.
    assert len(prepared) == 5


def test_a_loader_is_shared_out_anew_in_cells() -> None:
    names = {"loader": Accelerator(cpu=True).prepare(ten()), "gather_again": gather_again}
    with Pool(2, namespace=names) as pool:
        done = pool.run("found = gather_again(loader)", out=["found"])
    assert done.out["found"] == [[float(i) for i in range(10)]] * 2


def test_a_loader_that_each_rank_would_read_whole_is_refused() -> None:
    prepared = Accelerator(cpu=True).prepare(ten())

    def read(loader: Any) -> int:
        return len(list(loader))

    with pytest.raises(ConfigError, match=r"prepared in one process and is read by 2.*prepare\(\)"):
        notebook_launcher(read, (prepared,), 2)
    assert list(notebook_launcher(read, (prepared,), 1)) == [5]


@pytest.mark.slow
@isolated
@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_what_accelerate_has_prepared_is_prepared_for_the_ranks(start_method: str) -> None:
    from accelerate import Accelerator as Peer

    def train(model: nn.Module, loader: Any) -> tuple[str, float, int]:
        accelerator = Peer(cpu=True)
        model, loader = accelerator.prepare(model, loader)
        torch.manual_seed(accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 1)).square().mean())
        (parameter, *_) = model.parameters()
        return type(model).__name__, float(parameter.grad), len(list(loader))

    model, loader = Peer(cpu=True).prepare(nn.Linear(1, 1), ten())
    one, other = notebook_launcher(train, (model, loader), 2, start_method=start_method)
    assert one == other
    assert (one[0], one[2]) == ("DistributedDataParallel", 3)


def test_what_is_prepared_says_so_as_with_accelerate_and_is_prepared_for_ranks_again() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    prepared = Accelerator(cpu=True).prepare(model, optimizer, scheduler, ten())
    assert all(item._is_accelerate_prepared for item in prepared)

    def wrap(model: nn.Module) -> tuple[str, bool]:
        ready = Accelerator().prepare(model)
        return type(ready).__name__, ready._is_accelerate_prepared

    found = notebook_launcher(wrap, (prepared[0],), 2)
    assert list(found) == [("DistributedDataParallel", True)] * 2
