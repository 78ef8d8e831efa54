"""Where each weight of a checkpoint lies that DeepSpeed's ``engine.save_checkpoint`` wrote.

::

    <checkpoint>/latest                                            the tag of the last save
    <checkpoint>/<tag>/mp_rank_00_model_states.pt                  stages 0-2
    <checkpoint>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt stage 3, one per rank
    <checkpoint>/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt

Stages 1 and 2 lay the parameters of an optimizer's group end to end, fill up, and cut the whole
into one part per rank; a parameter may go over a cut::

    group   [ w1        ][ w2   ][ w3              ]··
    rank 0  [ w1        ][ w2 |
    rank 1                    | ][ w3              ]··

Stage 3 cuts each parameter into as many parts of equal size, the last one filled up, and lays those
of a rank end to end, in sub-groups of bounded size::

    rank 0  [ w1' ][ w2' ][ w3' ]
    rank 1  [ w1"·][ w2" ][ w3"·]

Weights in fp32 are the optimizer's; what it does not train (frozen parameters, buffers) is with the
model's states. Of an optimizer on NVMe there are empty tensors, and in stage 0 the fp32 weights of
bf16 and fp16 have no names: both are refused.

Files are read by torch as plain data, with a stand-in for any other class: no code of a file is
run. They are mapped, and pages given back piece by piece, so a few MiB are in memory at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import pickle
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.units import count_noun, number_ranges
from nbaccel.base.weight_files import OLD_TORCH_FORMAT

if TYPE_CHECKING:
    from typing_extensions import Self


_CHUNK_ELEMENTS = 2**20
# A buffer may repeat its elements (`expand`); a file of a few bytes must not make gigabytes.
_REPEATED = 16
_REPEATED_BYTES = 64 * 2**20


class Unknown:
    """An object of a class that is not looked up; it keeps its constructor's arguments."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Self:
        """Without a constructor's work: pickles make objects by this alone."""
        unknown = super().__new__(cls)
        unknown.args = args
        return unknown

    def __setstate__(self, state: Any) -> None:
        """Ignored, since state is not needed."""


class StateFile(NamedTuple):
    """A file that is mapped, with what was saved."""

    path: Path
    states: Any


def is_readable(path: Path) -> bool:
    """Whether a file is not of torch's format of before 2020, which cannot be mapped."""
    with path.open("rb") as file:
        return file.read(len(OLD_TORCH_FORMAT)) != OLD_TORCH_FORMAT


def read_states(path: Path) -> StateFile:
    """Read what ``torch.save`` wrote, but not the numbers of its tensors."""
    try:
        stand_ins: list[Any] = [
            type(name.rpartition(".")[2], (Unknown,), {"__module__": name.rpartition(".")[0]})
            for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)
        ]
        with torch.serialization.safe_globals(stand_ins):
            states = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle is a program that may raise anything
        # torch's text has several paragraphs, and recommends to read the file without any check.
        reason = next(iter(str(error).splitlines()), "")
        if isinstance(error, pickle.UnpicklingError):
            reason = reason.partition("you can do so")[0].partition("Please")[0]
        if not is_readable(path):  # DeepSpeed's "checkpoint_serialization": false
            reason = (
                "torch's format of before 2020, which cannot be mapped; torch.save writes it anew"
            )
        raise CheckpointDamaged(
            f"{path} cannot be read, at a size of {path.stat().st_size:,} bytes "
            f"({type(error).__name__}: {reason}): it is torn, by a kill, a full disk or a copy, or "
            "no checkpoint. Copy it again, or convert an earlier one (tag=...)."
        ) from error
    return StateFile(path, states)


class FileTensor(NamedTuple):
    """A tensor, and the file that it lies in."""

    path: Path
    tensor: torch.Tensor

    @classmethod
    def of(cls, path: Path, value: Any) -> FileTensor:
        """A tensor of a file; ValueError for what has no numbers, or repeats them too often."""
        tensor: torch.Tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or value.is_quantized:
            raise ValueError(f"a tensor is {tensor.layout} on {tensor.device}")
        stored_bytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes > max(_REPEATED_BYTES, _REPEATED * stored_bytes):
            raise ValueError(f"a tensor of {stored_bytes} bytes has the shape {list(tensor.shape)}")
        return cls(path, tensor)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Its elements in their order, a few MiB at a time; each is gone with the next."""
        flat = self.tensor.reshape(-1)
        # A copy, which has other strides, is not in the file's mapping, and would be zeroed.
        is_mapped = flat.data_ptr() == self.tensor.data_ptr()
        for chunk in torch.split(flat, _CHUNK_ELEMENTS):
            yield chunk
            if is_mapped:
                # The system gets the pages of the file back; the next read brings them again.
                first = chunk.data_ptr() - chunk.data_ptr() % mmap.PAGESIZE
                size = chunk.data_ptr() + chunk.nbytes - first
                pages = (ctypes.c_void_p(first), ctypes.c_size_t(size))
                ctypes.CDLL(None).madvise(*pages, ctypes.c_int(mmap.MADV_DONTNEED))


def pieces_between(tensors: Iterable[FileTensor], begin: int, end: int) -> tuple[FileTensor, ...]:
    """Some elements of tensors that are laid end to end: as many as there are."""
    pieces = []
    for path, tensor in tensors:
        first = max(begin, 0)
        count = min(end, tensor.numel()) - first
        if count > 0:
            pieces.append(FileTensor(path, tensor.view(-1).narrow(0, first, count)))
        begin -= tensor.numel()
        end -= tensor.numel()
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be written: its name, its shape, and the pieces that it is put together from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # type of its elements when it has been read
    pieces: tuple[FileTensor, ...] = ()  # its elements in their order; empty: not in files

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, path: Path, value: torch.Tensor) -> Weight:
        """A tensor as it is, with floating-point numbers as fp32."""
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return cls(name, tuple(value.shape), dtype, (FileTensor.of(path, value),))

    def chunks(self) -> Iterator[torch.Tensor]:
        """Its elements in their order, a few MiB at a time."""
        for piece in self.pieces:
            for chunk in piece.chunks():
                yield chunk.to(self.dtype)


@contextlib.contextmanager
def checked_bits(weights: Iterable[Weight]) -> Iterator[None]:
    """A block that reads weights; it ends with an error where their bits are not those saved."""
    # In threads, as checksums cover whole records, whose parts the block may read in any order.
    checksums_of = functools.cache(_checksums_in)
    # By address: a record may have several weights.
    records = {
        piece.tensor.untyped_storage().data_ptr(): (weight.name, piece)
        for weight in weights
        for piece in weight.pieces
        if checksums_of(piece.path)
    }
    # zlib lets other threads run. Few, because each has a piece in memory.
    threads = ThreadPoolExecutor(max_workers=4)
    try:
        sums = threads.map(_sum_of_record, (piece for _, piece in records.values()))
        yield
        for (name, piece), record in zip(records.values(), sums, strict=True):
            if record not in checksums_of(piece.path):
                raise CheckpointDamaged(
                    f"{piece.path} has flipped bits: the checksum of the record with {name} "
                    f"({record[0]:,} bytes) is wrong. Weights would be others than were trained. "
                    "Copy it again, or convert another checkpoint (tag=...)."
                )
    finally:
        threads.shutdown(cancel_futures=True)


def _sum_of_record(piece: FileTensor) -> tuple[int, int]:
    """Size and CRC-32 of the record that a tensor lies in."""
    storage = piece.tensor.untyped_storage()
    stored = FileTensor(piece.path, torch.empty(0, dtype=torch.uint8).set_(storage))
    crc = 0
    for chunk in stored.chunks():
        crc = zlib.crc32(chunk.numpy().data, crc)
    return storage.nbytes(), crc


def _checksums_in(path: Path) -> set[tuple[int, int]]:
    """Size and CRC-32 of each record; none where it was saved without, as torch can."""
    if not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    has_checksums = any(record.CRC for record in records)
    return {(record.file_size, record.CRC) for record in records if has_checksums}


# Raised where entries have another type than DeepSpeed gives them; the file may be anything.
_ENTRY_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MOST_RANKS = 2**20  # `range` of a number in a damaged file must not take all memory
_STAGE_NAMES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
_WITH_ENGINE = (
    "Load the checkpoint into its engine, in a fresh process, and use fp32_state_dict(engine)."
)
_GroupShapes = Mapping[str, tuple[int, ...]]
_Weights = dict[str, Weight]
_Layout = tuple[_Weights, dict[str, str]]
"""Weights by name, in the model's order; tied parameters → the names there of what they are."""


def read_layout(checkpoint_dir: str | Path, tag: str | None, exclude_frozen: bool) -> _Layout:
    """Find out where the fp32 weights of a checkpoint are; at stages 1 to 3 none is read."""
    files = _find_files(checkpoint_dir, tag)
    try:
        model = _file_with(files.model.get(0) or next(iter(files.model.values())), "module")
        of_stage = _of_stages_1_to_3 if files.optimizer else _of_stage_0
        return of_stage(files, model, exclude_frozen)
    except ConfigError:
        raise  # it is a `ValueError`, too
    except _ENTRY_ERRORS as error:
        raise CheckpointDamaged(
            f"{files.folder} has files without entries of DeepSpeed's ({type(error).__name__}: "
            f"{error}). Convert what engine.save_checkpoint wrote (tag=...)."
        ) from error


def _file_with(path: Path, key: str) -> StateFile:
    file = read_states(path)
    if not isinstance(file.states, Mapping) or not isinstance(file.states.get(key), Mapping):
        raise ConfigError(
            f"{path} has no {key!r}, but {_keys(file.states)}. Convert a checkpoint that "
            "engine.save_checkpoint wrote; that of a pipeline must be loaded into its engine."
        )
    return file


def _keys(states: Any) -> str:
    if not isinstance(states, Mapping):
        return f"a {type(states).__name__}"
    return ", ".join(map(str, list(states)[:6])) or "nothing"


def _of_stages_1_to_3(files: CheckpointFiles, model: StateFile, exclude_frozen: bool) -> _Layout:
    optimizers = {rank: _optimizer_file(path) for rank, path in files.optimizer.items()}
    stage, num_ranks = _agreed_stage(files, optimizers)
    files.check_ranks(range(num_ranks), num_ranks)
    ordered = [optimizers[rank] for rank in range(num_ranks)]
    module = model.states["module"]
    buffers = set(model.states.get("buffer_names") or ())
    shared = model.states.get("shared_params") or {}
    if stage == 3:
        trained = _trained_at_stage_3(files, model, ordered)
        frozen = _frozen_at_stage_3(files, model)
    else:
        trained = _trained_at_stages_1_and_2(files, model, ordered)
        frozen = _whole(model, module.keys() - {*trained, *buffers, *shared})
    # Trained weights last: where a name is among several, the optimizer's copy counts.
    weights = {**_whole(model, buffers), **({} if exclude_frozen else frozen), **trained}
    tied = {n: target for n, target in shared.items() if n not in weights and target in weights}
    in_order = {name: weights[name] for name in module if name in weights}
    return in_order | weights, tied


def _whole(model: StateFile, names: set[str]) -> _Weights:
    return {
        name: Weight.whole(name, model.path, value)
        for name, value in model.states["module"].items()
        if name in names and isinstance(value, torch.Tensor)
    }


def _optimizer_file(path: Path) -> StateFile:
    """A rank's file, with the state of the ZeRO optimizer alone."""
    file = _file_with(path, "optimizer_state_dict")
    states = file.states["optimizer_state_dict"]
    if (groups := states.get("ds_zero_partition_groups")) is not None:
        raise _cut_otherwise(path, f"has parameters over own groups ({_keys(groups)}), as experts")
    return file._replace(states=states)


def _agreed_stage(files: CheckpointFiles, optimizers: Mapping[int, StateFile]) -> tuple[int, int]:
    """Stage and number of ranks, which must be the same in every file."""
    said = {rank: _said_of_save(file.states) for rank, file in optimizers.items()}
    stage, count = next(iter(said.values()))
    beyond = [rank for rank in (*files.optimizer, *files.model) if rank >= count]
    if len(set(said.values())) > 1 or beyond:
        few = sorted(said.items())[:4]
        texts = "; ".join(f"rank {rank}: stage {stage} of {count}" for rank, (stage, count) in few)
        raise ConfigError(
            f"{files.folder} mixes files of different saves, with stage and number of ranks as "
            f"{texts}. Delete those of the older "
            f"one{f', of rank {number_ranges(sorted({*beyond}))}' if beyond else ''}."
        )
    return stage, count


def _said_of_save(states: Mapping[str, Any]) -> tuple[int, int]:
    """Stage and number of ranks as one file has them."""
    stage = states["zero_stage"]
    if isinstance(stage, Unknown):  # an enumeration of DeepSpeed's, made from value or name
        stage = stage.args[-1]
    counts = states.get("partition_count", 1)
    count = int(max(counts) if isinstance(counts, (list, tuple)) else counts)
    if not 0 < count <= _MOST_RANKS:
        raise ValueError(f"partition_count is {counts}")
    return _STAGE_NAMES[stage] if isinstance(stage, str) else int(stage), count


def _trained_at_stages_1_and_2(
    files: CheckpointFiles, model: StateFile, optimizers: Sequence[StateFile]
) -> _Weights:
    trained: _Weights = {}
    paddings = optimizers[0].states.get("param_alignment_paddings")  # not in all versions
    for number, shapes in enumerate(_shape_groups(model)):
        key = "single_partition_of_fp32_groups"
        parts = [FileTensor.of(file.path, file.states[key][number]) for file in optimizers]
        trained |= _laid_out(
            f"group {number} of {files.folder}",
            [parts],
            shapes,
            paddings=paddings[number] if paddings else (),
            # DeepSpeed aligns a group to twice the number of ranks: less than that may be left.
            slack=2 * len(optimizers),
        )
    return trained


def _trained_at_stage_3(
    files: CheckpointFiles, model: StateFile, optimizers: Sequence[StateFile]
) -> _Weights:
    groups = _shape_groups(model)
    for file in optimizers:
        for shapes, tensor in zip(groups, file.states["fp32_flat_groups"], strict=False):
            if not tensor.numel() and any(_share(one, len(optimizers)) for one in shapes.values()):
                raise ConfigError(
                    f"{file.path} has no fp32 weights from {next(iter(shapes))} on: they were "
                    f"swapped to NVMe when the checkpoint was saved. {_WITH_ENGINE}"
                )
    ranks = [
        [FileTensor.of(file.path, tensor) for tensor in file.states["fp32_flat_groups"]]
        for file in optimizers
    ]
    return _laid_out(str(files.folder), ranks, {name: one[name] for one in groups for name in one})


def _frozen_at_stage_3(files: CheckpointFiles, model: StateFile) -> _Weights:
    shapes = _checked_shapes(model.states.get("frozen_param_shapes") or {})
    ranks = [_file_with(files.model[rank], "module") for rank in sorted(files.model) if shapes]
    frozen: _Weights = {}
    key = "frozen_param_fragments"
    for name, shape in shapes.items():
        fragments = [[FileTensor.of(one.path, one.states[key][name])] for one in ranks]
        frozen |= _laid_out(str(files.folder), fragments, {name: shape})
    return frozen


def _laid_out(
    place: str,
    strips: Sequence[Sequence[FileTensor]],
    shapes: _GroupShapes,
    *,
    paddings: Sequence[int] = (),
    slack: int = 0,
) -> _Weights:
    """Weights that lie end to end, the same part of each in every strip."""
    weights: _Weights = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        count = _share(shape, len(strips))
        parts = chain.from_iterable(pieces_between(one, begin, begin + count) for one in strips)
        # The last part is filled up.
        pieces = pieces_between(parts, 0, torch.Size(shape).numel())
        weights[name] = Weight(name, shape, torch.float32, pieces)
        begin += count + padding
    for number, strip in enumerate(strips):
        saved = sum(tensor.numel() for _, tensor in strip)
        # All kinds of files that do not belong together are found by this.
        if not begin <= saved <= begin + slack:
            part = f" in part {number}" if strips[1:] else ""
            raise ConfigError(
                f"{place}: the shapes of {_keys(shapes)} add up to {begin:,} elements{part}, and "
                f"{saved:,} were saved: saves are mixed. Convert another (tag=...)."
            )
    return weights


def _share(shape: tuple[int, ...], num_parts: int) -> int:
    """Elements of a parameter in each part, padding included."""
    return -(-torch.Size(shape).numel() // num_parts)


def _shape_groups(model: StateFile) -> list[_GroupShapes]:
    return [_checked_shapes(group) for group in model.states.get("param_shapes") or ()]


def _checked_shapes(shapes: Mapping[str, Any]) -> _GroupShapes:
    """Shapes from the file; two sizes below 0 would give a positive number of elements."""
    checked = {str(name): tuple(shape) for name, shape in shapes.items()}
    for name, sizes in checked.items():
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"{sizes} is no shape of {name}")
    return checked


def _of_stage_0(files: CheckpointFiles, model: StateFile, exclude_frozen: bool) -> _Layout:
    if files.is_of_stage_3 or model.states.get("param_shapes"):
        ranks = model.states.get("dp_world_size")
        saved_by = count_noun(ranks, "rank") if isinstance(ranks, int) else "some ranks"
        raise ConfigError(
            f"{files.folder} was saved with ZeRO by {saved_by}, and has no optimizer states, which "
            "are the fp32 weights: none of its *_optim_states.pt is there. Copy them here, or "
            "convert another checkpoint (tag=...)."
        )
    optimizer = model.states.get("optimizer")
    if isinstance(optimizer, Mapping) and {"fp32_groups", "fp32_groups_flat"} & optimizer.keys():
        raise ConfigError(
            f"{model.path} was saved without ZeRO in 16 bit: its weights are rounded, and those in "
            f"fp32 are in its optimizer ({_keys(optimizer)}), without names. {_WITH_ENGINE}"
        )
    if exclude_frozen:
        raise ConfigError(
            f"{model.path} does not tell which of its {len(model.states['module'])} weights were "
            "frozen, without ZeRO. Leave exclude_frozen_parameters out."
        )
    weights: _Weights = {}
    tied: dict[str, str] = {}
    first_names: dict[tuple[int, torch.Size], str] = {}
    for name, value in model.states["module"].items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's extra state is no weight
        first_name = first_names.setdefault((value.data_ptr(), value.shape), name)
        # Empty tensors may be in one place without being tied.
        if first_name == name or not value.numel():
            weights[name] = Weight.whole(name, model.path, value)
        else:
            tied[name] = first_name
    return weights, tied


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


class CheckpointFiles(NamedTuple):
    """The files of one save, by rank."""

    folder: Path
    model: dict[int, Path]  # files of model states; that of stages 0-2 counts as rank 0's
    optimizer: dict[int, Path]

    @classmethod
    def of(cls, folder: Path) -> CheckpointFiles:
        """Those in a folder."""
        return cls(folder, _by_rank(folder, _MODEL_FILE), _by_rank(folder, _OPTIMIZER_FILE))

    @property
    def is_of_stage_3(self) -> bool:
        """Whether each rank has a file of model states."""
        return any(path.name.startswith("zero_pp_rank") for path in self.model.values())

    def check_ranks(self, ranks: Collection[int], num_ranks: int) -> None:
        """Refuse a checkpoint without files of ranks."""
        kinds = {"optim": self.optimizer, **({"model": self.model} if self.is_of_stage_3 else {})}
        mistakes = [
            f"{self.folder} was saved by {count_noun(num_ranks, 'rank')}, and the files "
            f"*zero_pp_rank_N_mp_rank_00_{kind}_states.pt of rank {number_ranges(missing)} are "
            "missing: each holds a part of every weight. Copy them here (use_node_local_storage "
            "leaves them on each node), or take another checkpoint (tag=...)."
            for kind, files in kinds.items()
            if (missing := sorted(set(ranks) - files.keys()))
        ]
        if mistakes:
            raise CheckpointDamaged(*mistakes)


def _find_files(checkpoint_dir: str | Path, tag: str | None) -> CheckpointFiles:
    folder = _tagged_folder(Path(checkpoint_dir).expanduser(), tag)
    _check_kind(folder)
    files = CheckpointFiles.of(folder)
    if not files.model:
        raise ConfigError(
            f"{folder} has no file *_model_states.pt, with names and shapes of the weights: it "
            f"holds {_content_of(folder)}. Copy that file here, or convert another checkpoint."
        )
    return files


def _content_of(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(names[:8]) or "nothing at all"


def _tagged_folder(root: Path, tag: str | None) -> Path:
    if not root.is_dir():
        beside = _content_of(root.parent) if root.parent.is_dir() else "nothing at all"
        raise ConfigError(
            f"{root} {'is a file' if root.exists() else 'does not exist'}, and a checkpoint of "
            f"ZeRO is a folder. Beside it there are: {beside}. Give the folder that "
            "save_checkpoint was given."
        )
    if _has_states(root) and tag in (None, root.name):
        return root
    latest = root / "latest"
    if tag is None and latest.is_file():
        with latest.open("rb") as file:
            content = file.read(_LONGEST_NAME + 1)
        tag = content.decode("utf-8", errors="replace").strip()
        if len(content) > _LONGEST_NAME or not _TAG_FOLDER.fullmatch(tag):
            raise CheckpointDamaged(
                f"{latest} holds {tag[:60]!r}, not the name of a folder beside it. Give tag=..."
            )
    if tag is not None and (root / tag).is_dir():
        return root / tag
    tags = sorted(path.name for path in root.iterdir() if _has_states(path))
    wanted = "file `latest`, which tells the last tag" if tag is None else f"checkpoint {tag!r}"
    hint = f", or one of these folders: tag={tags[-1]!r}" if tags else ""
    raise ConfigError(
        f"{root} has no {wanted}, and its folders with *_states.pt are: "
        f"{', '.join(tags) or 'none'}. It holds {_content_of(root)}. Give the folder that "
        f"save_checkpoint was given{hint}."
    )


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(_ANY_STATES))


def _check_kind(folder: Path) -> None:
    """Refuse checkpoints that cannot be put together from data-parallel parts."""
    names = sorted(path.name for path in folder.glob(_ANY_STATES))
    matches = [_MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name) for name in names]
    ranks = sorted({int(match["parallel"]) for match in matches if match})
    if experts := [name for name in names if _EXPERT_FILE.fullmatch(name)]:
        raise _cut_otherwise(folder, f"has experts in files of their own ({experts[0]})")
    if ranks[1:]:
        there = f"over {len(ranks)} ranks (mp_rank_{ranks[-1]:02d} is there)"
        raise _cut_otherwise(folder, f"was saved with tensor parallelism, {there}")
    if (folder / "zero").is_dir() and not any(folder.glob("*_optim_states.pt")):
        raise ConfigError(
            f"{folder} is a universal checkpoint, which has no files of ranks. Convert the one "
            f"that it was made from, tag={folder.name.removesuffix('_universal')!r}, or load it "
            "and use fp32_state_dict(engine)."
        )


def _cut_otherwise(thing: object, what: str) -> ConfigError:
    return ConfigError(
        f"{thing} {what}: the parts of all ranks put together would be wrong. Make a universal "
        "checkpoint with ds_to_universal, or load it into its engine and gather or save there."
    )


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    name_by_rank: dict[int, str] = {}
    names = sorted(path.name for path in folder.glob(_ANY_STATES))
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
