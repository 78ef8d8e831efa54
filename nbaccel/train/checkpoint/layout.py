"""How the files of a checkpoint are named, and what a folder has of them.

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
    random_states_0.pkl, …                        generators by rank, and the accumulation step
    gradients_0.bin, …                            by rank, of a save amid a group of batches
    custom_checkpoint_0.pkl, …                    registered objects
    nbaccel_manifest.json                         sizes and checksums of all these, when saved
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Contents", "gradients", "is_part", "loader_file", "numbered", "random_states"]

SAFE, UNSAFE = "model.safetensors", "pytorch_model.bin"
OPTIMIZER, SCHEDULER, SCALER = "optimizer.bin", "scheduler.bin", "scaler.pt"
SAMPLER, STATEFUL = "sampler.bin", "dl_state_dict.bin"
CUSTOM = "custom_checkpoint_{}.pkl"
MANIFEST = "nbaccel_manifest.json"
SHARDED_OPTIMIZER = "optimizer_{}"
SHARD_KINDS = {
    "fsdp": re.compile(r"pytorch_model_fsdp_(\d+)"),
    "deepspeed": re.compile(r"pytorch_model(?:_(\d+))?"),
}
"""Strategies whose processes write shards, and what folders they write for each model."""

_PART = re.compile(
    r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin"
    r"|(optimizer|scheduler)(_\d+)?\.bin|(sampler|dl_state_dict)(_\d+)?(_rank\d+)?\.bin"
    r"|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|gradients_\d+\.bin|pytorch_model_fsdp_\d+|optimizer_\d+"
    r"|pytorch_model(_\d+)?|latest|zero_to_(fp32|torch)\.py|nbaccel_manifest\.json)"
)


def is_part(name: str) -> bool:
    """Whether a file or folder of this name is a checkpoint's own, not one of the user's."""
    return _PART.fullmatch(name) is not None


def numbered(name: str, number: int) -> str:
    """A name with its number: ``optimizer.bin`` for 0, then ``optimizer_1.bin``."""
    stem, dot, ending = name.partition(".")
    return name if number == 0 else f"{stem}_{number}{dot}{ending}"


def sharded_model(kind: str, number: int) -> str:
    """The folder of a model in shards."""
    return f"pytorch_model_fsdp_{number}" if kind == "fsdp" else numbered("pytorch_model", number)


def random_states(rank: int) -> str:
    """The file of a process's generators."""
    return f"random_states_{rank}.pkl"


def gradients(rank: int) -> str:
    """The file of a process's gradients that wait for an optimizer step."""
    return f"gradients_{rank}.bin"


def loader_file(number: int, *, stateful: bool, rank: int = 0) -> str:
    """The file that says where a loader is, for one process."""
    stem, _, ending = numbered(STATEFUL if stateful else SAMPLER, number).partition(".")
    return f"{stem}_rank{rank}.{ending}" if rank else f"{stem}.{ending}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a folder has of a checkpoint.

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
    def of(cls, folder: Path) -> Contents:
        """Look into a folder."""
        files = [p.name for p in folder.iterdir() if not p.is_dir()]
        folders = [p.name for p in folder.iterdir() if p.is_dir()]
        return cls(
            models=_numbers(files, r"model(?:_(\d+))?\.safetensors")
            | _numbers(files, r"pytorch_model(?:_(\d+))?\.bin"),
            sharded_models={
                kind: found
                for kind, pattern in SHARD_KINDS.items()
                if (found := _numbers(folders, pattern))
            },
            optimizers=_numbers(files, r"optimizer(?:_(\d+))?\.bin"),
            schedulers=_numbers(files, r"scheduler(?:_(\d+))?\.bin"),
            custom=_numbers(files, r"custom_checkpoint_(\d+)\.pkl"),
            has_scaler=SCALER in files,
        )


def _numbers(names: list[str], pattern: str | re.Pattern[str]) -> frozenset[int]:
    matches = (re.fullmatch(pattern, name) for name in names)
    return frozenset(int(match[1] or 0) for match in matches if match)
