"""A worker's namespace: names that come from the notebook, and names that go to it."""

from __future__ import annotations

import copyreg
import difflib
import linecache
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel.transfer import memfd, pickling, sharded_tensors, weight_sync
from nbaccel.transfer.free_names import is_users
from nbaccel.transfer.function_pickling import Reducer
from nbaccel.transfer.namespace_update import Load, NamespaceUpdate
from nbaccel.transfer.received_modules import ReceivedModules

__all__ = ["Namespace"]


class Namespace:
    """The names of one worker, and the modules among them that came by an arena."""

    def __init__(
        self,
        user_ns: dict[str, Any],
        *,
        own_rank: int,
        target_device: str,
        num_nodes: int = 1,
        share_back: bool = True,
    ) -> None:
        self._user_ns = user_ns
        self._rank = own_rank
        self._device = target_device
        self._received_modules = ReceivedModules(
            own_rank=own_rank, num_nodes=num_nodes, share_back=share_back
        )
        self._before: dict[str, int] = {}

    def take(
        self,
        namespace_update: NamespaceUpdate,
        file_descriptors: Sequence[int],
        wanted_names: Sequence[str],
    ) -> None:
        """Bind what came from the notebook, and apply what changed in its modules."""
        # Not strict: the descriptors of the payloads follow those of the arenas.
        for (arena_key, num_bytes), file_descriptor in zip(
            namespace_update.arenas, file_descriptors, strict=False
        ):
            # Before the payload is opened, which refers to these arenas.
            self._received_modules.open_arena(arena_key, num_bytes, file_descriptor)
        local_part = namespace_update.of(self._rank)
        if local_part is None:
            return
        update_part, payload_index = local_part
        for variable_name, source_lines in update_part.sources.items():
            # No modification time, or linecache would look for the file and drop the lines.
            linecache.cache[variable_name] = (
                sum(map(len, source_lines)),
                None,
                source_lines,
                variable_name,
            )
        update_load: Load = pickling.unpack(
            update_part.payload,
            file_descriptors[payload_index],
            self._received_modules.mappings,
            target_device=self._device,
            namespace=self._user_ns,
            find_module=self._received_modules.module,
        )
        for arena_key, module_manifest, module in update_load.modules:
            self._received_modules.add(arena_key, module_manifest, module)
        for module_update in update_load.updates:
            self._received_modules.apply(module_update)
        self._received_modules.forget(update_part.forget, update_part.forget_arenas)
        self._user_ns.update(
            (variable_name, update_load.names[variable_name]) for variable_name in wanted_names
        )

    # ------------------------------------------------------------------- around a cell

    def begin(self) -> None:
        """A cell starts: remember what is bound."""
        self._before = self._snapshot()

    def bound(self) -> tuple[str, ...]:
        """The user's names that were bound, rebound or deleted since `begin`."""
        ids_before = self._before
        ids_after = self._snapshot()
        return tuple(
            name for name in ids_before | ids_after if ids_before.get(name) != ids_after.get(name)
        )

    def _snapshot(self) -> dict[str, int]:
        """Ids, not values: the snapshot must not keep alive what a cell deletes."""
        return {name: id(value) for name, value in self._user_ns.items() if is_users(name)}

    def dirty(self) -> tuple[str, ...]:
        """Keys of the notebook's modules whose weights may have changed."""
        return self._received_modules.dirty()

    def write_weights(
        self, staging_files: Mapping[str, int]
    ) -> tuple[weight_sync.WeightReport, dict[str, int]]:
        """Write the changed weights into staging files: rank 0 all, others their shards."""
        return self._received_modules.write_weights(staging_files)

    def share_equal_pages(self) -> None:
        """The notebook has the weights: share those pages again that are equal to the arena's."""
        self._received_modules.share_equal_pages()

    # ------------------------------------------------------------------- to the notebook

    def pack(self, variable_names: Sequence[str]) -> tuple[memfd.PackedObject, int]:
        """Pack the values of these names for the notebook, as a dict.

        Tensors come to the CPU. A sharded tensor comes whole if every rank has all of it; else this
        rank's piece does, and a line on stderr says so. A model in DDP comes without the wrapper,
        which is of no use where there is no process group.
        """
        missing_names = [
            variable_name for variable_name in variable_names if variable_name not in self._user_ns
        ]
        if missing_names:
            raise NameError(self._not_bound(missing_names), name=missing_names[0])
        notebook_reducer = _NotebookReducer(self._user_ns)
        pickle_sender = pickling.Sender.create()
        pickle_sender.reduce = notebook_reducer
        packed_object, file_descriptor = pickling.pack(
            {variable_name: self._user_ns[variable_name] for variable_name in variable_names},
            pickle_sender,
        )
        if notebook_reducer.pieces:
            sys.stderr.write(
                f"nbaccel: rank {self._rank} has only a piece of {notebook_reducer.pieces} sharded "
                f"tensor(s) in {', '.join(variable_names)}, and that is what comes. For all of it, "
                "gather on all ranks in a cell first: accelerator.get_state_dict(m), or "
                "full_tensor().\n"
            )
        return packed_object, file_descriptor

    def _not_bound(self, missing_names: Sequence[str]) -> str:
        lines = []
        for variable_name in missing_names:
            names = [variable_name for variable_name in self._user_ns if is_users(variable_name)]
            matches = difflib.get_close_matches(variable_name, names, n=3)
            spelling_hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
            lines.append(
                f"name {variable_name!r} is not defined in worker {self._rank}.{spelling_hint}"
            )
        return "\n".join(lines)


class _NotebookReducer(Reducer):
    """Replaces what means nothing in the notebook: devices, process groups, wrappers."""

    def __init__(self, worker_namespace: dict[str, Any]) -> None:
        super().__init__(worker_namespace)
        self.pieces = 0

    def __call__(self, pickled_object: Any) -> Any:
        if isinstance(pickled_object, nn.Module):
            inner_module = (
                pickled_object.module
                if isinstance(pickled_object, DistributedDataParallel)
                else None
            )
            inner_module = inner_module or sharded_tensors.module_inside(pickled_object)
            state = sharded_tensors.state_without_engine(pickled_object)
            if inner_module is not None:
                return _as_it_is, (inner_module,)
            if state is not None:
                return copyreg.__newobj__, (type(pickled_object),), state  # type: ignore[attr-defined]
        if isinstance(pickled_object, torch.Tensor) and (
            sharded_tensors.is_sharded(pickled_object)
            or pickled_object.device.type not in ("cpu", "meta")
        ):
            return _as_it_is, (self._at_hand(pickled_object),)
        return super().__call__(pickled_object)

    def _at_hand(self, local_tensor: torch.Tensor) -> torch.Tensor:
        local_values: Any = local_tensor.detach()
        if sharded_tensors.is_dtensor(local_tensor):
            self.pieces += not all(
                placement.is_replicate() for placement in local_values.placements
            )
            local_values = local_values.to_local()
        elif sharded_tensors.full_shape(local_tensor) != tuple(local_tensor.shape):
            self.pieces += 1
            piece_values = [
                tensor_piece.detach().cpu()
                for _, tensor_piece in sharded_tensors.pieces(local_tensor)
            ]
            local_values = torch.cat(piece_values) if piece_values else local_values
        elif sharded_tensors.is_sharded(local_tensor):
            # A view into a flat buffer: pickling it would send the whole buffer.
            local_values = local_values.clone()
        local_values = local_values.cpu()
        if isinstance(local_tensor, nn.Parameter):
            return nn.Parameter(local_values, local_tensor.requires_grad)
        local_part: torch.Tensor = local_values.requires_grad_(
            # A leaf keeps its flag, which detach() drops; a result comes without its graph.
            local_tensor.requires_grad and local_tensor.is_leaf
        )
        return local_part


def _as_it_is(value: Any) -> Any:
    # Pickle can put one object in the place of another only as the result of a call.
    return value
