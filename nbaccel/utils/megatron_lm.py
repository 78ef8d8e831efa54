"""Megatron-LM: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import MEGATRON, later

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "T5TrainStep",
    "add_model_config_to_megatron_parser",
    "avg_losses_across_data_parallel_group",
]

AbstractTrainStep = later("AbstractTrainStep", MEGATRON, __name__)
BertTrainStep = later("BertTrainStep", MEGATRON, __name__)
GPTTrainStep = later("GPTTrainStep", MEGATRON, __name__)
MegatronEngine = later("MegatronEngine", MEGATRON, __name__)
MegatronLMDummyDataLoader = later("MegatronLMDummyDataLoader", MEGATRON, __name__)
MegatronLMDummyScheduler = later("MegatronLMDummyScheduler", MEGATRON, __name__)
T5TrainStep = later("T5TrainStep", MEGATRON, __name__)
add_model_config_to_megatron_parser = later(
    "add_model_config_to_megatron_parser", MEGATRON, __name__
)
avg_losses_across_data_parallel_group = later(
    "avg_losses_across_data_parallel_group", MEGATRON, __name__
)
