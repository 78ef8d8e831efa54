"""The names of a checkpoint's files, and which of them a folder has.

The names are Accelerate's, so that either can read what the other wrote; ``sampler.bin``, which
its documentation promises, is written here, too.

    model.safetensors, model_1.safetensors, …     weights (pytorch_model.bin, … without safetensors)
    pytorch_model_fsdp_0/, …                      in shards, with the model's first optimizer
    pytorch_model/, pytorch_model_1/, …           the same of DeepSpeed, beside its own `latest`
    optimizer_1/, …                               in shards, the model's further optimizers
    optimizer.bin, scheduler.bin, …               by number, from 0
    sampler.bin, sampler_rank1.bin, …             where a loader is in its data, by rank
    dl_state_dict.bin, dl_state_dict_rank1.bin, … the same of torchdata's loaders
    scaler.pt                                     of fp16
    fp8_scales.bin                                scales and histories of fp8's delayed scaling
    random_states_0.pkl, …                        generators by rank, and the accumulation step
    gradients_0.bin, …                            by rank, of a save within a group of batches
    custom_checkpoint_0.pkl, …                    registered objects
    nbaccel_left_out.json                         names of frozen parameters that were not saved
    nbaccel_manifest.json                         sizes and checksums of all these, when saved
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nbaccel.base.errors import CheckpointDamaged

SAFE_WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"
OPTIMIZER_FILE = "optimizer.bin"
SCHEDULER_FILE = "scheduler.bin"
SCALER_FILE = "scaler.pt"
PRECISION_FILE = "fp8_scales.bin"
SAMPLER_FILE = "sampler.bin"
STATEFUL_LOADER_FILE = "dl_state_dict.bin"
CUSTOM_OBJECT_FILE = "custom_checkpoint_{}.pkl"
RANDOM_STATES_FILE = "random_states_{}.pkl"  # by rank
GRADIENTS_FILE = "gradients_{}.bin"  # by rank
MANIFEST_FILE = "nbaccel_manifest.json"
LEFT_OUT_FILE = "nbaccel_left_out.json"
OPTIMIZER_SHARDS = "optimizer_{}"
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


def loader_file(number: int, *, stateful: bool, rank: int = 0) -> str:
    """The file with the position of a loader, for one process."""
    file_stem, _, file_ending = numbered_name(
        STATEFUL_LOADER_FILE if stateful else SAMPLER_FILE, number
    ).partition(".")
    return f"{file_stem}_rank{rank}.{file_ending}" if rank else f"{file_stem}.{file_ending}"


def numbers_by_kind(folder: Path) -> dict[str, frozenset[int]]:
    """The numbers of a checkpoint's models, optimizers and so on, those in shards by their kind."""
    found = list(filter(None, (_kind_and_number(path.name) for path in folder.iterdir())))
    return {kind: frozenset(n for found_kind, n in found if found_kind == kind) for kind in _PARTS}


# ------------------------------------------------------------------------- what was left out


def left_out_text(names_by_model: Mapping[int, Collection[str]]) -> str:
    """What the checkpoint's file says."""
    content = {str(number): sorted(names) for number, names in names_by_model.items()}
    return json.dumps({"frozen_parameters_left_out": content}, indent=1) + "\n"


def read_left_out(folder: Path) -> dict[int, frozenset[str]]:
    """Names of what a checkpoint has left out, by number of the model; mostly none."""
    path = folder / LEFT_OUT_FILE
    if not path.exists():
        return {}
    noted: dict[int, frozenset[str]] = read_noted(
        path,
        lambda content: {
            int(number): frozenset(map(str, names))
            for number, names in content["frozen_parameters_left_out"].items()
        },
        "the names of the frozen parameters that were left out. Nothing has been loaded. Load "
        "another checkpoint, or copy the file again from where it was saved.",
    )
    return noted


def read_noted(path: Path, take: Callable[[Any], Any], what_it_has: str) -> Any:
    """What is noted in a checkpoint's JSON file."""
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    # JSON of any other shape raises one of these.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}): it has "
            f"{what_it_has}"
        ) from error
