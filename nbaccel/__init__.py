"""nbaccel: train on every chip of this machine, from a notebook cell.

The names below are imported when they are first used: ``import nbaccel`` costs nothing, torch
is not even looked at.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Where its classes say that they are: what pickles them by that name has to find it.
from nbaccel import errors as errors
from nbaccel.base import unloaded_magic

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbaccel.accelerator import (
        Accelerator,
    )
    from nbaccel.base.errors import (
        CheckpointDamaged,
        CheckpointFailed,
        CollectiveMismatch,
        CollectiveTimeout,
        ConfigError,
        LaunchTimeout,
        NbaccelError,
        PrecisionMismatch,
        TrainingDiverged,
        WorkerDied,
        WorkerFailed,
    )
    from nbaccel.big_modeling import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from nbaccel.bigmodel.device_map_display import show_device_map
    from nbaccel.calls.pool import Pool
    from nbaccel.config import (
        Fp8Config,
        RunConfig,
    )
    from nbaccel.config.handlers import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from nbaccel.deepspeed.environment import deepspeed_environment
    from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
    from nbaccel.deepspeed.weights.converting import load_fp32_state_dict, zero_to_fp32
    from nbaccel.deepspeed.weights.live_weights import fp32_state_dict, save_16bit_weights
    from nbaccel.deepspeed.zero_memory import estimate_memory
    from nbaccel.inference import (
        prepare_pippy,
    )
    from nbaccel.launchers import (
        debug_launcher,
        notebook_launcher,
        shutdown,
    )
    from nbaccel.notebook.advising import advise
    from nbaccel.notebook.pickers import (
        LaunchPicker,
        Picker,
        PrecisionPicker,
        ZeroPicker,
        configure,
    )
    from nbaccel.output.report.comparing import compare
    from nbaccel.parallelism_config import (
        ParallelismConfig,
    )
    from nbaccel.plan.inspecting import inspect_machine
    from nbaccel.plan.inventory import Inventory
    from nbaccel.plan.launch_plan import Choice, Plan
    from nbaccel.plan.resolving import resolve
    from nbaccel.plan.topology import Topology
    from nbaccel.plan.training_plan import TrainingPlan
    from nbaccel.state import (
        PartialState,
    )
    from nbaccel.train.prepare_loader import skip_first_batches
    from nbaccel.utils import (
        find_executable_batch_size,
        is_rich_available,
        set_seed,
        synchronize_rng_states,
    )

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CheckpointDamaged",
    "CheckpointFailed",
    "Choice",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "Fp8Config",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Inventory",
    "LaunchPicker",
    "LaunchTimeout",
    "NbaccelError",
    "ParallelismConfig",
    "PartialState",
    "Picker",
    "Plan",
    "Pool",
    "PrecisionMismatch",
    "PrecisionPicker",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RunConfig",
    "Topology",
    "TrainingDiverged",
    "TrainingPlan",
    "WorkerDied",
    "WorkerFailed",
    "ZeroPicker",
    "__version__",
    "advise",
    "compare",
    "configure",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "deepspeed_environment",
    "disk_offload",
    "dispatch_model",
    "estimate_memory",
    "find_executable_batch_size",
    "fp32_state_dict",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "inspect_machine",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_fp32_state_dict",
    "notebook_launcher",
    "prepare_pippy",
    "resolve",
    "save_16bit_weights",
    "set_seed",
    "show_device_map",
    "shutdown",
    "skip_first_batches",
    "synchronize_rng_states",
    "zero_to_fp32",
]

_HOMES = {
    "nbaccel.accelerator": ("Accelerator",),
    "nbaccel.notebook.advising": ("advise",),
    "nbaccel.big_modeling": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
    ),
    "nbaccel.bigmodel.device_map_display": ("show_device_map",),
    "nbaccel.config": ("Fp8Config", "RunConfig"),
    "nbaccel.config.handlers": (
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
        "ProjectConfiguration",
    ),
    "nbaccel.deepspeed.environment": ("deepspeed_environment",),
    "nbaccel.deepspeed.zero_memory": ("estimate_memory",),
    "nbaccel.deepspeed.strategy.plugin": ("DeepSpeedPlugin",),
    "nbaccel.deepspeed.weights.converting": ("load_fp32_state_dict", "zero_to_fp32"),
    "nbaccel.deepspeed.weights.live_weights": ("fp32_state_dict", "save_16bit_weights"),
    "nbaccel.base.errors": (
        "CheckpointDamaged",
        "CheckpointFailed",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "ConfigError",
        "LaunchTimeout",
        "NbaccelError",
        "PrecisionMismatch",
        "TrainingDiverged",
        "WorkerDied",
        "WorkerFailed",
    ),
    "nbaccel.inference": ("prepare_pippy",),
    "nbaccel.launchers": (
        "debug_launcher",
        "notebook_launcher",
        "shutdown",
    ),
    "nbaccel.notebook.pickers": (
        "LaunchPicker",
        "Picker",
        "PrecisionPicker",
        "ZeroPicker",
        "configure",
    ),
    "nbaccel.output.report.comparing": ("compare",),
    "nbaccel.parallelism_config": ("ParallelismConfig",),
    "nbaccel.plan": (
        "Choice",
        "Inventory",
        "Plan",
        "inspect_machine",
        "resolve",
    ),
    "nbaccel.plan.training_plan": ("TrainingPlan",),
    "nbaccel.calls.pool": ("Pool",),
    "nbaccel.state": ("PartialState",),
    "nbaccel.plan.topology": ("Topology",),
    "nbaccel.train.prepare_loader": ("skip_first_batches",),
    "nbaccel.utils": (
        "find_executable_batch_size",
        "is_rich_available",
        "set_seed",
        "synchronize_rng_states",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
# ``import nbaccel; nbaccel.hooks...``: the modules that ``import accelerate`` imports, too.
_MODULES = frozenset({
    *("big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers"),
    *("logging", "optimizer", "parallelism_config", "scheduler", "state", "tracking", "utils"),
})  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"nbaccel.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        # A missing package other than nbaccel is named by the error itself.
        if not str(error.name).startswith("nbaccel."):
            raise
        from nbaccel.base.errors import MissingBackend

        raise MissingBackend(
            f"nbaccel.{name} cannot be used: {error.name} was left out of this installation, "
            "and nothing else replaces it. Install nbaccel whole."
        ) from error
    except AttributeError as error:
        # `from nbaccel import` drops an AttributeError, such as that of a `torch.py` of the user's
        # in place of torch (pytorch/pytorch#36042).
        raise ImportError(f"nbaccel.{name} cannot be imported: {error}") from error
    # Stored, so that the next use does not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Give a notebook `%%accelerate` and `%accelerate`; `%load_ext nbaccel` calls this."""
    from nbaccel.notebook import extension

    extension.load_extension(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Take them back and end the workers: IPython calls this at `%unload_ext nbaccel`."""
    from nbaccel.notebook import extension

    extension.unload_extension(ipython)


# At import, because a cell with %%accelerate may run before %load_ext.
unloaded_magic.register_stand_in()
