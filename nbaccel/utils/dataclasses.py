"""Settings of a training loop, one small class per concern, and the words they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from nbaccel.base.public_names import hand_on
from nbaccel.config.enumerations import (
    ComputeEnvironment as ComputeEnvironment,
    CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from nbaccel.config.field_rules import Handler
from nbaccel.config.fp8 import (
    AORecipeKwargs as AORecipeKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
)
from nbaccel.config.handlers import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from nbaccel.parallelism_config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    ParallelismConfig as ParallelismConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from nbaccel.plan import registry
from nbaccel.utils.operations import TensorInformation as TensorInformation

if TYPE_CHECKING:
    from nbaccel.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
else:
    DeepSpeedPlugin = registry.plugin_class("DeepSpeedPlugin")

KwargsHandler = Handler
BnbQuantizationConfig: Any
MegatronLMPlugin: Any


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of that name among a model's modules; None where no module has one."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


hand_on(globals(), "DeepSpeedPlugin", "KwargsHandler")
