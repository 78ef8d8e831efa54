"""Which files a checkpoint of DeepSpeed consists of, and what is wrong with them.

::

    <checkpoint>/latest                                            the tag of the last save
    <checkpoint>/<tag>/mp_rank_00_model_states.pt                  stages 0-2
    <checkpoint>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt stage 3, one per rank
    <checkpoint>/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt
    <checkpoint>/<tag>/offloaded_tensors/rank<rr>/*.tensor.swp      optimizer offloaded to NVMe
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nbaccel.deepspeed.weights.archive import read_outline
from nbaccel.deepspeed.weights.stored import StoredTensor
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.units import counted, spans

__all__ = ["Files", "find_files"]

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<parallel>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?P<kind>\w*?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<parallel>\d+)_optim_states\.pt"
)
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*")
_ANY_STATES = "*_states.pt"
_TAG = re.compile(r"[^/\\\x00-\x1f]+")
_LONGEST_NAME = 255  # bytes, on the usual file systems


@dataclass(frozen=True, slots=True)
class Files:
    """What there is of one save.

    Attributes:
        folder: Where they lie.
        model: Files of model states, by rank; that of stages 0-2 counts as rank 0's.
        optimizer: Files of optimizer states, by rank.
    """

    folder: Path
    model: dict[int, Path]
    optimizer: dict[int, Path]

    def check_ranks(self, num_ranks: int, stage: int) -> None:
        """Refuse a checkpoint of which files are missing, or that is mixed with another.

        Args:
            num_ranks: How many saved it, by what the files say.
            stage: ZeRO's stage.

        Raises:
            ConfigError: It tells which files.
        """
        mistakes = [self._told("optim", self.optimizer, num_ranks)]
        if stage == 3:
            mistakes.append(self._told("model", self.model, num_ranks))
        found = [mistake for mistake in mistakes if mistake]
        if found:
            raise ConfigError(*found)

    def _told(self, kind: str, files: dict[int, Path], num_ranks: int) -> str:
        missing = sorted(set(range(num_ranks)) - files.keys())
        extra = sorted(files.keys() - set(range(num_ranks)))
        if missing:
            pattern = f"*zero_pp_rank_N_mp_rank_00_{kind}_states.pt"
            return (
                f"{self.folder} was saved by {counted(num_ranks, 'rank')}, and the files {pattern} "
                f"of rank {spans(missing)} are missing: each holds a part of every weight. Copy "
                "them here from the machine that wrote them (use_node_local_storage leaves them "
                "on each node), or convert another checkpoint (tag=...)."
            )
        if extra:
            names = ", ".join(files[rank].name for rank in extra[:3])
            return (
                f"{self.folder} was saved by {counted(num_ranks, 'rank')}, but files of further "
                f"ranks lie there, too ({names}): an earlier save of more ranks was written over, "
                "and it is not certain which parts belong together. If the last save is the one "
                "you want and it ended well, delete those files and try again."
            )
        return ""


def find_files(checkpoint_dir: str | Path, tag: str | None = None) -> Files:
    """Find the files of one save.

    Args:
        checkpoint_dir: What ``save_checkpoint`` was given, or the folder of one tag in it.
        tag: Which save; None for the one that ``latest`` names.

    Returns:
        The files.

    Raises:
        ConfigError: There is no such checkpoint, or one that cannot be converted.
    """
    root = Path(checkpoint_dir).expanduser()
    if not root.is_dir():
        raise ConfigError(_no_folder(root))
    folder = _tagged(root, tag)
    _check_kind(folder)
    model, optimizer = _by_rank(folder, _MODEL), _by_rank(folder, _OPTIMIZER)
    if not model:
        names = sorted(path.name for path in folder.iterdir())
        raise ConfigError(
            f"{folder} has no file *_model_states.pt, which tells the names and shapes of the "
            f"weights: it holds {', '.join(names[:6]) or 'nothing'}. The save was interrupted, or "
            "rank 0 wrote on another machine. Copy that file here, or convert another checkpoint."
        )
    return Files(folder, model, optimizer)


def _no_folder(root: Path) -> str:
    if root.exists():
        return _told_of_placeholders(root) or (
            f"{root} is a file, and a checkpoint of ZeRO is a folder, in which each rank has files "
            "of its own. Give the folder that save_checkpoint was given."
        )
    beside = sorted(p.name for p in root.parent.glob("[!.]*") if p.is_dir())
    there = f"In {root.parent} there are: {', '.join(beside[:8])}." if beside else ""
    return (
        f"{root} does not exist, so there is no checkpoint to convert. {there} Give the folder "
        "that save_checkpoint was given."
    ).replace("  ", " ")


def _tagged(root: Path, tag: str | None) -> Path:
    tags = sorted(path.name for path in root.iterdir() if _has_states(path))
    if tag is None:
        if _has_states(root):
            return root
        tag = _latest(root, tags)
    elif not tags and root.name == tag and _has_states(root):
        return root
    if not (root / tag).is_dir():
        raise ConfigError(
            f"{root} has no checkpoint of the tag {tag!r}: {_listed(tags)}. Give one of these."
            if tags
            else f"{root} has no checkpoint of the tag {tag!r}, nor of any other. Give the folder "
            "that save_checkpoint was given."
        )
    return root / tag


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(_ANY_STATES))


def _latest(root: Path, tags: list[str]) -> str:
    latest = root / "latest"
    if latest.is_file():
        return _checked_tag(latest)
    if tags:
        raise ConfigError(
            f"{root} has no file `latest`, which would tell the tag of the last save. "
            f"T{_listed(tags)[1:]}. Say which: tag={tags[-1]!r}."
        )
    names = sorted(path.name for path in root.iterdir())
    weights = sorted([*root.glob("*.safetensors"), *root.glob("*.bin")])
    raise ConfigError(
        next(filter(None, map(_told_of_placeholders, weights)), "")
        or f"{root} is no checkpoint of DeepSpeed: it has neither a file `latest` nor a folder "
        f"with *_states.pt in it, but {', '.join(names[:6]) or 'nothing at all'}. Give the folder "
        "that save_checkpoint was given."
    )


def _checked_tag(latest: Path) -> str:
    """The tag in a file `latest`: the name of a folder beside it, and not a way to elsewhere."""
    with latest.open("rb") as file:
        content = file.read(_LONGEST_NAME + 1)
    tag = content.decode("utf-8", errors="replace").strip()
    if len(content) > _LONGEST_NAME or tag in {"", ".", ".."} or not _TAG.fullmatch(tag):
        raise CheckpointDamaged(
            f"{latest} holds {tag[:60]!r}, and should hold the tag of the last save, which is the "
            "name of a folder beside it: it is damaged, or not written by DeepSpeed. Say which "
            "save is meant: tag=..."
        )
    return tag


def _told_of_placeholders(path: Path) -> str:
    """What to say of a file of weights that were saved while ZeRO-3 had them in pieces."""
    try:
        shapes = _shapes_in(path)
    except (ConfigError, SafetensorError):
        return ""
    found = [n for n, shape in shapes.items() if shape == (0,)]
    ones = [n for n, shape in shapes.items() if shape == (1,)]
    if 2 * len(ones) > len(shapes) > 1:
        found += ones
    if not found:
        return ""
    return (
        f"{path} holds ZeRO-3 placeholders instead of weights: {len(found)} of its {len(shapes)} "
        f"tensors have shape (0,) or (1,), as {found[0]}. It was written by state_dict() or "
        "torch.save while the parameters were spread over the ranks, and the weights are not in "
        "it. Convert the checkpoint that engine.save_checkpoint wrote, if there is one."
    )


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no dict
    state = read_outline(path)
    items = state.items() if isinstance(state, Mapping) else ()
    return {str(name): item.shape for name, item in items if isinstance(item, StoredTensor)}


def _listed(tags: list[str]) -> str:
    return f"there {'is' if len(tags) == 1 else 'are'} {', '.join(tags)}"


def _check_kind(folder: Path) -> None:
    """What is a checkpoint, but none that can be put together from data-parallel parts."""
    if (folder / "zero").is_dir() and not any(folder.glob("*_optim_states.pt")):
        raise ConfigError(
            f"{folder} is a universal checkpoint, made from another one by ds_to_universal: it has "
            "a folder per parameter instead of files of ranks. Convert the checkpoint that it was "
            f"made from: tag={folder.name.removesuffix('_universal')!r}, if it is still there; or "
            "load this one into an engine and use fp32_state_dict(engine)."
        )
    names = [path.name for path in folder.glob(_ANY_STATES)]
    experts = sorted(filter(_EXPERT.fullmatch, names))
    if experts:
        raise ConfigError(
            f"{folder} has experts in files of their own ({experts[0]}), whose parameters are "
            "spread over groups of ranks that differ from those of the rest. Load it into its "
            "engine, and save there, or make a universal checkpoint with ds_to_universal."
        )
    matches = [m for pattern in (_MODEL, _OPTIMIZER) for n in names if (m := pattern.fullmatch(n))]
    parallel = sorted({int(match["parallel"]) for match in matches})
    if parallel[1:]:
        raise ConfigError(
            f"{folder} was saved with tensor parallelism, over {len(parallel)} ranks (mp_rank_"
            f"{parallel[-1]:02d} is there): how its weights were cut is known to the model alone. "
            "Make a universal checkpoint with ds_to_universal, or gather in its engine."
        )


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(_ANY_STATES)):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        rank = int(match["rank"] or 0)
        if rank in found:
            raise ConfigError(
                f"{folder} has both {found[rank].name} and {path.name} for rank {rank}: two saves "
                "of different kinds went to one tag. Delete the files of the older one."
            )
        found[rank] = path
    return found
