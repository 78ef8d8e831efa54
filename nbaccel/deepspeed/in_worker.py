"""Changes to DeepSpeed and Hugging Face Accelerate, made in a worker when it imports them.

DeepSpeed prints a line when it compiles. The rest is for DeepSpeed through Accelerate, and through
transformers' Trainer, in the workers of a CPU launch.

A CPU worker has ``ACCELERATE_USE_CPU``, without which Accelerate would not find the other
processes. Accelerate 1.15 reads it as "no DeepSpeed", too (``AcceleratorState.__init__``), and
silently trains with DDP. In a worker that computes on the CPU both hold: the processes communicate
by gloo, and a DeepSpeed plugin means DeepSpeed.

Nothing is imported here: classes are changed when the modules that define them are imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from nbaccel.base import env, training_libraries
from nbaccel.base.training_libraries import patch_module
from nbaccel.deepspeed import library

_USE_CPU = "ACCELERATE_USE_CPU"


def explain_signal(signal_name: str, functions: Sequence[str]) -> tuple[str, str] | None:
    """The likely cause and the remedy where a worker without shared memory has crashed."""
    # It crashes without a message.
    if signal_name != "SIGSEGV" or "inference_all_reduce" not in functions:
        return None
    return (
        "DeepSpeed adds up through shared memory, and this worker has none: /dev/shm lacks 66 MiB "
        "for each worker, or it was forked after DeepSpeed had run in the notebook.",
        "Enlarge /dev/shm (docker run --shm-size=1g), and leave start_method at 'auto'.",
    )


def enter_worker(device: str) -> None:
    """Prepare a worker for DeepSpeed and Accelerate; cheap where neither is ever imported."""
    patch_module(library.BUILDER, library.change_builder)
    if device == "cpu":
        patch_module("accelerate.state", _change_state)
        patch_module("accelerate.utils.dataclasses", _change_plugin)


def _change_state(changed_module: Any) -> None:
    """Let a plugin mean DeepSpeed, although the CPU was asked for."""
    changed_class = changed_module.AcceleratorState
    init = changed_class.__init__
    if hasattr(init, "__wrapped__"):
        return  # forked from a process that has changed it already

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("deepspeed_plugin") is None or not env.flag(_USE_CPU):
            init(self, *args, **kwargs)
            return
        # First with `cpu`, so that Accelerate finds the other processes and meets them over gloo;
        # then without, as only so its state takes the plugin.
        if not training_libraries.accelerate_is_set_up():
            handed_on = kwargs.keys() - _OF_ACCELERATOR
            changed_module.PartialState(
                True, **{argument_name: kwargs[argument_name] for argument_name in handed_on}
            )
        _join_process_group()
        with env.applied({_USE_CPU: None}):
            init(self, *args, **{**kwargs, "cpu": False})

    changed_class.__init__ = made


_OF_ACCELERATOR = {
    *("mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin"),
    *("torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "_from_accelerator"),
}
"""Arguments of `AcceleratorState` that are not passed on to the process group."""


def _change_plugin(module: Any) -> None:
    """Let DeepSpeed find the processes once there is a plugin: `zero.Init` may come next."""
    changed_class = module.DeepSpeedPlugin
    init = changed_class.__post_init__
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def settled(self: Any) -> None:
        init(self)
        if env.flag(_USE_CPU):
            _join_process_group()

    changed_class.__post_init__ = settled


def _join_process_group() -> None:
    """Let DeepSpeed take up the process group, if there is one; else it counts one process."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return
    # Here, because this module is imported in every worker, also in those without DeepSpeed.
    from nbaccel.deepspeed.strategy.engines import begin_comm
    from nbaccel.deepspeed.zero_config import ZeroConfig

    begin_comm(ZeroConfig())
