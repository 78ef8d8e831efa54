"""Whether transformers builds models in shards, by ``deepspeed.zero.Init``.

transformers asks a weak reference of its own, in which ``HfDeepSpeedConfig`` puts itself. The same
reference makes ``generate`` keep ranks in step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from nbaccel._optional import is_installed
from nbaccel.deepspeed.kinds import AUTO

__all__ = ["announced", "applied"]


def announced(settings: Mapping[str, Any], world_size: int = 1) -> Any:
    """Let transformers build what comes in shards.

    Args:
        settings: A DeepSpeed configuration of stage 3.
        world_size: Processes.

    Returns:
        What must be kept as long as it shall hold; None where there is no transformers.
    """
    if not is_installed("transformers"):
        return None
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    make: Any = HfDeepSpeedConfig
    return make(_concrete(settings, world_size))


@contextlib.contextmanager
def applied(settings: Mapping[str, Any] | None) -> Iterator[None]:
    """The same for a block; with None models are built whole in it.

    Args:
        settings: A DeepSpeed configuration of stage 3, or None.
    """
    if not is_installed("transformers"):
        yield
        return
    from transformers.integrations import deepspeed as integration

    module: Any = integration
    before = module._hf_deepspeed_config_weak_ref
    module.unset_hf_deepspeed_config()
    kept = announced(settings) if settings is not None else None
    try:
        yield
    finally:
        del kept
        module._hf_deepspeed_config_weak_ref = before


def _concrete(settings: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """DeepSpeed reads batch sizes here, too, and knows no "auto"; sizes mean nothing for it."""
    found = copy.deepcopy(dict(settings))
    for key in [key for key, value in found.items() if value == AUTO]:
        del found[key]
    for section in [value for value in found.values() if isinstance(value, dict)]:
        for key in [key for key, value in section.items() if value == AUTO]:
            del section[key]
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & found.keys():
        found["train_micro_batch_size_per_gpu"] = 1
        found["train_batch_size"] = world_size * found.get("gradient_accumulation_steps", 1)
    return found
