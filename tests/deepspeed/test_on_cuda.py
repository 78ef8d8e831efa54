"""DeepSpeed's engines on GPUs, beside DDP: stages, precisions and offloads that a CPU has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import notebook_launcher
from tests.deepspeed.strategy.test_training import Row, distance, net, train_all

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROWS = {
    "ddp": Row(cpu=False),
    **{
        f"{stage} {precision} {offload}": Row(
            stage=stage, precision=precision, offload=offload, cpu=False
        )
        for stage in (0, 1, 2, 3)
        for precision in ("no", "bf16", "fp16")
        for offload in ("none", "cpu")
        if stage or offload == "none"
    },
}
# Offloading compiles Adam for the CPU against CUDA's headers.
NEEDS_NVCC = [name for name in ROWS if name.endswith("cpu")]


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.utils.cpp_extension import CUDA_HOME

    rows = {name: row for name, row in ROWS.items() if CUDA_HOME or name not in NEEDS_NVCC}
    models = {name: net() for name in rows}
    # In workers also where there is one GPU: what comes home is looked at.
    results = notebook_launcher(train_all, (models, rows), start_method="template", timeout=800)
    return results[0], models


@pytest.mark.parametrize("name", [name for name in ROWS if name != "ddp"])
def test_training_on_gpus_is_near_ddp_and_comes_home(ran, name):
    results, models = ran
    if name not in results:
        pytest.skip("needs nvcc to compile DeepSpeed's Adam")
    mine, ddp = results[name], results["ddp"]
    assert mine["type"] == "DEEPSPEED"
    close = 1e-4 if " no " in name else 5e-2
    assert mine["losses"] == pytest.approx(ddp["losses"], abs=close)
    assert {value.dtype for value in models[name].state_dict().values()} == {torch.float32}
    assert distance(models[name].state_dict(), net().state_dict()) > 1e-4
