"""A configuration as text: JSON for workers, YAML for people, a schema for editors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from nbaccel._optional import require
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Exchangeable", "Plain", "each_once", "read_yaml", "unreadable"]

_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""Numbers of YAML 1.2 that are text in YAML 1.1: ``3e-5``, ``1e6``."""


def unreadable(what: str, language: str, error: Exception) -> ConfigError:
    """What is told of a text that is no JSON, or no YAML.

    Args:
        what: What the text describes.
        language: ``JSON`` or ``YAML``.
        error: What its reader said.
    """
    return ConfigError(
        f"{what} cannot be read from {language}: {error}. "
        "A setting half read would train something else. Correct the text there."
    )


def each_once(what: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """An ``object_pairs_hook`` for JSON in which a key that stands twice is a mistake.

    Args:
        what: What the text describes, for the message.

    Returns:
        The hook; it raises :class:`ConfigError`.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{what} names {', '.join(twice)} more than once. "
                "One of the values would be lost. Remove one of them."
            )
        return dict(pairs)

    return once


def read_yaml(text: str) -> Any:
    """Read YAML in which ``3e-5`` is a number, as in JSON and in YAML 1.2.

    Args:
        text: YAML.

    Returns:
        What it holds.

    Raises:
        ValueError: It is no YAML; the message has the line.
    """
    yaml = require("yaml", extra="", why="Reading a configuration file")

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined,misc]  # imported when needed
        """With the numbers of YAML 1.2; a class of its own, so that nobody else's changes."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class Plain(BaseModel):
    """A model whose `repr` is code with what was said, and not the defaults."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                yield name, value

    def __str__(self) -> str:
        return repr(self)


class Exchangeable(Plain):
    """A model that goes to text and comes back."""

    def to_json(self) -> str:
        """All settings as one JSON object, defaults included: a worker needs no other source.

        Returns:
            Text that :meth:`from_json` reads.
        """
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, or any JSON object of settings.

        Args:
            text: A JSON object.

        Returns:
            The configuration.

        Raises:
            ConfigError: The text is no JSON object, or its settings are wrong.
        """
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise unreadable(f"A {cls.__name__}", "JSON", error) from error
        return cls._from_mapping(settings, "JSON")

    def to_yaml(self) -> str:
        """The settings that differ from the defaults as YAML, for a file that people read.

        Returns:
            Text that :meth:`from_yaml` reads.
        """
        yaml = require("yaml", extra="", why="Writing a configuration file")
        settings = json.loads(self.model_dump_json(exclude_defaults=True))
        return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read what :meth:`to_yaml` wrote, or any YAML mapping of settings.

        Args:
            text: A YAML mapping; an empty text gives the defaults.

        Returns:
            The configuration.

        Raises:
            ConfigError: The text is no YAML mapping, or its settings are wrong.
        """
        try:
            settings = read_yaml(text)
        except ValueError as error:
            raise unreadable(f"A {cls.__name__}", "YAML", error) from error
        return cls._from_mapping({} if settings is None else settings, "YAML")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema, for editors and forms: type, range, meaning and unit of each setting.

        Returns:
            A JSON schema as a dictionary.
        """
        return cls.model_json_schema()

    @classmethod
    def _from_mapping(cls, settings: object, language: str) -> Self:
        if not isinstance(settings, dict):
            raise ConfigError(
                f"A {cls.__name__} cannot be read from {language} of {type(settings).__name__}: "
                f"got {str(settings)[:60]!r}. Settings need names. "
                "Write names and values: num_processes and 2, for example."
            )
        return cls(**{str(name): value for name, value in settings.items()})
