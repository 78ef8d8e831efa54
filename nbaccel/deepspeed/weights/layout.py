"""How ZeRO lays parameters out in its files, and where each weight therefore is.

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
with the model's states, in the precision of training; stage 0 has it all there.

The layout is the one that DeepSpeed 0.19's ``engine.save_checkpoint`` writes and that its
``utils/zero_to_fp32.py`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.deepspeed.weights.archive import Unknown, read_outline
from nbaccel.deepspeed.weights.folder import Files, find_files
from nbaccel.deepspeed.weights.master import weights_of_stage_0
from nbaccel.deepspeed.weights.stored import StoredTensor, Strip, Weight, num_elements
from nbaccel.deepspeed.weights.swapped import swapped_in
from nbaccel.errors import CheckpointDamaged, ConfigError

__all__ = ["Layout", "read_layout"]

# What comes of entries that have another type than DeepSpeed gives them.
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_MOST_RANKS = 2**20
_STAGE_NAMES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_Shapes = Mapping[str, tuple[int, ...]]


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
    """Find out where the fp32 weights of a checkpoint lie; at stages 1 to 3 none of them is read.

    Args:
        checkpoint_dir: What ``save_checkpoint`` was given, or the folder of one tag in it.
        tag: Which save; None for the one that ``latest`` names.
        exclude_frozen_parameters: Leave out what was not trained.

    Returns:
        The layout.

    Raises:
        CheckpointDamaged: Files are torn, or not what DeepSpeed writes.
        ConfigError: There is no such checkpoint, it is not complete, or of a kind that cannot be
            put together without its model.
    """
    files = find_files(checkpoint_dir, tag)
    try:
        return _read(files, exclude_frozen_parameters)
    except ConfigError:
        raise
    except _ODD as error:
        raise CheckpointDamaged(
            f"{files.folder} has files that do not tell what DeepSpeed's do "
            f"({type(error).__name__}: {error}): they are damaged, or something else wrote them. "
            "Convert a checkpoint that engine.save_checkpoint wrote (tag=...)."
        ) from error


def _read(files: Files, exclude_frozen_parameters: bool) -> Layout:
    first = files.model.get(0) or next(iter(files.model.values()))
    model = _model_states(first)
    if not files.optimizer:
        return _of_stage_0(files, model, exclude_frozen_parameters)
    states = {rank: _optimizer_states(path) for rank, path in files.optimizer.items()}
    stage, num_ranks = _agreed(files, states)
    files.check_ranks(num_ranks, stage)
    ordered = [states[rank] for rank in range(num_ranks)]
    collect = _stage_3 if stage == 3 else _stages_1_and_2
    trained, frozen = collect(files, model, ordered)
    found = {**_buffers(model), **({} if exclude_frozen_parameters else frozen), **trained}
    tied = {
        name: target
        for name, target in (model.get("shared_params") or {}).items()
        if name not in found and target in found
    }
    return Layout(files.folder, stage, num_ranks, _in_order(found, model), tied)


def _in_order(weights: dict[str, Weight], model: Mapping[str, Any]) -> dict[str, Weight]:
    names = [name for name in model["module"] if name in weights]
    return {name: weights[name] for name in dict.fromkeys([*names, *weights])}


# ------------------------------------------------------------------------- what files say


def _model_states(path: Path) -> Mapping[str, Any]:
    states = read_outline(path)
    if not isinstance(states, Mapping) or not isinstance(states.get("module"), Mapping):
        raise ConfigError(
            f"{path} has no model in it, though its name says so: it holds "
            f"{_keys(states)}. A pipeline's engine writes its layers elsewhere, which cannot be "
            "converted; load such a checkpoint into its engine."
        )
    return states


def _optimizer_states(path: Path) -> Mapping[str, Any]:
    states = read_outline(path)
    inner = states.get("optimizer_state_dict") if isinstance(states, Mapping) else None
    if not isinstance(inner, Mapping) or "zero_stage" not in inner:
        raise ConfigError(
            f"{path} holds no state of a ZeRO optimizer, though its name says so: it has "
            f"{_keys(states)}. Convert a checkpoint that engine.save_checkpoint wrote."
        )
    if inner.get("ds_zero_partition_groups") is not None:
        raise ConfigError(
            f"{path} has parameters that are partitioned over groups of their own "
            f"({_keys(inner['ds_zero_partition_groups'])}), as experts are: parts of all ranks put "
            "together would be wrong. Make a universal checkpoint with ds_to_universal."
        )
    return inner


def _keys(states: Any) -> str:
    if not isinstance(states, Mapping):
        return f"a {type(states).__name__}"
    return ", ".join(map(str, list(states)[:6])) or "nothing"


def _agreed(files: Files, states: Mapping[int, Mapping[str, Any]]) -> tuple[int, int]:
    """Stage and number of ranks, which every file must say alike."""
    said = {rank: (_stage(state["zero_stage"]), _count(state)) for rank, state in states.items()}
    if len(set(said.values())) > 1:
        told = "; ".join(f"rank {r}: stage {s} of {n}" for r, (s, n) in sorted(said.items())[:4])
        raise ConfigError(
            f"{files.folder} mixes files of different saves, with stage and number of ranks as "
            f"{told}. Parts of two saves do not make one. Delete those of the older one."
        )
    return next(iter(said.values()))


def _stage(value: Any) -> int:
    if isinstance(value, Unknown):  # an enumeration of DeepSpeed's, made from value or name
        value = value.args[-1]
    return _STAGE_NAMES[value] if isinstance(value, str) else int(value)


def _count(state: Mapping[str, Any]) -> int:
    told = state.get("partition_count", 1)
    count = max(told) if isinstance(told, (list, tuple)) else int(told)
    if not 0 < count <= _MOST_RANKS:
        raise ValueError(f"partition_count is {told}")
    return int(count)


# ------------------------------------------------------------------------- the stages


def _of_stage_0(files: Files, model: Mapping[str, Any], exclude_frozen: bool) -> Layout:
    if any(path.name.startswith("zero_pp_rank") for path in files.model.values()):
        raise ConfigError(
            f"{files.folder} has model states of ZeRO-3 and no optimizer states "
            "(*_optim_states.pt), in which the fp32 weights are: model states of ZeRO-3 hold "
            "placeholders. Copy those files here, or convert another checkpoint."
        )
    if model.get("param_shapes"):
        raise ConfigError(
            f"{files.folder} was saved with ZeRO by {_told_ranks(model)}, and none of its "
            "*_optim_states.pt is there, in which the fp32 weights are. Copy them here, or convert "
            "another checkpoint (tag=...)."
        )
    (path,) = files.model.values()
    found = weights_of_stage_0(path, model, exclude_frozen_parameters=exclude_frozen)
    return Layout(files.folder, 0, 1, *found)


def _told_ranks(model: Mapping[str, Any]) -> str:
    """How many ranks saved a checkpoint, as far as the model's states tell."""
    count = model.get("dp_world_size")
    return f"{count} rank{'s' if count != 1 else ''}" if isinstance(count, int) else "some ranks"


def _buffers(model: Mapping[str, Any]) -> dict[str, Weight]:
    names = set(model.get("buffer_names") or ())
    return {
        name: Weight.whole(name, value)
        for name, value in model["module"].items()
        if name in names and isinstance(value, StoredTensor)
    }


def _stages_1_and_2(
    files: Files, model: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    trained: dict[str, Weight] = {}
    paddings = states[0].get("param_alignment_paddings")
    for number, shapes in enumerate(_shapes(model)):
        strip = Strip([state["single_partition_of_fp32_groups"][number] for state in states])
        padding = paddings[number] if paddings else [0] * len(shapes)
        begin = 0
        for (name, shape), fill in zip(shapes.items(), padding, strict=True):
            numel = num_elements(shape)
            trained[name] = Weight.flat(name, shape, strip.part(begin, numel))
            begin += numel + fill
        _check_used(files, f"group {number}", begin, strip.numel, slack=2 * len(states))
    known = {*trained, *(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
    frozen = {
        name: Weight.whole(name, value)
        for name, value in model["module"].items()
        if name not in known and isinstance(value, StoredTensor)
    }
    return trained, frozen


def _stage_3(
    files: Files, model: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    groups = _shapes(model)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    strips = [
        Strip(swapped_in(files.folder, rank, state["fp32_flat_groups"], groups, len(states)))
        for rank, state in enumerate(states)
    ]
    trained, begin = {}, 0
    for name, shape in shapes.items():
        share = -(-num_elements(shape) // len(strips))
        pieces = [strip.part(begin, share) for strip in strips]
        trained[name] = Weight.flat(name, shape, _cut(pieces, num_elements(shape)))
        begin += share
    for rank, strip in enumerate(strips):
        _check_used(files, f"rank {rank}", begin, strip.numel, slack=0)
    return trained, _frozen_of_stage_3(files, model)


def _cut(parts: Sequence[tuple[StoredTensor, ...]], numel: int) -> tuple[StoredTensor, ...]:
    """Pieces of all ranks in a row, without what fills up the last ones."""
    found: list[StoredTensor] = []
    for piece in (piece for part in parts for piece in part):
        if numel > 0:
            found.append(piece.part(0, min(numel, piece.numel)))
            numel -= found[-1].numel
    return tuple(found)


def _frozen_of_stage_3(files: Files, model: Mapping[str, Any]) -> dict[str, Weight]:
    shapes = model.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    ranks = [files.model[rank] for rank in sorted(files.model)]
    fragments = [_model_states(path)["frozen_param_fragments"] for path in ranks]
    return {
        name: Weight.flat(
            name,
            _shape(shape),
            _cut(
                [(fragment[name].part(0, fragment[name].numel),) for fragment in fragments],
                num_elements(shape),
            ),
        )
        for name, shape in shapes.items()
    }


def _shapes(model: Mapping[str, Any]) -> list[_Shapes]:
    return [
        {str(name): _shape(shape) for name, shape in group.items()}
        for group in model.get("param_shapes") or ()
    ]


def _shape(shape: Any) -> tuple[int, ...]:
    """A shape of the file's; sizes below 0 would cancel out."""
    sizes = tuple(shape)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return sizes


def _check_used(files: Files, where: str, used: int, there: int, slack: int) -> None:
    """All that was saved must have become a weight, but for what fills up."""
    if not 0 <= there - used <= slack and not 0 <= used - there <= slack:
        raise ConfigError(
            f"{files.folder}: the parameters' shapes add up to {used:,} elements in {where}, and "
            f"{there:,} were saved. Files of different saves lie there together, or the model "
            "changed between them. Convert another checkpoint (tag=...)."
        )
