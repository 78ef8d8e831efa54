"""What all settings of a training loop have in common, and how wrong ones are told."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nbaccel.errors import ConfigError

__all__ = ["Handler", "Settings", "at_least", "refuse"]


class Settings:
    """What all settings can do."""

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, as given."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Only the settings that differ from their defaults."""
        plain = type(self)()
        return {
            name: value for name, value in self.to_dict().items() if value != getattr(plain, name)
        }


class Handler(Settings):
    """Settings that go into ``Accelerator(kwargs_handlers=[...])``, one of each class."""


def at_least(owner: object, least: float, *names: str) -> list[str]:
    """What is to be said of numbers that are too small.

    Args:
        owner: The settings.
        least: The smallest number that has a meaning.
        *names: Settings to look at; None is no number.

    Returns:
        A message for each that is smaller.
    """
    return [
        f"{type(owner).__name__}({name}={value!r}) is too small: it must be at least {least}. "
        "A smaller value has no meaning. Give one, or leave it out."
        for name in names
        if (value := getattr(owner, name)) is not None and value < least
    ]


def refuse(mistakes: list[str]) -> None:
    """Raise all mistakes together, if there are any.

    Raises:
        ConfigError: There are.
    """
    if mistakes:
        raise ConfigError(*mistakes)
