"""Gradient checkpointing: keep a few activations and compute the others again."""

from __future__ import annotations

from typing import Any

from nbaccel.base.errors import ConfigError

# transformers 5 renamed it; models written for older versions have the other name.
_ENABLING_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def can_checkpoint_gradients(model: Any) -> bool:
    """Whether a model has a switch for gradient checkpointing, as those of transformers have."""
    # transformers gives the method to every model, and for some it raises.
    return _enabling_method(model) is not None and getattr(
        model, "supports_gradient_checkpointing", True
    )


def checkpoints_gradients(model: Any) -> bool:
    """Whether it is on already."""
    flag_names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    flag_name = next(
        (
            flag_name
            for flag_name in flag_names
            if hasattr(type(model), flag_name) or flag_name in vars(model)
        ),
        "",
    )
    return bool(getattr(model, flag_name, False))


def enable_gradient_checkpointing(model: Any) -> None:
    """Turn it on."""
    enable_method = _enabling_method(model)
    if enable_method is None:
        raise ConfigError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(): torch has no switch "
            "for it that all modules share. Give the model that method, or call "
            "torch.utils.checkpoint in its forward()."
        )
    enable_method()


def _enabling_method(model: Any) -> Any:
    methods = (getattr(model, name, None) for name in _ENABLING_METHODS)
    return next((method for method in methods if callable(method)), None)
