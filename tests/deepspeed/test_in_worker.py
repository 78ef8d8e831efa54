"""transformers' Trainer and Accelerate, told to use DeepSpeed in CPU workers, use it: never DDP."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import notebook_launcher
from nbaccel.base.optional_packages import is_installed
from nbaccel.config import RunConfig
from tests.deepspeed import needs
from tests.house.source import ROOT
from tests.programs import run_program

pytestmark = [
    pytest.mark.slow,
    *needs.ENGINE,
    pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed"),
    pytest.mark.skipif(not is_installed("accelerate"), reason="accelerate is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def fit(folder: Path, deepspeed: dict[str, Any] | None) -> dict[str, Any]:
    """As in a user's cell: nothing says that this is a CPU, or that there are several processes."""
    from transformers import AutoModelForCausalLM

    from tests.deepspeed import transformers_runs

    read = partial(AutoModelForCausalLM.from_pretrained, folder / "model")
    return transformers_runs.fit(read, deepspeed, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.deepspeed.transformers_runs import tiny_model

    found = tmp_path_factory.mktemp("trainer")
    tiny_model("gpt2").save_pretrained(found / "model")
    return found


def test_a_trainer_with_a_configuration_trains_with_its_stage(folder):
    from tests.deepspeed.transformers_runs import settings

    plain = notebook_launcher(fit, (folder, None), num_processes=2, timeout=240)[0]
    found = notebook_launcher(fit, (folder, settings(3)), num_processes=2, timeout=240)
    assert (plain["stage"], plain["world_size"]) == (None, 2)
    for one in found:
        assert (one["stage"], one["world_size"]) == (3, 2)
        assert one["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert found[0]["shapes"] == [(0,)], "read in pieces, as on GPUs"


def by_the_run(folder: Path) -> dict[str, Any]:
    """The stage of the launch; and Accelerate's own Accelerator with a plugin."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    found = fit(folder, None)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = nn.Linear(4, 4)
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(engine(torch.ones(2, 4)).sum())
    optimizer.step()
    found["accelerate"] = (
        type(engine).__name__,
        accelerator.num_processes,
        accelerator.device.type,
    )
    return found


def test_a_stage_of_the_launch_is_the_trainers_and_accelerates_plugin_means_deepspeed(folder):
    config = RunConfig(num_processes=2, device="cpu", zero_stage=2, timeout=240)
    found = notebook_launcher(by_the_run, (folder,), config=config)
    for one in found:
        assert (one["stage"], one["world_size"]) == (2, 2)
        assert one["accelerate"] == ("DeepSpeedEngine", 2, "cpu")


ON_A_GPU = """
from nbaccel.deepspeed.library import enter_worker

enter_worker("cuda")
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin

made = AcceleratorState.__init__, DeepSpeedPlugin.__post_init__
print([hasattr(method, "__wrapped__") for method in made])
"""


def test_on_a_gpu_accelerate_is_as_it_is():
    done = run_program([sys.executable, "-c", ON_A_GPU], cwd=ROOT)
    assert done.stdout == "[False, False]\n", done.stderr
    # Nor is it changed in the notebook.
    changed = {getattr(finder, "module_name", "") for finder in sys.meta_path}
    assert not changed & {"accelerate.state", "accelerate.utils.dataclasses"}
