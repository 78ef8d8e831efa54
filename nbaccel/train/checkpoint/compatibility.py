"""Whether what a checkpoint holds is as it was saved, and fits what it is to be read into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbaccel.base import torch_private
from nbaccel.base.intact import Recorded, file_problem
from nbaccel.plan.contracts.place import Place
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.left_out import read_left_out
from nbaccel.train.checkpoint.saving import CheckpointParts

_ShapesByName = Mapping[str, tuple[int, ...]]
_SHOWN_NAMES = 3
# State of torch's optimizers that is as large as the parameter it belongs to.
_PARAMETER_SHAPED_STATE = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "sum",
        "acc_delta",
        "prev",
        "step_size",
    ]
)


def model_problem(
    model: nn.Module,
    saved: _ShapesByName,
    *,
    strict: bool = True,
    left_out: Collection[str] = (),
) -> str:
    """What keeps weights from being loaded into a model."""
    adapting_prefixes = _adapting_prefixes(model)
    # Parts that load a state in a way of their own cannot be compared by name or shape.
    model_shapes = {
        tensor_name: tensor_shape
        for tensor_name, tensor_shape in _shapes_of(model).items()
        if not tensor_name.startswith(adapting_prefixes)
    }
    saved_shapes = {
        _uncompiled_name(tensor_name): tensor_shape
        for tensor_name, tensor_shape in saved.items()
        if not _uncompiled_name(tensor_name).startswith(adapting_prefixes)
    }
    # None is the shape of a lazy parameter, which takes that of the file.
    reshaped = [
        tensor_name
        for tensor_name in model_shapes
        if tensor_name in saved_shapes
        and model_shapes[tensor_name] is not None
        and model_shapes[tensor_name] != saved_shapes[tensor_name]
    ]
    # BatchNorm starts its counter at 0 where an old file has none, so that is no mismatch.
    missing_names = [
        tensor_name
        for tensor_name in model_shapes
        if tensor_name not in saved_shapes
        and tensor_name not in left_out
        and not tensor_name.endswith("num_batches_tracked")
    ]
    unknown_names = [tensor_name for tensor_name in saved_shapes if tensor_name not in model_shapes]
    problems = []
    if reshaped:
        pairs = (
            f"{tensor_name} {list(saved_shapes[tensor_name])} for "
            f"{list(model_shapes[tensor_name] or ())}"
            for tensor_name in reshaped[:_SHOWN_NAMES]
        )
        problems.append(f"other shapes ({', '.join(pairs)}{_count_more(reshaped)})")
    if strict and missing_names:
        problems.append(f"no {', '.join(missing_names[:_SHOWN_NAMES])}{_count_more(missing_names)}")
    if strict and unknown_names:
        problems.append(
            f"{', '.join(unknown_names[:_SHOWN_NAMES])}{_count_more(unknown_names)}, which the "
            "model does not have"
        )
    if not problems:
        return ""
    return f"is of another model than the {type(model).__name__}: it has {'; '.join(problems)}"


def _count_more(names: list[str]) -> str:
    return f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""


def _uncompiled_name(tensor_name: str) -> str:
    # The model or the saved one may have been compiled, without the other being so.
    return tensor_name.replace(torch_private.COMPILED_PREFIX, "")


def named_as_in(model: nn.Module, saved_weights: Mapping[str, Any]) -> dict[str, Any]:
    """Saved weights under the names of a model that is compiled, or was, unlike the saved one."""
    names = {_uncompiled_name(name): name for name in model.state_dict(keep_vars=True)}
    return {names.get(_uncompiled_name(name), name): it for name, it in saved_weights.items()}


def _shapes_of(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Shapes by name; None where any fits."""
    shapes_by_name = {
        _uncompiled_name(tensor_name): None if is_lazy(value) else tuple(value.shape)
        for tensor_name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    for tensor_name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_shape"):  # ZeRO-3 has a placeholder there
            shapes_by_name[_uncompiled_name(tensor_name)] = tuple(parameter.ds_shape)
    return shapes_by_name


def _adapting_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Parts of a model that read a state in a way of their own: they may rename or reshape."""
    return tuple(
        _uncompiled_name(f"{module_name}." if module_name else "")
        for module_name, module in model.named_modules()
        if any(map(_is_user_code, torch_private.state_readers(module)))
    )


def _is_user_code(function: Any) -> bool:
    return not str(getattr(function, "__module__", "")).startswith(("torch.", "deepspeed."))


def optimizer_problem(optimizer: Optimizer, saved_state: Any) -> str:
    """What keeps a state from being loaded into an optimizer."""
    hooks = torch_private.has_state_loading_hooks(optimizer)
    if hooks or _is_user_code(type(optimizer).load_state_dict):
        return ""
    if not isinstance(saved_state, Mapping) or not {"state", "param_groups"} <= saved_state.keys():
        return f"holds no state of an optimizer, but {_describe_state(saved_state)}"
    try:
        # A file of something else may have any structure below these two keys.
        saved_counts = [len(param_group["params"]) for param_group in saved_state["param_groups"]]
        saved_shapes = dict(_state_shapes(saved_state["state"]))
    except (LookupError, TypeError, AttributeError) as error:
        return f"holds no state of an optimizer ({type(error).__name__}: {error})"
    expected_counts = [len(param_group["params"]) for param_group in optimizer.param_groups]
    if saved_counts != expected_counts:
        return (
            f"is of another optimizer: it has groups of {saved_counts} parameters, and the "
            f"{type(optimizer).__name__} has groups of {expected_counts}"
        )
    return _shape_problem(optimizer, saved_state, saved_shapes)


def _state_shapes(
    entries: Mapping[Any, Any],
) -> Iterator[tuple[Any, dict[str, tuple[int, ...]]]]:
    for number, state in entries.items():
        yield (
            number,
            {
                name: tuple(value.shape)
                for name, value in state.items()
                if name in _PARAMETER_SHAPED_STATE and isinstance(value, torch.Tensor)
            },
        )


def _shape_problem(
    optimizer: Optimizer, state: Mapping[str, Any], saved_shapes: Mapping[Any, _ShapesByName]
) -> str:
    parameter_numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # The state of other optimizers may have any shape (Adafactor's is factored).
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    for number, parameter in zip(parameter_numbers, parameters, strict=True):
        for name, saved_shape in saved_shapes.get(number, {}).items():
            if saved_shape != tuple(parameter.shape):
                return (
                    f"is of another model: its {name} of parameter {number} has shape "
                    f"{list(saved_shape)}, and the parameter has {list(parameter.shape)}"
                )
    return ""


def state_problem(item: Any, saved_state: Any) -> str:
    """What keeps a state from being loaded into a scheduler, scaler or loader."""
    try:
        state = item.state_dict()
    except Exception:  # the user's own, which need not have a state before it has loaded one
        return ""
    if not isinstance(state, Mapping) or not state:
        return ""
    if isinstance(saved_state, Mapping) and (state.keys() & saved_state.keys()):
        return ""
    return f"holds no state of a {type(item).__name__}, but {_describe_state(saved_state)}"


def _describe_state(saved_state: Any) -> str:
    if isinstance(saved_state, Mapping):
        return f"{', '.join(map(str, list(saved_state)[:6])) or 'nothing'}"
    return f"a {type(saved_state).__name__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShards:
    """A folder of which every process reads a part.

    Attributes:
        model: The model that it is read into.
        optimizer: The optimizer whose state is there, too.
        folder: The folder.
        left_out: Names of the model's frozen parameters that are not in it.
    """

    model: nn.Module
    optimizer: Optimizer | None
    folder: Path
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSources:
    """The files of a load, by the objects that they are read into.

    Attributes:
        folder: The checkpoint.
        recorded: Sizes and checksums noted when it was saved, by path below the folder.
        weights: By number of the model; a load hook's own files are not known.
        sharded_models: By number of the model.
        optimizers: By number of the optimizer.
        sharded_optimizers: Optimizers with a folder of their own, by number.
        schedulers: In order.
        scaler: The state of fp16's loss scaler.
        precision: The state of the precision; None where there is none, or the precision has none.
        custom: States of registered objects, in order.
        loaders: By number of the loader.
        gradients: Gradients of this process, within a group of batches.
        generators: Random states of this process.
        first_generators: Random states of process 0, with the step.
        left_out: Names of frozen parameters that were not saved, by number of the model.
    """

    folder: Path
    recorded: Mapping[str, Recorded]
    weights: Mapping[int, Path]
    sharded_models: Mapping[int, SourceShards]
    optimizers: Mapping[int, Path]
    sharded_optimizers: Mapping[int, SourceShards]
    schedulers: tuple[Path, ...]
    scaler: Path | None
    precision: Path | None
    custom: tuple[Path, ...]
    loaders: Mapping[int, Path]
    gradients: Path | None
    generators: Path | None
    first_generators: Path | None
    left_out: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def damaged(self, place: Place) -> list[str]:
        """Problems of files; each file is read by one process of a node."""
        files = [path for path in (*self.loaders.values(), self.gradients, self.generators) if path]
        common_files = self._common_files()
        # Shared out, because reading everything on every process would multiply the time.
        shared_out = common_files[place.local_rank :: place.local_world_size]
        return [
            text
            # A set, because process 0's random states are among both.
            for path in {*files, *shared_out}
            if (text := self._file_problem(path))
        ]

    def _common_files(self) -> list[Path]:
        all_shards = (*self.sharded_models.values(), *self.sharded_optimizers.values())
        files = {
            *self.weights.values(),
            *self.optimizers.values(),
            *self.schedulers,
            *self.custom,
            *(path for path in (self.scaler, self.precision, self.first_generators) if path),
            *(
                path
                for model_shards in all_shards
                for path in self._files_inside(model_shards.folder)
            ),
        }
        # Sorted, because each process of a node takes its share of the same list.
        return sorted(files)

    def _files_inside(self, folder: Path) -> Iterable[Path]:
        """The files of shards: those that exist, and those of the manifest."""
        yield from (path for path in folder.rglob("*") if path.is_file())
        prefix = folder.relative_to(self.folder).as_posix() + "/"
        yield from (self.folder / name for name in self.recorded if name.startswith(prefix))

    def _file_problem(self, path: Path) -> str:
        name = path.relative_to(self.folder).as_posix()
        text = file_problem(path, self.recorded.get(name))
        if not text:
            return ""
        return (
            f"{path} {text}. Nothing has been loaded. Load another checkpoint, or copy "
            "the file again from where it was saved."
        )


def find_sources(
    folder: Path, parts: CheckpointParts, place: Place, recorded: Mapping[str, Recorded]
) -> CheckpointSources:
    """Find the files that this process will read."""
    return _SourceFinder(folder, parts, place, recorded).find_all()


class _SourceFinder:
    def __init__(
        self, folder: Path, parts: CheckpointParts, place: Place, recorded: Mapping[str, Recorded]
    ) -> None:
        self._folder = folder
        self._parts = parts
        self._place = place
        self._recorded = recorded
        self._left_out = read_left_out(folder)

    def find_all(self) -> CheckpointSources:
        parts = self._parts
        sharded_models = self._sharded_models()
        optimizers, sharded_optimizers = self._optimizer_files()
        return CheckpointSources(
            folder=self._folder,
            recorded=self._recorded,
            weights=self._weight_files(sharded_models),
            sharded_models=sharded_models,
            optimizers=optimizers,
            sharded_optimizers=sharded_optimizers,
            schedulers=self._numbered_files(layout.SCHEDULER_FILE, len(parts.schedulers)),
            scaler=self._folder / layout.SCALER_FILE if parts.scaler is not None else None,
            # A precision without it, or one saved under another, begins with no history.
            precision=self._existing_file(layout.PRECISION_FILE)
            if parts.precision_state()
            else None,
            custom=tuple(
                self._folder / layout.CUSTOM_OBJECT_FILE.format(number)
                for number in range(len(parts.custom))
            ),
            loaders=self._loader_files(),
            # Sharded gradients are not saved; another strategy's may lie in the folder.
            gradients=None
            if parts.sharder
            else self._existing_file(layout.gradients_file(self._place.rank)),
            generators=self._existing_file(layout.random_states_file(self._place.rank)),
            first_generators=self._existing_file(layout.random_states_file(0)),
            left_out=self._left_out,
        )

    def _existing_file(self, *file_names: str) -> Path | None:
        """The first that exists, or that the manifest has."""
        names = (
            file_name
            for file_name in file_names
            if file_name in self._recorded or (self._folder / file_name).exists()
        )
        # A name of the manifest counts without a file, so that a deleted file is reported as
        # missing.
        name = next(names, None)
        return None if name is None else self._folder / name

    def _numbered_files(self, name: str, count: int) -> tuple[Path, ...]:
        return tuple(self._folder / layout.numbered_name(name, number) for number in range(count))

    def _sharded_models(self) -> dict[int, SourceShards]:
        sharder = self._parts.sharder
        sharded_models = {}
        if sharder is None:
            return {}
        for number, model in enumerate(self._parts.models):
            folder = self._folder / sharder.shard_folder(number)
            if folder.is_dir():
                optimizer = self._parts.optimizer_of(model)
                sharded_models[number] = SourceShards(
                    model=model,
                    optimizer=optimizer,
                    folder=folder,
                    left_out=self._left_out.get(number, frozenset()),
                )
        return sharded_models

    def _weight_files(self, sharded_models: Mapping[int, SourceShards]) -> dict[int, Path]:
        weight_files = {}
        for number in set(range(len(self._parts.models))) - sharded_models.keys():
            file_names = (
                layout.numbered_name(base_name, number)
                for base_name in (layout.SAFE_WEIGHTS, layout.PICKLED_WEIGHTS)
            )
            path = self._existing_file(*file_names)
            if path is not None:
                weight_files[number] = path
        return weight_files

    def _optimizer_files(self) -> tuple[dict[int, Path], dict[int, SourceShards]]:
        optimizer_files: dict[int, Path] = {}
        shard_folders: dict[int, SourceShards] = {}
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shard_folder = self._folder / layout.OPTIMIZER_SHARDS.format(number)
            name = layout.numbered_name(layout.OPTIMIZER_FILE, number)
            if model is not None and self._parts.sharder is not None and shard_folder.is_dir():
                shard_folders[number] = SourceShards(
                    model=model,
                    optimizer=optimizer,
                    folder=shard_folder,
                    left_out=self._left_out_of(model),
                )
            # Without a model the optimizer cannot be in shards: its file is listed even if it is
            # missing.
            elif model is None or self._existing_file(name) is not None:
                optimizer_files[number] = self._folder / name
        return optimizer_files, shard_folders

    def _left_out_of(self, model: nn.Module | None) -> frozenset[str]:
        numbers = (number for number, each in enumerate(self._parts.models) if each is model)
        return self._left_out.get(next(numbers, -1), frozenset())

    def _loader_files(self) -> dict[int, Path]:
        loader_files = {}
        for number, loader in self._parts.stateful_loaders():
            is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            file = layout.loader_file(number, stateful=is_stateful, rank=self._place.rank)
            path = self._existing_file(file, layout.loader_file(number, stateful=is_stateful))
            if path is not None:
                loader_files[number] = path
        return loader_files
