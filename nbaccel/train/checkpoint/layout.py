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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

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
MANIFEST_FILE = "nbaccel_manifest.json"
LEFT_OUT_FILE = "nbaccel_left_out.json"
OPTIMIZER_SHARDS = "optimizer_{}"
SHARD_FOLDERS = {
    "fsdp": re.compile(r"pytorch_model_fsdp_(\d+)"),
    "deepspeed": re.compile(r"pytorch_model(?:_(\d+))?"),
}
"""Strategies whose processes write shards, and what folders they write for each model."""

# Anything that does not match is the user's: a save moves it into the new folder.
_CHECKPOINT_PART = re.compile(
    r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin"
    r"|(optimizer|scheduler)(_\d+)?\.bin|(sampler|dl_state_dict)(_\d+)?(_rank\d+)?\.bin"
    r"|scaler\.pt|fp8_scales\.bin|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|gradients_\d+\.bin|pytorch_model_fsdp_\d+|optimizer_\d+"
    # DeepSpeed writes `latest` and the scripts beside its shards.
    r"|pytorch_model(_\d+)?|latest|zero_to_(fp32|torch)\.py|nbaccel_(manifest|left_out)\.json)"
)


def is_checkpoint_part(name: str) -> bool:
    """Whether a file or folder of this name is a checkpoint's own, not one of the user's."""
    return _CHECKPOINT_PART.fullmatch(name) is not None


def numbered_name(file_name: str, number: int) -> str:
    """A name with its number: ``optimizer.bin`` for 0, then ``optimizer_1.bin``."""
    file_stem, separator, file_ending = file_name.partition(".")
    return file_name if number == 0 else f"{file_stem}_{number}{separator}{file_ending}"


def random_states_file(rank: int) -> str:
    """The file of a process's generators."""
    return f"random_states_{rank}.pkl"


def gradients_file(rank: int) -> str:
    """The file of a process's gradients that wait for an optimizer step."""
    return f"gradients_{rank}.bin"


def loader_file(number: int, *, stateful: bool, rank: int = 0) -> str:
    """The file with the position of a loader, for one process."""
    file_stem, _, file_ending = numbered_name(
        STATEFUL_LOADER_FILE if stateful else SAMPLER_FILE, number
    ).partition(".")
    return f"{file_stem}_rank{rank}.{file_ending}" if rank else f"{file_stem}.{file_ending}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContents:
    """The parts of a checkpoint that a folder has.

    Attributes:
        models: Numbers of the models with weights in one file.
        sharded_models: Numbers of those in shards, by kind.
        optimizers: Numbers of the optimizers in one file.
        schedulers: Numbers of schedulers.
        custom: Numbers of registered objects.
        has_scaler: Whether there is a scaler.
    """

    models: frozenset[int]
    sharded_models: Mapping[str, frozenset[int]]
    optimizers: frozenset[int]
    schedulers: frozenset[int]
    custom: frozenset[int]
    has_scaler: bool

    @classmethod
    def of(cls, folder: Path) -> CheckpointContents:
        """Look into a folder."""
        file_names = [path.name for path in folder.iterdir() if not path.is_dir()]
        folder_names = [path.name for path in folder.iterdir() if path.is_dir()]
        return cls(
            models=_matched_numbers(file_names, r"model(?:_(\d+))?\.safetensors")
            | _matched_numbers(file_names, r"pytorch_model(?:_(\d+))?\.bin"),
            sharded_models={
                shard_kind: model_numbers
                for shard_kind, pattern in SHARD_FOLDERS.items()
                if (model_numbers := _matched_numbers(folder_names, pattern))
            },
            optimizers=_matched_numbers(file_names, r"optimizer(?:_(\d+))?\.bin"),
            schedulers=_matched_numbers(file_names, r"scheduler(?:_(\d+))?\.bin"),
            custom=_matched_numbers(file_names, r"custom_checkpoint_(\d+)\.pkl"),
            has_scaler=SCALER_FILE in file_names,
        )


def _matched_numbers(file_names: list[str], pattern: str | re.Pattern[str]) -> frozenset[int]:
    matches = (re.fullmatch(pattern, file_name) for file_name in file_names)
    return frozenset(int(name_match[1] or 0) for name_match in matches if name_match)


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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["frozen_parameters_left_out"]
        return {int(number): frozenset(map(str, names)) for number, names in content.items()}
    # JSON of any other shape raises one of these.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}): it has the names "
            "of the frozen parameters that were left out. Nothing has been loaded. Load another "
            "checkpoint, or copy the file again from where it was saved."
        ) from error
