"""Weights kept on disk: Accelerate's import path of what is in `nbaccel.bigmodel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.lazy_names import names_imported_as
from nbaccel.bigmodel.offload_folder import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)

if not TYPE_CHECKING:
    __all__ = list(names_imported_as(__file__))
