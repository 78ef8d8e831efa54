"""From an `Accelerator`'s arguments to a ``Request``, and from that to a ``TrainingRun``.

Arguments of the call win over a configuration, and that over the environment (Accelerate silently
lets some variables win over arguments). A run has what was decided, and what does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from nbaccel.base import env
from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.log import write_notice
from nbaccel.config import Fp8Config, RunConfig, capabilities as rows, run_config_of
from nbaccel.config.fp8 import Fp8Handler
from nbaccel.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Handler,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from nbaccel.plan import registry, training_plan
from nbaccel.plan.contracts import training as contracts
from nbaccel.plan.contracts.device import Device
from nbaccel.plan.topology import ACTIVATION_CHECKPOINTING
from nbaccel.train import distributed
from nbaccel.train.collectives import Collectives

_HANDLERS = (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs, Fp8Handler)
_Kind = TypeVar("_Kind")


def one_of(given_handlers: Sequence[Any], kind: type[_Kind]) -> _Kind:
    """The settings of a class among those given as ``kwargs_handlers``, or its defaults."""
    return next((item for item in given_handlers if isinstance(item, kind)), None) or kind()


def _checked_handlers(
    given_handlers: Sequence[Handler] | None, other_spelling: Sequence[Handler] | None
) -> tuple[Any, ...]:
    """One of each class, among them settings of strategies, under either name of the argument."""
    if given_handlers is not None and other_spelling is not None:
        raise _two_given(f"kwargs_handlers={given_handlers}", f"kwarg_handlers={other_spelling}")
    # Of strategies whose settings have no argument of their own; by their classes' paths, as
    # importing the classes of all rows would import their libraries.
    of_strategies = [row.settings for row in rows.STRATEGIES if row.settings and not row.arguments]
    by_kind: dict[Any, Any] = {}
    for handler in given_handlers or other_spelling or ():
        path = f"{type(handler).__module__}:{type(handler).__qualname__}"
        kinds = [kind for kind in _HANDLERS if isinstance(handler, kind)]
        kind: Any = path if path in of_strategies else next(iter(kinds), None)
        if kind is None:
            known = [*(one.__name__ for one in _HANDLERS)]
            known += [path.partition(":")[2] for path in of_strategies]
            raise ConfigError(
                f"kwargs_handlers got a {type(handler).__name__}: {handler!r}. It would have "
                f"no effect. Give objects of {', '.join(known)}."
            )
        if kind in by_kind:
            raise _two_given(f"kwargs_handlers with {by_kind[kind]}", f"{handler}")
        by_kind[kind] = handler
    return tuple(by_kind.values())


def _two_given(first: str, second: str) -> ConfigError:
    return ConfigError(
        f"Accelerator got {first} and {second}: only one of them can hold. Give one alone."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that was asked of an `Accelerator`, complete."""

    asked: contracts.TrainingRequest
    handlers: tuple[Any, ...]  # those given as ``kwargs_handlers``
    accumulation: GradientAccumulationPlugin
    data: DataLoaderConfiguration
    project: ProjectConfiguration
    settings: Any = None  # those of the strategy that was asked for; None where none was
    said_by_settings: contracts.SaidBySettings = field(default_factory=contracts.SaidBySettings)
    activation_checkpointing: bool = False
    downcast_bf16: bool = False

    def settings_for(self, strategy_name: str) -> Any:
        """The settings of the strategy that the plan names."""
        strategy = self.asked.strategy
        if strategy is not None and strategy.strategy == strategy_name:
            return self.settings
        return registry.strategy_settings(strategy_name, self.handlers)

    def settings_of(self, argument_name: str) -> Any:
        """The settings that an argument of `Accelerator` stands for, if that strategy was asked."""
        strategy = self.asked.strategy
        if strategy is None or argument_name not in rows.strategy_row(strategy.strategy).arguments:
            return None
        return self.settings

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """Merge the arguments of an `Accelerator`, its configuration and the environment."""
        run_config = None if given["config"] is None else run_config_of(given["config"])
        handlers = _checked_handlers(given["kwargs_handlers"], given["kwarg_handlers"])
        plugins = {name: value for name, value in given.items() if name in _STRATEGY_ARGUMENTS}
        strategy = registry.wanted_strategy(
            contracts.Said(
                run=run_config, arguments=plugins, handlers=handlers, has_environment=True
            )
        )
        # Before precision and accumulation, because a DeepSpeed file may set both.
        strategy_settings, request = None, contracts.SaidBySettings()
        if strategy is not None:
            strategy_settings = strategy.settings()
            request = registry.strategy(strategy.strategy).said_by(strategy_settings)
            strategy = replace(strategy, reason=request.reason or strategy.reason)
        loader_config = _loader_settings(given["dataloader_config"], given["split_batches"])
        accumulation, steps_source = _accumulation_settings(
            given["gradient_accumulation_steps"], given["gradient_accumulation_plugin"], run_config
        )
        precision_name, precision_source = _requested_precision(
            given["mixed_precision"], run_config, request
        )
        if steps_source == "default" and request.accumulation_steps is not None:
            steps_source = "config"
            accumulation = replace(accumulation, num_steps=request.accumulation_steps)
        project_dir = given["project_dir"]
        project_settings = given["project_config"] or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and project_settings.project_dir is None:
            project_settings.set_directories(project_dir)
        asked = contracts.TrainingRequest(
            mixed_precision=precision_name,
            precision_source=precision_source,
            accumulation_steps=accumulation.num_steps or 1,
            accumulation_source=steps_source,
            strategy=strategy,
            fp8=_fp8_settings(run_config, handlers, precision_name),
            device=_requested_device(run_config, cpu=given["cpu"]),
            split_batches=loader_config.split_batches,
        )
        flag = bool(env.flag(ACTIVATION_CHECKPOINTING))
        return cls(
            downcast_bf16=given["downcast_bf16"] or bool(env.flag("ACCELERATE_DOWNCAST_BF16")),
            asked=asked,
            handlers=handlers,
            accumulation=accumulation,
            data=loader_config,
            project=project_settings,
            settings=strategy_settings,
            said_by_settings=request,
            activation_checkpointing=(
                flag if run_config is None else run_config.activation_checkpointing
            ),
        )


def _loader_settings(
    config: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    # A copy, because `accelerator.even_batches = ...` is about this accelerator alone.
    loader_config = DataLoaderConfiguration() if config is None else replace(config)
    if split_batches is None or split_batches == loader_config.split_batches:
        return loader_config
    if config is not None:
        raise _two_given(f"split_batches={split_batches}", f"dataloader_config={config}")
    return replace(loader_config, split_batches=split_batches)


def _accumulation_settings(
    num_steps: int | None,
    accumulation_plugin: GradientAccumulationPlugin | None,
    run_config: RunConfig | None,
) -> tuple[GradientAccumulationPlugin, Any]:
    """The settings, and where the number of batches comes from."""
    if num_steps is not None and num_steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps={num_steps!r} must be a whole number of at least 1: the "
            "number of batches in one optimizer step. Give 1 to step after every batch."
        )
    plugin_steps = None if accumulation_plugin is None else accumulation_plugin.num_steps
    if num_steps is not None and plugin_steps not in (None, num_steps):
        raise _two_given(
            f"gradient_accumulation_steps={num_steps}",
            f"gradient_accumulation_plugin={accumulation_plugin}",
        )
    plugin = accumulation_plugin or GradientAccumulationPlugin()
    if plugin.num_steps is not None:
        return plugin, "argument"
    source = "argument"
    if num_steps is None and run_config is not None:
        num_steps, source = run_config.gradient_accumulation_steps, "config"
    if num_steps is None:
        text = (env.read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "") or "").strip()
        if text and not (text.isdecimal() and int(text)):
            raise ConfigError(
                f"Environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS={text!r} is no whole "
                "number above 0, of batches in one optimizer step. Correct or unset it."
            )
        num_steps, source = int(text or 1), "environment" if text else "default"
    # `replace` copies: the caller may give the same plugin to another accelerator.
    return replace(plugin, num_steps=num_steps), source


def _requested_precision(
    precision: str | None, run_config: RunConfig | None, settings_request: contracts.SaidBySettings
) -> tuple[str, Any]:
    """Its name, and where that comes from."""
    if precision is not None:
        # A member of Accelerate's PrecisionType counts as its value.
        name, source = str(getattr(precision, "value", precision)).lower(), "argument"
    elif run_config is not None:
        name, source = run_config.mixed_precision, "config"
    else:
        text = (env.read("ACCELERATE_MIXED_PRECISION", "") or "").strip().lower()
        name, source = (text, "environment") if text else ("no", "default")
    if settings_request.mixed_precision is None or settings_request.mixed_precision == name:
        return name, source
    # A file wins over defaults; a `no` of the environment may be the launcher's, not the user's.
    if source == "default" or (source == "environment" and name == "no"):
        return settings_request.mixed_precision, "config"
    raise ConfigError(
        f"mixed_precision={name!r} contradicts {settings_request.speaker}, which sets "
        f"{settings_request.mixed_precision!r}. Models are cast as one of them says. Leave "
        f"one out{settings_request.remedy}."
    )


def _fp8_settings(
    run_config: RunConfig | None, handlers: Sequence[Any], name: str
) -> Fp8Config | None:
    handler = next((handler for handler in handlers if isinstance(handler, Fp8Handler)), None)
    if handler is None:
        return Fp8Config.from_environment() if run_config is None else run_config.fp8
    if not any(row.name == name and row.has_backends for row in rows.PRECISIONS):
        raise ConfigError(
            f"kwargs_handlers got {type(handler).__name__} with mixed_precision={name!r}: nothing "
            "would compute in 8 bits. Give mixed_precision='fp8', or leave the handler out."
        )
    settings = handler.to_config()
    if run_config is not None and run_config.fp8 not in (None, settings):
        raise _two_given(f"kwargs_handlers with {handler}", f"config.fp8={run_config.fp8}")
    return settings


def _requested_device(run_config: RunConfig | None, *, cpu: bool) -> str:
    """The row of the device that was asked for; empty where none was."""
    if distributed.wants_cpu(cpu):
        # The first row is the host.
        return rows.DEVICES[0].name
    device = "" if run_config is None or run_config.device == "auto" else run_config.device
    return device if device and registry.device(device).is_available() else ""


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How prepared models are compiled, said in one of two ways."""
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigError(
            f"Accelerator(dynamo_plugin={plugin!r}) is no TorchDynamoPlugin: it is unknown how to "
            "compile. Give TorchDynamoPlugin(backend='inductor'), or dynamo_backend='inductor'."
        )
    if backend is not None:
        raise _two_given(f"dynamo_backend={backend!r}", f"dynamo_plugin={plugin}")
    return plugin


_STRATEGY_ARGUMENTS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins")
_UNSERVED_ARGUMENTS = {
    "torch_tp_plugin": "tensor parallelism",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "a mix of parallelisms",
}


def refuse_unserved(given: Mapping[str, Any]) -> None:
    """Refuse arguments of Accelerator that this version does not serve, rather than ignore them."""
    for name, meaning in _UNSERVED_ARGUMENTS.items():
        if given[name] is not None:
            raise PlatformUnsupported(
                f"Accelerator({name}={given[name]!r}) means {meaning}, which this version of "
                "nbaccel does not support; training without it would be something else. Leave it "
                "out, and use fsdp_plugin for models too big for one device."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What all parts of one `Accelerator` are given; it does not change while training."""

    request: Request  # the arguments, the environment and the configuration, made one
    place: contracts.Place  # this process among the others
    initial_plan: training_plan.TrainingPlan  # what needs no model, each decision with its reason
    strategy: contracts.Strategy  # how the processes train a model together
    precision: contracts.Precision  # the number format that layers compute in
    collectives: Collectives  # collective operations over all processes
    dynamo: TorchDynamoPlugin  # how prepared models are compiled, if at all

    @classmethod
    def begin(cls, request: Request, dynamo: TorchDynamoPlugin) -> TrainingRun:
        """Join the process group, and choose strategy and precision."""
        asked = request.asked
        process_group = one_of(request.handlers, InitProcessGroupKwargs)
        device_backend = registry.device(asked.device or distributed.name_device())
        expected_place = contracts.Place(
            device=device_backend.torch_device(distributed.local_rank()),
            device_row=device_backend.name,
            world_size=distributed.world_size(),
        )
        # Planned twice: a refusal after the processes have met would leave the others waiting; the
        # backend, which the second plan explains, is known only then.
        expected = _observed_facts(expected_place)
        training_plan.plan_training(asked, expected)
        # Looked up for its refusal and dtype; the object is built for the device that was found.
        precision_class = registry.precision(
            asked.mixed_precision, asked.fp8, expected.device, expected.compute_capability
        )
        note = _downcast(request, precision_class, device_backend)
        place = distributed.init_process(device=device_backend.name, settings=process_group)
        plan = training_plan.plan_training(asked, _observed_facts(place))
        plan = replace(plan, warnings=(*plan.warnings, *note))
        strategy_class = registry.strategy(plan.strategy)
        # An engine casts models and scales losses itself: doing both would scale twice.
        is_left_to_engine = strategy_class.owns_precision and not precision_class.converts_layers
        precision_name = "no" if is_left_to_engine else asked.mixed_precision
        precision = _build_precision(request, place, precision_name, plan)
        return cls(
            request=request,
            place=place,
            initial_plan=plan,
            strategy=strategy_class.build(
                place, request.settings_for(plan.strategy), precision=precision, asked=asked
            ),
            precision=precision,
            collectives=Collectives(place, distributed.timeout_s(process_group)),
            dynamo=dynamo,
        )

    @property
    def plan(self) -> training_plan.TrainingPlan:
        """The decisions so far, with those that followed from the prepared models."""
        plan = self.initial_plan
        choices = (*self.precision.choices, *self.strategy.choices)
        return replace(plan, choices=(*plan.choices, *choices))


def _downcast(
    request: Request, precision: type[contracts.Precision], device: Device
) -> tuple[str, ...]:
    """Let floats be shorter on the device, where that was asked for; what is to be said of it."""
    if not request.downcast_bf16:
        return ()
    reason = f"mixed_precision={precision.name!r} does not compute in bfloat16"
    if precision.dtype == torch.bfloat16:
        reason = device.downcast_floats()
    if not reason:
        return ()
    note = f"downcast_bf16=True has no effect: {reason}."
    if distributed.rank() == 0:
        write_notice(f"nbaccel: {note}\n")
    return (note,)


def _observed_facts(place: contracts.Place) -> training_plan.ProcessFacts:
    return training_plan.ProcessFacts(
        device=place.device_name,
        device_name=str(place.device),
        world_size=place.world_size,
        rank=place.rank,
        backend=place.backend,
        can_join=distributed.can_join(),
        compute_capability=registry.device(place.device_name).capability(place.device),
    )


def _build_precision(
    request: Request, place: contracts.Place, name: str, plan: training_plan.TrainingPlan
) -> contracts.Precision:
    facts = _observed_facts(place)
    fp8 = request.asked.fp8 or Fp8Config()
    choice = rows.fp8_backend(fp8.backend, rows.device_row(facts.device), facts.compute_capability)
    has_backends = rows.precision_row(name).has_backends
    if has_backends and choice.row is not None and choice.row.recipes:
        fp8 = fp8.changed(recipe=training_plan.recipe_of(fp8, choice.row))
    precision_settings = contracts.PrecisionSettings(
        device=place.device,
        autocast=one_of(request.handlers, AutocastKwargs),
        scaler=one_of(request.handlers, GradScalerKwargs),
        fp8=fp8 if has_backends else request.asked.fp8,
        emulates_fp8=choice.row is not None
        and training_plan.is_emulated(choice.row, facts.compute_capability),
        world_size=place.world_size,
        is_main=place.is_main,
        accumulation_steps=plan.accumulation_steps,
        is_sharded=registry.strategy(plan.strategy).shards_parameters,
        handlers=request.handlers,
    )
    precision_class = registry.precision(
        name, request.asked.fp8, facts.device, facts.compute_capability
    )
    return precision_class.build(precision_settings)
