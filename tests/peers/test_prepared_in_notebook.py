"""What was prepared or built in the notebook, by one process, and then goes to ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, ConfigError, notebook_launcher
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


def test_a_loader_that_each_rank_would_read_whole_is_refused() -> None:
    prepared = Accelerator(cpu=True).prepare(ten())
    read = lambda loader: len(list(loader))  # noqa: E731
    with pytest.raises(ConfigError, match=r"prepared in one process and is read by 2.*prepare\(\)"):
        notebook_launcher(read, (prepared,), 2)
    assert list(notebook_launcher(read, (prepared,), 1)) == [5]


@pytest.mark.parametrize("start_method", ["template", "fork"])
def test_an_accelerator_by_which_each_rank_would_train_alone_is_refused(start_method: str) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    for use in (accelerator.prepare, lambda _: accelerator.num_processes):
        with pytest.raises(ConfigError, match=r"was made in one process and is used by 2.*Make it"):
            notebook_launcher(use, (model,), 2, start_method=start_method)
    assert list(notebook_launcher(lambda: accelerator.num_processes, (), 1)) == [1]


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


# ---------------------------------------------------------------------- a `Trainer` of transformers


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def build(folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(32)]
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        max_steps=4,
        learning_rate=0.1,
        save_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(Regression(), arguments, train_dataset=data, eval_dataset=data)


def built_inside(folder: str) -> list[float]:
    trainer = build(folder)
    trainer.train()
    return [p.sum().item() for p in trainer.model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@isolated(timeout_s=600)
def test_it_trains_as_one_that_was_built_in_the_workers_also_after_an_evaluation() -> None:
    """Accelerate's mark on the model must not travel: each rank would train one of its own."""

    def train(trainer: Any) -> tuple[str, float]:
        trainer.train()
        first = next(trainer.model.parameters())
        return type(trainer.model_wrapped).__name__, float(first.detach().sum())

    with tempfile.TemporaryDirectory() as folder:
        expected = notebook_launcher(built_inside, (folder,), 2)[0]
        for start_method in ("template", "fork"):
            trainer = build(folder)
            found = notebook_launcher(
                trainer.train, num_processes=2, start_method=start_method, timeout=300
            )
            assert [out.global_step for out in found] == [4, 4]
            assert [p.sum().item() for p in trainer.model.parameters()] == expected
            trainer = build(folder)
            trainer.evaluate()
            for _ in range(2):
                one, other = notebook_launcher(train, (trainer,), 2, start_method=start_method)
                assert one == other
                assert one[0] == "DistributedDataParallel"
                trainer.predict(trainer.eval_dataset)
