"""The training loop on GPUs: over NCCL where each worker has one, over gloo where two share one.

Each body runs in workers or in a fresh process, because a CUDA context cannot be taken back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    WorkerFailed,
    notebook_launcher,
    set_seed,
)
from tests.isolation import isolated

pytestmark = pytest.mark.gpu

PRECISIONS = pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
STEPS = 60


def train(settings: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    set_seed(0)
    accelerator = Accelerator(**settings)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = 8 * STEPS * accelerator.num_processes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 16, generator=generator)
    loader: Any = DataLoader(
        TensorDataset(x, x.argmax(1) % 4),
        batch_size=8,
        shuffle=True,
        pin_memory=torch.cuda.is_available(),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        assert inputs.device == accelerator.device
        output = model(inputs)
        assert output.dtype is torch.float32
        loss = nn.functional.cross_entropy(output, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None:
        before = accelerator.get_state_dict(model)
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
    return {
        "type": accelerator.distributed_type,
        "device": str(accelerator.device),
        "backend": accelerator.state.backend,
        "losses": losses,
        "scale": accelerator.scaler.get_scale() if accelerator.scaler else None,
        "gathered": accelerator.gather_for_metrics(
            torch.tensor([accelerator.process_index], device=accelerator.device)
        ).tolist(),
        "objects": accelerator.gather_for_metrics([accelerator.process_index]),
        "in sync": accelerator.check_in_sync(),
        "weights": {k: v.cpu() for k, v in accelerator.get_state_dict(model).items()},
    }


def assert_trained(found: dict[str, Any], precision: str) -> None:
    assert sum(found["losses"][-9:]) < 0.9 * sum(found["losses"][:9])
    assert found["in sync"]
    assert (found["scale"] is not None) == (precision == "fp16")


@PRECISIONS
@isolated
def test_a_bare_cell_trains_on_the_gpu_and_can_launch_afterwards(precision: str) -> None:
    found = train({"mixed_precision": precision})
    assert found["type"] == DistributedType.NO
    assert found["device"].startswith("cuda")
    assert_trained(found, precision)
    # The context that this process has now must not keep it from launching.
    results = notebook_launcher(train, ({"mixed_precision": precision},), num_processes=2)
    assert [r["objects"] for r in results] == [[0, 1]] * 2


@PRECISIONS
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_several_processes_train_on_gpus(precision: str, sharded: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mixed_precision": precision}
    num_processes = 2
    if sharded:
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        num_processes = num_sharding()
    results = notebook_launcher(
        train, (settings, str(tmp_path / "state")), num_processes, start_method="template"
    )
    for found in results:
        assert found["gathered"] == found["objects"] == list(range(num_processes))
        assert_trained(found, precision)
    kind = DistributedType.FSDP if sharded else DistributedType.MULTI_GPU
    assert [found["type"] for found in results] == [kind] * num_processes


def num_sharding() -> int:
    """Processes for fully_shard, which needs NCCL and so a GPU for each."""
    return min(2, torch.cuda.device_count())


def test_fsdp_on_a_shared_gpu_is_refused() -> None:
    settings = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    with pytest.raises(WorkerFailed, match="talk by gloo"):
        notebook_launcher(train, (settings,), num_processes=torch.cuda.device_count() + 1)
