"""The same training with DeepSpeed by nbaccel and by Accelerate: losses and weights are equal."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import notebook_launcher
from tests.deepspeed import needs

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]

ROWS, BATCH = 200, 8  # 25 batches: one of the two processes goes round again
Case = tuple[int, str, int]
"""ZeRO stage, where it is offloaded to, batches for one step."""

CASES: tuple[Case, ...] = ((2, "none", 1), (2, "cpu", 2), (3, "none", 2), (3, "cpu", 1))
LIBRARIES = ("nbaccel", "accelerate")


def config(case: Case) -> dict[str, Any]:
    """What both libraries are given; they fill in "auto" themselves."""
    stage, offload, _ = case
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": offload}}
    if stage == 3:
        zero |= {
            "offload_param": {"device": offload},
            # Otherwise parameters this small stay whole, and ZeRO-3 would be tested in name only.
            "stage3_param_persistence_threshold": 0,
            # Accelerate gathers the state dict only where this is set.
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    return {"zero_optimization": zero, "gradient_clipping": 0.5, **dict.fromkeys(sizes, "auto")}


def accelerator(library: str, case: Case) -> Any:
    if library == "nbaccel":
        import nbaccel as made_by

        options: dict[str, Any] = {"cpu": True}
    else:
        import accelerate as made_by
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        # Told to use the CPU it would leave DeepSpeed out, and without a backend count one process.
        os.environ.pop("ACCELERATE_USE_CPU", None)
        options = {"kwargs_handlers": [made_by.InitProcessGroupKwargs(backend="gloo")]}
    plugin = made_by.DeepSpeedPlugin(hf_ds_config=deepcopy(config(case)))
    made = made_by.Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=case[2], **options
    )
    assert made.distributed_type == "DEEPSPEED"
    return made


def train(library: str, case: Case) -> dict[str, Any]:
    made = accelerator(library, case)
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100)
    values, labels = load_digits(return_X_y=True)
    rows = torch.tensor(values[:ROWS], dtype=torch.float32) / 16, torch.tensor(labels[:ROWS])
    loader: Any = DataLoader(TensorDataset(*rows), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = made.prepare(model, optimizer, loader, scheduler)
    found = []
    for x, y in loader:
        with made.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            made.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append((loss.item(), optimizer.param_groups[0]["lr"]))
    state = {k: v.clone() for k, v in (made.get_state_dict(model) or {}).items()}
    settled = made.state.deepspeed_plugin.deepspeed_config
    sizes = {key: value for key, value in settled.items() if "batch" in key or "accum" in key}
    made.free_memory()
    return {"steps": found, "state": state, "sizes": sizes}


def train_all() -> dict[tuple[str, Case], dict[str, Any]]:
    """By Accelerate last: it leaves variables that ask for DeepSpeed in its process."""
    torch.set_num_threads(1)
    return {(library, case): train(library, case) for library in LIBRARIES for case in CASES}


@pytest.fixture(scope="module")
def trained() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("OMP_NUM_THREADS", "1")  # or Accelerate sets the threads, with a warning
        launched = notebook_launcher(
            train_all, num_processes=2, start_method="template", timeout=240
        )
    return list(launched)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_losses_rates_weights_and_sizes_are_the_same(trained: list[Any], case: Case) -> None:
    for rank in trained:
        mine, theirs = (rank[library, case]["steps"] for library in LIBRARIES)
        assert mine == theirs
        assert min(loss for loss, _ in mine) < mine[0][0]
    mine, theirs = (trained[0][library, case]["state"] for library in LIBRARIES)
    assert mine.keys() == theirs.keys()
    assert [tuple(value.shape) for value in mine.values()] == [(33, 64), (33,), (10, 33), (10,)]
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    mine, theirs = (trained[0][library, case]["sizes"] for library in LIBRARIES)
    assert mine == theirs
