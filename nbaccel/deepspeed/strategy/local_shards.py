"""Which elements of a parameter this process has under each ZeRO stage, and whole weights of them.

    stage 3       a placeholder; this process's part of the weights, and of their float32 copy
    stages 1, 2   whole weights, and this process's part of their float32 copy
    stage 0       whole weights; nothing is cut, and they are copied back as those of any module

The float32 copy is what was trained: it is what is copied back to the notebook, and no process ever
holds all of it. Either part of stage 3 may be in a file (NVMe).
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.leftovers import LeftoverFolders, announce_leftover
from nbaccel.base.units import first_few, format_bytes
from nbaccel.deepspeed import private_api
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig
from nbaccel.deepspeed.zero_memory import DEFAULTS
from nbaccel.plan.contracts.training import Piece


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 has it in parts; gathered at the moment or not."""
    # Not by `ds_id`, which DeepSpeed's flat groups have, too.
    return hasattr(tensor, "ds_shape")


def is_cut(tensor: torch.Tensor) -> bool:
    """See :meth:`ShardReader.is_cut`."""
    return is_partitioned(tensor) or private_api.has_fp32_fragment(tensor)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """See :meth:`ShardReader.whole_shape`."""
    return tuple(tensor.ds_shape) if is_partitioned(tensor) else None  # type: ignore[attr-defined]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole, for any tensor."""
    shape = whole_shape(tensor)
    return tuple(tensor.shape) if shape is None else shape


def local_pieces(tensor: torch.Tensor, held: Any = None) -> list[Piece]:
    """See :meth:`ShardReader.local_pieces`; empty where this process has nothing of it."""
    if is_partitioned(tensor):
        return _of_placeholder(tensor)
    fp32_mapping = private_api.fp32_fragment(tensor)
    if fp32_mapping is not None:
        return [_of_mapping(fp32_mapping)]
    if held is not None:
        return [_of_destroyed(tensor, held)]
    # The mapping is None where the float32 copy is another rank's, and after an engine that never
    # stepped.
    return []


def hold(tensor: torch.Tensor) -> object:
    """See :meth:`ShardReader.hold`; an engine that is destroyed forgets its float32 copies."""
    return private_api.fp32_fragment(tensor)


def assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """See :meth:`ShardReader.assign`; the float32 copy and the weights themselves."""
    flat_values = whole.reshape(-1)
    # The float32 copy, too: from it the next step makes the weights.
    if private_api.is_swapped_out(tensor):
        first, count = _local_span(tensor)
        part = flat_values[first : first + count]
        # The tensor that DeepSpeed's public function returns is a buffer, released by then.
        private_api.write_swapped_fp32(tensor, lambda values: values[:count].copy_(part))
    else:
        for first_element, part_values in local_pieces(tensor):
            part_values.copy_(flat_values[first_element : first_element + part_values.numel()])
    if not is_partitioned(tensor):
        tensor.data.copy_(whole)
        return
    first, count = _local_span(tensor)
    part = flat_values[first : first + count]
    if is_on_disk(tensor):
        write_part(tensor, part)
    else:
        local_part: Any = tensor.ds_tensor  # type: ignore[attr-defined]
        local_part.data.view(-1)[:count].copy_(part)
    if tensor.data.numel() == tensor.ds_numel:  # type: ignore[attr-defined]
        tensor.data.copy_(whole)  # small parameters (or gathered ones) are whole here, besides


def _of_mapping(fp32_mapping: Any) -> Piece:
    values = fp32_mapping.hp_fragment.detach().reshape(-1)
    return int(fp32_mapping.lp_fragment_address.start), values


def _of_destroyed(tensor: torch.Tensor, mapping: Any) -> Piece:
    """The float32 copy, unless the weights were changed after the engine had been destroyed."""
    first, copy = _of_mapping(mapping)
    weights = tensor.detach().reshape(-1)[first : first + copy.numel()]
    # Both agree as long as the copy, rounded, gives the weights: then the copy has more digits.
    return first, copy if torch.equal(copy.to(weights), weights) else weights


def _of_placeholder(tensor: Any) -> list[Piece]:
    first_element, element_count = _local_span(tensor)
    # Of a parameter with fewer elements than there are ranks, the last ranks have only padding.
    if element_count == 0:
        return []
    # A frozen parameter has no float32 copy, also where the engine trains others.
    if private_api.zero3_optimizer(tensor) is not None and tensor.requires_grad:
        from deepspeed.utils import safe_get_local_fp32_param

        values = safe_get_local_fp32_param(tensor)
        if values is not None:
            return [(first_element, values.detach().reshape(-1)[:element_count])]
    on_disk = is_on_disk(tensor)
    weights = read_part(tensor) if on_disk else tensor.ds_tensor
    return [(first_element, weights.detach().reshape(-1)[:element_count])]


def _local_span(tensor: Any) -> tuple[int, int]:
    """First element and number of elements that this process has, without padding."""
    part_size = int(tensor.ds_tensor.ds_numel)
    rank = getattr(tensor, "ds_zero_partition_rank", None)  # from 0.19.3 on
    if rank is None:
        rank = dist.get_rank(tensor.ds_process_group)
    first_element = int(rank) * part_size
    return first_element, max(0, min(part_size, int(tensor.ds_numel) - first_element))


# ------------------------------------------------------------------------------ whole weights
# Parameters are gathered a few at a time, and only process 0 keeps them: process 0 holds the model
# besides its part, the others hold their part, and all of them a few whole parameters for a moment.

_AT_A_TIME_BYTES = 256 << 20


def gather_weights(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict, whole; a collective where weights are in shards."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    # With `keep_vars` the entries are the parameters themselves, with DeepSpeed's attributes;
    # without it they would be detached placeholders.
    state = module.state_dict(keep_vars=True)
    tensors = {id(value): value for value in state.values() if isinstance(value, torch.Tensor)}
    whole: dict[int, torch.Tensor] = {}
    # DeepSpeed reads ahead into the buffers through which gathering reads from disk.
    free_buffers(module)
    for group in _groups_by_size(tensors.values()):
        cut = [tensor for tensor in group if is_partitioned(tensor)]
        with GatheredParameters(cut, enabled=bool(cut)):
            for tensor in group if keep else ():
                # A copy: at stages 1 and 2 a parameter is a view of its flattened group, and
                # `torch.save` writes the whole storage of a view.
                whole[id(tensor)] = tensor.detach().to("cpu", copy=True)
    return {name: whole.get(id(value), value) for name, value in state.items()} if keep else {}


def scatter_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state dict; a collective."""
    own = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    misfit = _misfit_text(module, own, state, strict=strict) if dist.get_rank() == 0 else ""
    # Process 0's list decides: the others may have an empty state, and all must broadcast alike.
    told: list[Any] = [misfit, [name for name in own if name in state]]
    dist.broadcast_object_list(told, 0)
    misfit, wanted_names = told
    if misfit:
        raise ConfigError(misfit)
    done: set[int] = set()
    with torch.no_grad():
        for name in wanted_names:
            tensor = own[name]
            if id(tensor) in done:
                continue
            # Tied parameters are one tensor of several names.
            done.add(id(tensor))
            # In float32 also for a model in 16 bit, whose optimizer has a float32 copy to be set.
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            shape = shape_of(tensor)
            whole = torch.empty(shape, dtype=dtype, device=tensor.device)
            if dist.get_rank() == 0:
                whole.copy_(state[name])
            dist.broadcast(whole, 0)
            if is_cut(tensor):
                assign(tensor, whole)
            else:
                tensor.detach().copy_(whole)


def _misfit_text(
    module: nn.Module, own: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> str:
    wrong = [
        f"{name} has shape {tuple(state[name].shape)} instead of {shape_of(tensor)}"
        for name, tensor in own.items()
        if name in state and tuple(state[name].shape) != shape_of(tensor)
    ]
    if strict:
        wrong += [f"{name} is missing" for name in own if name not in state]
        wrong += [f"{name} is unknown" for name in state if name not in own]
    if not wrong:
        return ""
    return (
        f"The state does not fit {type(module).__name__}: {first_few(wrong, 5, separator='; ')}. "
        "Weights would go to the wrong places. Load the state of the same model, or give "
        "strict=False for names alone."
    )


def _groups_by_size(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists that are not too big together, gathered."""
    group: list[torch.Tensor] = []
    group_bytes = 0
    for tensor in tensors:
        # A placeholder of ZeRO-3 is empty; `ds_numel` is what it takes when it is gathered.
        num_bytes = int(getattr(tensor, "ds_numel", tensor.numel())) * tensor.element_size()
        # One at a time from disk: each takes one of the few buffers.
        is_alone = is_on_disk(tensor) or any(map(is_on_disk, group))
        if group and (is_alone or group_bytes + num_bytes > _AT_A_TIME_BYTES):
            yield group
            group = []
            group_bytes = 0
        group.append(tensor)
        group_bytes += num_bytes
    if group:
        yield group


# ------------------------------------------------------------------------------ on disk
# DeepSpeed empties its folder when an engine is made, also where another engine of the process has
# its states in it, and leaves the files there when the process ends: so each engine has a folder,
# and none is left behind. There are no more buffers than `buffer_count`, and what was read ahead
# stays in one until it is used: so nothing here takes a buffer, and files are read and written
# directly.


class Claim:
    """An engine's use of folders on the fast disk."""

    def __init__(self, folders: set[Path], rank: int) -> None:
        self.folders = folders
        # A forked child inherits the claim, but not the files.
        self._pid = os.getpid()
        self.leftovers = [
            LeftoverFolders(
                folder.absolute(),
                f"zero_stage_3/*/rank{rank}",
                whole=folder.name.startswith(_ENGINE_FOLDER_PREFIX),
            )
            for folder in sorted(folders)
        ]

    def release(self) -> None:
        """Remove this process's files; a second time does nothing."""
        if self not in _OPEN_CLAIMS:
            return
        # Also in a forked child, where the exit handler must not come to it again.
        _OPEN_CLAIMS.remove(self)
        if os.getpid() != self._pid:
            return  # a forked child's copy; the files are its parent's
        for leftover in self.leftovers:
            leftover.remove()
            announce_leftover(leftover, is_there=False)


_ENGINE_FOLDER_PREFIX = "engine_"
_OPEN_CLAIMS: list[Claim] = []
"""Of this process: engines of several Accelerators must not meet in one folder."""


def claim(zero_config: ZeroConfig, rank: int) -> tuple[ZeroConfig, Claim]:
    """Give an engine folders that no other engine of this process has."""
    used = folders_in_use()
    own: set[Path] = set()
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero_config, name)
        if section is None or section.device != "nvme":
            continue
        # The user's folder is taken as given where it is free: only further engines get one in it.
        base = Path(section.nvme_path)
        folder = base
        number = 0
        while folder in used:
            number += 1
            folder = base / f"{_ENGINE_FOLDER_PREFIX}{number}"
        zero_config = zero_config.changed(**{name: section.changed(nvme_path=str(folder))})
        own.add(folder)
    new_claim = Claim(own, rank)
    if own:
        _OPEN_CLAIMS.append(new_claim)
    for leftover in new_claim.leftovers:
        # Before the files exist: a worker that is killed cannot remove them, and the notebook does.
        announce_leftover(leftover, is_there=True)
    return zero_config, new_claim


def folders_in_use() -> set[Path]:
    """Those in which engines of this process have files."""
    return {folder for other_claim in _OPEN_CLAIMS for folder in other_claim.folders}


def leave() -> None:
    """Release all: this process ends."""
    for open_claim in tuple(_OPEN_CLAIMS):
        open_claim.release()


# On import, since exit handlers run in reverse order: the environment's, which is registered later
# and destroys engines, comes first. A worker ends by `os._exit`, and calls `leave` beforehand.
atexit.register(leave)


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether this process's part of a parameter is in a file."""
    local_part = getattr(tensor, "ds_tensor", None)
    return getattr(local_part, "final_location", None) == "nvme"


def read_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter, out of its file."""
    # A copy: the engine overwrites the file in a later step, and a mapping would show that.
    return _mapped_part(tensor, is_shared=False).clone()


def write_part(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write this process's part of a parameter into its file."""
    _mapped_part(tensor, is_shared=True)[: values.numel()].copy_(values)
    local_part: Any = tensor.ds_tensor  # type: ignore[attr-defined]
    # A part that was read ahead is used from its buffer, where it is outdated by now.
    if local_part.status.name == "AVAILABLE":
        local_part.data.view(-1)[: values.numel()].copy_(values)


def free_buffers(module: nn.Module) -> None:
    """Release what was read ahead, so that there is a buffer for what is gathered next."""
    for parameter in filter(is_on_disk, module.parameters()):
        swapped_parameter: Any = parameter
        # A read that is under way still writes into its buffer.
        swapped_parameter.nvme_swapper.synchronize_reads()
        # A parameter that is gathered, or being gathered, needs its buffer.
        is_used = swapped_parameter.ds_status.name != "NOT_AVAILABLE"
        if swapped_parameter.ds_tensor.status.name == "AVAILABLE" and not is_used:
            swapped_parameter.nvme_swapper.remove_partition_and_release_buffers([swapped_parameter])


def skip_repeated_reads(module: nn.Module) -> None:
    """Let a parameter that several layers use be read ahead once.

    DeepSpeed 0.19 lists it as often as it will be used, and fails on the second time (`already
    assigned swap buffer`): every T5 looks at a layer's weights from outside of the layer.
    """
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in module.parameters())
    # The parameters of an engine share one swapper, which must be wrapped once.
    for swapper in {id(swapper): swapper for swapper in swappers if swapper is not None}.values():
        swapper.swap_in = functools.partial(_read_once, swapper.swap_in)


def check_buffers(model: nn.Module, zero_config: ZeroConfig, world_size: int) -> None:
    """Refuse buffers into which the largest parameter does not go."""
    section = zero_config.offload_param
    if section is None or section.device != "nvme":
        return
    usual_size, usual_count = (
        DEFAULTS[f"{ZERO}.offload_param.{name}"] for name in ("buffer_size", "buffer_count")
    )
    size = usual_size if section.buffer_size is None else int(section.buffer_size)
    count = usual_count if section.buffer_count is None else int(section.buffer_count)
    parts = {
        # A model built in shards has placeholders: `ds_numel` is the size of the whole parameter.
        name: -(-int(getattr(parameter, "ds_numel", parameter.numel())) // world_size)
        for name, parameter in model.named_parameters()
    }
    name = max(parts, key=lambda name: parts[name])
    if parts[name] > size:
        number_bytes = 2 if zero_config.is_on("bf16") or zero_config.is_on("fp16") else 4
        raise ConfigError(
            f"{ZERO}.offload_param.buffer_size={size} is too small: a process reads {parts[name]} "
            f"numbers of {name} from disk, into one buffer. DeepSpeed would stop with 'More "
            f"elements than buffer size'. Set it to {parts[name]} or more; the {count} buffers "
            f"(buffer_count) then take {format_bytes(parts[name] * count * number_bytes)} of host "
            "memory in each process."
        )


def _mapped_part(tensor: Any, *, is_shared: bool) -> torch.Tensor:
    param_swapper = tensor.nvme_swapper
    # DeepSpeed may swap out asynchronously: the file need not have its bytes yet.
    param_swapper.synchronize_writes()
    path = Path(param_swapper.get_path(tensor))
    if not path.is_file():
        raise ConfigError(
            f"{path} is gone: it held this process's part of a parameter of shape "
            f"{tuple(tensor.ds_shape)}, of which there is no copy. Keep the folder "
            "(offload_param.nvme_path) until accelerator.free_memory() has taken the weights "
            "back."
        )
    part_size = int(tensor.ds_tensor.ds_numel)
    return torch.from_file(str(path), shared=is_shared, size=part_size, dtype=tensor.dtype)


def _read_once(swap_in: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    # By id, since tensors compare element by element.
    unique = {id(parameter): parameter for parameter in parameters}
    return swap_in(list(unique.values()), *args, **kwargs)
