from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, notebook_launcher
from nbaccel.state import AcceleratorState, DistributedType, GradientState, PartialState
from nbaccel.utils import GradientAccumulationPlugin
from tests.isolation import isolated


def test_a_state_alone_says_so() -> None:
    state = PartialState(cpu=True)
    assert state.distributed_type is DistributedType.NO
    assert state.backend is None
    assert state.initialized
    assert not state.fork_launched
    assert str(state) == (
        "Distributed environment: NO\nNum processes: 1\nProcess index: 0\n"
        "Local process index: 0\nDevice: cpu\n"
    )
    state.set_device()
    state.destroy_process_group()
    assert isinstance(state.default_device, torch.device)


def test_states_and_accelerators_of_a_process_agree() -> None:
    def body() -> Any:
        state = PartialState(cpu=True, timeout=40.0)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        own = accelerator.state
        found = {
            "types": [s.distributed_type.value for s in (state, own, accelerator)],
            "numbers": [s.process_index for s in (state, own, accelerator)],
            "backend": state.backend,
            "kind": type(own) is AcceleratorState,
            "precision": own.mixed_precision,
            "forked": state.fork_launched,
            "text": str(own),
            "plugins": (own.fsdp_plugin, own.deepspeed_plugin),
        }
        state.wait_for_everyone()
        state.destroy_process_group()
        state.destroy_process_group()
        found["left"] = dist.is_initialized()
        return found

    for rank, found in enumerate(notebook_launcher(body, num_processes=2)):
        text = found.pop("text")
        assert found == {
            "types": ["MULTI_CPU"] * 3,
            "numbers": [rank] * 3,
            "backend": found["backend"],
            "kind": True,
            "precision": "bf16",
            "forked": True,
            "plugins": (None, None),
            "left": False,
        }
        assert "gloo" in found["backend"]
        assert text.startswith("Distributed environment: MULTI_CPU  Backend: ")
        assert f"Process index: {rank}\n" in text
        assert text.endswith("Mixed precision type: bf16\n")


@pytest.mark.slow
@isolated(timeout_s=60)
def test_states_without_arguments_are_those_of_the_newest_accelerator_until_a_reset():
    from nbaccel import Accelerator
    from nbaccel.state import is_initialized

    def has_none():
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"  # only asked where there is none
        state = AcceleratorState()
        found = (state.mixed_precision, state.num_processes, state.distributed_type.value)
        del os.environ["ACCELERATE_MIXED_PRECISION"]
        return not is_initialized() and found == ("fp16", 1, "NO")

    assert has_none()
    first = Accelerator(cpu=True, mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState().mixed_precision == "bf16"
    second = Accelerator(cpu=True)
    assert AcceleratorState().mixed_precision == "no"
    assert AcceleratorState().num_processes == second.num_processes == 1
    del second
    gc.collect()
    assert AcceleratorState().mixed_precision == first.mixed_precision == "bf16"
    child = os.fork()
    if not child:  # a forked worker has made none
        os._exit(0 if has_none() else 1)
    assert os.waitpid(child, 0)[1] == 0
    del first
    gc.collect()
    assert has_none()
    plugin = GradientAccumulationPlugin(num_steps=4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert GradientState().num_steps == GradientState(plugin).num_steps == 4
    found = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state = GradientState()
    state.sync_gradients = False
    assert (state.num_steps, found.sync_gradients, accelerator.sync_gradients) == (2, False, True)
    GradientState._reset_state()
    assert GradientState().num_steps == 1
    state, accelerator = PartialState(cpu=True), Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert state.num_processes == accelerator.state.num_processes == 1
    assert has_none()
