"""What an `Accelerator` was asked: its arguments, the environment and a configuration, made one.

What is said in the call wins over a configuration, and that over the environment (Accelerate lets
some variables win over arguments without a word).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel import _catalog, env
from nbaccel.capabilities import strategy_row
from nbaccel.config import Configured, RunConfig, run_config_of
from nbaccel.config.engine import engine_config
from nbaccel.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Handler,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from nbaccel.config.variables import ACTIVATION_CHECKPOINTING
from nbaccel.errors import ConfigError, PlatformUnsupported
from nbaccel.plan.training import Asked
from nbaccel.train import arrival

__all__ = ["Handlers", "Request", "dynamo_of", "refuse_unserved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handlers:
    """The settings given as ``kwargs_handlers``, one of each class."""

    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    process_group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def of(cls, given: Sequence[Handler] | None) -> Handlers:
        """Sort a list of handlers.

        Raises:
            ConfigError: Two of one class, or something that is no handler.
        """
        names = {
            AutocastKwargs: "autocast",
            GradScalerKwargs: "scaler",
            DistributedDataParallelKwargs: "ddp",
            InitProcessGroupKwargs: "process_group",
            ProfileKwargs: "profile",
        }
        found: dict[str, Any] = {}
        for handler in given or ():
            name = names.get(type(handler))
            if name is None:
                raise ConfigError(
                    f"kwargs_handlers got a {type(handler).__name__}: {handler!r}. It would have "
                    f"no effect. Give objects of {', '.join(kind.__name__ for kind in names)}."
                )
            if name in found:
                raise ConfigError(
                    f"kwargs_handlers got two {type(handler).__name__}: {found[name]} and "
                    f"{handler}. Only one can hold. Give one with both settings."
                )
            found[name] = handler
        return cls(**found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """All that was asked of an `Accelerator`, complete."""

    asked: Asked
    handlers: Handlers
    accumulation: GradientAccumulationPlugin
    data: DataLoaderConfiguration
    project: ProjectConfiguration
    fsdp: FullyShardedDataParallelPlugin | None
    deepspeed: Any = None
    activation_checkpointing: bool = False

    @property
    def writes_shards(self) -> bool:
        """Whether every process writes its own part of a checkpoint."""
        return self.deepspeed is not None or (self.fsdp is not None and self.fsdp.writes_shards)

    @classmethod
    def of(
        cls,
        *,
        mixed_precision: str | None,
        cpu: bool,
        gradient_accumulation_steps: int | None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None,
        split_batches: bool | None,
        dataloader_config: DataLoaderConfiguration | None,
        project_dir: Any,
        project_config: ProjectConfiguration | None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None,
        deepspeed_plugin: Any,
        deepspeed_plugins: Any,
        kwargs_handlers: Sequence[Handler] | None,
        config: RunConfig | Configured | None,
    ) -> Request:
        """Put together what was said in several places.

        Raises:
            ConfigError: Two of them contradict each other, or a value is wrong.
        """
        if fsdp_plugin is None and env.flag("ACCELERATE_USE_FSDP"):
            fsdp_plugin = FullyShardedDataParallelPlugin()
        run = None if config is None else run_config_of(config)
        deepspeed = _deepspeed(deepspeed_plugin, deepspeed_plugins, fsdp_plugin, run)
        data = _data(dataloader_config, split_batches)
        steps, source, plugin = _accumulation(
            gradient_accumulation_steps, gradient_accumulation_plugin, run
        )
        precision, said_by = _precision(mixed_precision, run)
        if deepspeed is not None:
            first = deepspeed.active
            precision, said_by = _precision_of_plugin(first, precision, said_by)
            if source == "default" and first.accumulation_steps is not None:
                steps, source = first.accumulation_steps, "config"
                plugin = replace(plugin, num_steps=steps)
        project = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and project.project_dir is None:
            project.set_directories(project_dir)
        config_says_cpu = run is not None and run.device == "cpu"
        asked = Asked(
            mixed_precision=precision,
            precision_source=said_by,
            accumulation_steps=steps,
            accumulation_source=source,
            fsdp=fsdp_plugin is not None,
            zero_stage=None if deepspeed is None else deepspeed.active.zero_stage,
            cpu=arrival.wants_cpu(cpu) or config_says_cpu,
            split_batches=data.split_batches,
        )
        return cls(
            asked=asked,
            handlers=Handlers.of(kwargs_handlers),
            accumulation=plugin,
            data=data,
            project=project,
            fsdp=fsdp_plugin,
            deepspeed=deepspeed,
            activation_checkpointing=_activation_checkpointing(run),
        )


def _data(
    given: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    # A copy, because `accelerator.even_batches = ...` is about this accelerator alone.
    data = DataLoaderConfiguration() if given is None else replace(given)
    if split_batches is None or split_batches == data.split_batches:
        return data
    if given is not None:
        raise ConfigError(
            f"split_batches={split_batches} contradicts "
            f"dataloader_config.split_batches={data.split_batches}. Batches would have another "
            "size than one of them says. Give it in the DataLoaderConfiguration alone."
        )
    return replace(data, split_batches=split_batches)


def _accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None, config: RunConfig | None
) -> tuple[int, Any, GradientAccumulationPlugin]:
    if steps is not None and steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps={steps!r} must be a whole number of at least 1: so many "
            "batches make one optimizer step. Give 1 to step after every batch."
        )
    if plugin is not None and steps is not None and plugin.num_steps not in (None, steps):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts "
            f"gradient_accumulation_plugin.num_steps={plugin.num_steps}. Only one can hold. Give "
            "num_steps in the plugin alone."
        )
    if plugin is not None and plugin.num_steps is not None:
        return plugin.num_steps, "argument", plugin
    plugin = plugin or GradientAccumulationPlugin()
    if steps is not None:
        return steps, "argument", replace(plugin, num_steps=steps)
    if config is not None and config.gradient_accumulation_steps is not None:
        steps = config.gradient_accumulation_steps
        return steps, "config", replace(plugin, num_steps=steps)
    text = env.read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "") or ""
    if not text.strip():
        return 1, "default", replace(plugin, num_steps=1)
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(
            f"Environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS={text!r} must be a whole "
            "number of at least 1: so many batches make one optimizer step. Correct or unset it."
        )
    return int(text), "environment", replace(plugin, num_steps=int(text))


def _activation_checkpointing(config: RunConfig | None) -> bool:
    said = bool(env.flag(ACTIVATION_CHECKPOINTING))
    return said if config is None else config.activation_checkpointing


def _precision(given: str | None, config: RunConfig | None) -> tuple[str, Any]:
    if given is not None:
        return str(getattr(given, "value", given)).lower(), "argument"
    if config is not None:
        return config.mixed_precision, "config"
    said = (env.read("ACCELERATE_MIXED_PRECISION", "") or "").strip().lower()
    return (said, "environment") if said else ("no", "default")


def _deepspeed(
    plugin: Any, plugins: Any, fsdp: FullyShardedDataParallelPlugin | None, config: RunConfig | None
) -> Any:
    """The plugins by which DeepSpeed trains; None where something else does."""
    given = plugin if plugin is not None else plugins
    asks = config is not None and config.uses_deepspeed
    asked = asks or (not fsdp and env.flag("ACCELERATE_USE_DEEPSPEED"))
    if given is None and not asked:
        return None
    if given is not None and fsdp is not None:
        raise ConfigError(
            f"Accelerator got {given} and {fsdp}: each shards models in its own way, and only one "
            "can. Give one of them."
        )
    module = _catalog.load(strategy_row("deepspeed").settings)
    if given is None:
        file = None if config is None or config.deepspeed is None else engine_config(config)
        stage = config.zero_stage if config is not None and asks else None
        given = module.DeepSpeedPlugin(file, zero_stage=stage)
    return module.Plugins(given)


def _precision_of_plugin(plugin: Any, value: str, source: Any) -> tuple[str, Any]:
    """A file may say the precision, too; what only the launcher's default says gives way."""
    said = plugin.mixed_precision
    silent = source == "default" or (source == "environment" and value == "no")
    if said is None or said == value:
        return value, source
    if silent:
        return said, "config"
    raise ConfigError(
        f"mixed_precision={value!r} contradicts the DeepSpeed configuration, which asks for "
        f"{said!r}. The engine casts the model as one of them says. Leave one out, or write "
        '"enabled": "auto" there.'
    )


def dynamo_of(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How prepared models are compiled, said in one of two ways.

    Raises:
        ConfigError: In both, or by something that is no plugin.
    """
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigError(
            f"Accelerator(dynamo_plugin={plugin!r}) is no TorchDynamoPlugin: nothing says how to "
            "compile. Give TorchDynamoPlugin(backend='inductor'), or dynamo_backend='inductor'."
        )
    if backend is not None:
        raise ConfigError(
            f"Accelerator got dynamo_backend={backend!r} and dynamo_plugin={plugin}: only one can "
            "hold. Give the backend in the plugin alone."
        )
    return plugin


_LATER = {
    "torch_tp_plugin": "tensor parallelism",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "a mix of parallelisms",
}


def refuse_unserved(**given: Any) -> None:
    """Refuse arguments of Accelerate that this version does not serve, rather than ignore them.

    Raises:
        PlatformUnsupported: One was given.
    """
    for name, value in given.items():
        if value is not None:
            raise PlatformUnsupported(
                f"Accelerator({name}={value!r}) asks for {_LATER[name]}, which this version of "
                "nbaccel does not serve; training without it would be something else. Leave it "
                "out, and use fsdp_plugin for models too big for one device."
            )
