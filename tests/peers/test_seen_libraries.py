"""What other libraries report of a training is seen: the real packages, unchanged code."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import notebook_launcher
from tests.isolation import isolated
from tests.peers.test_prepared_in_notebook import Regression

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set"),
    pytest.mark.filterwarnings("ignore::Warning:lightning"),
]

STEPS = 12


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(96, 2), torch.zeros(96, 1)), 4, shuffle=True)


def trainer_of(folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    data = [{"x": torch.ones(2), "labels": torch.zeros(1)} for _ in range(96)]
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=2,
        save_strategy="no",
    )
    return Trainer(Regression(), arguments, train_dataset=data)


def with_transformers(folder: str) -> None:
    trainer_of(folder).train()


def with_accelerate(folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = nn.Linear(2, 1)
    net, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), loader()
    )
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            accelerator.backward(5.0 + 0.0 * (net(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def with_fabric(folder: str) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = nn.Linear(2, 1)
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for step, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader())):
        loss = nn.functional.mse_loss(net(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("train_loss", loss, step=step)


def with_lightning(folder: str) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        default_root_dir=folder,
    )
    trainer.fit(Module(), loader(), loader())


def facts_of(function: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return notebook_launcher(function, (folder,), 2, timeout=300).report().facts


@isolated(timeout_s=300)
def test_a_trainer_of_transformers() -> None:
    facts = facts_of(with_transformers)
    assert [figures.steps for figures in facts.ranks] == [STEPS, STEPS]
    assert facts.metric_names[0] == "loss"
    curve = facts.curves["loss"][0]
    assert [step for step, _ in curve] == [2.0 * place for place in range(1, STEPS // 2 + 1)]
    assert {"grad_norm", "learning_rate"} <= set(facts.metric_names)
    assert "epoch" not in facts.metric_names
    assert all(figures.samples == STEPS * 4 for figures in facts.ranks)
    assert facts.timed_ranks


@isolated(timeout_s=300)
def test_accelerates_own_accelerator() -> None:
    facts = facts_of(with_accelerate)
    assert [figures.steps for figures in facts.ranks] == [6, 6]
    points = facts.curves["loss"][0]
    assert {value for _, value in points} == {5.0}, "in the scale in which its user thinks"
    assert [figures.samples for figures in facts.ranks] == [48, 48]


@isolated(timeout_s=300)
def test_lightning_fabric() -> None:
    facts = facts_of(with_fabric)
    assert facts.metric_names == ["train_loss"]
    assert [step for step, _ in facts.curves["train_loss"][0]] == [*range(12)]
    assert [figures.steps for figures in facts.ranks] == [12, 12]


@isolated(timeout_s=300)
def test_lightnings_trainer() -> None:
    facts = facts_of(with_lightning)
    assert set(facts.metric_names) == {"train_loss", "val_loss"}
    assert len(facts.curves["train_loss"][0]) == STEPS
    assert len(facts.curves["val_loss"][0]) == 1
    assert [figures.steps for figures in facts.ranks] == [STEPS, STEPS]
