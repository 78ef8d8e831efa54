"""Fields and sections of a DeepSpeed configuration: kinds of values, and messages on wrong ones.

A field says what it means and in which unit; its kind says which values are allowed and how to
correct a wrong one. ``None`` always means: left to DeepSpeed. ``"auto"`` is allowed everywhere,
because a file may hold it until it is resolved; `checking` reports where nothing resolves it.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.fields import FieldInfo

from nbaccel.base.errors import ConfigError
from nbaccel.config.field_rules import (
    FieldMistake,
    FieldRule,
    explain_mistakes,
    mistakes_in,
    rule_of,
)
from nbaccel.config.text_forms import json_like, read_object
from nbaccel.config.value_readers import numbers_read, plain_value, read_number

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = [
    "AUTO",
    "Depth",
    "DeviceField",
    "FloatFormat",
    "Fraction",
    "Number",
    "Params",
    "Section",
    "SectionRule",
    "StepsField",
    "Text",
    "Truth",
    "Whole",
    "WholeFromOne",
    "Words",
    "holds",
    "json_table",
    "merged_mappings",
    "section_of",
]


AUTO = "auto"


def _number_or_auto(value: Any) -> Any:
    if value == AUTO and isinstance(value, str):
        return value
    return numbers_read(read_number(value))


def _read_truth(value: Any) -> Any:
    value = plain_value(value)
    word = value.strip().lower() if isinstance(value, str) else value
    return word == "true" if word in ("true", "false") else value


def _read_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else plain_value(value)


def _read_word(value: Any) -> Any:
    value = plain_value(value)
    return value.strip().lower() if isinstance(value, str) else value


def json_table(value: Any) -> Any:
    """A mapping as JSON holds it."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} holds no keys and values")
    return json_like(value)


def _read_params(value: Any) -> Any:
    return numbers_read(json_table(value))


def _one_of(*allowed: str, what_to_do: str, known_words: Mapping[str, str]) -> FieldRule:
    must_be = f"one of {', '.join(allowed)}"
    return FieldRule(
        read=_read_word, must=must_be, do=what_to_do, allowed=allowed, words=known_words
    )


def _whole_rule(must_be: str, what_to_do: str) -> FieldRule:
    return FieldRule(read=_number_or_auto, must=must_be, do=what_to_do, value_kind="whole")


_AutoWord = Literal["auto"]

Whole = Annotated[
    Annotated[int, Field(ge=0)] | _AutoWord | None,
    _whole_rule("a whole number of at least 0", "Give a number, such as 500000000 or 5e8"),
]
WholeFromOne = Annotated[
    Annotated[int, Field(ge=1)] | _AutoWord | None,
    _whole_rule("a whole number of at least 1", "Give a number, such as 1 or 500000000"),
]
StepsField = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[float, Field(ge=math.inf)] | _AutoWord | None,
    _whole_rule("a whole number of at least 1, or infinity", "Give a number, such as 100"),
]
Depth = Annotated[
    Annotated[int, Field(ge=-1)] | _AutoWord | None,
    _whole_rule("a whole number of at least -1", "Give -1 for all"),
]
Number = Annotated[
    Annotated[float, Field(ge=0, allow_inf_nan=False)] | _AutoWord | None,
    FieldRule(
        read=_number_or_auto,
        must="a number of at least 0",
        do="Give a number, such as 1.0",
        value_kind="number",
    ),
]
Fraction = Annotated[
    Annotated[float, Field(ge=0, le=1)] | _AutoWord | None,
    FieldRule(
        read=_number_or_auto,
        must="a number from 0 to 1",
        do="Give a fraction, such as 0.5",
        value_kind="number",
    ),
]
Truth = Annotated[
    Annotated[bool, Strict()] | _AutoWord | None,
    FieldRule(read=_read_truth, must="true or false", do="Give one of them", value_kind="truth"),
]
Text = Annotated[
    Annotated[str, Field(min_length=1)] | None,
    FieldRule(
        read=_read_text, must="text that is not empty", do="Write it in quotes", value_kind="text"
    ),
]
Words = Annotated[
    list[str] | None,
    FieldRule(
        read=json_like,
        must="a list of texts",
        do='Write for example ["a", "b"]',
        value_kind="words",
    ),
]
_TABLE_RULE = FieldRule(
    read=json_table,
    must="a mapping of names to JSON values",
    do='Write for example {"lr": 0.001}',
    value_kind="table",
)
Params = Annotated[dict[str, Any] | None, replace(_TABLE_RULE, read=_read_params)]
DeviceField = Annotated[
    Literal["none", "cpu", "nvme", "auto"] | None,
    _one_of(
        "none",
        "cpu",
        "nvme",
        what_to_do='"none" keeps them on the device that computes',
        known_words={"gpu": "none", "cuda": "none", "disk": "nvme", "ssd": "nvme"},
    ),
]
FloatFormat = Annotated[
    Literal["fp32", "fp16", "bf16", "auto"] | None,
    _one_of(
        "fp32",
        "fp16",
        "bf16",
        what_to_do="Leave it out and DeepSpeed follows the precision of training",
        known_words={"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    ),
]


_EXTRA_FIELD = "extra"


@dataclass(frozen=True, kw_only=True)
class SectionRule(FieldRule):
    """The rule of a field that holds a section.

    Attributes:
        section: The section's class.
    """

    section: type[Section]


def holds(section_class: type[Section], short_key: str = "") -> SectionRule:
    """The rule of a field that holds a section."""

    def read(value: Any) -> Any:
        if isinstance(value, str) and short_key:
            return section_class.model_validate({short_key: value})
        return section_class(**value) if isinstance(value, Mapping) else value

    key_names = ", ".join(
        config_key for config_key in section_class.model_fields if config_key != _EXTRA_FIELD
    )
    return SectionRule(
        read=read,
        must="a section",
        do=f"Give a mapping with some of its keys: {key_names}",
        section=section_class,
    )


class Section(BaseModel):
    """A part of a configuration: what nbaccel names, and in ``extra`` what it does not.

    All settings are keyword-only; ``None`` leaves one to DeepSpeed. Wrong ones raise
    :class:`~nbaccel.base.errors.ConfigError`, which lists every mistake at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    extra: Annotated[
        dict[str, Any],
        Field(description="Further keys of this section, given to DeepSpeed as they are."),
        replace(_TABLE_RULE, do="Leave it out, or give a dictionary"),
    ] = Field(default_factory=dict)

    if not TYPE_CHECKING:  # a type checker must see the fields as keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                unknown_remedy = "Give keys that only DeepSpeed knows in `extra`."
                section_mistakes = explain_mistakes(
                    type(self), error, settings, unknown_remedy=unknown_remedy
                )
                raise ConfigError(*section_mistakes) from error

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
        named_values: dict[str, Any] = {}
        extra_keys: dict[str, Any] = dict(settings.get(_EXTRA_FIELD) or {})
        section_mistakes: list[FieldMistake] = []
        for config_key, section_value in settings.items():
            model_field = cls.model_fields.get(config_key)
            if model_field is None:
                extra_keys[config_key] = section_value
            elif config_key != _EXTRA_FIELD:
                section_class = section_of(model_field)
                # Mistakes of inner sections are collected with those of this one.
                try:
                    is_whole = section_class is None or not isinstance(section_value, Mapping)
                    named_values[config_key] = (
                        section_value
                        if is_whole or section_class is None
                        else section_class.from_dict(section_value)
                    )
                except ConfigError as error:
                    section_mistakes += [
                        field_mistake.under(config_key) for field_mistake in mistakes_in(error)
                    ]
        try:
            new_section = cls(extra=extra_keys, **named_values)
        except ConfigError as error:
            raise ConfigError(*error.args, *section_mistakes) from error
        if section_mistakes:
            raise ConfigError(*section_mistakes)
        return new_section

    def to_dict(self) -> dict[str, Any]:
        """The section as DeepSpeed reads it, without the keys that are left to DeepSpeed.

        Returns:
            Plain values; changing them changes nothing here.
        """
        return merged_mappings(dict(self._given()), self.extra)

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
        # Not pydantic's `model_copy`, which validates nothing.
        return type(self)(**{**dict(self), **settings})

    def _given(self) -> Iterator[tuple[str, Any]]:
        for name in type(self).model_fields:
            field_value = getattr(self, name)
            if field_value is not None and name != _EXTRA_FIELD:
                plain_value = (
                    field_value.to_dict()
                    if isinstance(field_value, Section)
                    else copy.deepcopy(field_value)
                )
                yield name, plain_value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None and value != {}:
                yield name, value

    def __str__(self) -> str:
        # pydantic's text has the fields alone, without the name of the class.
        return repr(self)

    def __hash__(self) -> int:
        # Sections hold lists and dictionaries, by which pydantic's own hash would fail.
        return hash(json.dumps(self.to_dict(), sort_keys=True))


def merged_mappings(
    first_mapping: dict[str, Any], second_mapping: Mapping[str, Any]
) -> dict[str, Any]:
    """Two mappings as one, level by level."""
    for key, second_value in second_mapping.items():
        value = first_mapping.get(key)
        # A section that is in both must keep the keys of both.
        if isinstance(value, dict) and isinstance(second_value, Mapping):
            merged_mappings(value, second_value)
        else:
            first_mapping[key] = copy.deepcopy(second_value)
    return first_mapping


def section_of(model_field: FieldInfo) -> type[Section] | None:
    """The section that a field holds."""
    rule = rule_of(model_field)
    return rule.section if isinstance(rule, SectionRule) else None
