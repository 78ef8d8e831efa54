"""Whether DeepSpeed is to train: called for every launch and `Accelerator`, imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbaccel.config.deepspeed_document import engine_config
from nbaccel.plan.contracts.asking import Said, Source, Wanted
from nbaccel.plan.launch_plan import Choice

if TYPE_CHECKING:
    from nbaccel.config import RunConfig
    from nbaccel.deepspeed.strategy.plugin import Plugins

__all__ = ["wanted"]

_STRATEGY_NAME = "deepspeed"
_SHARDED_WORDS = {
    0: "nothing",
    1: "the optimizer",
    2: "optimizer and gradients",
    3: "all, weights too,",
}


def wanted(said: Said) -> Wanted | None:
    """Requested by a plugin, a run's configuration, by name, or by ``ACCELERATE_USE_DEEPSPEED``.

    Args:
        said: What was said.
    """
    # From the most explicit source to the least: the first one decides, and is named as the reason.
    for name in ("deepspeed_plugin", "deepspeed_plugins"):
        if (plugin := said.arguments.get(name)) is not None:
            return _wanted_choice("argument", name, given_plugin=plugin)
    config = said.run
    if config is not None and config.uses_deepspeed:
        return _wanted_choice("config", f"zero_stage={config.zero_stage}", run_config=config)
    if (source := said.source_of_name(_STRATEGY_NAME)) is not None:
        return _wanted_choice(source, 'strategy="deepspeed"')
    if said.flag("ACCELERATE_USE_DEEPSPEED"):
        return _wanted_choice("environment", "ACCELERATE_USE_DEEPSPEED")
    return None


def _wanted_choice(
    setting_source: Source,
    setting_text: str,
    *,
    given_plugin: Any = None,
    run_config: RunConfig | None = None,
) -> Wanted:
    def settings() -> Plugins:
        # Imported only where DeepSpeed is chosen, since every launch and Accelerator gets here.
        from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin, Plugins

        if given_plugin is not None:
            return Plugins(given_plugin)
        if run_config is None:
            return Plugins(DeepSpeedPlugin(None))
        config_file = None if run_config.deepspeed is None else engine_config(run_config)
        return Plugins(DeepSpeedPlugin(config_file, zero_stage=run_config.zero_stage))

    stage = None if run_config is None else run_config.zero_stage or 0
    strategy_choice = () if stage is None else (_strategy_choice(stage),)
    return Wanted(
        strategy=_STRATEGY_NAME,
        source=setting_source,
        what=setting_text,
        reason="a DeepSpeedPlugin or zero_stage was given",
        settings=settings,
        headline="" if stage is None else f"ZeRO-{stage}",
        choices=strategy_choice,
    )


def _strategy_choice(stage: int) -> Choice:
    return Choice(
        "zero_stage", stage, f"asked for: {_SHARDED_WORDS[stage]} in shards, by DeepSpeed"
    )
