"""nbaccel: train on every chip of this machine, from a notebook cell.

The names below are imported when they are first used: ``import nbaccel`` does not look at torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Where its classes say that they are: what pickles them by that name has to find it.
from nbaccel import errors as errors
from nbaccel.base.public_names import names_handed_on, register_stand_in

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbaccel.accelerator import Accelerator as Accelerator
    from nbaccel.base.errors import (
        CheckpointDamaged as CheckpointDamaged,
        CheckpointFailed as CheckpointFailed,
        CollectiveMismatch as CollectiveMismatch,
        CollectiveTimeout as CollectiveTimeout,
        ConfigError as ConfigError,
        LaunchTimeout as LaunchTimeout,
        NbaccelError as NbaccelError,
        PrecisionMismatch as PrecisionMismatch,
        TrainingDiverged as TrainingDiverged,
        WorkerDied as WorkerDied,
        WorkerFailed as WorkerFailed,
    )
    from nbaccel.big_modeling import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        infer_auto_device_map as infer_auto_device_map,
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from nbaccel.bigmodel.device_map import show_device_map as show_device_map
    from nbaccel.calls.pool import Pool as Pool
    from nbaccel.config import Fp8Config as Fp8Config, RunConfig as RunConfig
    from nbaccel.config.handlers import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin as GradientAccumulationPlugin,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProfileKwargs as ProfileKwargs,
        ProjectConfiguration as ProjectConfiguration,
    )
    from nbaccel.data_loader import skip_first_batches as skip_first_batches
    from nbaccel.deepspeed.converting import (
        fp32_state_dict as fp32_state_dict,
        load_fp32_state_dict as load_fp32_state_dict,
        save_16bit_weights as save_16bit_weights,
        zero_to_fp32 as zero_to_fp32,
    )
    from nbaccel.deepspeed.environment import deepspeed_environment as deepspeed_environment
    from nbaccel.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from nbaccel.deepspeed.zero_memory import estimate_memory as estimate_memory
    from nbaccel.inference import prepare_pippy as prepare_pippy
    from nbaccel.launchers import (
        advise as advise,
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
        shutdown as shutdown,
    )
    from nbaccel.notebook.pickers import (
        LaunchPicker as LaunchPicker,
        Picker as Picker,
        PrecisionPicker as PrecisionPicker,
        ZeroPicker as ZeroPicker,
        configure as configure,
    )
    from nbaccel.output.report import compare as compare
    from nbaccel.parallelism_config import ParallelismConfig as ParallelismConfig
    from nbaccel.plan.inspecting import inspect_machine as inspect_machine
    from nbaccel.plan.inventory import Inventory as Inventory
    from nbaccel.plan.launch_plan import Choice as Choice, Plan as Plan
    from nbaccel.plan.resolving import resolve as resolve
    from nbaccel.plan.training_plan import TrainingPlan as TrainingPlan
    from nbaccel.state import PartialState as PartialState
    from nbaccel.utils import (
        find_executable_batch_size as find_executable_batch_size,
        is_rich_available as is_rich_available,
        set_seed as set_seed,
        synchronize_rng_states as synchronize_rng_states,
    )

__version__ = "0.1.0"

_HOMES = names_handed_on(__file__)
__all__ = list(_HOMES)
__all__ += ["__version__"]
# ``import nbaccel; nbaccel.hooks...``: the modules that ``import accelerate`` imports, too.
_MODULES = frozenset({
    *("big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers"),
    *("logging", "optimizer", "parallelism_config", "scheduler", "state", "tracking", "utils"),
})  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"nbaccel.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
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
register_stand_in()
