"""The same training by nbaccel and by Accelerate: losses, weights, metrics equal to the digit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import notebook_launcher

pytestmark = pytest.mark.slow

ROWS = 300  # 38 batches of 8, the last one of 4 rows: the two processes get 19 each
PRECISIONS = ("no", "bf16")
ACCUMULATIONS = (1, 3)
DATA: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"even_batches": False},
    "split": {"split_batches": True},
    "dispatch": {"dispatch_batches": True},
    "seedable": {"use_seedable_sampler": True, "data_seed": 7},
}
OPTIMIZERS = ("sgd", "adamw+onecycle")
CASES = tuple(itertools.product(PRECISIONS, ACCUMULATIONS, DATA, OPTIMIZERS))

Case = tuple[str, int, str, str]
Trained = dict[Case, dict[str, Any]]


def libraries(name: str) -> tuple[Any, Any]:
    """Accelerator and DataLoaderConfiguration of a library."""
    if name == "accelerate":
        import accelerate
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return accelerate.Accelerator, accelerate.DataLoaderConfiguration
    import nbaccel

    return nbaccel.Accelerator, nbaccel.DataLoaderConfiguration


def digits() -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x[:ROWS], dtype=torch.float32) / 16, torch.tensor(y[:ROWS]))


def train(library: str, case: Case) -> dict[str, Any]:
    precision, accumulation, data, optimizer_name = case
    make, configuration = libraries(library)
    torch.manual_seed(3)
    model: Any = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)
    )
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if optimizer_name == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    scheduler: Any = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
        if "onecycle" in optimizer_name
        else torch.optim.lr_scheduler.ConstantLR(optimizer)
    )
    accelerator = make(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        dataloader_config=configuration(**DATA[data]),
    )
    loader: Any = DataLoader(digits(), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append((loss.item(), len(x), optimizer.param_groups[0]["lr"]))
    return {
        "losses": losses,
        "weights": {k: v.clone() for k, v in accelerator.get_state_dict(model).items()},
        # Without even batches nothing can be gathered unless the rounds come out even.
        "metrics": evaluate(accelerator, model, batch_size=25 if data == "uneven" else 32),
    }


def evaluate(accelerator: Any, model: nn.Module, batch_size: int) -> list[Any]:
    model.eval()
    loader = accelerator.prepare(DataLoader(digits(), batch_size=batch_size))
    found = []
    for x, y in loader:
        with torch.no_grad():
            predictions = model(x)
        everything = accelerator.gather_for_metrics({"predictions": predictions, "labels": y})
        objects = accelerator.gather_for_metrics([int(label) for label in y])
        found.append((everything["predictions"].clone(), everything["labels"].clone(), objects))
    return found


def train_all(library: str) -> Trained:
    torch.set_num_threads(1)
    return {case: train(library, case) for case in CASES}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def trained(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Trained]]]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("OMP_NUM_THREADS", "1")  # or Accelerate sets the threads, with a warning
        yield {
            # One process: a bare cell.
            library: [train_all(library)]
            if request.param == 1
            else list(notebook_launcher(train_all, (library,), num_processes=2))
            for library in ("nbaccel", "accelerate")
        }
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_losses_rates_weights_and_metrics_are_the_same(trained: Any, case: Case) -> None:
    for mine, theirs in zip(trained["nbaccel"], trained["accelerate"], strict=True):
        assert mine[case]["losses"] == theirs[case]["losses"]
        torch.testing.assert_close(mine[case]["weights"], theirs[case]["weights"], rtol=0, atol=0)
        labels = torch.cat([labels for _, labels, _ in mine[case]["metrics"]])
        assert torch.equal(labels, digits().tensors[1]), "every sample once"
        for (a, b, c), (x, y, z) in zip(
            mine[case]["metrics"], theirs[case]["metrics"], strict=True
        ):
            assert torch.equal(a, x)
            assert torch.equal(b, y)
            assert c == z
