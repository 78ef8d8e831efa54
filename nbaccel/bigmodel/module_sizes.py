"""Parameters and buffers of a model by name: which are tied, and how many bytes they have.

Sizes are computed from shapes and formats, so that tensors on ``meta`` count with what they will
take; nothing is measured, and nothing is moved.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.trees import names_by_tensor
from nbaccel.bigmodel.tensor_placing import as_dtype
from nbaccel.config.enumerations import CustomDtype

_BYTES = {CustomDtype.INT2: 1 / 4, CustomDtype.INT4: 1 / 2, CustomDtype.FP8: 1}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes of one number of a format; those of ``torch.bool`` count as one bit."""
    if isinstance(dtype, CustomDtype):
        return _BYTES[dtype]
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Equal for two tensors if, and only if, they are views of the same memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name.

    Args:
        module: Whose.
        include_buffers: Whether buffers, too.
        recurse: Whether those of submodules, too.
        remove_non_persistent: Whether to leave out buffers that are not in the state dict.

    Yields:
        Names and tensors.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = set()
        if remove_non_persistent:
            left_out = get_non_persistent_buffers(module, recurse, fqns=True)
        buffers = module.named_buffers(recurse=recurse)
        yield from ((name, buffer) for name, buffer in buffers if name not in left_out)


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Names of the buffers that are not in the state dict.

    Without their submodules' names in front (`fqns`) those of different submodules may coincide.
    """
    saved_names = module.state_dict(keep_vars=True).keys()
    buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
    names = {name for name, _ in buffers if name not in saved_names}
    return names if fqns else {name.rpartition(".")[2] for name in names}


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, together; sorted."""
    groups = names_by_tensor(model.named_parameters(remove_duplicate=False)).values()
    return sorted(sorted(group) for group in groups if len(group) > 1)


WeightFormat = str | torch.dtype | CustomDtype
NamedPart = tuple[str, Any]  # a module, a parameter or a buffer, with its name in front

_log = get_logger(__name__)


def names_upwards(tensor_name: str) -> Iterator[str]:
    """A name and those of all modules around it, from the inside out; the model's is empty."""
    while tensor_name:
        yield tensor_name
        tensor_name = tensor_name.rpartition(".")[0]
    yield ""


def owner_in(tensor_name: str, names: Container[str]) -> str | None:
    """The name itself or that of the nearest module around it, whichever is among some names."""
    return next((outer for outer in names_upwards(tensor_name) if outer in names), None)


def class_names(no_split_module_classes: str | Iterable[str] | None) -> frozenset[str]:
    """Names of classes, however they were given."""
    if isinstance(no_split_module_classes, str):
        return frozenset({no_split_module_classes})
    return frozenset(no_split_module_classes or ())


def compute_module_sizes(
    model: nn.Module,
    dtype: WeightFormat | None = None,
    special_dtypes: Mapping[str, WeightFormat] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each tensor and of each module of a model.

    A parameter or buffer that stands in several places counts at the first of them.

    Args:
        model: The module; its tensors may be on ``meta``.
        dtype: The format in which weights will be loaded. It makes floating-point tensors smaller,
            never larger; integers and booleans stay as they are.
        special_dtypes: Formats of single tensors by name, which are taken as they are said.
        buffers_only: Whether parameters are left out.

    Returns:
        Sizes by dotted name; the whole model's under the empty name. Names without a size of their
        own (of tied weights but the first, of modules without tensors) answer 0.

    Raises:
        ConfigError: A format is none.
    """
    number_bytes = None if dtype is None else dtype_byte_size(_read_format(dtype))
    special_formats = (special_dtypes or {}).items()
    special_bytes = {name: dtype_byte_size(_read_format(it)) for name, it in special_formats}
    get_tensors = nn.Module.named_buffers if buffers_only else named_module_tensors
    module_sizes: dict[str, int] = defaultdict(int)
    for tensor_name, tensor in get_tensors(model, recurse=True):
        bytes_each = special_bytes.get(tensor_name)
        if bytes_each is None:
            bytes_each = dtype_byte_size(tensor.dtype)
            # Loading converts floating-point (and complex) numbers only.
            if number_bytes is not None and (tensor.is_floating_point() or tensor.is_complex()):
                bytes_each = min(number_bytes, bytes_each)
        tensor_bytes = tensor.numel() * bytes_each
        for module_name in names_upwards(tensor_name):
            # Formats below a byte make fractions; whole numbers stay whole.
            module_sizes[module_name] += tensor_bytes  # type: ignore[assignment]
    return module_sizes


def _read_format(number_format: WeightFormat) -> torch.dtype | CustomDtype:
    # Before torch's names: its `int4` is a name without arithmetic that counts a whole byte.
    with contextlib.suppress(ValueError):
        return CustomDtype(number_format)
    return as_dtype(number_format)  # type: ignore[arg-type]  # no CustomDtype any more


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: WeightFormat | None = None,
    special_dtypes: Mapping[str, WeightFormat] | None = None,
) -> int:
    """Bytes of all buffers of a model.

    Args:
        model: The module.
        dtype: As in :func:`compute_module_sizes`.
        special_dtypes: As in :func:`compute_module_sizes`.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[NamedPart],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Iterable[str] | None,
) -> tuple[int, list[str]]:
    """The largest layer: what has to fit on a device at once for the model to run at all.

    A layer has no submodules, or is not to be split by its class, or is a tensor of ``modules``.

    Args:
        modules: Modules and tensors with their names.
        module_sizes: Sizes by name, as of :func:`compute_module_sizes`.
        no_split_module_classes: Names of the classes that must not be split.

    Returns:
        Its bytes, and the names of all layers of this size.
    """
    whole_classes = class_names(no_split_module_classes)
    layer_bytes: list[tuple[str, int]] = []
    waiting_parts = list(reversed(modules))
    while waiting_parts:
        part_name, part = waiting_parts.pop()
        children = list(part.named_children()) if isinstance(part, nn.Module) else []
        if children and type(part).__name__ not in whole_classes:
            waiting_parts += [
                (f"{part_name}.{child_name}" if part_name else child_name, child)
                for child_name, child in reversed(children)
            ]
        else:
            layer_bytes.append((part_name, module_sizes.get(part_name, 0)))
    largest_bytes = max((size for _, size in layer_bytes), default=0)
    return largest_bytes, [name for name, size in layer_bytes if size == largest_bytes]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of a model, and of its largest layer.

    Args:
        model: The module; one of transformers says itself which of its classes are not split.

    Returns:
        The whole; the largest layer's bytes with the names of all layers of that size.
    """
    module_sizes = compute_module_sizes(model)
    whole_classes = getattr(model, "_no_split_modules", None)
    parts: list[NamedPart] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return module_sizes[""], get_max_layer_size(parts, module_sizes, whole_classes)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Names with no other name of the same mapping below them; tensors, where it has those."""
    parent_names = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parent_names]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[NamedPart],
) -> tuple[int, list[str], list[Any]]:
    """Bytes of a module with all modules that hold a parameter tied to one of its own.

    The tied parameters' bytes are taken off once: the memory is the module's own. Returns also, for
    each tied parameter, the name and the module that holds it.
    """
    parts_by_name = dict(modules_to_treat)
    holder_names = [_known_owner(tied_param, parts_by_name) for tied_param in tied_params]
    # A module with two tied parameters comes along once.
    bytes_around = sum(module_sizes[name] for name in dict.fromkeys(holder_names))
    tied_bytes = sum(module_sizes[tied_param] for tied_param in tied_params)
    holders = [parts_by_name[holder_name] for holder_name in holder_names]
    return module_size + bytes_around - tied_bytes, holder_names, holders


def _known_owner(tensor_name: str, names: Collection[str]) -> str:
    owner = owner_in(tensor_name, names)
    if owner is None:
        raise ConfigError(
            f"Neither {tensor_name!r} nor a module around it is in {list(names)[:8]}: where it "
            "belongs is not known. Add one of them there."
        )
    return owner


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model of transformers says that some of its weights are to be tied."""
    if "PreTrainedModel" not in {base_class.__name__ for base_class in type(model).__mro__}:
        return False
    model_config: Any = getattr(model, "config", None)
    read_text_config = getattr(model_config, "get_text_config", None)
    text_config = model_config if read_text_config is None else read_text_config(decoder=True)
    ties_words = getattr(text_config, "tie_word_embeddings", False)
    outputs: Any = getattr(model, "get_output_embeddings", lambda: None)
    flags = ("is_encoder_decoder", "tie_encoder_decoder")
    ties_halves = all(getattr(model_config, name, False) for name in flags)
    ties_own = any(hasattr(module, "_tie_weights") for module in model.modules())
    return bool((ties_words and outputs() is not None) or ties_halves or ties_own)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Collection[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn, in the log, of tied parameters that a map puts on different devices."""
    for tied_names in tied_params:
        devices = {name: device_map[_known_owner(name, device_map)] for name in tied_names}
        if len(set(devices.values())) > 1:
            text = "Tied parameters are mapped to different devices: %s. Each device would get its "
            text += 'own copy, and they are one weight no more. Change the map, or take "auto".'
            _log.warning(text, devices)
