"""Settings of a training loop, one small class per concern, and the words they are made of."""

from __future__ import annotations

from nbaccel._later import FP8, MEGATRON, QUANTIZATION, later
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
from nbaccel.config.settings import Handler as KwargsHandler
from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
from nbaccel.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from nbaccel.utils.operations import TensorInformation

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
]

AORecipeKwargs = later("AORecipeKwargs", FP8, __name__)
FP8RecipeKwargs = later("FP8RecipeKwargs", FP8, __name__)
MSAMPRecipeKwargs = later("MSAMPRecipeKwargs", FP8, __name__)
TERecipeKwargs = later("TERecipeKwargs", FP8, __name__)
BnbQuantizationConfig = later("BnbQuantizationConfig", QUANTIZATION, __name__)
MegatronLMPlugin = later("MegatronLMPlugin", MEGATRON, __name__)
