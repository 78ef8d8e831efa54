"""Settings of a training loop, one small class per concern, and the words they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nbaccel.base.unsupported_names import MEGATRON_LM, QUANTIZED_LOADING, missing_name_of
from nbaccel.config.enumerations import (
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from nbaccel.config.field_rules import Handler as KwargsHandler
from nbaccel.config.fp8 import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from nbaccel.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from nbaccel.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from nbaccel.plan import registry
from nbaccel.utils.operations import TensorInformation

if TYPE_CHECKING:
    from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
else:
    DeepSpeedPlugin = registry.plugin_class("DeepSpeedPlugin")

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "get_module_class_from_name",
]

BnbQuantizationConfig = missing_name_of("BnbQuantizationConfig", QUANTIZED_LOADING, __name__)
MegatronLMPlugin = missing_name_of("MegatronLMPlugin", MEGATRON_LM, __name__)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of that name among a model's modules.

    Args:
        module: The model.
        name: Of the class, as in ``transformer_layer_cls_to_wrap``.

    Returns:
        The class; None where no module has one of that name.
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
