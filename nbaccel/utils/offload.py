"""Weights kept on disk: Accelerate's import path of what is in `nbaccel.bigmodel`."""

from nbaccel.base.public_names import hand_on
from nbaccel.bigmodel.offload_folder import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)

hand_on(globals())
