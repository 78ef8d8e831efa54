"""Settings of plugins in a `RunConfig` arrive in the `Accelerator` of its workers."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

from nbaccel import Accelerator, notebook_launcher
from nbaccel.config import RunConfig
from tests.strategies.needs import SHARDING


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


@SHARDING
def test_fsdp_is_set_up_as_the_configuration_says():
    config = RunConfig(
        num_processes=2,
        device="cpu",
        strategy="fsdp",
        fsdp={
            "transformer_cls_names_to_wrap": ["Block"],
            "reshard_after_forward": False,
            "state_dict_type": "FULL_STATE_DICT",
        },
    )

    def body():
        from torch.distributed.fsdp import FSDPModule

        accelerator = Accelerator()
        model = nn.Sequential(Block(), nn.Linear(4, 4), Block())
        model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        plugin = accelerator.state.fsdp_plugin
        return (
            [isinstance(part, FSDPModule) for part in accelerator.unwrap_model(model)],
            plugin.reshard_after_forward,
            plugin.writes_shards,
        )

    assert notebook_launcher(body, config=config) == [([True, False, True], False, False)] * 2


def test_models_are_compiled_as_the_configuration_says():
    config = RunConfig(num_processes=1, device="cpu", start_method="template", dynamo="eager")

    def body():
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(2, 2))
        # Where a model keeps its compiled call.
        return model._compiled_call_impl is not None, str(accelerator.state.dynamo_plugin.backend)

    assert notebook_launcher(body, config=config) == [(True, "EAGER")]
