"""A `Trainer` of transformers that was built in the notebook trains in the workers: real ones."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Pool, notebook_launcher
from tests.isolation import isolated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set"),
]


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


@isolated
def test_it_trains_as_one_that_was_built_in_the_workers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = notebook_launcher(built_inside, (folder,), 2)[0]
        for start_method in ("template", "fork"):
            trainer = build(folder)
            found = notebook_launcher(
                trainer.train, num_processes=2, start_method=start_method, timeout=300
            )
            assert [out.global_step for out in found] == [4, 4]
            assert [p.sum().item() for p in trainer.model.parameters()] == expected


@isolated
def test_it_evaluates_and_knows_its_rank() -> None:
    def look(trainer: Any) -> tuple[float, bool, int]:
        loss = trainer.evaluate()["eval_loss"]
        return round(loss, 5), trainer.state.is_world_process_zero, trainer.args.process_index

    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder)
        alone = round(trainer.evaluate()["eval_loss"], 5)
        found = notebook_launcher(look, (trainer,), 2, timeout=300)
    assert list(found) == [(alone, True, 0), (alone, False, 1)]


@isolated
def test_it_trains_all_ranks_together_after_it_has_evaluated_in_the_notebook() -> None:
    """Accelerate's mark on the model must not travel: each rank would train one of its own."""

    def train(trainer: Any) -> tuple[str, float]:
        trainer.train()
        first = next(trainer.model.parameters())
        return type(trainer.model_wrapped).__name__, float(first.detach().sum())

    with tempfile.TemporaryDirectory() as folder:
        for start_method in ("template", "fork"):
            trainer = build(folder)
            trainer.evaluate()
            for _ in range(2):
                one, other = notebook_launcher(train, (trainer,), 2, start_method=start_method)
                assert one == other
                assert one[0] == "DistributedDataParallel"
                trainer.predict(trainer.eval_dataset)


@isolated
def test_it_trains_in_a_live_cell() -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = {"trainer": build(folder)}
        expected = notebook_launcher(built_inside, (folder,), 2)[0]
        with Pool(2, namespace=names, timeout=300) as pool:
            pool.run("trainer.train();")
        assert [p.sum().item() for p in names["trainer"].model.parameters()] == expected
