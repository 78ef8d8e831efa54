"""Models whose weights are not in this process's memory, refused before they are prepared."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import first_few
from nbaccel.plan.contracts.bundle import Bundle

__all__ = ["refuse_missing_values"]


def refuse_missing_values(bundle: Bundle, placements: Sequence[bool]) -> None:
    """Refuse what cannot be trained: weights on ``meta``, which nobody or a hook will fill.

    A model whose weights lie in host memory or on disk can be prepared without an optimizer, for
    inference.

    Args:
        bundle: What is about to be prepared.
        placements: For each model whether it is to be moved to the device.

    Raises:
        ConfigError: A model has such weights; it says which, and how they get values.
    """
    mistakes = [
        message
        for model, is_moved in zip(bundle.models, placements, strict=True)
        if (is_moved or bundle.optimizers)
        and (message := _why_refused(model, is_trained=bool(bundle.optimizers)))
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def _why_refused(model: nn.Module, *, is_trained: bool) -> str:
    empty_names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not empty_names:
        return ""
    device_map = getattr(model, "hf_device_map", None)
    shown = f"{len(empty_names)} weights of {type(model).__name__} ({first_few(empty_names, 2)})"
    if device_map is None:
        return (
            f"{shown} are on meta: they have no values to train or to compute with. Load them "
            "first: load_checkpoint_in_model(model, path) maps the files, and with FSDP or ZeRO-3 "
            "each process then reads its own part only. (model.to_empty(device='cpu') makes room "
            "for new values.)"
        )
    if not is_trained:
        return ""
    return (
        f"{shown} are kept in host memory or on disk (hf_device_map={_shorten(device_map)}) and "
        "only brought in for a forward: an optimizer would step tensors without values. Give "
        "max_memory with more room or another device_map, so that all weights are in memory; or "
        "load the model without device_map and give Accelerator a fsdp_plugin, or a "
        "deepspeed_plugin with stage 3 and offloading."
    )


def _shorten(device_map: object) -> str:
    text = str(device_map)
    return text if len(text) <= 60 else f"{text[:57]}..."
