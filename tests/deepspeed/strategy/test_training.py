"""Training with DeepSpeed's real engines through `Accelerator`, beside the same with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import notebook_launcher
from tests.deepspeed import needs
from tests.deepspeed.strategy.runs import Row, net, train_all

pytestmark = [
    *needs.ENGINE,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]

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
        train_all,
        (models, ROWS),
        num_processes=2,
        start_method="template",
        timeout=240,
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
