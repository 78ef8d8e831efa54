"""Which files a checkpoint of DeepSpeed consists of, and what is wrong where they do not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.units import count_noun, number_ranges
from nbaccel.deepspeed.weights.placeholders import placeholders
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
    """The files of one save.

    Attributes:
        folder: Where they lie.
        model: Files of model states, by rank; that of stages 0-2 counts as rank 0's.
        optimizer: Files of optimizer states, by rank.
    """

    folder: Path
    model: dict[int, Path]
    optimizer: dict[int, Path]

    def check_ranks(self, num_ranks: int, stage: int) -> None:
        """Refuse a checkpoint with missing files, or mixed with another."""
        mistakes = [self._rank_mistake("optim", self.optimizer, num_ranks)]
        if stage == 3:
            mistakes.append(self._rank_mistake("model", self.model, num_ranks))
        if any(mistakes):
            raise ConfigError(*filter(None, mistakes))

    def _rank_mistake(self, state_kind: str, files: dict[int, Path], num_ranks: int) -> str:
        saved = f"{self.folder} was saved by {count_noun(num_ranks, 'rank')}"
        missing_ranks = sorted(set(range(num_ranks)) - files.keys())
        extra_ranks = sorted(files.keys() - set(range(num_ranks)))
        if missing_ranks:
            return (
                f"{saved}, and the files *zero_pp_rank_N_mp_rank_00_{state_kind}_states.pt of rank "
                f"{number_ranges(missing_ranks)} are missing: each holds a part of every weight. "
                "Copy them here from the machine that wrote them (use_node_local_storage leaves "
                "them on each node), or convert another checkpoint (tag=...)."
            )
        if extra_ranks:
            names = ", ".join(files[rank].name for rank in extra_ranks[:3])
            return (
                f"{saved}, but files of further ranks are there, too ({names}): an earlier save of "
                "more ranks was written over, and it is not certain which parts belong together. "
                "If the last save is the one you want and it was completed, delete those files and "
                "try again."
            )
        return ""


def find_files(checkpoint_dir: str | Path, tag: str | None = None) -> CheckpointFiles:
    """Find the files of one save."""
    root = Path(checkpoint_dir).expanduser()
    if not root.is_dir():
        raise ConfigError(_no_folder(root))
    folder = _tagged_folder(root, tag)
    _check_kind(folder)
    model = _by_rank(folder, _MODEL_FILE)
    if not model:
        raise ConfigError(
            f"{folder} has no file *_model_states.pt, which tells the names and shapes of the "
            f"weights: it holds {_content_of(folder) or 'nothing'}. The save was interrupted, or "
            "rank 0 wrote on another machine. Copy that file here, or convert another checkpoint."
        )
    return CheckpointFiles(folder, model, _by_rank(folder, _OPTIMIZER_FILE))


def _content_of(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:6])


def _no_folder(root: Path) -> str:
    if root.exists():
        return _placeholder_text(root) or (
            f"{root} is a file, and a checkpoint of ZeRO is a folder, in which each rank has files "
            f"of its own. {_GIVE_FOLDER}"
        )
    others = ", ".join(sorted(path.name for path in root.parent.glob("[!.]*/"))[:8])
    neighbours = f"In {root.parent} there are: {others}. " if others else ""
    return (
        f"{root} does not exist, so there is no checkpoint to convert. {neighbours}{_GIVE_FOLDER}"
    )


def _tagged_folder(root: Path, tag: str | None) -> Path:
    tags = sorted(path.name for path in root.iterdir() if _has_states(path))
    listed_tags = f"there {'is' if len(tags) == 1 else 'are'} {', '.join(tags)}"
    if _has_states(root) and tag in (None, root.name):
        return root
    if tag is None and (root / "latest").is_file():
        tag = _latest_tag(root / "latest")
    if tag is None:
        raise ConfigError(
            f"{root} has no file `latest`, which would tell the tag of the last save. "
            f"T{listed_tags[1:]}. Say which: tag={tags[-1]!r}."
            if tags
            else _no_checkpoint(root)
        )
    if not (root / tag).is_dir():
        choice = f": {listed_tags}. Give one of these." if tags else f", nor any. {_GIVE_FOLDER}"
        raise ConfigError(f"{root} has no checkpoint of the tag {tag!r}{choice}")
    return root / tag


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(_ANY_STATES))


def _no_checkpoint(root: Path) -> str:
    files = sorted([*root.glob("*.safetensors"), *root.glob("*.bin")])
    return next(filter(None, map(_placeholder_text, files)), "") or (
        f"{root} is no checkpoint of DeepSpeed: it has neither a file `latest` nor a folder with "
        f"*_states.pt in it, but {_content_of(root) or 'nothing at all'}. {_GIVE_FOLDER}"
    )


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


def _placeholder_text(path: Path) -> str:
    """The message about weights that were saved while ZeRO-3 had them in parts; or empty."""
    try:
        state = _state_dict_in(path)
        names = placeholders(state)
    except (ConfigError, SafetensorError, AttributeError):
        return ""
    if not names:
        return ""
    return (
        f"{path} holds ZeRO-3 placeholders instead of weights: {len(names)} of its {len(state)} "
        f"tensors have shape (0,) or (1,), as {names[0]}. It was written by state_dict() or "
        "torch.save while the parameters were spread over the ranks, and the weights are not in "
        "it. Convert the checkpoint that engine.save_checkpoint wrote, if there is one."
    )


def _state_dict_in(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        return dict(read_states(path).states.items())
    with safe_open(path, "pt") as file:
        return {
            name: torch.empty(file.get_slice(name).get_shape(), device="meta")
            for name in list(file.keys())
        }


def _check_kind(folder: Path) -> None:
    """Refuse checkpoints that cannot be put together from data-parallel parts."""
    if (folder / "zero").is_dir() and not any(folder.glob("*_optim_states.pt")):
        raise ConfigError(
            f"{folder} is a universal checkpoint, made from another one by ds_to_universal: "
            "it has a folder per parameter instead of files of ranks. Convert the checkpoint that "
            f"it was made from: tag={folder.name.removesuffix('_universal')!r}, if it is "
            "still there; or load this one into an engine and use fp32_state_dict(engine)."
        )
    names = sorted(path.name for path in folder.glob(_ANY_STATES))
    experts = list(filter(_EXPERT_FILE.fullmatch, names))
    if experts:
        raise ConfigError(
            f"{folder} has experts in files of their own ({experts[0]}), whose parameters are "
            "spread over groups of ranks that differ from those of the rest. Load it into its "
            "engine, and save there, or make a universal checkpoint with ds_to_universal."
        )
    matches = [_MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name) for name in names]
    parallel_ranks = sorted({int(match["parallel"]) for match in matches if match})
    if parallel_ranks[1:]:
        raise ConfigError(
            f"{folder} was saved with tensor parallelism, over {len(parallel_ranks)} ranks "
            f"(mp_rank_{parallel_ranks[-1]:02d} is there): how its weights were cut is known to "
            "the model alone. Make a universal checkpoint with ds_to_universal, or gather in "
            "its engine."
        )


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    file_by_rank: dict[int, Path] = {}
    for path in sorted(folder.glob(_ANY_STATES)):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        # Below stage 3 there is one file of model states, without a rank in its name.
        rank = int(match["rank"] or 0)
        if rank in file_by_rank:
            raise ConfigError(
                f"{folder} has both {file_by_rank[rank].name} and {path.name} for rank {rank}: two "
                "saves of different kinds went to one tag. Delete the files of the older one."
            )
        file_by_rank[rank] = path
    return file_by_rank
