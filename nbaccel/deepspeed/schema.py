"""Which keys the installed DeepSpeed reads, found out by letting it read.

DeepSpeed has no schema of its whole configuration. Some sections are pydantic models, which name
their fields; the rest are dictionaries that it reads with ``get``. So it is given a dictionary that
records which keys are looked up, and a key that no model has, so that the model of a section raises
an error with its class name. Nothing here lists a key that DeepSpeed reads.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from nbaccel.base.optional_packages import require
from nbaccel.deepspeed import library, private_api

__all__ = [
    "Arguments",
    "Schema",
    "deepspeed_schema",
    "missing_arguments",
    "optimizer_arguments",
    "quiet_logger",
]

# DeepSpeed reads these only where processes are connected, or in other places than its reader.
_UNASKED_KEYS = ("sequence_parallel_size",)
# Their inner names are the user's own, or are read by parsers that refuse what they do not know.
_FREE_SECTIONS = ("data_efficiency.data_sampling", "data_efficiency.data_routing", "pipeline")
_STRANGE_KEY = "nbaccel asks"
_ENOUGH_SETTINGS = {"train_micro_batch_size_per_gpu": 1}


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a constructor takes.

    Attributes:
        owner: Its class, for messages.
        known: Names of arguments.
        needed: Those without a default.
        open: Whether it takes any name.
    """

    owner: str
    known: frozenset[str]
    needed: frozenset[str] = frozenset()
    open: bool = False


@dataclass(frozen=True, slots=True)
class Default:
    """DeepSpeed's default for a key that is not given.

    Attributes:
        value: The default.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys, models and classes of the installed DeepSpeed.

    Attributes:
        version: DeepSpeed's version.
        sections: Keys of each section by its path; the top level is the empty path. A section that
            is not here takes any key.
        models: DeepSpeed's own model of a section, where it has one.
        removed: Keys that DeepSpeed had, by path, and its sentence on each.
        optimizers: Names of optimizers: DeepSpeed's, in any case, and torch's.
        own_optimizers: DeepSpeed's alone.
        schedulers: Learning rate schedules and what their constructors take.
    """

    version: str
    sections: Mapping[str, frozenset[str]]
    models: Mapping[str, type[BaseModel]] = field(repr=False)
    removed: Mapping[str, str] = field(repr=False)
    optimizers: tuple[str, ...] = ()
    own_optimizers: tuple[str, ...] = ()
    schedulers: Mapping[str, Arguments] = field(default_factory=dict)

    def places(self, config_key: str) -> tuple[str, ...]:
        """Where a key belongs."""
        return tuple(path for path, keys in self.sections.items() if config_key in keys)

    def default(self, config_key: str) -> Default | None:
        """DeepSpeed's default for a key of one of its models, which replace ``"auto"`` by it."""
        section_path, _, field_name = config_key.rpartition(".")
        model = self.models.get(section_path)
        if model is None:
            return None
        fields_by_key = {
            model_field.alias or name: model_field
            for name, model_field in model.model_fields.items()
        }
        model_field = fields_by_key.get(field_name) or model.model_fields.get(field_name)
        if model_field is None or model_field.is_required():
            return None
        field_default = model_field.get_default(call_default_factory=True)
        # DeepSpeed's defaults are of a subclass of `int` there, whose `repr` has commas.
        return Default(
            int(field_default)
            if isinstance(field_default, int) and field_default > 1
            else field_default
        )


class _KeyRecorder(dict[str, Any]):
    """A dictionary that records every key that is looked up in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary does."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself: ``key in holder.keys()`` is a question for a key as well."""
        return self

    def __copy__(self) -> _KeyRecorder:
        # DeepSpeed copies the dictionary and reads the copy: look-ups must be recorded here.
        return self


@lru_cache(maxsize=1)
def deepspeed_schema() -> Schema:
    """Find out what the installed DeepSpeed reads; once per process."""
    reason = "Checking a DeepSpeed configuration"
    deepspeed = library.load_module("deepspeed", why=reason)
    config_reader = library.load_module("deepspeed.runtime.config", why=reason)
    model_by_path: dict[str, type[BaseModel]] = {}
    keys_by_path: dict[str, frozenset[str]] = {}
    removed_keys = private_api.removed_keys(config_reader)
    with quiet_logger():
        top_keys = _asked_keys(config_reader.DeepSpeedConfig, ())
        keys_by_path[""] = frozenset((top_keys | set(_UNASKED_KEYS)) - set(removed_keys))
        for config_key in sorted(keys_by_path[""]):
            _look_behind(config_reader.DeepSpeedConfig, (config_key,), keys_by_path, model_by_path)
    return Schema(
        version=str(deepspeed.__version__),
        sections=MappingProxyType(keys_by_path),
        models=MappingProxyType(model_by_path),
        removed=MappingProxyType(removed_keys),
        optimizers=(*config_reader.DEEPSPEED_OPTIMIZERS, *_torch_optimizers()),
        own_optimizers=tuple(config_reader.DEEPSPEED_OPTIMIZERS),
        schedulers=MappingProxyType(dict(_known_schedulers())),
    )


@contextmanager
def quiet_logger() -> Iterator[None]:
    """A block in which DeepSpeed's logger is silent: it logs every configuration it reads."""
    logger = logging.getLogger("DeepSpeed")
    level_before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level_before)


def _nested_settings(path: tuple[str, ...], inner_settings: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(path):
        inner_settings = {key: inner_settings}
    return {**_ENOUGH_SETTINGS, **inner_settings}


def _asked_keys(config_reader: Callable[..., Any], path: tuple[str, ...]) -> set[str]:
    """The keys that DeepSpeed looks up in a plain section."""
    keys: set[str] = set()
    # Some sections are read on only where they have a type, or are turned on.
    for content, config_key in (
        ({}, ""),
        ({"type": "Adam"}, "type"),
        ({"enabled": True}, "enabled"),
    ):
        # Each try is a run of DeepSpeed's reader, and useless for a section without such a key.
        if config_key and config_key not in keys:
            continue
        recorder = _KeyRecorder(content if path else _ENOUGH_SETTINGS)
        # The reader fails on most of these settings, in many ways: what it had looked up until then
        # is the answer.
        with contextlib.suppress(Exception):
            config_reader(_nested_settings(path, recorder) if path else recorder)
        keys |= recorder.asked
    return keys


def _look_behind(
    config_reader: Callable[..., Any],
    section_path: tuple[str, ...],
    keys_by_path: dict[str, frozenset[str]],
    model_by_path: dict[str, type[BaseModel]],
) -> None:
    """Find out what a path leads to: a model, a plain section, or a value."""
    if ".".join(section_path) in _FREE_SECTIONS:
        return
    if model := _model_behind(config_reader, section_path):
        _spread_model(section_path, model, keys_by_path, model_by_path)
        return
    keys = _asked_keys(config_reader, section_path)
    if keys - {"enabled"}:  # with that key alone, the others are read elsewhere, and later
        keys_by_path[".".join(section_path)] = frozenset(keys)
        for config_key in sorted(keys):
            # Each look runs DeepSpeed's reader, so the search ends at two levels.
            if len(section_path) < 2 and config_key not in ("params", "type"):
                _look_behind(
                    config_reader, (*section_path, config_key), keys_by_path, model_by_path
                )


def _model_behind(
    reader: Callable[..., Any], section_path: tuple[str, ...]
) -> type[BaseModel] | None:
    try:
        reader(_nested_settings(section_path, {_STRANGE_KEY: None}))
    except ValidationError as error:
        model_names = {model.__name__: model for model in _all_models()}
        for detail in error.errors(include_url=False):
            if detail["type"] == "extra_forbidden" and detail["loc"][-1] == _STRANGE_KEY:
                found_model = model_names.get(error.title)
                for step in detail["loc"][:-1]:
                    found_model = (
                        dict(_inner_models(found_model)).get(str(step)) if found_model else None
                    )
                return found_model
    except Exception:  # a section without a model fails in other ways
        return None
    return None


def _all_models() -> Iterator[type[BaseModel]]:
    module = library.load_module("deepspeed.runtime.config_utils", why="A DeepSpeed model")
    waiting_models: list[type[BaseModel]] = list(module.DeepSpeedConfigModel.__subclasses__())
    # Without a list of its models, DeepSpeed's base class has them as subclasses, at any depth.
    while waiting_models:
        model = waiting_models.pop()
        yield model
        waiting_models += model.__subclasses__()


def _inner_models(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, model_field in model.model_fields.items():
        annotation = model_field.annotation
        for part in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield model_field.alias or name, part


def _spread_model(
    section_path: tuple[str, ...],
    model: type[BaseModel],
    keys_by_path: dict[str, frozenset[str]],
    model_by_path: dict[str, type[BaseModel]],
) -> None:
    """Write down a model and those inside it."""
    key_names = {
        model_field.alias or field_name for field_name, model_field in model.model_fields.items()
    }
    keys_by_path[".".join(section_path)] = frozenset(key_names | set(model.model_fields))
    model_by_path[".".join(section_path)] = model
    for key, inner_model in _inner_models(model):
        _spread_model((*section_path, key), inner_model, keys_by_path, model_by_path)


def _torch_optimizers() -> list[str]:
    module = require("torch.optim", extra="", why="A list of optimizers")
    return sorted(
        name
        for name, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, module.Optimizer) and name != "Optimizer"
    )


def _known_schedulers() -> Iterator[tuple[str, Arguments]]:
    module = library.load_module("deepspeed.runtime.lr_schedules", why="A schedule")
    torch_own = require("torch.optim.lr_scheduler", extra="", why="A schedule")
    for name in module.VALID_LR_SCHEDULES:
        yield name, _arguments_of(getattr(module, name))
    for name, item in sorted(vars(torch_own).items()):
        if isinstance(item, type) and issubclass(item, torch_own.LRScheduler):
            yield name, _arguments_of(item)


def _arguments_of(made_class: type, *, further_names: tuple[str, ...] = ()) -> Arguments:
    # The first parameter is what it works on: an optimizer, or the model's parameters.
    parameter_list = list(inspect.signature(made_class).parameters.values())[1:]
    parameter_kinds = {parameter.kind for parameter in parameter_list}
    parameters = [p for p in parameter_list if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return Arguments(
        owner=made_class.__name__,
        known=frozenset(p.name for p in parameters) | frozenset(further_names),
        needed=frozenset(p.name for p in parameters if p.default is p.empty),
        open=inspect.Parameter.VAR_KEYWORD in parameter_kinds,
    )


def optimizer_arguments(
    optimizer_type: str, params: Mapping[str, Any], *, is_offloaded: bool
) -> Arguments | None:
    """What the optimizer takes that DeepSpeed makes under a name."""
    reason = f"The optimizer {optimizer_type}"
    lower_name = optimizer_type.lower()
    optim_module = require("torch.optim", extra="", why=reason)

    def own(module_name: str, class_name: str, *also: str) -> Arguments:
        operation_module = library.load_module(f"deepspeed.ops.{module_name}", why=reason)
        return _arguments_of(getattr(operation_module, class_name), further_names=also)

    if lower_name in ("adam", "adamw"):
        further_names = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
        if params.get("torch_adam"):
            return _arguments_of(optim_module.AdamW, further_names=further_names)
        return own("adam", "DeepSpeedCPUAdam" if is_offloaded else "FusedAdam", *further_names)
    if lower_name == "adagrad":
        return (
            own("adagrad", "DeepSpeedCPUAdagrad")
            if is_offloaded
            else _arguments_of(optim_module.Adagrad)
        )
    if lower_name == "lion":
        return own("lion", "DeepSpeedCPULion" if is_offloaded else "FusedLion")
    if lower_name == "lamb":
        return own("lamb", "FusedLamb")
    if lower_name == "muon":
        return _muon_arguments()
    return (
        _arguments_of(getattr(optim_module, optimizer_type))
        if optimizer_type in vars(optim_module)
        else None
    )


def _muon_arguments() -> Arguments | None:
    engine = library.load_module("deepspeed.runtime.engine", why="The optimizer Muon")
    half_keys = private_api.muon_argument_names(engine.DeepSpeedEngine)
    if not half_keys:
        return None
    names = ("muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "fp32_optimizer_states")
    return Arguments(owner="Muon", known=half_keys | frozenset(names))


def missing_arguments(arguments: Arguments, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments without a default that are not given."""
    return tuple(sorted(arguments.needed - set(params)))
