"""What transformers does by itself: a `Trainer` of the notebook in a worker, models in shards.

Its accelerator was made for the notebook's single process. Before it trains, evaluates or predicts
in a worker for the first time, it gets one for the worker's place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from nbaccel.base import accelerate_library, env
from nbaccel.base.import_patches import patch_module

_TRAINER_MODULE = "transformers.trainer"
_DEEPSPEED_MODULE = "transformers.integrations.deepspeed"
_TRAINER_ENTRIES = ("train", "evaluate", "predict")


def is_sharding_new_models() -> bool:
    """Whether transformers now cuts models while it builds them (ZeRO-3)."""
    module = sys.modules.get(_DEEPSPEED_MODULE)
    return module is not None and bool(module.is_deepspeed_zero3_enabled())


def run_notebook_trainers(around_training: Callable[[], AbstractContextManager[None]]) -> None:
    """Let trainers from the notebook work in this worker. Once per worker."""
    patch_module(
        _TRAINER_MODULE, functools.partial(_patch_trainer, around_training=around_training)
    )


def _patch_trainer(
    module: ModuleType, around_training: Callable[[], AbstractContextManager[None]]
) -> None:
    for name in _TRAINER_ENTRIES:
        method = getattr(module.Trainer, name, None)
        if method is not None:
            context = around_training if name == "train" else nullcontext
            setattr(module.Trainer, name, _adopting_method(method, context))


def _adopting_method(
    method: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def adopted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _comes_from_notebook(self):
            _rebuild_accelerator(self)
        with context():
            return method(self, *args, **kwargs)

    return adopted


def _comes_from_notebook(trainer: Any) -> bool:
    """Whether it was made for another process than this one."""
    try:
        return bool(trainer.args.world_size != int(env.snapshot()["WORLD_SIZE"])) or (
            not accelerate_library.is_set_up()
        )
    # Missing where it was bound to the notebook's process and therefore not pickled.
    except (AttributeError, KeyError):
        return True


def _rebuild_accelerator(trainer: Any) -> None:
    """Do again what its constructor made of the process it ran in."""
    accelerate_library.forget()
    arguments = trainer.args
    # A cached property, under its name and that of older versions; it holds the notebook's device.
    vars(arguments).pop("_setup_devices", None)
    vars(arguments).pop("__cached__setup_devices", None)
    arguments.device  # noqa: B018 - looks at the process and joins its group
    trainer.create_accelerator_and_postprocess()
    if getattr(trainer, "place_model_on_device", False):
        # As its constructor does: some devices need more than `to`. Seen in transformers 5.23.
        move = getattr(trainer, "_move_model_to_device", lambda model, device: model.to(device))
        move(trainer.model, arguments.device)
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
