"""A checkpoint's files: their names, how one is read, and how it is written.

A reader finds the old file or the new one, never a partial file. The names are Accelerate's, so
that either can read what the other wrote; ``sampler.bin``, which its documentation promises, is
written here, too.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes, save_file
from torch import nn

from nbaccel.base import atomic
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.torch_private import plain_data
from nbaccel.base.trees import names_by_tensor
from nbaccel.base.weight_files import OLD_TORCH_FORMAT, publishing
from nbaccel.config.given_values import shown
from nbaccel.transfer.sharded_tensors import shard_readers

_Noted = TypeVar("_Noted")
_WEIGHT_FILE_PATTERNS = {True: "model{suffix}.safetensors", False: "pytorch_model{suffix}.bin"}


def read_torch_file(path: Path, *, allowed: Iterable[Any] = (), **options: Any) -> Any:
    """Read what ``torch.save`` wrote, without running code that might be in it."""
    options = {"weights_only": True, "map_location": "cpu", **options}
    try:
        with plain_data(allowed):
            return torch.load(path, **options)
    except (MemoryError, ModuleNotFoundError):
        raise  # the machine's fault, not the file's
    except Exception as error:  # a damaged pickle can raise anything
        # Without torch's own advice, which is to let the file run whatever it says.
        raise CheckpointDamaged(why_unreadable(path, error)) from None


def read_torch_outline(path: Path, **options: Any) -> Any:
    """Read what ``torch.save`` wrote, without the values: tensors are on ``meta``."""
    with path.open("rb") as file:
        is_old = file.read(len(OLD_TORCH_FORMAT)) == OLD_TORCH_FORMAT
    return read_torch_file(path, **{**options, "map_location": "cpu" if is_old else "meta"})


def read_weights(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Weights by name, those too that were not written because they are tied to others."""
    is_outline = device.type == "meta"  # no values are read
    if path.suffix != ".safetensors":
        state = (
            read_torch_outline(path) if is_outline else read_torch_file(path, map_location=device)
        )
        if not isinstance(state, Mapping):
            raise ConfigError(f"{path} holds no weights by name, but a {type(state).__name__}.")
        weights = {str(name): value for name, value in state.items()}
        stored_names: Mapping[str, str] = {}
    else:
        try:
            with safe_open(path, "pt", device="cpu" if is_outline else str(device)) as file:
                weights = {
                    name: torch.empty(file.get_slice(name).get_shape(), device="meta")
                    if is_outline
                    else file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118 - safe_open has no __iter__
                }
                # huggingface_hub notes under which name a tied tensor was stored.
                stored_names = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CheckpointDamaged(
                f"{path} cannot be read ({error}). Nothing has been loaded. Load another one."
            ) from error
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for names in (*names_by_tensor(named).values(), *stored_names.items()):
        stored = [name for name in names if name in weights]
        weights |= {name: weights[stored[0]] for name in names if stored and name not in weights}
    return weights


def why_unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a file that torch was to read, and what to do."""
    # torch has one exception for everything that it refuses; only the text names the class.
    global_match = re.search(r"GLOBAL (\S+) (was not an allowed global)?", str(error))
    if global_match:
        remedy = (
            "If you wrote this file yourself and nobody could change it, "
            "torch.serialization.add_safe_globals allows this class; load_state also takes "
            "load_kwargs={'weights_only': False}, which allows all."
        )
        return (
            f"{path} holds a {global_match[1]}: only numbers, text, tensors and plain containers "
            "are read, because a pickle of anything else can run any code. Nothing of it was run "
            f"or loaded. {remedy if global_match[2] else 'Load another checkpoint.'}"
        )
    reason = str(error).partition("\n")[0][:200] or "it ends too early"
    if "weights_only" in reason:
        reason = "it is no pickle of plain data"
    return (
        f"{path} cannot be read ({type(error).__name__}: {reason}): it is truncated, "
        "damaged or of something else. Nothing has been loaded. Load another, or copy it again."
    )


def save(obj: Any, path: str | Path | IO[bytes], safe_serialization: bool = False) -> None:
    """Write an object to a file; a reader sees the old file or the whole new one."""
    _check_no_placeholders(obj, f"save(..., {str(path)!r})")
    if safe_serialization:
        _check_only_tensors(obj, "safe_serialization=False")
        obj = _with_addresses(obj)
    if not isinstance(path, (str, os.PathLike)):
        if safe_serialization:
            # safetensors refuses tensors that are not contiguous.
            path.write(to_bytes({name: tensor.contiguous() for name, tensor in obj.items()}))
        else:
            torch.save(obj, path)
        return
    path = Path(path).resolve()  # a link stays one, as with torch.save
    with atomic.partial_folder(path.parent, path.name) as folder:
        if safe_serialization:
            written_file = folder / "model.safetensors"
            if obj:
                # The caller named one file, so the weights must not be split, whatever their size.
                save_torch_state_dict(
                    dict(obj),
                    folder,
                    max_shard_size=sys.maxsize,
                    shared_tensors_to_discard=_tied_to_earlier(obj),
                )
            else:
                # huggingface_hub writes no file where there are no tensors.
                save_file({}, written_file, metadata={"format": "pt"})
        else:
            written_file = folder / "object"
            try:
                torch.save(obj, written_file)
            except RuntimeError:
                # torch's C++ writer drops the reason. Python's is slower and keeps it.
                with _ErrorNotingFile(written_file.open("wb", buffering=0)) as file:
                    try:
                        torch.save(obj, file)
                    except RuntimeError as error:
                        if file.error is not None:
                            raise file.error from error
                        raise
        # Before the rename, which could otherwise reach the disk sooner than the file's contents.
        atomic.sync_path(written_file)
        atomic.keep_access(written_file, path)
        written_file.replace(path)


class _ErrorNotingFile(io.BufferedWriter):
    """Keeps the OSError of a failed write, which torch replaces by a RuntimeError without cause."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def save_model(
    state_dict: Mapping[str, Any],
    folder: str | Path,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write weights as ``model.safetensors``, or in several files with an index.

    Each file appears whole. Files of an earlier save that do not belong to this one are removed
    last. Of tensors that are tied the first is written.
    """
    _check_only_tensors(state_dict, "accelerator.save(state_dict, file), which pickles it")
    _check_no_placeholders(state_dict, f"save_model(save_directory={str(folder)!r})")
    pattern = _WEIGHT_FILE_PATTERNS[safe_serialization]
    tensors = _with_addresses(state_dict)
    sizes = {_address(tensor): tensor.nbytes for tensor in tensors.values()}
    with publishing(Path(folder), sum(sizes.values()), pattern) as workshop:
        save_torch_state_dict(
            tensors,
            workshop,
            filename_pattern=pattern,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
            shared_tensors_to_discard=_tied_to_earlier(tensors),
        )


def _with_addresses(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors; in host memory those whose device gives no address, such as torch_xla's."""
    # safetensors' writers tell tied tensors by it: tied ones of such a device are written twice.
    tensors = dict(state_dict)
    for name, tensor in state_dict.items():
        try:
            tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            # Tensors of other classes, such as sharded ones, are left to the writer.
            if type(tensor) in _PLAIN:
                tensors[name] = tensor.detach().cpu()
    return tensors


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _address(tensor: torch.Tensor) -> int:
    """What tied tensors have in common; those of other classes, such as sharded ones, are not."""
    return tensor.data_ptr() if type(tensor) in _PLAIN else id(tensor)


def _tied_to_earlier(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are not written: readers look for the embedding, not for the head tied to it."""
    first_names: dict[int, str] = {}
    return [
        name
        for name, tensor in tensors.items()
        if first_names.setdefault(_address(tensor), name) != name
    ]


def _check_no_placeholders(obj: Any, text: str) -> None:
    # Without a library that leaves placeholders, an empty tensor is just an empty tensor.
    for reader in shard_readers():
        for checked_part in (obj, *(obj.values() if isinstance(obj, Mapping) else ())):
            if isinstance(checked_part, (Mapping, torch.nn.Module)):
                reader.check_whole(checked_part, text)


def _check_only_tensors(state_dict: Any, remedy: str) -> None:
    if not isinstance(state_dict, Mapping):
        raise ConfigError(
            f"Weights were to be saved, but this is {shown(state_dict)}, and files of weights "
            f"hold a dict of tensors. Give one, or use {remedy}."
        )
    other_names = [n for n, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    if other_names:
        raise ConfigError(
            f"{', '.join(map(repr, other_names[:3]))}{' …' if len(other_names) > 3 else ''} "
            f"cannot be saved here: a {type(state_dict[other_names[0]]).__name__} is no tensor, "
            f"and files of weights hold nothing else. Leave it out, or use {remedy}."
        )


# A second model's is ``model_1.safetensors``, and so on; a second process's ``sampler_rank1.bin``.
SAFE_WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"
OPTIMIZER_FILE = "optimizer.bin"
SCHEDULER_FILE = "scheduler.bin"
SCALER_FILE = "scaler.pt"  # of fp16
PRECISION_FILE = "fp8_scales.bin"  # scales and histories of fp8's delayed scaling
SAMPLER_FILE = "sampler.bin"  # where a loader is in its data
STATEFUL_LOADER_FILE = "dl_state_dict.bin"  # the same of torchdata's loaders
CUSTOM_OBJECT_FILE = "custom_checkpoint_{}.pkl"  # registered objects
RANDOM_STATES_FILE = "random_states_{}.pkl"  # generators by rank, and the accumulation step
GRADIENTS_FILE = "gradients_{}.bin"  # by rank, of a save within a group of batches
MANIFEST_FILE = "nbaccel_manifest.json"  # sizes and checksums of all these, when saved
LEFT_OUT_FILE = "nbaccel_left_out.json"  # names of frozen parameters that were not saved
OPTIMIZER_SHARDS = "optimizer_{}"  # a model's further ones; its first lies with the model's shards
# A kind's parts have their number in the last group, where it is not 0. Anything that matches none
# of them is the user's: a save moves it into the new folder.
_PARTS = {
    "model": r"model(?:_(\d+))?\.safetensors|pytorch_model(?:_(\d+))?\.bin",
    "optimizer": r"optimizer(?:_(\d+))?\.bin",
    "scheduler": r"scheduler(?:_(\d+))?\.bin",
    "registered object": r"custom_checkpoint_(\d+)\.pkl",
    "scaler": r"scaler\.pt",
    # Strategies whose processes write shards, and what folders they write for each model.
    "fsdp": r"pytorch_model_fsdp_(\d+)",
    "deepspeed": r"pytorch_model(?:_(\d+))?",
    # DeepSpeed writes `latest` and the scripts beside its shards.
    "": r"(?:sampler|dl_state_dict)(?:_\d+)?(?:_rank\d+)?\.bin|fp8_scales\.bin|optimizer_\d+"
    r"|random_states_\d+\.pkl|gradients_\d+\.bin|latest|zero_to_(?:fp32|torch)\.py"
    r"|nbaccel_(?:manifest|left_out)\.json",
}
SHARD_KINDS = ("fsdp", "deepspeed")


def _kind_and_number(name: str) -> tuple[str, int] | None:
    for kind, pattern in _PARTS.items():
        if name_match := re.fullmatch(pattern, name):
            return kind, int(name_match[name_match.lastindex]) if name_match.lastindex else 0
    return None


def is_checkpoint_part(name: str) -> bool:
    """Whether a file or folder of this name is a checkpoint's own, not one of the user's."""
    return _kind_and_number(name) is not None


def numbered_name(file_name: str, number: int) -> str:
    """A name with its number: ``optimizer.bin`` for 0, then ``optimizer_1.bin``."""
    file_stem, separator, file_ending = file_name.partition(".")
    return file_name if number == 0 else f"{file_stem}_{number}{separator}{file_ending}"


def loader_file(number: int, loader: Any, rank: int = 0) -> str:
    """The file with the position of a loader, for one process."""
    is_stateful = getattr(loader, "use_stateful_dataloader", False)
    name = numbered_name(STATEFUL_LOADER_FILE if is_stateful else SAMPLER_FILE, number)
    return name.replace(".bin", f"_rank{rank}.bin") if rank else name


def numbers_by_kind(folder: Path) -> dict[str, frozenset[int]]:
    """The numbers of a checkpoint's models, optimizers and so on, those in shards by their kind."""
    found = list(filter(None, (_kind_and_number(path.name) for path in folder.iterdir())))
    return {kind: frozenset(n for found_kind, n in found if found_kind == kind) for kind in _PARTS}


def write_left_out(folder: Path, names_by_model: Mapping[int, Collection[str]]) -> None:
    """Note names of what a checkpoint has left out, by number of the model."""
    content = {str(number): sorted(names) for number, names in names_by_model.items()}
    text = json.dumps({"frozen_parameters_left_out": content}, indent=1)
    atomic.write_text(folder / LEFT_OUT_FILE, f"{text}\n")


def read_left_out(folder: Path) -> dict[int, frozenset[str]]:
    """Read what :func:`write_left_out` noted; mostly nothing."""
    path = folder / LEFT_OUT_FILE
    if not path.exists():
        return {}
    return read_noted(
        path,
        lambda content: {
            int(number): frozenset(map(str, names))
            for number, names in content["frozen_parameters_left_out"].items()
        },
        "the names of the frozen parameters that were left out. Nothing has been loaded. Load "
        "another checkpoint, or copy the file again from where it was saved.",
    )


def read_noted(path: Path, take: Callable[[Any], _Noted], what_it_has: str) -> _Noted:
    """What is noted in a checkpoint's JSON file."""
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    # JSON of any other shape raises one of these.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}): it has "
            f"{what_it_has}"
        ) from error
