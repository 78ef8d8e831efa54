"""Which arenas are trained in the file that goes home: see the note in `weight_sync`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from nbaccel.transfer import memfd
from nbaccel.transfer.arena import PLAIN

__all__ = ["arenas_to_train_in", "move_mapping_to_file"]

# Share of an arena's bytes that is about to be trained. Training in place copies the whole arena
# once, otherwise the trained part is copied twice: half is where both cost the same.
_IN_PLACE_SHARE = 0.5


def arenas_to_train_in(
    arena_mappings: Mapping[str, memfd.Mapping],
    parameter_groups: Iterable[Iterable[torch.Tensor]],
) -> list[str]:
    """Which arenas are worth training in a file. See [Note: training in place]."""
    trained_parameters = {
        id(parameter): parameter
        for parameter_group in parameter_groups
        for parameter in parameter_group
        if parameter.requires_grad
    }
    keys = []
    for arena_key, arena_mapping in arena_mappings.items():
        parameter_spans = (
            _span_in(arena_mapping, parameter) for parameter in trained_parameters.values()
        )
        # Merged first: tied parameters and views of one storage would count twice.
        trained_bytes = memfd.total_bytes(
            memfd.merge_ranges(byte_span for byte_span in parameter_spans if byte_span)
        )
        if trained_bytes >= _IN_PLACE_SHARE * arena_mapping.nbytes:
            keys.append(arena_key)
    return keys


def move_mapping_to_file(arena_mapping: memfd.Mapping, file_descriptor: int) -> None:
    """Copy what a mapping shows to a file, and let the mapping show and write that file."""
    memfd.write_at(file_descriptor, arena_mapping.view(0, arena_mapping.nbytes), 0)
    # In this order: the mapping must never show a file that has not been filled.
    arena_mapping.replace(file_descriptor, is_private=False)


def _span_in(mapping: memfd.Mapping, tensor: torch.Tensor) -> memfd.ByteRange | None:
    if tensor.device.type != "cpu" or type(tensor) not in PLAIN:
        return None
    tensor_storage = tensor.untyped_storage()
    if not mapping.contains(tensor_storage.data_ptr(), tensor_storage.nbytes()):
        return None
    first_byte = tensor_storage.data_ptr() - mapping.address
    return (first_byte, first_byte + tensor_storage.nbytes())
