"""Implementations of what ``capabilities`` names, imported when first needed."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, MissingBackend, PlatformUnsupported
from nbaccel.base.public_names import NOT_INSTALLED, missing_name_of
from nbaccel.config import Fp8Config, RunConfig, capabilities as rows
from nbaccel.config.capability_rows import DeviceSigns, Fp8Choice, StrategyRow
from nbaccel.plan.contracts.device import Device, DeviceRuntime, UnlistedDevice
from nbaccel.plan.contracts.host_engine import Engine
from nbaccel.plan.contracts.training import Precision, Said, Source, Strategy, Wanted
from nbaccel.plan.launch_plan import Choice
from nbaccel.plan.topology import STRATEGY_VARIABLE

if TYPE_CHECKING:
    from nbaccel.plan.inventory import Gpu, Inventory


def device(device_name: str) -> Device:
    """The implementation of a device."""
    device_class: type[Device] = load_object(rows.device_row(device_name).path)
    return device_class()


def device_runtime(device_name: str) -> DeviceRuntime:
    """What a process that computes on a device needs of it."""
    if any(row.name == device_name for row in rows.DEVICES):
        return device(device_name)
    return UnlistedDevice(device_name)


def devices(names: Collection[str] | None = None) -> tuple[Device, ...]:
    """All devices in the order of their rows, but those that cannot be loaded."""
    loaded_devices = []
    for row in rows.DEVICES:
        if names is not None and row.name not in names:
            continue
        # Another package's module may raise anything, and must not disable the other devices.
        with contextlib.suppress(Exception):
            loaded_devices.append(device(row.name))
    return tuple(loaded_devices)


def has_sign(signs: DeviceSigns, root: Path = Path("/")) -> bool:
    """Whether this machine has one of them; two listings of folders where it has none."""
    return (
        any(env.read(name) for name in signs.variables)
        or any(name in sys.modules or PathFinder.find_spec(name) for name in signs.packages)
        or any(any(root.glob(pattern)) for pattern in signs.files)
        or (bool(signs.pci_vendor) and signs.pci_vendor in _vendors_on_bus(root))
    )


@functools.cache  # a launch asks for several vendors
def _vendors_on_bus(root: Path) -> set[str]:
    return {env.read_file(path).lower() for path in root.glob("sys/bus/pci/devices/*/vendor")}


def possible_devices(inventory: Inventory | None = None) -> tuple[Device, ...]:
    """Of these the ones of which this machine, or a described one, has a sign."""

    def is_told(signs: DeviceSigns) -> bool:
        if inventory is None:
            return has_sign(signs)
        return any(getattr(inventory, fact) for fact in signs.facts)

    return devices({row.name for row in rows.DEVICES if row.signs is None or is_told(row.signs)})


def usable_units(inventory: Inventory) -> tuple[Gpu, ...]:
    """The accelerators of a machine that a launch takes by itself; none where it takes the CPU."""
    for known in possible_devices(inventory):
        units = known.units(inventory)
        if units and not known.idle_reason(inventory):
            return units
    return ()


def prepare_notebook() -> str:
    """Let all devices sleep in a notebook's process."""
    for known in devices():
        known.keep_asleep()
    return next((known.name for known in devices() if known.expects_launches()), "")


def awake_accelerators() -> Iterator[Device]:
    """The accelerators in use by this process; asking initialises none."""
    return (device for device in devices() if device.is_awake())


def precision(
    precision_name: str,
    fp8: Fp8Config | None = None,
    device_name: str = "",
    compute_capability: tuple[int, int] | None = None,
) -> type[Precision]:
    """The implementation of a precision."""
    row = rows.precision_row(precision_name)
    choice = Fp8Choice()
    if row.has_backends:
        device_row_of = rows.device_row(device_name) if device_name else None
        backend = "" if fp8 is None else fp8.backend
        choice = rows.fp8_backend(backend, device_row_of, compute_capability)
    if choice.problem:
        raise PlatformUnsupported(
            f"mixed_precision={precision_name!r} ({row.meaning}) cannot be trained in: "
            f"{choice.problem}. bf16 is the nearest of those that can."
        )
    precision_class: type[Precision] = load_object((choice.row or row).path)
    return precision_class


def layer_restorers() -> Iterator[Callable[[Any], list[tuple[Any, Any]]]]:
    """What gives a module its own layers back, of each FP8 library that this process has used."""
    used = (row for row in rows.FP8_BACKENDS if row.restore and row.library in sys.modules)
    return (load_object(path) for path in dict.fromkeys(row.restore for row in used))


def strategy(strategy_name: str) -> type[Strategy]:
    """The implementation of a strategy."""
    strategy_class: type[Strategy] = load_object(rows.strategy_row(strategy_name).path)
    return strategy_class


def wanted_strategy(said: Said) -> Wanted | None:
    """The strategy that was requested."""
    requests = [wanted for row in rows.STRATEGIES if (wanted := _request_of(row, said)) is not None]
    # In the order of `Source`, the strongest first.
    for source in get_args(Source):
        requests_of_source = [wanted for wanted in requests if wanted.source == source]
        if len(requests_of_source) > 1:
            first_request, second_request, *_ = requests_of_source
            raise ConfigError(
                f"{first_request.what} and {second_request.what} were both given: each shards "
                f"models in its own way ({first_request.strategy} and {second_request.strategy}), "
                "and only one can. Give one of them."
            )
        if requests_of_source:
            return requests_of_source[0]
    return None


_ZERO_SHARDS = ("nothing", "the optimizer", "optimizer and gradients", "all, weights too,")
"""What is sharded, by ZeRO's stage."""


def _request_of(row: StrategyRow, said: Said) -> Wanted | None:
    """The strongest request for a strategy: an argument, a run's configuration, the environment."""
    for argument_name in row.arguments:
        if (plugin := said.arguments.get(argument_name)) is not None:
            return _wanted(row, said, "argument", argument_name, plugin)
    handler = _settings_among(row, said.handlers)
    if handler is not None and not row.is_default and not row.arguments:
        return _wanted(row, said, "argument", type(handler).__name__)
    if row.run_flag and said.run is not None and getattr(said.run, row.run_flag):
        stage = said.run.zero_stage or 0
        reason = f"asked for: {_ZERO_SHARDS[stage]} in shards, by DeepSpeed"
        choice = Choice("zero_stage", stage, reason)
        request = _wanted(row, said, "config", f"zero_stage={said.run.zero_stage}")
        return replace(request, headline=f"ZeRO-{stage}", choices=(choice,))
    if said.run is not None and said.run.strategy == row.name:
        return _wanted(row, said, "config", f'strategy="{row.name}"')
    if said.has_environment and env.read(STRATEGY_VARIABLE) == row.name:
        return _wanted(row, said, "environment", f'strategy="{row.name}"')
    if said.has_environment and row.variables and env.flag(flag := row.variables[0][0]):
        return _wanted(row, said, "environment", flag)
    return None


def _wanted(row: StrategyRow, said: Said, source: Source, what: str, plugin: Any = None) -> Wanted:
    def settings() -> Any:
        if row.make_settings:
            return load_object(row.make_settings)(plugin, said.run)
        return strategy_settings(row.name, said.handlers) if plugin is None else plugin

    reason = f"{what} was given: {row.meaning}"
    return Wanted(strategy=row.name, source=source, what=what, reason=reason, settings=settings)


def strategy_settings(strategy_name: str, handlers: tuple[Any, ...]) -> Any:
    """The settings of a strategy: those given, or its defaults."""
    capability_row = rows.strategy_row(strategy_name)
    settings = _settings_among(capability_row, handlers)
    if settings is not None or not capability_row.settings:
        return settings
    return load_object(capability_row.settings)()


def _settings_among(row: StrategyRow, handlers: tuple[Any, ...]) -> Any:
    """The first of a strategy's class; by its name, so that a class that is not here stays away."""
    named = ((f"{type(one).__module__}:{type(one).__qualname__}", one) for one in handlers)
    return next((handler for class_path, handler in named if class_path == row.settings), None)


def check_strategy(strategy_name: str, device_type: str, config: RunConfig | None = None) -> None:
    """Refuse, before a process starts, what cannot train in it."""
    if not strategy_name:
        return
    capability_row = rows.strategy_row(strategy_name)
    if capability_row.check:
        load_object(capability_row.check)(device_type)
    if capability_row.judge and config is not None:
        load_object(capability_row.judge)(config, device_type)


def worker_preparations() -> list[Callable[[str], None]]:
    """What the libraries of strategies do in each new worker; a template imports them once."""
    return [load_object(row.enter) for row in rows.STRATEGIES if row.enter]


def explain_signal(signal_name: str, functions: Sequence[str]) -> tuple[str, str] | None:
    """Likely cause of a worker's death and the remedy, where a strategy or device knows more."""
    for row in rows.STRATEGIES:
        if row.explain_signal:
            hint: tuple[str, str] | None = load_object(row.explain_signal)(signal_name, functions)
            if hint is not None:
                return hint
    hints = (device.explain_signal(signal_name) for device in possible_devices())
    return next(filter(None, hints), None)


def load_advisor() -> Any:
    """What finds the fastest configuration of a strategy that has one to find."""
    for row in rows.STRATEGIES:
        if row.advisor:
            return load_object(row.advisor)
    raise MissingBackend(
        f"advise needs one of {', '.join(row.name for row in rows.STRATEGIES)} with an advisor. "
        "Install nbaccel with its DeepSpeed backend."
    )


def plugin_class(class_name: str) -> Any:
    """The class of a strategy's settings, by the name that users import."""
    for row in rows.STRATEGIES:
        if row.settings.endswith(f":{class_name}"):
            return load_object(row.settings)
    return missing_name_of(class_name, NOT_INSTALLED, "nbaccel.utils.dataclasses")


def settings_forms() -> tuple[Any, ...]:
    """What pickers offer of strategies that have settings of their own."""
    return tuple(load_object(row.form)() for row in rows.STRATEGIES if row.form)


def engine(engine_name: str) -> Engine:
    """The implementation of an engine that has workers run on other hosts."""
    engine_class: type[Engine] = load_object(rows.engine_row(engine_name).path)
    return engine_class()


def load_object(object_path: str) -> Any:
    """The object that a capability row names."""
    module_name, _, object_name = object_path.partition(":")
    loaded_module = import_module(module_name)
    return getattr(loaded_module, object_name) if object_name else loaded_module
