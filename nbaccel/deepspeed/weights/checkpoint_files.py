"""Which files a checkpoint of DeepSpeed consists of, and what is wrong where they do not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.units import count_noun, number_ranges
from nbaccel.deepspeed.weights.placeholders import check_whole
from nbaccel.deepspeed.weights.state_files import read_states

_MODEL_FILE = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<parallel>\d+)_model_states\.pt"
)
_OPTIMIZER_FILE = re.compile(
    r"(?P<kind>\w*?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<parallel>\d+)_optim_states\.pt"
)
_EXPERT_FILE = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*")
_ANY_STATES = "*_states.pt"
# No separators: a tag that is read from a file must not lead to another folder.
_TAG_FOLDER = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f]+")
_LONGEST_NAME = 255  # bytes, on the usual file systems
_GIVE_FOLDER = "Give the folder that save_checkpoint was given."


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one save, by rank."""

    folder: Path
    model: dict[int, Path]
    """Files of model states; that of stages 0-2 counts as rank 0's."""
    optimizer: dict[int, Path]

    def check_ranks(self, num_ranks: int, stage: int) -> None:
        """Refuse a checkpoint with missing files, or mixed with another."""
        kinds = {"optim": self.optimizer, **({"model": self.model} if stage == 3 else {})}
        mistakes = []
        for kind, files in kinds.items():
            missing = sorted(set(range(num_ranks)) - files.keys())
            extra = sorted(files.keys() - set(range(num_ranks)))
            names = f"*zero_pp_rank_N_mp_rank_00_{kind}_states.pt of rank"
            if missing:
                mistakes.append(
                    f"{self.folder} was saved by {count_noun(num_ranks, 'rank')}, and the files "
                    f"{names} {number_ranges(missing)} are missing: each holds a part of every "
                    "weight. Copy them here from the machine that wrote them "
                    "(use_node_local_storage leaves them on each node), or convert another "
                    "checkpoint (tag=...)."
                )
            elif extra:
                mistakes.append(
                    f"{self.folder} was saved by {count_noun(num_ranks, 'rank')}, but files of "
                    f"further ranks are there, too ({names} {number_ranges(extra)}): an earlier "
                    "save of more ranks was written over, and it is not certain which parts belong "
                    "together. If the last save is the one you want and it was completed, delete "
                    "those files and try again."
                )
        if mistakes:
            raise ConfigError(*mistakes)


def find_files(checkpoint_dir: str | Path, tag: str | None = None) -> CheckpointFiles:
    """Find the files of one save."""
    root = Path(checkpoint_dir).expanduser()
    if not root.is_dir():
        _refuse_no_folder(root)
    folder = _tagged_folder(root, tag)
    names = sorted(path.name for path in folder.glob(_ANY_STATES))
    _check_kind(folder, names)
    model = _by_rank(folder, names, _MODEL_FILE)
    if not model:
        raise ConfigError(
            f"{folder} has no file *_model_states.pt, which tells the names and shapes of the "
            f"weights: it holds {_content_of(folder)}. The save was interrupted, or rank 0 wrote "
            "on another machine. Copy that file here, or convert another checkpoint."
        )
    return CheckpointFiles(folder, model, _by_rank(folder, names, _OPTIMIZER_FILE))


def _content_of(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing at all"


def _refuse_no_folder(root: Path) -> NoReturn:
    if root.exists():
        _refuse_placeholders(root)
        raise ConfigError(
            f"{root} is a file, and a checkpoint of ZeRO is a folder, in which each rank has files "
            f"of its own. {_GIVE_FOLDER}"
        )
    others = ", ".join(sorted(path.name for path in root.parent.glob("[!.]*/"))[:8])
    neighbours = f"In {root.parent} there are: {others}. " if others else ""
    raise ConfigError(
        f"{root} does not exist, so there is no checkpoint to convert. {neighbours}{_GIVE_FOLDER}"
    )


def _tagged_folder(root: Path, tag: str | None) -> Path:
    if _has_states(root) and tag in (None, root.name):
        return root
    if tag is None and (root / "latest").is_file():
        tag = _latest_tag(root / "latest")
    if tag is not None and (root / tag).is_dir():
        return root / tag
    tags = sorted(path.name for path in root.iterdir() if _has_states(path))
    if tag is None and not tags:
        for path in sorted([*root.glob("*.safetensors"), *root.glob("*.bin")]):
            _refuse_placeholders(path)
        raise ConfigError(
            f"{root} is no checkpoint of DeepSpeed: it has neither a file `latest` nor a folder "
            f"with *_states.pt in it, but {_content_of(root)}. {_GIVE_FOLDER}"
        )
    asked = "file `latest`, which would tell the tag of the last save"
    if tag is not None:
        asked = f"checkpoint of the tag {tag!r}"
    listed = f"there {'is' if len(tags) == 1 else 'are'} {', '.join(tags) or 'none'}"
    choice = f"Say which: tag={tags[-1]!r}." if tags else _GIVE_FOLDER
    raise ConfigError(f"{root} has no {asked}: {listed}. {choice}")


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(_ANY_STATES))


def _latest_tag(path: Path) -> str:
    """The tag in a file `latest`: the name of a folder beside it, and not a way to elsewhere."""
    with path.open("rb") as file:
        content = file.read(_LONGEST_NAME + 1)
    tag = content.decode("utf-8", errors="replace").strip()
    if len(content) > _LONGEST_NAME or not _TAG_FOLDER.fullmatch(tag):
        raise CheckpointDamaged(
            f"{path} holds {tag[:60]!r}, and should hold the tag of the last save, which is the "
            "name of a folder beside it: it is damaged, or not written by DeepSpeed. Say which "
            "save is meant: tag=..."
        )
    return tag


def _refuse_placeholders(path: Path) -> None:
    """Refuse a file of weights that was written while ZeRO-3 had them in parts."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
            state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        else:
            state = dict(read_states(path).states.items())
    except (ConfigError, SafetensorError, AttributeError):
        return
    check_whole(state, str(path))


def _check_kind(folder: Path, names: Sequence[str]) -> None:
    """Refuse checkpoints that cannot be put together from data-parallel parts."""
    if (folder / "zero").is_dir() and not any(folder.glob("*_optim_states.pt")):
        raise ConfigError(
            f"{folder} is a universal checkpoint, made from another one by ds_to_universal: "
            "it has a folder per parameter instead of files of ranks. Convert the checkpoint that "
            f"it was made from: tag={folder.name.removesuffix('_universal')!r}, if it is "
            "still there; or load this one into an engine and use fp32_state_dict(engine)."
        )
    experts = list(filter(_EXPERT_FILE.fullmatch, names))
    if experts:
        raise cut_otherwise(folder, f"has experts in files of their own ({experts[0]})")
    matches = [_MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name) for name in names]
    ranks = sorted({int(match["parallel"]) for match in matches if match})
    if ranks[1:]:
        name = f"mp_rank_{ranks[-1]:02d}"
        raise cut_otherwise(
            folder, f"was saved with tensor parallelism, over {len(ranks)} ranks ({name} is there)"
        )


def cut_otherwise(path: Path, what: str) -> ConfigError:
    """The error about weights that are not cut by data-parallel ranks alone."""
    return ConfigError(
        f"{path} {what}: its weights are not spread over all ranks alike, and the parts of all "
        "ranks put together would be wrong. Make a universal checkpoint with ds_to_universal, or "
        "load it into its engine and gather or save there."
    )


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    name_by_rank: dict[int, str] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        # Below stage 3 there is one file of model states, without a rank in its name.
        rank = int(match["rank"] or 0)
        if rank in name_by_rank:
            raise ConfigError(
                f"{folder} has both {name_by_rank[rank]} and {match[0]} for rank {rank}: two "
                "saves of different kinds went to one tag. Delete the files of the older one."
            )
        name_by_rank[rank] = match[0]
    return {rank: folder / name for rank, name in name_by_rank.items()}
