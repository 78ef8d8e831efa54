"""Making DeepSpeed's engine, and what a notebook expects of it beyond that.

input, output   floating-point inputs take the engine's format, outputs come back as float32,
as with every other strategy here
generate        keeps ranks in step where weights are in shards
quiet           no dozen lines of DeepSpeed's own log, unless the configuration asks for them
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbaccel.abc.standins import DummyOptim, DummyScheduler
from nbaccel.deepspeed import library
from nbaccel.deepspeed.config import ZERO
from nbaccel.deepspeed.strategy import heap, on_disk
from nbaccel.deepspeed.strategy.settling import stage_of
from nbaccel.errors import ConfigError
from nbaccel.precision.native import as_float32

__all__ = ["begin_comm", "fetch_together", "is_engines", "make_engine"]


def make_engine(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    settings: Mapping[str, Any],
    *,
    moe_layers: str | None,
    several: bool,
) -> Any:
    """Make an engine, where :func:`begin_comm` has been called.

    Args:
        model: The model; it is changed: cast, and at stage 3 taken apart.
        optimizer: A torch optimizer or what stands for one; None for none.
        scheduler: The same of its schedule.
        settings: Checked, without ``"auto"``.
        moe_layers: Class names of mixture-of-experts layers, with commas.
        several: Whether there are other processes.

    Returns:
        The engine.

    Raises:
        ConfigError: The model has no layers of these names.
    """
    deepspeed = library.load("deepspeed", why="Training with DeepSpeed")
    settings = dict(settings)
    settings.setdefault("steps_per_print", math.inf)
    arguments: dict[str, Any] = {"model": model, "config": settings}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        settings.setdefault("zero_allow_untested_optimizer", True)
        arguments["optimizer"] = _for_offload(optimizer, settings)
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None and is_engines(scheduler):
        arguments["lr_scheduler"] = scheduler
    if moe_layers and stage_of(settings) == 3:
        fetch_together(model, moe_layers)
    with _quiet(settings):
        engine, *_ = deepspeed.initialize(**arguments)
    _convert(engine)
    heap.return_all()
    on_disk.skip_repeated_reads(engine.module)
    if several and stage_of(settings) == 3:
        _keep_in_step(engine.module)
    return engine


def is_engines(scheduler: Any) -> bool:
    """Whether a schedule is of DeepSpeed's own kinds, which the engine advances."""
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in VALID_LR_SCHEDULES


def _for_offload(optimizer: Any, settings: Mapping[str, Any]) -> Any:
    """DeepSpeed steps on the CPU by optimizers of its own; those of torch are made into them."""
    device = (settings.get(ZERO, {}).get("offload_optimizer") or {}).get("device", "none")
    if device == "none" or settings.get("zero_force_ds_cpu_optimizer") is False:
        return optimizer
    if type(optimizer).__module__.startswith("deepspeed."):
        return optimizer
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kinds: dict[type, tuple[Callable[..., Any], dict[str, Any]]] = {
        torch.optim.AdamW: (DeepSpeedCPUAdam, {"adamw_mode": True}),
        torch.optim.Adam: (DeepSpeedCPUAdam, {"adamw_mode": False}),
        torch.optim.Adagrad: (DeepSpeedCPUAdagrad, {}),
    }
    if type(optimizer) not in kinds:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step where DeepSpeed offloads "
            f"(offload_optimizer.device={device!r}): it has AdamW, Adam and Adagrad for the CPU. "
            'Use one of these, or set "zero_force_ds_cpu_optimizer": false for a slow one.'
        )
    make, more = kinds[type(optimizer)]
    known = inspect.signature(make).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    # The same groups, not copies: a schedule made for the old one sets their learning rates.
    made = make(optimizer.param_groups, **{**defaults, **more})
    optimizer._opt_called = True  # torch's schedules would warn that the old one never stepped
    return made


def fetch_together(model: nn.Module, names: str) -> None:
    """Let ZeRO-3 gather layers as one, whose parts are not all used in every pass.

    Args:
        model: The model.
        names: Class names of such layers, with commas.

    Raises:
        ConfigError: The model has none of such a name.
    """
    from deepspeed.utils import set_z3_leaf_modules

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    there = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise ConfigError(
            f"transformer_moe_cls_names={names!r}: {type(model).__name__} has no layer of class "
            f"{', '.join(missing)}. Its experts would be fetched one by one, which can hang. It "
            f"has {', '.join(sorted(there))}."
        )
    set_z3_leaf_modules(model, [there[name] for name in wanted])


@contextlib.contextmanager
def _quiet(settings: Mapping[str, Any]) -> Iterator[None]:
    from deepspeed.utils import logger

    before = logger.level
    if settings.get("log_level") is None and not settings.get("dump_state"):
        logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(before)


def begin_comm(settings: Mapping[str, Any]) -> None:
    """Let DeepSpeed take up the process group, without which it cannot even destroy an engine.

    Args:
        settings: Of the engine to come.
    """
    deepspeed = library.load("deepspeed", why="Training with DeepSpeed")
    # It prints a line for the operation it loads.
    with _quiet(settings), contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_init_required=False)


def _convert(engine: Any) -> None:
    """Let it take and give what models here take and give, whatever it computes in."""
    dtype = next(
        (p.dtype for p in engine.module.parameters() if p.dtype in (torch.bfloat16, torch.float16)),
        None,
    )
    if dtype is None or not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        return

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map_only(torch.Tensor, cast, (args, kwargs))

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    engine.register_forward_pre_hook(before, with_kwargs=True)
    engine.register_forward_hook(lambda _, __, output: as_float32(output))


def _keep_in_step(module: nn.Module) -> None:
    """Let `generate` go on on every rank until the last has finished; see transformers' guide."""
    generate: Any = getattr(module, "generate", None)
    if not callable(generate) or "synced_gpus" not in inspect.signature(generate).parameters:
        return

    @functools.wraps(generate)
    def in_step(*args: Any, **kwargs: Any) -> Any:
        # A rank that stopped early would leave the others waiting for its part of the weights.
        if kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        return generate(*args, **kwargs)

    module.generate = in_step  # type: ignore[assignment]
