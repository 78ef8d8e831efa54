"""Modules that DeepSpeed has in shards: their parts, their whole weights, what they were before.

    stage 3       a placeholder; this process's part of the weights, and of their float32 copy
    stages 1, 2   whole weights, and this process's part of their float32 copy
    stage 0       whole weights; nothing is cut, and they are copied back as those of any module

The float32 copy is what was trained: it is what is copied back to the notebook, and no process ever
holds all of it. Either part of stage 3 may be in a file (NVMe).

DeepSpeed casts a module in place, moves its parameters into flat buffers, or leaves placeholders,
and hooks everywhere. In a notebook the module is to be saved or trained in another way afterwards.

The capability row names this module as DeepSpeed's :class:`~nbaccel.abc.ShardReader`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.atomic import LeftoverFolders, announce_leftover
from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import is_installed
from nbaccel.base.units import first_few, format_bytes
from nbaccel.config.given_values import drop_at, value_at
from nbaccel.deepspeed import library
from nbaccel.deepspeed.environment import (
    destroy,
    forget_groups,  # noqa: F401 - of the reader, as the next but one
    forget_modules,
    live_engines,
    tear_down,  # noqa: F401
)
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig, auto_keys
from nbaccel.deepspeed.zero_memory import DEFAULTS
from nbaccel.plan.contracts import training
from nbaccel.plan.contracts.training import Piece, Remembered


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 has it in parts; gathered at the moment or not."""
    # Not by `ds_id`, which DeepSpeed's flat groups have, too.
    return hasattr(tensor, "ds_shape")


def is_cut(tensor: torch.Tensor) -> bool:
    """See :meth:`ShardReader.is_cut`."""
    return is_partitioned(tensor) or library.has_fp32_fragment(tensor)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """See :meth:`ShardReader.whole_shape`."""
    return tuple(tensor.ds_shape) if is_partitioned(tensor) else None  # type: ignore[attr-defined]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole, for any tensor."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def local_pieces(tensor: torch.Tensor, held: Any = None) -> list[Piece]:
    """See :meth:`ShardReader.local_pieces`; empty where this process has nothing of it."""
    if is_partitioned(tensor):
        first, count = _local_span(tensor)
        # Of a parameter with fewer elements than there are ranks, the last ranks have only padding.
        return [(first, _own_part(tensor)[:count])] if count else []
    mapping = library.fp32_fragment(tensor)
    # None where the float32 copy is another rank's, and after an engine that never stepped.
    if mapping is None and held is None:
        return []
    fragment: Any = held if mapping is None else mapping
    first = int(fragment.lp_fragment_address.start)
    values = fragment.hp_fragment.detach().reshape(-1)
    if mapping is None:
        weights = tensor.detach().reshape(-1)[first : first + values.numel()]
        # The engine is gone, and weights may have changed: the copy counts if it rounds to them.
        values = values if torch.equal(values.to(weights), weights) else weights
    return [(first, values)]


def hold(tensor: torch.Tensor) -> object:
    """See :meth:`ShardReader.hold`; an engine that is destroyed forgets its float32 copies."""
    return library.fp32_fragment(tensor)


def assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """See :meth:`ShardReader.assign`; of the float32 copy, too, which the next step goes by."""
    flat_values = whole.reshape(-1)
    if not is_partitioned(tensor):
        for first_element, part_values in local_pieces(tensor):
            part_values.copy_(flat_values[first_element : first_element + part_values.numel()])
        tensor.data.copy_(whole)
        return
    first, count = _local_span(tensor)
    part = flat_values[first : first + count]
    master = _master_part(tensor)
    if master is not None and is_on_disk(tensor):
        raise ConfigError(
            f"A parameter of shape {tuple(whole.shape)} is on disk (offload_param.device='nvme'), "
            "where only steps change it. Load weights before `prepare`."
        )
    if master is not None:
        from deepspeed.utils import safe_set_local_fp32_param

        # A copy: what was read from disk is in a buffer that is used again for writing.
        safe_set_local_fp32_param(tensor, torch.cat([part.to(master), master[count:]]))
    local_part: Any = tensor.ds_tensor  # type: ignore[attr-defined]
    if is_on_disk(tensor):
        _mapped_part(tensor, is_shared=True)[:count].copy_(part)
    # A part of a file that was read ahead is used from its buffer, where it is outdated by now.
    if local_part.status.name == "AVAILABLE":
        local_part.data.view(-1)[:count].copy_(part)
    if tensor.data.numel() == tensor.ds_numel:  # type: ignore[attr-defined]
        tensor.data.copy_(whole)  # small parameters (or gathered ones) are whole here, besides


def _own_part(tensor: Any) -> torch.Tensor:
    """This process's part at stage 3, in float32 where it is trained, with its padding."""
    values = _master_part(tensor)
    if values is not None:
        return values
    # A copy: the engine overwrites the file in a later step, and a mapping would show that.
    on_disk = is_on_disk(tensor)
    values = _mapped_part(tensor, is_shared=False).clone() if on_disk else tensor.ds_tensor
    return values.detach().reshape(-1)


def _master_part(tensor: Any) -> torch.Tensor | None:
    """This process's part of the float32 copy at stage 3, with its padding."""
    # A frozen parameter has none, also where the engine trains others.
    if library.zero3_optimizer(tensor) is None or not tensor.requires_grad:
        return None
    from deepspeed.utils import safe_get_local_fp32_param

    values = safe_get_local_fp32_param(tensor)
    return None if values is None else values.detach().reshape(-1)


def _local_span(tensor: Any) -> tuple[int, int]:
    """First element and number of elements that this process has, without padding."""
    part_size = int(tensor.ds_tensor.ds_numel)
    rank = getattr(tensor, "ds_zero_partition_rank", None)  # from 0.19.3 on
    if rank is None:
        rank = dist.get_rank(tensor.ds_process_group)
    first_element = int(rank) * part_size
    return first_element, max(0, min(part_size, int(tensor.ds_numel) - first_element))


# One at a time: process 0 keeps the model besides its part, the others only their part.


def gather_weights(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict, whole; a collective where weights are in shards."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    # With `keep_vars` the entries are parameters with DeepSpeed's attributes, no placeholders.
    state = module.state_dict(keep_vars=True)
    tensors = {id(value): value for value in state.values() if isinstance(value, torch.Tensor)}
    whole: dict[int, torch.Tensor] = {}
    # DeepSpeed reads ahead into the buffers through which gathering reads from disk.
    free_buffers(module)
    for tensor in tensors.values():
        with GatheredParameters([tensor], enabled=is_partitioned(tensor)):
            if keep:
                # A copy: `torch.save` writes the whole storage of a view of a flattened group.
                whole[id(tensor)] = tensor.detach().to("cpu", copy=True)
    return {name: whole.get(id(value), value) for name, value in state.items()} if keep else {}


def scatter_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a whole state dict; a collective."""
    entries = module.state_dict(keep_vars=True).items()
    own = {name: value for name, value in entries if isinstance(value, torch.Tensor)}
    misfits = _misfits(own, state, strict=strict) if dist.get_rank() == 0 else ()
    # Process 0's list decides: the others may have an empty state, and all must broadcast alike.
    told: list[Any] = [misfits, [name for name in own if name in state]]
    dist.broadcast_object_list(told, 0)
    misfits, wanted_names = told
    if misfits:
        wrong = first_few(misfits, 5, separator="; ")
        raise ConfigError(
            f"The state does not fit {type(module).__name__}: {wrong}. Weights would go to the "
            "wrong places. Load the state of the same model, or give strict=False for names alone."
        )
    # Tied parameters are one tensor of several names.
    wanted = {id(own[name]): name for name in wanted_names}
    with torch.no_grad():
        for name in wanted.values():
            tensor = own[name]
            # In float32 also for a model in 16 bit, whose optimizer has a float32 copy to be set.
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            whole = torch.empty(shape_of(tensor), dtype=dtype, device=tensor.device)
            if dist.get_rank() == 0:
                whole.copy_(state[name])
            dist.broadcast(whole, 0)
            if is_cut(tensor):
                assign(tensor, whole)
            else:
                tensor.detach().copy_(whole)


def _misfits(
    own: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> list[str]:
    misfits = [
        f"{name} has shape {tuple(state[name].shape)} instead of {shape_of(tensor)}"
        for name, tensor in own.items()
        if name in state and tuple(state[name].shape) != shape_of(tensor)
    ]
    if strict:
        misfits += [f"{name} is missing" for name in own if name not in state]
        misfits += [f"{name} is unknown" for name in state if name not in own]
    return misfits


# DeepSpeed empties its folder when an engine is made, also of another engine's states, and leaves
# files when the process ends: so each engine has a folder, and none is left. What was read ahead
# stays in one of the few buffers until it is used: so nothing here takes a buffer.


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
_OPEN_CLAIMS: list[Claim] = []  # of this process: no two engines in one folder


def claim(zero_config: ZeroConfig, rank: int) -> tuple[ZeroConfig, Claim]:
    """Give an engine folders that no other engine of this process has."""
    used = folders_in_use()
    own: set[Path] = set()
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero_config, name)
        if section is None or section.device != "nvme":
            continue
        # The user's folder is taken as given where it is free: only further engines get one in it.
        folder = base = Path(section.nvme_path)
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


# On import, since exit handlers run in reverse: the environment's, which destroys engines, comes
# first. A worker ends by `os._exit`, and calls `leave` beforehand.
atexit.register(leave)


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether this process's part of a parameter is in a file."""
    local_part = getattr(tensor, "ds_tensor", None)
    return getattr(local_part, "final_location", None) == "nvme"


def _mapped_part(tensor: Any, *, is_shared: bool) -> torch.Tensor:
    """This process's part of a parameter, in its file."""
    param_swapper = tensor.nvme_swapper
    # DeepSpeed may swap out asynchronously: the file need not have its bytes yet.
    param_swapper.synchronize_writes()
    path = Path(param_swapper.get_path(tensor))
    if not path.is_file():
        raise ConfigError(
            f"{path} is gone, the only copy of this process's part of a parameter of shape "
            f"{tuple(tensor.ds_shape)}. Keep the folder (offload_param.nvme_path) until "
            "accelerator.free_memory() has taken the weights back."
        )
    part_size = int(tensor.ds_tensor.ds_numel)
    return torch.from_file(str(path), shared=is_shared, size=part_size, dtype=tensor.dtype)


def free_buffers(module: nn.Module) -> None:
    """Release what was read ahead, so that there is a buffer for what is gathered next."""
    swapped: Iterator[Any] = filter(is_on_disk, module.parameters())
    for parameter in swapped:
        # A read that is under way still writes into its buffer.
        parameter.nvme_swapper.synchronize_reads()
        # A parameter that is gathered, or being gathered, needs its buffer.
        is_used = parameter.ds_status.name != "NOT_AVAILABLE"
        if parameter.ds_tensor.status.name == "AVAILABLE" and not is_used:
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def skip_repeated_reads(module: nn.Module) -> None:
    """Let a parameter that several layers use be read ahead once."""
    # DeepSpeed 0.19 lists it per use and fails on the second (`already assigned swap buffer`):
    # every T5 looks at a layer's weights from outside of the layer.

    def read_once(swap_in: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # By id, since tensors compare element by element.
        unique = {id(parameter): parameter for parameter in parameters}
        return swap_in(list(unique.values()), *args, **kwargs)

    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in module.parameters())
    # The parameters of an engine share one swapper, which must be wrapped once.
    for swapper in {id(swapper): swapper for swapper in swappers if swapper is not None}.values():
        swapper.swap_in = functools.partial(read_once, swapper.swap_in)


def check_buffers(model: nn.Module, zero_config: ZeroConfig, world_size: int) -> None:
    """Refuse buffers into which the largest parameter does not go."""
    section = zero_config.offload_param
    if section is None or section.device != "nvme":
        return
    settings = zero_config.to_dict()
    keys = (f"{ZERO}.offload_param.buffer_size", f"{ZERO}.offload_param.buffer_count")
    size, count = (int(value_at(settings, key, DEFAULTS[key])) for key in keys)
    # A model built in shards has placeholders: `ds_numel` is the size of the whole parameter.
    named = model.named_parameters()
    sizes = {name: int(getattr(one, "ds_numel", one.numel())) for name, one in named}
    name = max(sizes, key=lambda name: sizes[name])
    part = -(-sizes[name] // world_size)
    if part > size:
        number_bytes = 2 if zero_config.is_on("bf16") or zero_config.is_on("fp16") else 4
        total = format_bytes(part * count * number_bytes)
        raise ConfigError(
            f"{ZERO}.offload_param.buffer_size={size} is too small: a process reads {part} numbers "
            f"of {name}. Set it to {part} or more; {count} buffers then take {total} of host "
            "memory in each process."
        )


# A parameter of ZeRO-3 has the shape ``(0,)`` while no layer uses it, and is saved so by torch.


def placeholders(module_or_state: nn.Module | Mapping[str, Any]) -> list[str]:
    """Names of the parameters that are placeholders of ZeRO-3."""
    if isinstance(module_or_state, nn.Module):
        # With duplicates: a tied parameter is named twice in the state dict, too.
        named = module_or_state.named_parameters(remove_duplicate=False)
        return [name for name, one in named if tuple(one.shape) != shape_of(one)]
    return [
        name
        for name, value in module_or_state.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        # There are only shapes, unless it was taken with `keep_vars`.
        and (tuple(value.shape) != shape_of(value) or value.shape == (0,))
    ]


def check_whole(module_or_state: nn.Module | Mapping[str, Any], thing: str) -> None:
    """Refuse weights that are placeholders of ZeRO-3, before they are saved or loaded."""
    names = placeholders(module_or_state)
    if names:
        raise ConfigError(
            f"{thing}: {len(names)} of the weights are ZeRO-3 placeholders "
            f"({first_few(names, 3)}), of shape (0,). Call nbaccel.fp32_state_dict(engine), "
            "nbaccel.save_16bit_weights(engine, folder) or accelerator.save_model(model, folder) "
            "on every rank; nbaccel.zero_to_fp32(...) reads checkpoints."
        )


# transformers goes by a weak reference to the last ``HfDeepSpeedConfig``, in `generate`, too.


def announced_config(zero_settings: Mapping[str, Any], world_size: int = 1) -> Any:
    """Let transformers build models in shards from here on."""
    if not is_installed("transformers"):
        return None
    integration: Any = import_module(library.TRANSFORMERS_MODULE)
    return integration.HfDeepSpeedConfig(without_auto(zero_settings, world_size))


@contextlib.contextmanager
def applied_config(zero_settings: Mapping[str, Any] | None) -> Iterator[None]:
    """The same for a block; with None models are built whole in it."""
    if not is_installed("transformers"):
        yield
        return
    integration: Any = import_module(library.TRANSFORMERS_MODULE)
    reference_before = library.hf_config_reference()
    integration.unset_hf_deepspeed_config()
    # A variable, because transformers' reference is weak: without one it would be gone at once.
    kept_config = announced_config(zero_settings) if zero_settings is not None else None
    try:
        yield
    finally:
        del kept_config
        library.keep_hf_config_reference(reference_before)


def building_whole() -> contextlib.AbstractContextManager[None]:
    """See :meth:`ShardReader.building_whole`: transformers does not use ``zero.Init`` meanwhile."""
    return applied_config(None)


def without_auto(zero_settings: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The settings for `zero.Init`, which reads batch sizes, has no use for them and no "auto"."""
    concrete_settings = copy.deepcopy(dict(zero_settings))
    for key in auto_keys(concrete_settings):
        drop_at(concrete_settings, key)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & concrete_settings.keys():
        steps = concrete_settings.get("gradient_accumulation_steps", 1)
        concrete_settings["train_micro_batch_size_per_gpu"] = 1
        concrete_settings["train_batch_size"] = world_size * steps
    return concrete_settings


_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def inner_module(module: nn.Module) -> nn.Module | None:
    """See :meth:`ShardReader.inner_module`."""
    _, _, submodules = torch_private.module_tables(module)
    return submodules.get("module") if _is_deepspeeds(type(module)) else None


def plain_state(module: nn.Module) -> dict[str, Any] | None:
    """See :meth:`ShardReader.plain_state`."""
    own = vars(module)
    hooks = [hook for name in _HOOK_TABLES for hook in (own.get(name) or {}).values()]
    parameters, _, _ = torch_private.module_tables(module)
    if not _is_deepspeeds(type(parameters)) and not any(map(_is_deepspeeds, hooks)):
        return None
    # DeepSpeed's objects refer to engines and process groups, which cannot be pickled.
    kept = {
        name: value
        for name, value in own.items()
        if name not in library.ZERO3_MODULE_ATTRIBUTES
        and not _is_deepspeeds(value)
        and not _is_deepspeeds(type(value))
    }
    for name in _HOOK_TABLES:
        table = own.get(name) or {}
        kept[name] = OrderedDict(item for item in table.items() if not _is_deepspeeds(item[1]))
    return kept | {"_parameters": _plain_table(parameters)}


def _plain_table(parameter_table: Any) -> dict[str, Any]:
    """A module's parameters by name, in a dictionary that is not DeepSpeed's."""
    # Through `dict.items`, since DeepSpeed's dictionary gathers what its `__getitem__` looks up.
    return dict(dict.items(parameter_table))


def _is_deepspeeds(inspected_object: Any) -> bool:
    """Whether a class, a function or a method was defined in DeepSpeed."""
    # Some hooks are `functools.partial` objects, which name their function in `func`.
    name = getattr(getattr(inspected_object, "func", inspected_object), "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "deepspeed"


# Of this process: in a live worker it outlives the Accelerator, which the cell's next run drops.
_REMEMBERED_STATES: WeakKeyDictionary[nn.Module, Remembered] = WeakKeyDictionary()


def remember(module: nn.Module) -> Remembered:
    """See :meth:`ShardReader.remember`; of a module that is taken apart, what it was before."""
    # A module that is in parts looks like its engine's; only a whole one is looked at again.
    if module not in _REMEMBERED_STATES or not any(map(is_cut, module.parameters())):
        _REMEMBERED_STATES[module] = training.remember(module)
    return _REMEMBERED_STATES[module]


def take_back(module: nn.Module, remembered: Remembered) -> bool:
    """See :meth:`ShardReader.take_back`; engines of this module are destroyed."""
    engines = _engines_of(module)
    cut_parameters = [*filter(is_cut, module.parameters())]
    if not engines and not cut_parameters:
        return False
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in cut_parameters:
            whole, count = _filled(parameter, parameter.device)
            # Where this process has only a part, the parameter keeps the weights that it has.
            if count >= whole.numel():
                found[id(parameter)] = whole
    _restore_module(module, remembered, found, engines)
    return True


def take_back_together(module: nn.Module, device: torch.device) -> None:
    """Make a module whole that earlier engines of all processes have; a collective."""
    # A cell is run again: hooks of the engine before would run beside the next one's, over
    # groups that may be gone, with weights in low precision.
    state_before = _REMEMBERED_STATES.get(module)
    is_engines = (
        state_before is not None
        and any(map(is_cut, module.parameters()))
        # A model that was built in shards is cut without an engine.
        and not any("ds_shape" in attributes for _, attributes in state_before.tensors.values())
    )
    had_engine = torch.tensor(is_engines, dtype=torch.int32, device=device)
    # If `prepare` failed on some ranks, those have no engine, and must take part below.
    dist.all_reduce(had_engine, dist.ReduceOp.MAX)
    if not had_engine:
        return
    whole_values = _put_together(module, device)
    _restore_module(module, state_before or remember(module), whole_values, _engines_of(module))
    forget_modules()


@torch.no_grad()
def _put_together(module: nn.Module, device: torch.device) -> dict[int, torch.Tensor]:
    """Whole weights by the identity of their parameters; a collective."""
    # Where engines had no copy of higher precision, or have forgotten it, the weights stay.
    found: dict[int, torch.Tensor] = {}
    missing: list[str] = []
    for name, parameter in module.named_parameters():
        whole, num_own = _filled(parameter, device)
        count = torch.tensor(num_own, dtype=torch.int64, device=device)
        dist.all_reduce(count)
        # The sum is the same on all ranks, so all take the same branch and none waits alone.
        if count == whole.numel():
            dist.all_reduce(whole)  # no element is in two parts: adding zeros changes none
            found[id(parameter)] = whole.to(parameter.device)
        elif is_partitioned(parameter) and parameter.numel() != whole.numel():
            missing.append(name)
    missing_count = torch.tensor(len(missing), device=device)
    dist.all_reduce(missing_count)
    if missing_count:
        raise ConfigError(
            f"{type(module).__name__} was taken apart by an engine that not all processes "
            f"finished: {int(missing_count)} part(s) of weights are lost "
            f"({', '.join(missing[:3]) or 'on other ranks'}). Build a new model, or %accelerate "
            "restart."
        )
    return found


def _filled(parameter: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
    """A whole float32 tensor with this process's pieces, zero elsewhere; how many it has."""
    whole = torch.zeros(shape_of(parameter), dtype=torch.float32, device=device)
    count = 0
    for first, values in local_pieces(parameter) if is_cut(parameter) else ():
        whole.view(-1)[first : first + values.numel()].copy_(values)
        count += values.numel()
    return whole, count


def _restore_module(
    module: nn.Module,
    state_before: Remembered,
    whole_values: Mapping[int, torch.Tensor],
    module_engines: list[Any],
) -> None:
    for engine in module_engines:
        unhook(engine)
        if dist.is_initialized():  # otherwise it was destroyed together with its process group
            destroy(engine)
    for inner_submodule in module.modules():
        # DeepSpeed's dictionary gathers what is looked up, over a group that is gone by now.
        parameter_table, _, _ = torch_private.module_tables(inner_submodule)
        torch_private.replace_parameter_table(inner_submodule, _plain_table(parameter_table))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole = whole_values.get(id(tensor), tensor.detach())
        as_it_is = (whole.dtype, frozenset(vars(tensor)))
        dtype, attributes = state_before.tensors.get(name, as_it_is)
        # In place: optimizers, tied layers and the notebook's variables refer to this very tensor.
        tensor.data = whole.to(dtype)
        tensor.grad = None
        # DeepSpeed's attributes would make the parameter look partitioned to the next engine.
        for attribute in vars(tensor).keys() - attributes:
            delattr(tensor, attribute)
    # It is the wrapper that keeps ranks in step, which hides the method of the class.
    vars(module).pop("generate", None)


def _engines_of(module: nn.Module) -> list[Any]:
    return [engine for engine in live_engines() if vars(engine).get("module") is module]


def unhook(engine: Any) -> None:
    """Remove the hooks that an engine's `destroy` leaves on the module."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        handle = getattr(engine, name, None)
        if handle is not None:
            handle.remove()
