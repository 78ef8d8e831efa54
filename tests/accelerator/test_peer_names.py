"""Members that code written for Accelerate reads, beside those that nbaccel itself needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import (
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    PartialState,
    ProfileKwargs,
)
from nbaccel.errors import ConfigError, PlatformUnsupported
from nbaccel.utils import InitProcessGroupKwargs, LoggerType, TorchDynamoPlugin
from tests.accelerator.loops import line, told

accelerate = pytest.importorskip("accelerate")


def test_every_public_member_of_accelerates_accelerator_is_there() -> None:
    theirs = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert not theirs - set(dir(Accelerator))


def test_the_handlers_that_were_given_can_be_read() -> None:
    given = [
        AutocastKwargs(cache_enabled=False),
        GradScalerKwargs(init_scale=2.0),
        DistributedDataParallelKwargs(find_unused_parameters=True),
        InitProcessGroupKwargs(timeout=60),
        ProfileKwargs(record_shapes=True),
    ]
    accelerator = Accelerator(cpu=True, kwargs_handlers=given)
    assert [
        accelerator.autocast_handler,
        accelerator.scaler_handler,
        accelerator.ddp_handler,
        accelerator.init_handler,
        accelerator.profile_handler,
    ] == given


def test_trackers_flag_and_device_maps(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    assert accelerator.log_with == [LoggerType.JSONL]
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert accelerator.flag_tensor == 1
    assert accelerator.check_trigger()
    assert accelerator.flag_tensor is None
    model = line()
    assert not accelerator.verify_device_map(nn.Sequential(model))
    model.hf_device_map = {"a": 0, "b": "disk"}
    assert accelerator.verify_device_map(nn.Sequential(model))


def test_there_is_one_kind_of_parallelism() -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.maybe_context_parallel([torch.ones(1)], [0], no_restore_buffers=set()):
        pass
    assert accelerator.deepspeed_ulysses_dl_adapter("loader", line()) == "loader"
    assert accelerator.should_save_model
    assert accelerator.torch_device_mesh is None
    assert not accelerator.is_composable_parallelism_enabled
    for kind in ("tensor", "pipeline", "context", "data"):
        with pytest.raises(PlatformUnsupported, match=f"no {kind} parallelism.*process_index"):
            getattr(accelerator, f"{kind}_parallel_rank")


def test_a_backward_that_steps() -> None:
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            loss.backward()
            self.param_groups[0]["lr"] = lr
            self.step()

    accelerator = Accelerator(cpu=True)
    model = line()
    assert "prepared are none" in told(lambda: accelerator.lomo_backward(torch.ones(()), 0.1))
    model, _ = accelerator.prepare(model, Lomo(model.parameters(), lr=1.0))
    accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.25)
    assert model.weight.item() == 0.75


def test_states_can_be_asked_as_accelerates() -> None:
    state = Accelerator(cpu=True).state
    assert not state.debug
    state.debug = True
    assert state.debug
    assert (state.is_fsdp2, state.parallelism_config) == (False, None)
    assert state.dynamo_plugin.to_kwargs()["backend"] == "no"
    assert PartialState(cpu=True).distributed_type is DistributedType.NO

    @PartialState(cpu=True).on_main_process()
    def speak() -> str:
        return "spoken"

    assert speak() == "spoken"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_a_dynamo_plugin_says_how_models_are_compiled() -> None:
    def forward(**arguments: Any) -> bool:
        accelerator = Accelerator(cpu=True, **arguments)
        model = accelerator.prepare(nn.Sequential(nn.ModuleList([line(), line()])[0]))
        assert model(torch.ones(1, 1)).item() == 1.0
        return model._compiled_call_impl is not None

    assert forward(dynamo_plugin=TorchDynamoPlugin(backend="eager", dynamic=True))
    assert not forward(dynamo_plugin=TorchDynamoPlugin(backend="no"))
    regional = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    assert forward(dynamo_plugin=regional)
    with pytest.raises(ConfigError, match=r"'eager' and dynamo_plugin=.*only one of them can hold"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=regional)
    with pytest.raises(ConfigError, match=r"dynamo_plugin={'backend': 'eager'}\) is no"):
        Accelerator(cpu=True, dynamo_plugin={"backend": "eager"})
