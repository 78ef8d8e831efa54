"""The base class of all settings of a training loop."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nbaccel.config.field_rules import field_mistakes, refuse_mistakes


class Settings:
    """Checks its fields, and gives them as a dictionary."""

    def __post_init__(self) -> None:
        refuse_mistakes(field_mistakes(self))

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, as given."""
        # Not `dataclasses.asdict`, which copies the values deeply.
        setting_names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        return {setting_name: getattr(self, setting_name) for setting_name in setting_names}

    def to_kwargs(self) -> dict[str, Any]:
        """Only the settings that differ from their defaults."""
        # A new object, because defaults may depend on the environment.
        settings = type(self)()
        return {
            name: value
            for name, value in self.to_dict().items()
            if value != getattr(settings, name)
        }


class Handler(Settings):
    """Settings that go into ``Accelerator(kwargs_handlers=[...])``, one of each class."""
