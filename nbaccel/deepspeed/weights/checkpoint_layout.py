"""Which files a checkpoint of DeepSpeed consists of, and where each weight lies in them.

::

    <checkpoint>/latest                                            the tag of the last save
    <checkpoint>/<tag>/mp_rank_00_model_states.pt                  stages 0-2
    <checkpoint>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt stage 3, one per rank
    <checkpoint>/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt
    <checkpoint>/<tag>/offloaded_tensors/rank<rr>/*.tensor.swp      optimizer offloaded to NVMe

Stages 1 and 2 lay the parameters of an optimizer's group end to end, fill up, and cut the whole
into one part per rank; a parameter may go over a cut::

    group   [ w1        ][ w2   ][ w3              ]··
    rank 0  [ w1        ][ w2 |
    rank 1                    | ][ w3              ]··

Stage 3 cuts each parameter into as many parts of equal size, the last one filled up, and lays those
of a rank end to end, in sub-groups of bounded size::

    rank 0  [ w1' ][ w2' ][ w3' ]
    rank 1  [ w1"·][ w2" ][ w3"·]

Weights in fp32 are those of the optimizer. What it does not train (frozen parameters, buffers) is
with the model's states, in the precision of training; stage 0 has everything there.

The layout is the one that DeepSpeed 0.19's ``engine.save_checkpoint`` writes and that its
``utils/zero_to_fp32.py`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.units import count_noun, number_ranges
from nbaccel.deepspeed.weights.fp32_reading import swapped_in, weights_of_stage_0
from nbaccel.deepspeed.weights.torch_archive import (
    StoredTensor,
    Strip,
    Unknown,
    Weight,
    num_elements,
    read_outline,
)

__all__ = ["CheckpointFiles", "Layout", "find_files", "read_layout"]


_MODEL_FILE = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<parallel>\d+)_model_states\.pt"
)
_OPTIMIZER_FILE = re.compile(
    r"(?P<kind>\w*?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<parallel>\d+)_optim_states\.pt"
)
_EXPERT_FILE = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*")
_ANY_STATES = "*_states.pt"
# No separators: a tag that is read from a file must not lead to another folder.
_TAG_FOLDER = re.compile(r"[^/\\\x00-\x1f]+")
_LONGEST_NAME = 255  # bytes, on the usual file systems


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
        rank_mistakes = [self._rank_mistake("optim", self.optimizer, num_ranks)]
        if stage == 3:
            rank_mistakes.append(self._rank_mistake("model", self.model, num_ranks))
        mistakes = [rank_mistake for rank_mistake in rank_mistakes if rank_mistake]
        if mistakes:
            raise ConfigError(*mistakes)

    def _rank_mistake(self, state_kind: str, files: dict[int, Path], num_ranks: int) -> str:
        missing_ranks = sorted(set(range(num_ranks)) - files.keys())
        extra_ranks = sorted(files.keys() - set(range(num_ranks)))
        if missing_ranks:
            pattern = f"*zero_pp_rank_N_mp_rank_00_{state_kind}_states.pt"
            return (
                f"{self.folder} was saved by {count_noun(num_ranks, 'rank')}, and the files "
                f"{pattern} of rank {number_ranges(missing_ranks)} are missing: each holds a "
                "part of every weight. Copy them here from the machine that wrote them "
                "(use_node_local_storage leaves them on each node), or convert another checkpoint "
                "(tag=...)."
            )
        if extra_ranks:
            names = ", ".join(files[rank].name for rank in extra_ranks[:3])
            return (
                f"{self.folder} was saved by {count_noun(num_ranks, 'rank')}, but files of further "
                f"ranks are there, too ({names}): an earlier save of more ranks was written "
                "over, and it is not certain which parts belong together. If the last save is the "
                "one you want and it was completed, delete those files and try again."
            )
        return ""


def find_files(checkpoint_dir: str | Path, tag: str | None = None) -> CheckpointFiles:
    """Find the files of one save."""
    checkpoint_root = Path(checkpoint_dir).expanduser()
    if not checkpoint_root.is_dir():
        raise ConfigError(_no_folder(checkpoint_root))
    state_folder = _tagged_folder(checkpoint_root, tag)
    _check_kind(state_folder)
    model = _by_rank(state_folder, _MODEL_FILE)
    optimizer = _by_rank(state_folder, _OPTIMIZER_FILE)
    if not model:
        file_names = sorted(file_path.name for file_path in state_folder.iterdir())
        raise ConfigError(
            f"{state_folder} has no file *_model_states.pt, which tells the names and shapes of "
            f"the weights: it holds {', '.join(file_names[:6]) or 'nothing'}. The save was "
            "interrupted, or rank 0 wrote on another machine. Copy that file here, or convert "
            "another checkpoint."
        )
    return CheckpointFiles(state_folder, model, optimizer)


def _no_folder(root: Path) -> str:
    if root.exists():
        return _placeholder_text(root) or (
            f"{root} is a file, and a checkpoint of ZeRO is a folder, in which each "
            "rank has files of its own. Give the folder that save_checkpoint was given."
        )
    siblings = [path for path in root.parent.glob("[!.]*") if path.is_dir()]
    others = ", ".join(sorted(path.name for path in siblings)[:8])
    folders_there = f"In {root.parent} there are: {others}." if others else ""
    return (
        f"{root} does not exist, so there is no checkpoint to convert. "
        f"{folders_there} Give the folder that save_checkpoint was given."
    ).replace("  ", " ")


def _tagged_folder(checkpoint_root: Path, checkpoint_tag: str | None) -> Path:
    tags = sorted(path.name for path in checkpoint_root.iterdir() if _has_states(path))
    if checkpoint_tag is None:
        if _has_states(checkpoint_root):
            return checkpoint_root
        checkpoint_tag = _latest_tag(checkpoint_root, tags)
    elif not tags and checkpoint_root.name == checkpoint_tag and _has_states(checkpoint_root):
        return checkpoint_root
    if not (checkpoint_root / checkpoint_tag).is_dir():
        raise ConfigError(
            f"{checkpoint_root} has no checkpoint of the tag {checkpoint_tag!r}: "
            f"{_listed_tags(tags)}. Give one of these."
            if tags
            else f"{checkpoint_root} has no checkpoint of the tag {checkpoint_tag!r}, nor of any "
            "other. Give the folder that save_checkpoint was given."
        )
    return checkpoint_root / checkpoint_tag


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(_ANY_STATES))


def _latest_tag(root: Path, known_tags: list[str]) -> str:
    latest_path = root / "latest"
    if latest_path.is_file():
        return _checked_tag(latest_path)
    if known_tags:
        raise ConfigError(
            f"{root} has no file `latest`, which would tell the tag of the last save. "
            f"T{_listed_tags(known_tags)[1:]}. Say which: tag={known_tags[-1]!r}."
        )
    names = sorted(file_path.name for file_path in root.iterdir())
    files = sorted([*root.glob("*.safetensors"), *root.glob("*.bin")])
    raise ConfigError(
        next(filter(None, map(_placeholder_text, files)), "")
        or f"{root} is no checkpoint of DeepSpeed: it has neither a file `latest` nor a "
        f"folder with *_states.pt in it, but {', '.join(names[:6]) or 'nothing at all'}. Give "
        "the folder that save_checkpoint was given."
    )


def _checked_tag(path: Path) -> str:
    """The tag in a file `latest`: the name of a folder beside it, and not a way to elsewhere."""
    with path.open("rb") as file:
        tag_bytes = file.read(_LONGEST_NAME + 1)
    checkpoint_tag = tag_bytes.decode("utf-8", errors="replace").strip()
    if (
        len(tag_bytes) > _LONGEST_NAME
        or checkpoint_tag in {"", ".", ".."}
        or not _TAG_FOLDER.fullmatch(checkpoint_tag)
    ):
        raise CheckpointDamaged(
            f"{path} holds {checkpoint_tag[:60]!r}, and should hold the tag of the last "
            "save, which is the name of a folder beside it: it is damaged, or not written by "
            "DeepSpeed. Say which save is meant: tag=..."
        )
    return checkpoint_tag


def _placeholder_text(file_path: Path) -> str:
    """The message about weights that were saved while ZeRO-3 had them in parts; or empty."""
    try:
        tensor_shapes = _shapes_in(file_path)
    except (ConfigError, SafetensorError):
        return ""
    empty_names = [tensor_name for tensor_name, shape in tensor_shapes.items() if shape == (0,)]
    placeholder_names = [
        tensor_name for tensor_name, shape in tensor_shapes.items() if shape == (1,)
    ]
    # A single number may be a weight; where most tensors are one, they are old placeholders.
    if 2 * len(placeholder_names) > len(tensor_shapes) > 1:
        empty_names += placeholder_names
    if not empty_names:
        return ""
    return (
        f"{file_path} holds ZeRO-3 placeholders instead of weights: {len(empty_names)} of its "
        f"{len(tensor_shapes)} tensors have shape (0,) or (1,), as {empty_names[0]}. It was "
        "written by state_dict() or torch.save while the parameters were spread over the ranks, "
        "and the weights are not in it. Convert the checkpoint that engine.save_checkpoint wrote, "
        "if there is one."
    )


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            tensor_names = list(file.keys())
            return {name: tuple(file.get_slice(name).get_shape()) for name in tensor_names}
    state = read_outline(path)
    entries = state.items() if isinstance(state, Mapping) else ()
    return {
        str(tensor_name): entry.shape
        for tensor_name, entry in entries
        if isinstance(entry, StoredTensor)
    }


def _listed_tags(known_tags: list[str]) -> str:
    return f"there {'is' if len(known_tags) == 1 else 'are'} {', '.join(known_tags)}"


def _check_kind(folder: Path) -> None:
    """Refuse checkpoints that cannot be put together from data-parallel parts."""
    if (folder / "zero").is_dir() and not any(folder.glob("*_optim_states.pt")):
        raise ConfigError(
            f"{folder} is a universal checkpoint, made from another one by ds_to_universal: "
            "it has a folder per parameter instead of files of ranks. Convert the checkpoint that "
            f"it was made from: tag={folder.name.removesuffix('_universal')!r}, if it is "
            "still there; or load this one into an engine and use fp32_state_dict(engine)."
        )
    file_names = [file_path.name for file_path in folder.glob(_ANY_STATES)]
    files = sorted(filter(_EXPERT_FILE.fullmatch, file_names))
    if files:
        raise ConfigError(
            f"{folder} has experts in files of their own ({files[0]}), whose "
            "parameters are spread over groups of ranks that differ from those of the rest. "
            "Load it into its engine, and save there, or make a universal checkpoint with "
            "ds_to_universal."
        )
    name_matches = [
        name_match
        for name_pattern in (_MODEL_FILE, _OPTIMIZER_FILE)
        for file_name in file_names
        if (name_match := name_pattern.fullmatch(file_name))
    ]
    parallel_ranks = sorted({int(name_match["parallel"]) for name_match in name_matches})
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
        name_match = pattern.fullmatch(path.name)
        if name_match is None:
            continue
        # Below stage 3 there is one file of model states, without a rank in its name.
        rank = int(name_match["rank"] or 0)
        if rank in file_by_rank:
            raise ConfigError(
                f"{folder} has both {file_by_rank[rank].name} and {path.name} for "
                f"rank {rank}: two saves of different kinds went to one tag. Delete the files of "
                "the older one."
            )
        file_by_rank[rank] = path
    return file_by_rank


# Raised where entries have another type than DeepSpeed gives them; the file may be anything.
_STRUCTURE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_MOST_RANKS = 2**20  # `range` of a number in a damaged file must not take all memory
_STAGE_NAMES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights of a checkpoint, and where they lie.

    Attributes:
        folder: The checkpoint's, with the files in it.
        stage: ZeRO's stage.
        num_ranks: How many saved it.
        weights: By name, in the model's order.
        tied: Name of a parameter → the name in `weights` of the one it is.
    """

    folder: Path
    stage: int
    num_ranks: int
    weights: dict[str, Weight]
    tied: dict[str, str]


def read_layout(
    checkpoint_dir: str | Path, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> Layout:
    """Find out where the fp32 weights of a checkpoint are; at stages 1 to 3 none is read."""
    checkpoint_files = find_files(checkpoint_dir, tag)
    try:
        return _read_states(checkpoint_files, exclude_frozen_parameters)
    except ConfigError:
        raise  # it is a `ValueError`, too
    except _STRUCTURE_ERRORS as error:
        raise CheckpointDamaged(
            f"{checkpoint_files.folder} has files without the entries that DeepSpeed writes "
            f"({type(error).__name__}: {error}): they are damaged, or something else wrote them. "
            "Convert a checkpoint that engine.save_checkpoint wrote (tag=...)."
        ) from error


def _read_states(files: CheckpointFiles, exclude_frozen_parameters: bool) -> Layout:
    first_state = files.model.get(0) or next(iter(files.model.values()))
    model = _model_states(first_state)
    if not files.optimizer:
        return _of_stage_0(files, model, exclude_frozen_parameters)
    rank_states = {
        rank: _optimizer_states(file_path) for rank, file_path in files.optimizer.items()
    }
    stage, num_ranks = _agreed_stage(files, rank_states)
    files.check_ranks(num_ranks, stage)
    ordered_states = [rank_states[rank] for rank in range(num_ranks)]
    collect_weights = _weights_of_stage_3 if stage == 3 else _stages_1_and_2
    trained_weights, frozen_weights = collect_weights(files, model, ordered_states)
    # Trained weights last: where a name is among several, the optimizer's copy counts.
    weights = {
        **_buffer_weights(model),
        **({} if exclude_frozen_parameters else frozen_weights),
        **trained_weights,
    }
    tied_names = {
        tensor_name: tied_target
        for tensor_name, tied_target in (model.get("shared_params") or {}).items()
        if tensor_name not in weights and tied_target in weights
    }
    return Layout(files.folder, stage, num_ranks, _in_order(weights, model), tied_names)


def _in_order(weight_by_name: dict[str, Weight], model: Mapping[str, Any]) -> dict[str, Weight]:
    module_names = [tensor_name for tensor_name in model["module"] if tensor_name in weight_by_name]
    return {
        tensor_name: weight_by_name[tensor_name]
        for tensor_name in dict.fromkeys([*module_names, *weight_by_name])
    }


def _model_states(path: Path) -> Mapping[str, Any]:
    rank_states = read_outline(path)
    if not isinstance(rank_states, Mapping) or not isinstance(rank_states.get("module"), Mapping):
        raise ConfigError(
            f"{path} has no model in it, though its name says so: it holds "
            f"{_keys_of_states(rank_states)}. A pipeline's engine writes its layers elsewhere, "
            "which cannot be converted; load such a checkpoint into its engine."
        )
    return rank_states


def _optimizer_states(path: Path) -> Mapping[str, Any]:
    rank_states = read_outline(path)
    inner_states = (
        rank_states.get("optimizer_state_dict") if isinstance(rank_states, Mapping) else None
    )
    if not isinstance(inner_states, Mapping) or "zero_stage" not in inner_states:
        raise ConfigError(
            f"{path} holds no state of a ZeRO optimizer, though its name says so: it has "
            f"{_keys_of_states(rank_states)}. Convert a checkpoint that engine.save_checkpoint "
            "wrote."
        )
    if inner_states.get("ds_zero_partition_groups") is not None:
        raise ConfigError(
            f"{path} has parameters that are partitioned over groups of their own "
            f"({_keys_of_states(inner_states['ds_zero_partition_groups'])}), as experts are: "
            "parts of all ranks put together would be wrong. Make a universal checkpoint with "
            "ds_to_universal."
        )
    return inner_states


def _keys_of_states(rank_states: Any) -> str:
    if not isinstance(rank_states, Mapping):
        return f"a {type(rank_states).__name__}"
    return ", ".join(map(str, list(rank_states)[:6])) or "nothing"


def _agreed_stage(
    files: CheckpointFiles, rank_states: Mapping[int, Mapping[str, Any]]
) -> tuple[int, int]:
    """Stage and number of ranks, which must be the same in every file."""
    layout_by_rank = {
        rank: (_stage_value(rank_state["zero_stage"]), _partition_count(rank_state))
        for rank, rank_state in rank_states.items()
    }
    if len(set(layout_by_rank.values())) > 1:
        texts = "; ".join(
            f"rank {number}: stage {zero_stage} of {rank_count}"
            for number, (zero_stage, rank_count) in sorted(layout_by_rank.items())[:4]
        )
        raise ConfigError(
            f"{files.folder} mixes files of different saves, with stage and number of "
            f"ranks as {texts}. Parts of two saves do not make one. Delete those of the "
            "older one."
        )
    return next(iter(layout_by_rank.values()))


def _stage_value(stage_value: Any) -> int:
    if isinstance(stage_value, Unknown):  # an enumeration of DeepSpeed's, made from value or name
        stage_value = stage_value.args[-1]
    return _STAGE_NAMES[stage_value] if isinstance(stage_value, str) else int(stage_value)


def _partition_count(state: Mapping[str, Any]) -> int:
    partition_counts = state.get("partition_count", 1)
    partition_count = (
        max(partition_counts)
        if isinstance(partition_counts, (list, tuple))
        else int(partition_counts)
    )
    if not 0 < partition_count <= _MOST_RANKS:
        raise ValueError(f"partition_count is {partition_counts}")
    return int(partition_count)


def _of_stage_0(files: CheckpointFiles, model: Mapping[str, Any], exclude_frozen: bool) -> Layout:
    if any(path.name.startswith("zero_pp_rank") for path in files.model.values()):
        raise ConfigError(
            f"{files.folder} has model states of ZeRO-3 and no optimizer states "
            "(*_optim_states.pt), in which the fp32 weights are: model states of ZeRO-3 hold "
            "placeholders. Copy those files here, or convert another checkpoint."
        )
    if model.get("param_shapes"):
        raise ConfigError(
            f"{files.folder} was saved with ZeRO by {_saved_ranks(model)}, and none of "
            "its *_optim_states.pt is there, in which the fp32 weights are. Copy them here, or "
            "convert another checkpoint (tag=...)."
        )
    (path,) = files.model.values()
    weights = weights_of_stage_0(path, model, exclude_frozen_parameters=exclude_frozen)
    return Layout(files.folder, 0, 1, *weights)


def _saved_ranks(model: Mapping[str, Any]) -> str:
    """How many ranks saved a checkpoint, where the model's states have it."""
    rank_count = model.get("dp_world_size")
    return (
        f"{rank_count} rank{'s' if rank_count != 1 else ''}"
        if isinstance(rank_count, int)
        else "some ranks"
    )


def _buffer_weights(model: Mapping[str, Any]) -> dict[str, Weight]:
    buffer_names = set(model.get("buffer_names") or ())
    return {
        tensor_name: Weight.whole(tensor_name, value)
        for tensor_name, value in model["module"].items()
        if tensor_name in buffer_names and isinstance(value, StoredTensor)
    }


def _stages_1_and_2(
    files: CheckpointFiles,
    model: Mapping[str, Any],
    rank_states: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    trained_weights: dict[str, Weight] = {}
    group_paddings = rank_states[0].get("param_alignment_paddings")  # not in all versions
    for group_number, tensor_shapes in enumerate(_shapes_of_groups(model)):
        strip = Strip(
            [
                rank_state["single_partition_of_fp32_groups"][group_number]
                for rank_state in rank_states
            ]
        )
        group_padding = group_paddings[group_number] if group_paddings else [0] * len(tensor_shapes)
        first_element = 0
        for (tensor_name, shape), padding_elements in zip(
            tensor_shapes.items(), group_padding, strict=True
        ):
            element_count = num_elements(shape)
            trained_weights[tensor_name] = Weight.flat(
                tensor_name, shape, strip.part(first_element, element_count)
            )
            first_element += element_count + padding_elements
        # DeepSpeed aligns a group to twice the number of ranks, so that less than that may be left.
        _check_used(
            files,
            f"group {group_number}",
            first_element,
            strip.numel,
            allowed_slack=2 * len(rank_states),
        )
    known_names = {
        *trained_weights,
        *(model.get("buffer_names") or ()),
        *(model.get("shared_params") or ()),
    }
    frozen_weights = {
        tensor_name: Weight.whole(tensor_name, tensor_value)
        for tensor_name, tensor_value in model["module"].items()
        if tensor_name not in known_names and isinstance(tensor_value, StoredTensor)
    }
    return trained_weights, frozen_weights


def _weights_of_stage_3(
    files: CheckpointFiles,
    model: Mapping[str, Any],
    rank_states: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    shape_groups = _shapes_of_groups(model)
    tensor_shapes = {
        tensor_name: shape
        for shape_group in shape_groups
        for tensor_name, shape in shape_group.items()
    }
    flat_strips = [
        Strip(
            swapped_in(
                files.folder,
                rank,
                rank_state["fp32_flat_groups"],
                shape_groups,
                len(rank_states),
            )
        )
        for rank, rank_state in enumerate(rank_states)
    ]
    trained_weights = {}
    first_element = 0
    for tensor_name, shape in tensor_shapes.items():
        rank_share = -(-num_elements(shape) // len(flat_strips))
        strip_pieces = [flat_strip.part(first_element, rank_share) for flat_strip in flat_strips]
        trained_weights[tensor_name] = Weight.flat(
            tensor_name, shape, _cut_pieces(strip_pieces, num_elements(shape))
        )
        first_element += rank_share
    for rank, flat_strip in enumerate(flat_strips):
        _check_used(files, f"rank {rank}", first_element, flat_strip.numel, allowed_slack=0)
    return trained_weights, _frozen_of_stage_3(files, model)


def _cut_pieces(
    strip_parts: Sequence[tuple[StoredTensor, ...]], element_count: int
) -> tuple[StoredTensor, ...]:
    """Pieces of all ranks in a row, without the padding of the last ones."""
    cut_pieces: list[StoredTensor] = []
    for strip_piece in (strip_piece for strip_part in strip_parts for strip_piece in strip_part):
        if element_count > 0:
            cut_pieces.append(strip_piece.part(0, min(element_count, strip_piece.numel)))
            element_count -= cut_pieces[-1].numel
    return tuple(cut_pieces)


def _frozen_of_stage_3(files: CheckpointFiles, model: Mapping[str, Any]) -> dict[str, Weight]:
    tensor_shapes = model.get("frozen_param_shapes") or {}
    if not tensor_shapes:
        return {}
    rank_states = [files.model[rank] for rank in sorted(files.model)]
    frozen_fragments = [
        _model_states(file_path)["frozen_param_fragments"] for file_path in rank_states
    ]
    return {
        tensor_name: Weight.flat(
            tensor_name,
            _checked_shape(shape),
            _cut_pieces(
                [
                    (frozen_fragment[tensor_name].part(0, frozen_fragment[tensor_name].numel),)
                    for frozen_fragment in frozen_fragments
                ],
                num_elements(shape),
            ),
        )
        for tensor_name, shape in tensor_shapes.items()
    }


def _shapes_of_groups(model: Mapping[str, Any]) -> list[_TensorShapes]:
    return [
        {str(name): _checked_shape(shape) for name, shape in group.items()}
        for group in model.get("param_shapes") or ()
    ]


def _checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape from the file; two sizes below 0 would give a positive number of elements."""
    dimension_sizes = tuple(shape)
    if not all(
        type(dimension_size) is int and dimension_size >= 0 for dimension_size in dimension_sizes
    ):
        raise ValueError(f"{dimension_sizes} is no shape")
    return dimension_sizes


def _check_used(
    files: CheckpointFiles,
    place: str,
    used_elements: int,
    available_elements: int,
    allowed_slack: int,
) -> None:
    """Refuse a checkpoint in which elements are left over, beside padding."""
    if (
        not 0 <= available_elements - used_elements <= allowed_slack
        and not 0 <= used_elements - available_elements <= allowed_slack
    ):
        raise ConfigError(
            f"{files.folder}: the parameters' shapes add up to {used_elements:,} "
            f"elements in {place}, and {available_elements:,} were saved. Files of "
            "different saves lie there together, or the model changed between them. Convert "
            "another checkpoint (tag=...)."
        )
