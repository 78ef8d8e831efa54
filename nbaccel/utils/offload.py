"""Weights kept on disk: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import BIG_MODELS, later

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

OffloadedWeightsLoader = later("OffloadedWeightsLoader", BIG_MODELS, __name__)
PrefixedDataset = later("PrefixedDataset", BIG_MODELS, __name__)
extract_submodules_state_dict = later("extract_submodules_state_dict", BIG_MODELS, __name__)
load_offloaded_weight = later("load_offloaded_weight", BIG_MODELS, __name__)
offload_state_dict = later("offload_state_dict", BIG_MODELS, __name__)
offload_weight = later("offload_weight", BIG_MODELS, __name__)
save_offload_index = later("save_offload_index", BIG_MODELS, __name__)
