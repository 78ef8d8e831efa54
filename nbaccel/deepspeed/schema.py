"""Which keys the installed DeepSpeed knows, asked of DeepSpeed itself.

DeepSpeed has no schema of its whole configuration. Some sections are pydantic models, which say
what they know; the rest are dictionaries that it reads with ``get``. So it is handed a dictionary
that writes down what is asked of it, and a key that no model can know, which makes the model
behind a section complain under its own name. Nothing here lists a key that DeepSpeed reads.
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

from nbaccel._optional import require
from nbaccel.deepspeed import library

__all__ = ["Arguments", "Schema", "deepspeed_schema", "optimizer_arguments", "quiet", "required"]

# DeepSpeed asks for these only where processes are connected, or by other ways than its reader.
_ALSO = ("sequence_parallel_size",)
# Their inner names are the user's own, or are read by parsers that refuse what they do not know.
_FREE = ("data_efficiency.data_sampling", "data_efficiency.data_routing", "pipeline")
_STRANGE = "nbaccel asks"
_ENOUGH = {"train_micro_batch_size_per_gpu": 1}


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
    """What DeepSpeed takes for a key that is not given.

    Attributes:
        value: The default.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Schema:
    """What the installed DeepSpeed knows.

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

    def places(self, key: str) -> tuple[str, ...]:
        """Where a key belongs.

        Args:
            key: A key.

        Returns:
            Paths of the sections that know it.
        """
        return tuple(path for path, keys in self.sections.items() if key in keys)

    def default(self, key: str) -> Default | None:
        """What DeepSpeed takes for a key of one of its models, which drop ``"auto"``.

        Args:
            key: A dotted path.

        Returns:
            The default; None where the key is in no model, or has none.
        """
        path, _, name = key.rpartition(".")
        model = self.models.get(path)
        if model is None:
            return None
        fields = {entry.alias or own: entry for own, entry in model.model_fields.items()}
        entry = fields.get(name) or model.model_fields.get(name)
        if entry is None or entry.is_required():
            return None
        value = entry.get_default(call_default_factory=True)
        # DeepSpeed has an int of its own there, which shows itself with commas.
        return Default(int(value) if isinstance(value, int) and value > 1 else value)


class _Recorder(dict[str, Any]):
    """A dictionary that writes down every key it is asked for."""

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

    def __copy__(self) -> _Recorder:
        return self


@lru_cache(maxsize=1)
def deepspeed_schema() -> Schema:
    """Ask the installed DeepSpeed what it knows; once per process.

    Returns:
        Its keys.

    Raises:
        MissingBackend: DeepSpeed is not installed.
    """
    why = "Checking a DeepSpeed configuration"
    deepspeed = library.load("deepspeed", why=why)
    reader = library.load("deepspeed.runtime.config", why=why)
    models: dict[str, type[BaseModel]] = {}
    sections: dict[str, frozenset[str]] = {}
    gone = dict(getattr(reader, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))
    inner_gone = dict(getattr(reader, "_REMOVED_ZERO_CONFIG_KEYS", {}))
    removed = gone | {f"zero_optimization.{key}": text for key, text in inner_gone.items()}
    with quiet():
        top = _asked(reader.DeepSpeedConfig, ())
        sections[""] = frozenset((top | set(_ALSO)) - set(gone))
        for key in sorted(sections[""]):
            _look(reader.DeepSpeedConfig, (key,), sections, models)
    return Schema(
        version=str(deepspeed.__version__),
        sections=MappingProxyType(sections),
        models=MappingProxyType(models),
        removed=MappingProxyType(removed),
        optimizers=(*reader.DEEPSPEED_OPTIMIZERS, *_torch_optimizers()),
        own_optimizers=tuple(reader.DEEPSPEED_OPTIMIZERS),
        schedulers=MappingProxyType(dict(_schedulers())),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed's logger is silent for the length of a block: it logs every configuration."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _nested(path: tuple[str, ...], inner: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(path):
        inner = {key: inner}
    return {**_ENOUGH, **inner}


def _asked(reader: Callable[..., Any], path: tuple[str, ...]) -> set[str]:
    """What DeepSpeed asks a plain section for."""
    asked: set[str] = set()
    # Some sections are read on only where they have a type, or are turned on.
    for content, key in (({}, ""), ({"type": "Adam"}, "type"), ({"enabled": True}, "enabled")):
        if key and key not in asked:
            continue
        recorder = _Recorder(content if path else _ENOUGH)
        # What it asked before it gave up, over whatever, is what counts.
        with contextlib.suppress(Exception):
            reader(_nested(path, recorder) if path else recorder)
        asked |= recorder.asked
    return asked


def _look(
    reader: Callable[..., Any],
    path: tuple[str, ...],
    sections: dict[str, frozenset[str]],
    models: dict[str, type[BaseModel]],
) -> None:
    """Find out what stands behind a path: a model, a plain section, or a value."""
    if ".".join(path) in _FREE:
        return
    if model := _model_behind(reader, path):
        _spread(path, model, sections, models)
        return
    asked = _asked(reader, path)
    if asked - {"enabled"}:  # where that is all, the rest is read by others, and later
        sections[".".join(path)] = frozenset(asked)
        for key in sorted(asked):
            if len(path) < 2 and key not in ("params", "type"):
                _look(reader, (*path, key), sections, models)


def _model_behind(reader: Callable[..., Any], path: tuple[str, ...]) -> type[BaseModel] | None:
    try:
        reader(_nested(path, {_STRANGE: None}))
    except ValidationError as error:
        names = {model.__name__: model for model in _all_models()}
        for detail in error.errors(include_url=False):
            if detail["type"] == "extra_forbidden" and detail["loc"][-1] == _STRANGE:
                found = names.get(error.title)
                for step in detail["loc"][:-1]:
                    found = dict(_inner_models(found)).get(str(step)) if found else None
                return found
    except Exception:  # a section without a model answers in its own way
        return None
    return None


def _all_models() -> Iterator[type[BaseModel]]:
    base = library.load("deepspeed.runtime.config_utils", why="A DeepSpeed model")
    waiting: list[type[BaseModel]] = list(base.DeepSpeedConfigModel.__subclasses__())
    while waiting:
        model = waiting.pop()
        yield model
        waiting += model.__subclasses__()


def _inner_models(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, entry in model.model_fields.items():
        annotation = entry.annotation
        for part in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield entry.alias or name, part


def _spread(
    path: tuple[str, ...],
    model: type[BaseModel],
    sections: dict[str, frozenset[str]],
    models: dict[str, type[BaseModel]],
) -> None:
    """Write down a model and those inside it."""
    names = {entry.alias or name for name, entry in model.model_fields.items()}
    sections[".".join(path)] = frozenset(names | set(model.model_fields))
    models[".".join(path)] = model
    for key, inner in _inner_models(model):
        _spread((*path, key), inner, sections, models)


def _torch_optimizers() -> list[str]:
    optim = require("torch.optim", extra="", why="A list of optimizers")
    return sorted(
        name
        for name, item in vars(optim).items()
        if isinstance(item, type) and issubclass(item, optim.Optimizer) and name != "Optimizer"
    )


def _schedulers() -> Iterator[tuple[str, Arguments]]:
    own = library.load("deepspeed.runtime.lr_schedules", why="A schedule")
    torch_own = require("torch.optim.lr_scheduler", extra="", why="A schedule")
    for name in own.VALID_LR_SCHEDULES:
        yield name, _arguments(getattr(own, name))
    for name, item in sorted(vars(torch_own).items()):
        if isinstance(item, type) and issubclass(item, torch_own.LRScheduler):
            yield name, _arguments(item)


def _arguments(made: type, *, also: tuple[str, ...] = ()) -> Arguments:
    # The first is what it works on: an optimizer, or parameters.
    parameters = list(inspect.signature(made).parameters.values())[1:]
    kinds = {parameter.kind for parameter in parameters}
    given = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return Arguments(
        owner=made.__name__,
        known=frozenset(p.name for p in given) | frozenset(also),
        needed=frozenset(p.name for p in given if p.default is p.empty),
        open=inspect.Parameter.VAR_KEYWORD in kinds,
    )


def optimizer_arguments(
    name: str, params: Mapping[str, Any], *, offloaded: bool
) -> Arguments | None:
    """What the optimizer takes that DeepSpeed makes under a name.

    Args:
        name: As in ``optimizer.type``.
        params: What is given to it; ``torch_adam`` decides whose Adam it is.
        offloaded: Whether the optimizer's state is kept on the host.

    Returns:
        Its arguments; None where its package is not installed or there is no such optimizer.
    """
    why = f"The optimizer {name}"
    low = name.lower()
    optim = require("torch.optim", extra="", why=why)

    def own(module: str, made: str, *also: str) -> Arguments:
        found = library.load(f"deepspeed.ops.{module}", why=why)
        return _arguments(getattr(found, made), also=also)

    if low in ("adam", "adamw"):
        also = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
        if params.get("torch_adam"):
            return _arguments(optim.AdamW, also=also)
        return own("adam", "DeepSpeedCPUAdam" if offloaded else "FusedAdam", *also)
    if low == "adagrad":
        return own("adagrad", "DeepSpeedCPUAdagrad") if offloaded else _arguments(optim.Adagrad)
    if low == "lion":
        return own("lion", "DeepSpeedCPULion" if offloaded else "FusedLion")
    if low == "lamb":
        return own("lamb", "FusedLamb")
    if low == "muon":
        return _muon()
    return _arguments(getattr(optim, name)) if name in vars(optim) else None


def _muon() -> Arguments | None:
    engine = library.load("deepspeed.runtime.engine", why="The optimizer Muon")
    halves = [
        getattr(engine.DeepSpeedEngine, name, None)
        for name in ("_MUON_HALF_KEYS", "_ADAM_HALF_KEYS")
    ]
    if not all(halves):
        return None
    also = ("muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "fp32_optimizer_states")
    known = frozenset(key for half in halves for key in half or ()) | frozenset(also)
    return Arguments(owner="Muon", known=known)


def required(schedule: Arguments, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments without a default that are not given.

    Args:
        schedule: What the constructor takes.
        params: What is given to it.

    Returns:
        Their names.
    """
    return tuple(sorted(schedule.needed - set(params)))
