"""A configuration file of Accelerate while it is read: what each key became."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.config.mistakes import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedKey:
    """One key of a file.

    Attributes:
        key: With dots, where it is in a section.
        value: What the file says.
        outcome: The setting that it became, or why it has no effect.
        is_used: Whether it became one.
    """

    key: str
    value: Any
    outcome: str
    is_used: bool


class FileReading:
    """Collects settings and mistakes.

    Attributes:
        given: As given.
        folder: As given.
        settings: Settings of `RunConfig` found so far.
        variables: Variables for the workers found so far.
        mapped_keys: Every key read so far.
        mistakes: Messages.
        origins: The file's key of a setting.
    """

    def __init__(self, given: Mapping[str, Any], folder: Path) -> None:
        self.given = given
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.variables: dict[str, str] = {}
        self.mapped_keys: list[MappedKey] = []
        self.mistakes: list[str] = []
        self.origins: dict[str, str] = {}

    def use(self, key: str, value: Any, outcome: str) -> None:
        """Note what a key became."""
        self.mapped_keys.append(MappedKey(key=key, value=value, outcome=outcome, is_used=True))

    def note_unused(self, key: str, value: Any, reason: str) -> None:
        """Note why a key has no effect."""
        self.mapped_keys.append(MappedKey(key=key, value=value, outcome=reason, is_used=False))

    def refuse(self, key: str, mistake: str) -> None:
        """Note a mistake."""
        self.mistakes.append(mistake)

    def truth(self, key: str, value: Any) -> bool:
        """A truth value, also one that was written as text."""
        if isinstance(value, str) and value.strip().lower() in _FILE_TRUTH_WORDS:
            return _FILE_TRUTH_WORDS[value.strip().lower()]
        if not isinstance(value, bool):
            self.refuse(key, f"{key}={shown(value)} must be true or false.")
        return value is True

    def mapping(self, key: str, value: Any) -> dict[str, Any]:
        """A section; empty, and a mistake, where it is none."""
        if isinstance(value, Mapping):
            return {str(entry_key): entry_value for entry_key, entry_value in value.items()}
        self.refuse(
            key, f"{key}={shown(value)} must be a section. Write names and values below it."
        )
        return {}

    def section(self, key: str, distributed_type: str) -> dict[str, Any]:
        """A section that counts for one kind of training only; empty for others."""
        is_wanted = str(self.given.get("distributed_type")).strip().upper() == distributed_type
        value = self.given.get(key)
        return dict(value) if is_wanted and isinstance(value, Mapping) else {}

    def complete_settings(self) -> dict[str, Any]:
        """The settings for `RunConfig`, variables included."""
        variables = {"variables": self.variables} if self.variables else {}
        settings = {**self.settings, **variables}
        if "hostfile" in settings:
            # One command starts the workers on all hosts, and counts them together.
            num_nodes = settings.pop("num_nodes", 1)
            settings.pop("node_rank", None)
            if isinstance(settings.get("num_processes"), int):
                settings["num_processes"] *= num_nodes
        return settings

    def origin_of(self, mistake: str) -> str:
        """Where in the file a setting comes from that has another name there."""
        name = setting_of(mistake)
        key = self.origins.get(name, name)
        return f" In this file it is {key}." if key != name else ""


def setting_of(mistake: str) -> str:
    """The setting that a message begins with."""
    return mistake.partition(" ")[0].partition("=")[0].rstrip(":")


_FILE_TRUTH_WORDS = {"true": True, "yes": True, "false": False, "no": False}
