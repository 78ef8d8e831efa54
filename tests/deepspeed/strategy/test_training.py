"""Training with DeepSpeed's real engines through `Accelerator`, beside the same with DDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, DeepSpeedPlugin, notebook_launcher
from tests.deepspeed import needs

pytestmark = [*needs.ENGINE, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

NUM_ROWS = 256


@dataclass(frozen=True)
class Row:
    """One way to train."""

    stage: int | None = None
    precision: str = "no"
    offload: str = "none"
    accumulate: int = 1
    clip: float | None = 0.5
    optimizer: str = "AdamW"
    cpu: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def plugin(self) -> DeepSpeedPlugin | None:
        if self.stage is None:
            return None
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            # Otherwise parameters this small stay whole, and ZeRO-3 would be tested in name only.
            zero["stage3_param_persistence_threshold"] = 0
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": self.offload}
            if self.stage == 3:
                zero["offload_param"] = {"device": self.offload}
        return DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, **self.more})


def net(seed: int = 0) -> nn.Module:
    """Sizes that two processes cannot halve, a buffer, and two tied weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 10)
    )
    model[3].weight = model[2].weight
    model.register_buffer("scale", torch.ones(3))
    return model


def data(rows: int = NUM_ROWS) -> TensorDataset:
    values, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(values[:rows], dtype=torch.float32) / 16, torch.tensor(labels[:rows])
    )


def loader(batch_size: int = 16) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=batch_size)


def train(model: nn.Module, row: Row, steps: int = 6) -> dict[str, Any]:
    """Train for some batches; what a loop can see of it, equal on all processes."""
    accelerator = Accelerator(
        deepspeed_plugin=row.plugin(),
        mixed_precision=row.precision,
        gradient_accumulation_steps=row.accumulate,
        cpu=row.cpu,
    )
    optimizer = getattr(torch.optim, row.optimizer)(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    prepared, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, loader(), scheduler
    )
    losses, norms = [], []
    for number, (values, labels) in enumerate(batches):
        if number == steps:
            break
        with accelerator.accumulate(prepared):
            loss = F.cross_entropy(prepared(values), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients and row.clip is not None:
                norms.append(accelerator.clip_grad_norm_(prepared.parameters(), row.clip).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(prepared)
    return {
        "losses": losses,
        "norms": norms,
        "rate": scheduler.get_last_lr()[0],
        "state": {name: value.clone() for name, value in state.items()},
        "type": accelerator.distributed_type.value,
        "first": tuple(next(prepared.parameters()).shape),
        "metrics": accuracy(accelerator, prepared),
    }


def accuracy(accelerator: Accelerator, model: nn.Module) -> tuple[int, int]:
    """Right answers and samples, over data whose last batch has to be filled up."""
    batches = accelerator.prepare(DataLoader(data(100), batch_size=16))
    right = count = 0
    with torch.no_grad():
        for values, labels in batches:
            pair = (model(values).argmax(-1), labels)
            answers, truth = accelerator.gather_for_metrics(pair)
            right += int((answers == truth).sum())
            count += len(truth)
    return right, count


def train_all(models: dict[str, nn.Module], rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    return {name: train(models[name], row) for name, row in rows.items()}


STAGES = [
    (stage, precision, offload)
    for stage in (0, 1, 2, 3)
    for precision in ("no", "bf16")
    for offload in ("none", "cpu")
    if stage or offload == "none"
]
ROWS = {
    **{f"{s} {p} {o}": Row(stage=s, precision=p, offload=o) for s, p, o in STAGES},
    "ddp no": Row(),
    "ddp accumulated": Row(accumulate=2),
    "2 accumulated": Row(stage=2, accumulate=2),
    "3 accumulated": Row(stage=3, accumulate=2, offload="cpu"),
    "ddp SGD": Row(optimizer="SGD", clip=None),
    "1 SGD": Row(stage=1, optimizer="SGD", clip=None, more={"gradient_clipping": 0}),
    "3 SGD": Row(stage=3, optimizer="SGD", clip=None, more={"gradient_clipping": 0}),
}
# The row of DDP that each computes the same as.
FP32 = {
    name: f"ddp {name.split()[1]}"
    for name in ROWS
    if not name.startswith("ddp") and " bf16 " not in name
}
BF16 = [name for name in ROWS if " bf16 " in name and not name.startswith("0")]


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, Any], dict[str, Any]]:
    """What each row gave on rank 0, and its model as it came home. One launch for all."""
    models = {name: net() for name in ROWS}
    results = notebook_launcher(
        train_all, (models, ROWS), num_processes=2, start_method="template", timeout=240
    )
    return results[0], models


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[k].double() - right[k].double()).abs().max()) for k in left)


@pytest.mark.parametrize("name", FP32)
def test_losses_norms_and_weights_are_those_of_ddp(ran, name):
    results, _ = ran
    mine, ddp = results[name], results[FP32[name]]
    assert mine["type"] == "DEEPSPEED"
    assert mine["losses"] == pytest.approx(ddp["losses"], abs=2e-6)
    assert mine["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
    assert mine["rate"] == ddp["rate"]
    assert mine["metrics"] == ddp["metrics"]
    assert distance(mine["state"], ddp["state"]) < 1e-5


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_near_and_the_same_at_every_stage(ran, name):
    results, _ = ran
    mine, ddp = results[name], results["ddp no"]
    assert mine["losses"] == pytest.approx(ddp["losses"], abs=2e-2)
    assert mine["losses"] == pytest.approx(results[BF16[0]]["losses"], abs=1e-4)
    assert {value.dtype for key, value in mine["state"].items() if key != "scale"} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("name", list(ROWS))
def test_trained_weights_come_home_in_the_notebooks_format(ran, name):
    results, models = ran
    assert (results[name]["first"] == (0,)) == name.startswith("3"), "placeholders"
    home = models[name].state_dict()
    assert {value.dtype for value in home.values()} == {torch.float32}
    assert models[name][2].weight is models[name][3].weight
    trained = results[name]["state"]
    # In bf16 what was trained is the float32 copy; the state dict has it rounded.
    rounded = {key: home[key].to(trained[key].dtype) for key in home}
    assert distance(rounded, trained) == 0
    if name in BF16:
        assert distance(home, trained) > 0
    assert distance(home, net().state_dict()) > 1e-4
