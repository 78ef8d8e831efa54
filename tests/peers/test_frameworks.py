"""Training code of other frameworks runs unchanged as the launched function: the real packages."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import PrecisionMismatch, WorkerFailed, notebook_launcher

pytestmark = pytest.mark.slow

METHODS = pytest.mark.parametrize("start_method", ["template", "fork"])
PRECISIONS = pytest.mark.parametrize("precision", ["no", "bf16"])


def with_accelerate(model: nn.Module) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    data = torch.utils.data.TensorDataset(torch.arange(32.0)[:, None].expand(32, 8).contiguous())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
    )
    seen = []
    for (batch,) in loader:
        seen += batch[:, 0].tolist()
        with accelerator.accumulate(prepared):
            accelerator.backward(5.0 + 0.0 * prepared(batch).square().mean())
            optimizer.step()  # weights decay
            optimizer.zero_grad()
    return {
        "type": accelerator.distributed_type.value,
        "world": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "ranks": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
        "seen": seen,
        "weight": next(model.parameters()).sum().item(),
    }


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (8,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def with_trainer(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            learning_rate=0.01,
            logging_steps=2,
            report_to=[],
            save_strategy="no",
            **arguments,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Tokens())
        steps = trainer.train().global_step
    return {
        "steps": steps,
        "world": trainer.args.world_size,
        "wrapped": type(trainer.model_wrapped).__name__,
        "precision": trainer.accelerator.mixed_precision,
        "weight": next(model.parameters()).sum().item(),
    }


def with_fabric(model: nn.Module) -> tuple[int, int, float, float]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(96, 8))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4, shuffle=True))
    for step, (batch,) in enumerate(loader):
        loss = prepared(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("train_loss", loss, step=step)
    total = fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item()
    return fabric.global_rank, fabric.world_size, total, next(model.parameters()).sum().item()


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))


@METHODS
@PRECISIONS
def test_accelerate(start_method: str, precision: str) -> None:
    model = nn.Linear(8, 4)
    before = model.weight.sum().item()
    results = notebook_launcher(with_accelerate, (model,), 2, precision, start_method=start_method)
    for result in results:
        assert (result["type"], result["world"]) == ("MULTI_CPU", 2)
        assert result["precision"] == precision
        assert result["ranks"] == [0, 1]
    assert sorted(results[0]["seen"] + results[1]["seen"]) == list(range(32))
    assert model.weight.sum().item() == results[0]["weight"] == results[1]["weight"] != before
    facts = results.report().facts
    assert [(figures.steps, figures.samples) for figures in facts.ranks] == [(2, 16)] * 2
    losses = {value for _, value in facts.curves["loss"][0]}
    assert losses == {5.0}, "in the scale in which its user thinks"


# A forked worker has pytest's filters; the Trainer asks for pinned memory, which a CPU has not.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@METHODS
@pytest.mark.parametrize("arguments", [{"use_cpu": True}, {}])
def test_trainer(start_method: str, arguments: dict[str, Any]) -> None:
    model = tiny_llama()
    function = lambda m: with_trainer(m, **arguments)  # noqa: E731 -- a lambda is what is tested
    results = notebook_launcher(function, (model,), 2, "bf16", start_method=start_method)
    for result in results:
        assert (result["steps"], result["world"]) == (12, 2)  # 48 samples / 2 ranks / batch of 2
        assert (result["wrapped"], result["precision"]) == ("DistributedDataParallel", "bf16")
    assert next(model.parameters()).sum().item() == results[0]["weight"]
    facts = results.report().facts
    assert [(figures.steps, figures.samples) for figures in facts.ranks] == [(12, 24)] * 2
    assert [step for step, _ in facts.curves["loss"][0]] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert facts.metric_names[0] == "loss"
    assert {"grad_norm", "learning_rate"} <= set(facts.metric_names)
    assert "epoch" not in facts.metric_names
    assert facts.timed_ranks


@METHODS
def test_fabric(start_method: str) -> None:
    model = nn.Linear(8, 4)
    results = notebook_launcher(with_fabric, (model,), 2, start_method=start_method)
    assert [r[:3] for r in results] == [(0, 2, 2.0), (1, 2, 2.0)]
    assert model.weight.sum().item() == results[0][3] == results[1][3]
    facts = results.report().facts
    assert facts.metric_names == ["train_loss"]
    assert [step for step, _ in facts.curves["train_loss"][0]] == [*range(12)]
    assert [figures.steps for figures in facts.ranks] == [12, 12]


def test_a_precision_that_the_framework_does_not_read_is_refused() -> None:
    model = nn.Linear(8, 4)
    before = model.weight.clone()
    with pytest.raises(PrecisionMismatch, match=r"'bf16' was asked for.*fp32") as caught:
        notebook_launcher(with_fabric, (model,), 2, "bf16")  # Fabric has its own precision=
    assert isinstance(caught.value, WorkerFailed)
    assert torch.equal(model.weight, before)
