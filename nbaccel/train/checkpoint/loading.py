"""``load_state``: restores what ``save_state`` wrote, if all of it exists and is unchanged.

    each process                                                exchanged by all
    ------------                                                ----------------
    sizes and checksums of files (shared out in a node)    ◄─►  damaged? nothing is loaded
    small states read, names and shapes compared           ◄─►  damaged or unfit? nothing is loaded
    load hooks; schedulers, registered objects, loaders    ◄─►  refused? put back as they were
    weights, optimizers, random numbers                    ◄─►  all through

A refusal is the same exception on all processes. A part that is small is read when it is compared,
and kept; of large parts only names and shapes are read before all processes have agreed to load.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbaccel.base import torch_private
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.units import count_noun, first_few
from nbaccel.base.weight_files import file_problem
from nbaccel.config.given_values import shown
from nbaccel.plan.contracts.training import ModelShards, Place
from nbaccel.train import rng
from nbaccel.train.checkpoint import files, folder_writing
from nbaccel.train.checkpoint.files import read_torch_file, read_torch_outline, read_weights
from nbaccel.train.checkpoint.saving import CheckpointParts, trained_by_name, uncompiled_name
from nbaccel.train.collectives import Collectives

LoadHook = Callable[[list[Any], str], None]
_log = get_logger(__name__)

# State of torch's optimizers that has its parameter's shape; that of Adafactor, say, has others.
_PARAMETER_SHAPED_STATE = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "sum", "acc_delta", "prev", "step_size"),
}


def load_state(
    folder: str | Path,
    parts: CheckpointParts,
    place: Place,
    collectives: Collectives,
    *,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    hooks: Iterable[LoadHook] = (),
    **options: Any,
) -> int | None:
    """Put back what :func:`~nbaccel.train.checkpoint.save_state` wrote; a collective.

    Nothing in the files is run: states hold plain data, and those of registered objects also
    instances of classes that the object's own state has at the time. ``weights_only=False`` in
    `load_kwargs` lifts that, and lets a file run any code. Load such only if you trust who wrote
    it.
    """
    if map_location not in {None, "cpu", "on_device"}:
        raise TypeError(
            f"load_state(map_location={shown(map_location)}) must be 'cpu' or 'on_device'. "
            "States go where their model is in any case. Leave it out."
        )
    device = place.device if map_location == "on_device" else torch.device("cpu")
    text = f"load_state({str(folder)!r})"
    # Walked through several times below, which a generator does not allow.
    hooks = list(hooks)
    read_options = {"map_location": device, **(load_kwargs or {})}
    with folder_writing.all_succeed(collectives, text):
        source_folder = folder_writing.find_checkpoint(Path(folder))
        if parts.sharder is not None:
            folder_writing.check_is_own_part(source_folder, place)
        check_contents(source_folder, parts, with_models=not hooks)
        load = _CheckpointLoad(source_folder, parts, place, read_options, device, options)
        damaged = load.damaged_files()
    try:
        # Two exchanges, because a damaged file must not even be read for comparison.
        _judge_together(collectives, text, damaged, [])
        with folder_writing.all_succeed(collectives, text):
            damaged, unfit = load.check(with_models=not hooks)
        _judge_together(collectives, text, damaged, unfit)
        # Around `all_succeed`: if another process failed, this one undoes its part, too.
        with contextlib.ExitStack() as undoing:
            with folder_writing.all_succeed(collectives, text):
                load.run_hooks(hooks)
                load.load_small_states(undoing)
            undoing.pop_all()
        with folder_writing.all_succeed(collectives, text):
            load.load_large_parts()
        return load.step
    finally:
        # Its parts refer to it, and would keep models in memory.
        vars(load).clear()


def _judge_together(
    collectives: Collectives, call_text: str, damaged: list[str], unfit: list[str]
) -> None:
    answers = collectives.answers(f"{call_text}: all files read", [damaged, unfit])
    for position, error_class in enumerate((CheckpointDamaged, ConfigError)):
        # Several processes may find the same problem in a common file: it is reported once.
        if texts := dict.fromkeys(text for answer in answers for text in answer[position]):
            raise error_class(*texts)


_SHARD_REMEDIES = {
    "fsdp": "with FSDP as it was saved, or save it with state_dict_type='FULL_STATE_DICT'",
    "deepspeed": "with DeepSpeed as it was saved, or take its weights: nbaccel to-fp32 DIR OUT",
}


def check_contents(folder: Path, parts: CheckpointParts, *, with_models: bool = True) -> None:
    """Refuse a folder that does not fit, before anything is loaded from it."""
    there = files.numbers_by_kind(folder)
    text = f"The checkpoint {str(folder)!r}"
    own_kind = parts.sharder.shard_kind if parts.sharder is not None else ""
    own_shards = there[own_kind] if own_kind else frozenset()
    others = [kind for kind in files.SHARD_KINDS if kind != own_kind and there[kind]]
    mistakes = []
    expected: list[tuple[str, int, frozenset[int]]] = []
    # Another strategy's shards are a mistake only if there is nothing that this run can read.
    if others and not (own_shards or there["model"]) and (parts.models or parts.optimizers):
        mistakes += [
            f"{text} has {count_noun(len(there[kind]), 'model')} in shards, one file per process. "
            f"The strategy of this run cannot put them together. Load it {_SHARD_REMEDIES[kind]}."
            for kind in others
        ]
    else:
        if with_models:
            expected.append(("model", len(parts.models), there["model"] | own_shards))
        # An optimizer in shards is in the model's folder, and is checked when that is read.
        if not own_shards:
            expected.append(("optimizer", len(parts.optimizers), there["optimizer"]))
    expected.append(("scheduler", len(parts.schedulers), there["scheduler"]))
    # Kinds of which nothing was prepared may be there: a script that evaluates has no optimizer.
    expected = [row for row in expected if row[1]]
    expected.append(("registered object", len(parts.custom), there["registered object"]))
    if parts.scaler is not None:
        expected.append(("scaler", 1, there["scaler"]))
    for kind, num_expected, numbers in expected:
        if numbers != frozenset(range(num_expected)):
            listed = f" ({', '.join(map(str, sorted(numbers)))})" if numbers else ""
            mistakes.append(
                f"{text} has {count_noun(len(numbers), kind)}{listed}, but {num_expected} "
                f"{'is' if num_expected == 1 else 'are'} to be loaded: states would get lost, or "
                "to wrong ones. Prepare and register the same objects in the same order as then."
            )
    if mistakes:
        raise ConfigError(*mistakes)


@dataclass(eq=False, kw_only=True)
class _SavedPart:
    """A file or folder of a checkpoint, on its way back."""

    path: Path
    check: Callable[[], Any]  # refuses what does not fit; nothing is changed
    load: Callable[[], Any]  # puts it back
    target: Any = None  # of a small state: what it is the state of
    is_common: bool = True  # whether all processes read it; others are one process's own

    def files(self, recorded: Iterable[str]) -> Iterable[str]:
        """Names of its files below the checkpoint; `recorded` are those of the manifest."""
        if not self.path.is_dir():
            return [self.path.name]
        paths = (path for path in self.path.rglob("*") if path.is_file())
        inside = [name for name in recorded if name.startswith(f"{self.path.name}/")]
        return [*(path.relative_to(self.path.parent).as_posix() for path in paths), *inside]


def _small_state(
    path: Path,
    target: Any,
    read: Callable[[Path], Any],
    compare: Callable[[Any, Any], str] | None = None,
    *,
    is_common: bool = True,
) -> _SavedPart:
    """The state of an object, which is kept from the comparison on."""
    states: list[Any] = []

    def check() -> None:
        states.append(read(path))
        if compare is not None:
            _refuse(path, compare(target, states[-1]))

    def load() -> None:
        target.load_state_dict(states[-1])

    return _SavedPart(path=path, check=check, load=load, target=target, is_common=is_common)


def _put_back(target: Any, state_before: Any) -> None:
    # An object that refuses its own earlier state cannot be restored; others still can.
    with contextlib.suppress(Exception):
        target.load_state_dict(state_before)


def _refuse(path: Path, problem: str) -> None:
    if problem:
        raise ConfigError(
            f"{path} {problem}. Nothing has been loaded. Prepare and register the same "
            "objects in the same order as when it was saved, or load another checkpoint."
        )


def _classes_in(state_dict: Any) -> set[type]:
    """Classes of the user's own in a state: instances of them may be read back."""
    classes: set[type] = set()
    pending = [state_dict]
    seen_ids = set()
    while pending:
        value = pending.pop()
        # By id, because values need not be hashable, and a state may contain itself.
        if id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        value_class = value if isinstance(value, type) else type(value)
        if value_class.__module__ != "builtins":
            classes.add(value_class)
        if isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
        elif value is not value_class and not value_class.__module__.startswith(("torch", "numpy")):
            pending += getattr(value, "__dict__", {}).values()
    return classes


@dataclass(eq=False)
class _CheckpointLoad:
    """One process's share of a load."""

    _folder: Path
    _parts: CheckpointParts
    _place: Place
    _read_options: Mapping[str, Any]
    _device: torch.device
    _options: Mapping[str, Any]
    step: int | None = None  # the accumulation step; None where no file has it

    def __post_init__(self) -> None:
        read_options = self._read_options
        self._read: Callable[[Path], Any] = partial(read_torch_file, **read_options)
        self._read_outline: Callable[[Path], Any] = partial(read_torch_outline, **read_options)
        self._damaged: list[str] = []
        self._recorded = {}
        try:
            self._recorded = dict(folder_writing.read_manifest(self._folder))
        except CheckpointDamaged as error:
            self._damaged += error.mistakes
        self._left_out = files.read_left_out(self._folder)
        self._rng_states: dict[str, Any] | None = None
        # A load hook's own files are not known.
        self._models = {
            number: part
            for number, model in enumerate(self._parts.models)
            if (part := self._find_model(number, model)) is not None
        }
        self._optimizers = list(self._find_optimizers())
        self._small = list(self._find_small_states())
        self._loaders: dict[int, _SavedPart] = {}
        for number, loader in self._parts.stateful_loaders():
            name = files.loader_file(number, loader, self._place.rank)
            path = self._existing_file(name, files.loader_file(number, loader))
            if path is not None:
                part = _small_state(path, loader, self._read, _loader_problem, is_common=False)
                self._loaders[number] = part
        self._large = list(self._find_large())

    def _existing_file(self, *file_names: str) -> Path | None:
        """The first that exists, or that the manifest has: a deleted file is told as missing."""
        for file_name in file_names:
            if file_name in self._recorded or (self._folder / file_name).exists():
                return self._folder / file_name
        return None

    def _find_model(self, number: int, model: nn.Module) -> _SavedPart | None:
        sharder = self._parts.sharder
        if sharder and (shards := self._folder / sharder.shard_folder(number)).is_dir():
            return self._shard_folder(shards, number, model, self._parts.optimizer_of(model))
        bases = (files.SAFE_WEIGHTS, files.PICKLED_WEIGHTS)
        path = self._existing_file(*(files.numbered_name(base, number) for base in bases))
        if path is None:
            return None
        strategy = self._parts.strategy
        inner = strategy.unwrap(model)
        left_out = self._left_out.get(number, frozenset())

        def check() -> None:
            is_strict = bool(self._options.get("strict", True))
            if is_strict:
                _refuse(path, _trained_problem(inner, left_out))
            saved = read_weights(path, inner, torch.device("meta"))
            _refuse(path, _model_problem(inner, saved, strict=is_strict, left_out=left_out))

        def load() -> None:
            # One of the two models may be compiled, or have been, unlike the other.
            names = {uncompiled_name(name): name for name in inner.state_dict(keep_vars=True)}
            saved = read_weights(path, inner, self._device)
            weights = {names.get(uncompiled_name(n), n): value for n, value in saved.items()}
            # Names have been compared: what is missing is frozen and stays as it is.
            missing = {"strict": False} if left_out else {}
            strategy.load_model_state(model, weights, **{**self._options, **missing})

        return _SavedPart(path=path, check=check, load=load)

    def _shard_folder(
        self, path: Path, number: int, model: nn.Module, optimizer: Optimizer | None
    ) -> _SavedPart:
        """A folder of which every process reads a part: a model, with an optimizer or without."""
        sharder: Any = self._parts.sharder
        left_out = self._left_out.get(number, frozenset())
        ranks, _ = folder_writing.ranks_and_hosts(self._folder)
        shards = ModelShards(
            model=model, optimizer=optimizer, folder=path, left_out=left_out, ranks_there=ranks
        )

        def check() -> None:
            _refuse(path, _trained_problem(self._parts.strategy.unwrap(model), left_out))
            sharder.check_sharded(shards)

        return _SavedPart(path=path, check=check, load=partial(sharder.load_sharded, shards))

    def _find_optimizers(self) -> Iterator[_SavedPart]:
        """Those with a file or folder of their own; the first one's shards are the model's."""
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._folder / files.OPTIMIZER_SHARDS.format(number)
            name = files.numbered_name(files.OPTIMIZER_FILE, number)
            if model is not None and self._parts.sharder is not None and shards.is_dir():
                models = self._parts.models
                model_number = next(n for n, other in enumerate(models) if other is model)
                yield self._shard_folder(shards, model_number, model, optimizer)
            # Without a model it cannot be in shards: its file is listed even if it is missing.
            elif model is None or self._existing_file(name) is not None:
                yield self._optimizer_file(self._folder / name, optimizer, model)

    def _optimizer_file(
        self, path: Path, optimizer: Optimizer, model: nn.Module | None
    ) -> _SavedPart:
        put_back: Callable[[Any], Any] = optimizer.load_state_dict
        if model is not None:
            put_back = partial(self._parts.strategy.load_optimizer_state, model, optimizer)
        return _SavedPart(
            path=path,
            check=lambda: _refuse(path, _optimizer_problem(optimizer, self._read_outline(path))),
            load=lambda: put_back(self._read(path)),
        )

    def _find_small_states(self) -> Iterator[_SavedPart]:
        parts = self._parts
        for number, scheduler in enumerate(parts.schedulers):
            path = self._folder / files.numbered_name(files.SCHEDULER_FILE, number)
            yield _small_state(path, scheduler, self._read, _state_problem)
        if (scaler := parts.scaler) is not None:
            path = self._folder / files.SCALER_FILE
            yield _small_state(path, scaler, read_torch_file, _state_problem)
        # A precision without a file, or one saved under another, begins with no history; a state
        # of another model is left to the precision.
        precision_path = self._existing_file(files.PRECISION_FILE)
        precision = parts.precision_state
        if precision_path is not None and precision.state_dict():
            yield _small_state(precision_path, precision, read_torch_file)
        options = {n: value for n, value in self._read_options.items() if n == "weights_only"}
        for path, custom_object in self._registered():
            if not isinstance(custom_object, (nn.Module, Optimizer)):
                # Plain data, and classes that its state has now.
                classes = _classes_in(custom_object.state_dict())
                read = partial(read_torch_file, allowed=classes, **options)
                yield _small_state(path, custom_object, read)

    def _registered(self) -> Iterator[tuple[Path, Any]]:
        for number, custom_object in enumerate(self._parts.custom):
            yield self._folder / files.CUSTOM_OBJECT_FILE.format(number), custom_object

    def _find_large(self) -> Iterator[_SavedPart]:
        for path, custom_object in self._registered():
            if isinstance(custom_object, (nn.Module, Optimizer)):
                yield _registered_large(path, custom_object)
        # Sharded gradients are not saved; another strategy's may lie in the folder.
        gradients = self._existing_file(files.GRADIENTS_FILE.format(self._place.rank))
        if gradients is not None and self._parts.sharder is None:
            yield _SavedPart(
                path=gradients,
                check=lambda: self._read_outline(gradients),
                load=lambda: self._parts.set_gradients(self._read(gradients)),
                is_common=False,
            )
        # Last, because a `load_state_dict` or a hook of the user's may draw random numbers.
        generators = self._existing_file(files.RANDOM_STATES_FILE.format(self._place.rank))
        if generators is not None:
            yield _SavedPart(
                path=generators,
                check=lambda: self._check_generators(generators),
                load=lambda: rng.restore_rng_states(self._place, self._rng_states or {}),
                is_common=False,
            )

    def _check_generators(self, path: Path) -> None:
        """Set and undone: only setting a state shows whether a generator accepts it."""
        states = read_torch_file(path)
        try:
            with rng.preserve_rng_states():
                rng.restore_rng_states(self._place, states)
        except Exception as error:  # each generator has its own exceptions for a wrong state
            raise CheckpointDamaged(
                f"{path} holds no states of random number generators "
                f"({type(error).__name__}: {error}). Load another checkpoint."
            ) from error
        self._rng_states = states

    @property
    def _all(self) -> list[_SavedPart]:
        parts = (self._models.values(), self._optimizers, self._small, self._loaders.values())
        return [*itertools.chain(*parts), *self._large]

    def damaged_files(self) -> list[str]:
        """Problems of files; each file is read by one process of a node."""
        first_states = files.RANDOM_STATES_FILE.format(0)
        common = {first_states} if (self._folder / first_states).exists() else set()
        own: set[str] = set()
        for part in self._all:
            (common if part.is_common else own).update(part.files(self._recorded))
        # Shared out, because reading everything on every process would multiply the time; sorted,
        # because each process of a node takes its share of the same list.
        shared_out = sorted(common)[self._place.local_rank :: self._place.local_world_size]
        problems = (
            (name, file_problem(self._folder / name, self._recorded.get(name)))
            for name in sorted({*own, *shared_out})
        )
        return self._damaged + [
            f"{self._folder / name} {problem}. Nothing has been loaded. Load another checkpoint, "
            "or copy the file again from where it was saved."
            for name, problem in problems
            if problem
        ]

    def check(self, *, with_models: bool) -> tuple[list[str], list[str]]:
        """Compare everything with what it is read into; what is damaged, and what does not fit."""
        damaged: list[str] = []
        unfit: list[str] = []
        # Weights are compared with the models that load hooks leave.
        weights = [part for part in self._models.values() if not part.path.is_dir()]
        checked = self._all if with_models else [p for p in self._all if p not in weights]
        for check in (*(part.check for part in checked), self._read_step):
            try:
                check()
            except CheckpointDamaged as error:
                damaged += error.mistakes
            except ConfigError as error:
                unfit += error.mistakes
        return damaged, unfit

    def _read_step(self) -> None:
        # A run with more processes than the saved one has ranks without a file of their own.
        first = self._existing_file(files.RANDOM_STATES_FILE.format(0))
        states = self._rng_states or (read_torch_file(first) if first is not None else {})
        self.step = states.get("step")

    def run_hooks(self, hooks: Sequence[LoadHook]) -> None:
        """Run the hooks, and check the models that they leave against their files."""
        if not hooks:  # all have been compared
            return
        models = list(self._parts.models)
        for load_hook in hooks:
            load_hook(models, str(self._folder))
        remaining: dict[int, _SavedPart] = {}
        for number, model in enumerate(models):
            saved = self._find_model(number, model) if number in self._models else None
            if saved is None:
                raise ConfigError(
                    f"The checkpoint {str(self._folder)!r} has no weights of model {number}, "
                    "and no load hook took it. Prepare the saved models, or register the hook."
                )
            remaining[number] = saved
            if not saved.path.is_dir():
                saved.check()
        self._models = remaining

    def load_small_states(self, undoing: contextlib.ExitStack) -> None:
        """Schedulers, scaler, registered objects and loaders: any may refuse its state."""
        for part in self._small:
            # One whose state cannot be copied cannot be undone.
            with contextlib.suppress(Exception):
                undoing.callback(_put_back, part.target, copy.deepcopy(part.target.state_dict()))
            part.load()
        # Last, and not undone: one that refuses its state has not changed.
        for number, _ in self._parts.stateful_loaders():
            if number in self._loaders:
                self._loaders[number].load()
            else:
                text = "%s has no state of loader %d: it begins at its first epoch"
                _log.warning(text, self._folder, number)

    def load_large_parts(self) -> None:
        """Weights, optimizers, registered models, gradients and random numbers; not undone."""
        for part in (*self._models.values(), *self._optimizers, *self._large):
            part.load()
        name = files.RANDOM_STATES_FILE.format(self._place.rank)
        if self._existing_file(name) is None:
            _log.warning("%s has no %s: random numbers begin anew", self._folder, name)


def _registered_large(path: Path, target: nn.Module | Optimizer) -> _SavedPart:

    def problem() -> str:
        if isinstance(target, Optimizer):
            return _optimizer_problem(target, read_torch_outline(path))
        return _model_problem(target, read_weights(path, target, torch.device("meta")))

    return _SavedPart(
        path=path,
        check=lambda: _refuse(path, problem()),
        load=lambda: target.load_state_dict(read_torch_file(path)),
    )


def _loader_problem(loader: Any, state: Any) -> str:
    """Loaders of nbaccel compare it themselves, and torchdata's cannot."""
    if compare := getattr(loader, "check_state_dict", None):
        compare(state)
    elif not getattr(loader, "use_stateful_dataloader", False):
        return _state_problem(loader, state)
    return ""


def _model_problem(
    model: nn.Module,
    saved_weights: Mapping[str, Any],
    *,
    strict: bool = True,
    left_out: Collection[str] = (),
) -> str:
    """What keeps weights, of which only shapes are looked at, from being loaded into a model."""
    # Parts that read a state in a way of their own may rename or reshape: they are not compared.
    adapting_prefixes = tuple(
        uncompiled_name(f"{module_name}." if module_name else "")
        for module_name, module in model.named_modules()
        if any(map(_is_user_code, torch_private.state_readers(module)))
    )
    shapes = {n: it for n, it in _shapes_of(model).items() if not n.startswith(adapting_prefixes)}
    saved_shapes = {
        name: tuple(value.shape)
        for saved_name, value in saved_weights.items()
        if hasattr(value, "shape")
        and not (name := uncompiled_name(saved_name)).startswith(adapting_prefixes)
    }
    # None is the shape of a lazy parameter, which takes that of the file.
    reshaped = [
        f"{name} {list(saved_shapes[name])} for {list(shape)}"
        for name, shape in shapes.items()
        if shape is not None and saved_shapes.get(name, shape) != shape
    ]
    # BatchNorm starts its counter at 0 where an old file has none, so that is no mismatch.
    known = {*saved_shapes, *left_out}
    missing = [n for n in shapes if n not in known and not n.endswith("num_batches_tracked")]
    unknown = [name for name in saved_shapes if name not in shapes]
    problems = [f"other shapes ({first_few(reshaped, 3)})"] if reshaped else []
    if strict and missing:
        problems.append(f"no {first_few(missing, 3)}")
    if strict and unknown:
        problems.append(f"{first_few(unknown, 3)}, which the model does not have")
    if not problems:
        return ""
    return f"is of another model than the {type(model).__name__}: it has {'; '.join(problems)}"


def _shapes_of(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Shapes by name; None where any fits."""
    shapes_by_name = {
        uncompiled_name(tensor_name): None if is_lazy(value) else tuple(value.shape)
        for tensor_name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    for tensor_name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_shape"):  # ZeRO-3 has a placeholder there
            shapes_by_name[uncompiled_name(tensor_name)] = tuple(parameter.ds_shape)
    return shapes_by_name


def _is_user_code(function: Any) -> bool:
    return not str(getattr(function, "__module__", "")).startswith(("torch.", "deepspeed."))


def _optimizer_problem(optimizer: Optimizer, saved_state: Any) -> str:
    hooks = torch_private.has_state_loading_hooks(optimizer)
    if hooks or _is_user_code(type(optimizer).load_state_dict):
        return ""
    if not isinstance(saved_state, Mapping) or not {"state", "param_groups"} <= saved_state.keys():
        return f"holds no state of an optimizer, but {_describe_state(saved_state)}"
    try:
        # A file of something else may have any structure below these two keys.
        saved_counts = [len(param_group["params"]) for param_group in saved_state["param_groups"]]
        expected_counts = [len(param_group["params"]) for param_group in optimizer.param_groups]
        if saved_counts != expected_counts:
            return (
                f"is of another optimizer: it has groups of {saved_counts} parameters, and the "
                f"{type(optimizer).__name__} has groups of {expected_counts}"
            )
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        return _shape_problem(optimizer, saved_state) if is_torchs else ""
    except (LookupError, TypeError, AttributeError) as error:
        return f"holds no state of an optimizer ({type(error).__name__}: {error})"


def _shape_problem(optimizer: Optimizer, saved_state: Mapping[str, Any]) -> str:
    numbers = [number for group in saved_state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved_state["state"].get(number, {}).items():
            if name in _PARAMETER_SHAPED_STATE and value.shape != parameter.shape:
                return (
                    f"is of another model: its {name} of parameter {number} has shape "
                    f"{list(value.shape)}, and the parameter has {list(parameter.shape)}"
                )
    return ""


def _state_problem(item: Any, saved_state: Any) -> str:
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
        return ", ".join(map(str, list(saved_state)[:6])) or "nothing"
    return f"a {type(saved_state).__name__}"


def _trained_problem(model: nn.Module, names: Collection[str]) -> str:
    is_trained = trained_by_name(model)
    trained_names = sorted(name for name in names if is_trained.get(name, True))
    if not trained_names:
        return ""
    return (
        "was saved with exclude_frozen_parameters=True and has no values for parameters that the "
        f"{type(model).__name__} now trains or does not have: {first_few(trained_names, 3)}"
    )
