"""Packages that DeepSpeed logs through, looked for before every process fails to import one."""

from __future__ import annotations

from collections.abc import Iterator

from nbaccel._optional import is_installed
from nbaccel.deepspeed.config import ZeroConfig

__all__ = ["missing_monitors"]

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section → the module that DeepSpeed imports for it, which is its package's name, too."""


def missing_monitors(config: ZeroConfig) -> Iterator[str]:
    """The sections that are turned on without their package.

    Args:
        config: The configuration.

    Yields:
        A message each.
    """
    for name, package in _PACKAGES.items():
        section = getattr(config, name)
        if section is not None and section.enabled is True and not is_installed(package):
            yield (
                f"{name}.enabled cannot be true without the package {package}, which is not "
                "installed. Every process would fail when DeepSpeed makes its engine. Install it: "
                f"pip install {package}, or leave {name} out."
            )
