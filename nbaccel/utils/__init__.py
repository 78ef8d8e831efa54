"""Functions that training code uses beside an `Accelerator`, under the names Accelerate has.

The collectives here work on the process group of this process, with or without an `Accelerator`.
"""

from __future__ import annotations

from nbaccel.abc.standins import DummyOptim, DummyScheduler
from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
from nbaccel.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    ProfileKwargs,
    ProjectConfiguration,
)
from nbaccel.utils.memory import find_executable_batch_size, release_memory
from nbaccel.utils.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    wait_for_everyone,
)
from nbaccel.utils.random import set_seed, synchronize_rng_states
from nbaccel.utils.tqdm import tqdm

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]
