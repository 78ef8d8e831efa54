"""Megatron-LM: names of a part that is still to come."""

from __future__ import annotations

from nbaccel.base.unsupported_names import MEGATRON_LM, missing_name_of

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

AbstractTrainStep = missing_name_of("AbstractTrainStep", MEGATRON_LM, __name__)
BertTrainStep = missing_name_of("BertTrainStep", MEGATRON_LM, __name__)
GPTTrainStep = missing_name_of("GPTTrainStep", MEGATRON_LM, __name__)
MegatronEngine = missing_name_of("MegatronEngine", MEGATRON_LM, __name__)
MegatronLMDummyDataLoader = missing_name_of("MegatronLMDummyDataLoader", MEGATRON_LM, __name__)
MegatronLMDummyScheduler = missing_name_of("MegatronLMDummyScheduler", MEGATRON_LM, __name__)
T5TrainStep = missing_name_of("T5TrainStep", MEGATRON_LM, __name__)
add_model_config_to_megatron_parser = missing_name_of(
    "add_model_config_to_megatron_parser", MEGATRON_LM, __name__
)
avg_losses_across_data_parallel_group = missing_name_of(
    "avg_losses_across_data_parallel_group", MEGATRON_LM, __name__
)
