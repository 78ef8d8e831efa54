"""A Lightning `Trainer` that was built in the notebook is refused in several workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import ConfigError, Pool, notebook_launcher
from tests.isolation import isolated

pytestmark = [
    # Lightning's own, of torch's pytree and of loaders without workers.
    pytest.mark.filterwarnings("ignore::Warning:lightning"),
    pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning"),
]

QUIET = {
    "max_steps": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
REMEDY = (
    r'Build it in the function or cell that the workers run: Trainer\(devices=2, strategy="ddp"\)'
)


def build_model() -> Any:
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            features, labels = batch
            loss = (self.layer(features) - labels).square().mean()
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.layer(batch[0]).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            torch.manual_seed(0)
            data = [(torch.randn(2), torch.randn(1)) for _ in range(24)]
            return torch.utils.data.DataLoader(data, batch_size=4)

        val_dataloader = train_dataloader

    return Regression()


@pytest.mark.slow
@isolated(timeout_s=300)
def test_several_workers_refuse_to_call_it() -> None:
    import lightning

    model = build_model()
    for trainer, built_for in (
        (lightning.Trainer(**QUIET, devices=1), r"1 process \(SingleDeviceStrategy\)"),
        (
            lightning.Trainer(**QUIET, devices=2, strategy="ddp_notebook"),
            r"2 processes \(DDPStrategy\)",
        ),
    ):
        for function, args in (
            (trainer.fit, (model,)),
            (lambda trainer=trainer: trainer.fit(model), ()),
        ):
            with pytest.raises(ConfigError, match=f"(?s){built_for}.*{REMEDY}"):
                notebook_launcher(function, args, 2, timeout=60)
    import pytorch_lightning

    trainer = pytorch_lightning.Trainer(**QUIET, devices=1)
    with pytest.raises(ConfigError, match=r"trainer\.validate\(\) cannot be called in 2 workers"):
        notebook_launcher(trainer.validate, (model,), 2, timeout=60)


def built_inside(model: Any, trainer: Any = None) -> tuple[int, int, float]:
    """The remedy, with a variable that has the name of one in the notebook."""
    import lightning

    trainer = lightning.Trainer(**QUIET, devices=2, strategy="ddp")
    trainer.fit(model)
    return trainer.world_size, trainer.global_step, model.layer.weight.sum().item()


@isolated(timeout_s=300)
@pytest.mark.slow
def test_what_is_built_in_the_workers_trains() -> None:
    import lightning

    for start_method in ("template", "fork"):
        model = build_model()
        # It holds the notebook's trainer from here on, which is no reason to refuse it.
        lightning.Trainer(**QUIET, devices=1).fit(model)
        found = notebook_launcher(built_inside, (model,), 2, start_method=start_method, timeout=200)
        total = model.layer.weight.sum().item()
        assert list(found) == [(2, 3, total), (2, 3, total)]
        facts = found.report().facts
        assert set(facts.metric_names) == {"train_loss", "val_loss"}
        assert [len(facts.curves[name][0]) for name in ("train_loss", "val_loss")] == [3, 1]
        assert [figures.steps for figures in facts.ranks] == [3, 3]


@isolated(timeout_s=300)
@pytest.mark.slow
def test_a_live_cell_is_told_too() -> None:
    import lightning

    trainer, model = lightning.Trainer(**QUIET, devices=1), build_model()
    with Pool(2, namespace={"trainer": trainer, "model": model}, timeout=200) as pool:
        # Or a rank may be stopped within it, because the other one has raised, and keep half of it.
        pool.run("import lightning")
        with pytest.raises(ConfigError, match=f"(?s)outside of them.*{REMEDY}"):
            pool.call(trainer.fit, model)
        with pytest.raises(ConfigError, match=f"(?s)outside of them.*{REMEDY}"):
            pool.run("trainer.fit(model)")
        assert pool.run("1 + 1").seconds < 100  # the workers live on
