"""Weights kept on disk: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import BIG_MODEL_INFERENCE, missing_name_of

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

OffloadedWeightsLoader = missing_name_of("OffloadedWeightsLoader", BIG_MODEL_INFERENCE, __name__)
PrefixedDataset = missing_name_of("PrefixedDataset", BIG_MODEL_INFERENCE, __name__)
extract_submodules_state_dict = missing_name_of(
    "extract_submodules_state_dict", BIG_MODEL_INFERENCE, __name__
)
load_offloaded_weight = missing_name_of("load_offloaded_weight", BIG_MODEL_INFERENCE, __name__)
offload_state_dict = missing_name_of("offload_state_dict", BIG_MODEL_INFERENCE, __name__)
offload_weight = missing_name_of("offload_weight", BIG_MODEL_INFERENCE, __name__)
save_offload_index = missing_name_of("save_offload_index", BIG_MODEL_INFERENCE, __name__)
