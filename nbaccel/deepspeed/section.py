"""A section of a DeepSpeed configuration: named settings, and in ``extra`` those without a name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from nbaccel.config.json_text import read_object
from nbaccel.config.mistakes import closest, shown
from nbaccel.deepspeed.kinds import Kind, table
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Holds", "Section", "kind_of", "merged", "section_of"]

_EXTRA = "extra"


@dataclass(frozen=True)
class Holds:
    """Marks a field that holds a section.

    Attributes:
        section: The section's class.
        short: The key of it that a bare text stands for: ``optimizer="AdamW"``.
    """

    section: type[Section]
    short: str = ""

    def read(self, value: Any) -> Any:
        """Make the section of what was given for it.

        Args:
            value: A section, a mapping, or the text that stands for one.

        Returns:
            The section, or the value for the validator to refuse.
        """
        if isinstance(value, str) and self.short:
            alone: dict[str, Any] = {self.short: value}
            return self.section(**alone)
        return self.section(**value) if isinstance(value, Mapping) else value


class Section(BaseModel):
    """A part of a configuration: what nbaccel names, and in ``extra`` what it does not.

    All settings are keyword-only; ``None`` leaves one to DeepSpeed. Wrong ones raise
    :class:`~nbaccel.errors.ConfigError`, which lists every mistake at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    extra: Annotated[
        dict[str, Any],
        Field(description="Further keys of this section, given to DeepSpeed as they are."),
        BeforeValidator(table),
        Kind(must="a mapping of names to JSON values", do="Leave it out, or give a dictionary"),
    ] = Field(default_factory=dict)

    if not TYPE_CHECKING:  # a checker must see the keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(*_explained(type(self), error)) from error

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read a section of a DeepSpeed configuration; keys without a field go to ``extra``.

        Args:
            settings: Keys and values, as in JSON.

        Returns:
            The section.

        Raises:
            ConfigError: Values are wrong, all of them listed.
        """
        named: dict[str, Any] = {}
        extra: dict[str, Any] = dict(settings.get(_EXTRA) or {})
        mistakes: list[str] = []
        for key, value in settings.items():
            entry = cls.model_fields.get(key)
            if entry is None:
                extra[key] = value
            elif key != _EXTRA:
                section = section_of(entry)
                try:
                    whole = section is None or not isinstance(value, Mapping)
                    named[key] = value if whole or section is None else section.from_dict(value)
                except ConfigError as error:
                    mistakes += [f"{key}.{mistake}" for mistake in error.mistakes]
        try:
            made = cls(extra=extra, **named)
        except ConfigError as error:
            raise ConfigError(*error.mistakes, *mistakes) from error
        if mistakes:
            raise ConfigError(*mistakes)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The section as DeepSpeed reads it, without what is left to DeepSpeed.

        Returns:
            Plain values; changing them changes nothing here.
        """
        return merged(dict(self._given()), self.extra)

    def to_json(self) -> str:
        """The section as a JSON object.

        Returns:
            Text that :meth:`from_json` reads.
        """
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, or any DeepSpeed configuration.

        Args:
            text: A JSON object.

        Returns:
            The section.

        Raises:
            ConfigError: The text is no JSON object, names a key twice, or values are wrong.
        """
        return cls.from_dict(read_object(text, cls.__name__))

    def changed(self, **settings: Any) -> Self:
        """A copy with other values, validated like a new one.

        Args:
            **settings: The settings to change.

        Returns:
            The copy.

        Raises:
            ConfigError: The new settings are wrong.
        """
        return type(self)(**{**dict(self), **settings})

    def _given(self) -> Iterator[tuple[str, Any]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None and name != _EXTRA:
                entry = value.to_dict() if isinstance(value, Section) else copy.deepcopy(value)
                yield name, entry

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None and value != {}:
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


def merged(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings as one, level by level.

    Args:
        first: Changed and returned.
        second: Its values win.

    Returns:
        The first mapping.
    """
    for key, value in second.items():
        mine = first.get(key)
        if isinstance(mine, dict) and isinstance(value, Mapping):
            merged(mine, value)
        else:
            first[key] = copy.deepcopy(value)
    return first


def section_of(entry: FieldInfo) -> type[Section] | None:
    """The section that a field holds.

    Args:
        entry: The field.

    Returns:
        Its class, or None for a field that holds a plain value.
    """
    return next((item.section for item in entry.metadata if isinstance(item, Holds)), None)


def kind_of(entry: FieldInfo) -> Kind | None:
    """The kind of a field's value.

    Args:
        entry: The field.

    Returns:
        The kind; None for a field that holds a section.
    """
    return next((item for item in entry.metadata if isinstance(item, Kind)), None)


def _explained(model: type[Section], error: ValidationError) -> Iterator[str]:
    seen: set[str] = set()
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else model.__name__
        # A union reports each of its branches; the user made one mistake.
        if name in seen:
            continue
        seen.add(name)
        inner = detail.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            yield from (f"{name}.{mistake}" for mistake in inner.mistakes)
        else:
            yield _message(model, name, detail["input"])


def _message(model: type[Section], name: str, value: object) -> str:
    entry = model.model_fields.get(name)
    if entry is None:
        meant = closest(name, model.model_fields)
        return (
            f"{name} is no setting of {model.__name__}: got {name}={shown(value)}. "
            f"It would change nothing, without a word."
            f"{meant or ' Give keys that only DeepSpeed knows in `extra`.'}"
        )
    meaning = (entry.description or "").strip()
    kind = kind_of(entry)
    if kind is None:
        keys = ", ".join(key for key in section_of(entry).model_fields if key != _EXTRA)  # type: ignore[union-attr]
        return (
            f"{name} must be a section: got {shown(value)}. {meaning} "
            f"Give a mapping with some of its keys: {keys}."
        )
    meant = closest(value, kind.allowed, kind.words) if isinstance(value, str) else ""
    return f"{name} must be {kind.must}: got {shown(value)}. {meaning}{meant or f' {kind.do}.'}"
