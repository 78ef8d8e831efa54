"""A configuration as text: JSON for workers, YAML for people, a schema for editors."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ValidationError

from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import require
from nbaccel.config.field_rules import explain_mistakes
from nbaccel.config.given_values import plain_value, shown

if TYPE_CHECKING:
    from typing_extensions import Self

# Far deeper than any configuration, and far from Python's limit for recursion.
_MAX_JSON_DEPTH = 64
_TOO_DEEP = f"it is nested more than {_MAX_JSON_DEPTH} levels deep"
_MAX_BITS = 1024  # Of a whole number: a larger one does not fit into any number of a training


def read_file(file_path: str | Path) -> dict[str, Any]:
    """Read a file that holds DeepSpeed's configuration, a JSON object."""
    source = f"The DeepSpeed configuration {shown(str(file_path))}"
    try:
        source_text = Path(file_path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        text = f"{source} cannot be read: {error}. Give the path of a JSON file."
        raise ConfigError(text) from error
    return read_object(source_text, source)


def read_object(source_text: str, source_name: str) -> dict[str, Any]:
    """Read a JSON object in which no key stands twice."""

    def each_once(key_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Python's reader keeps the last value and drops the others silently.
        key_names = [name for name, _ in key_pairs]
        repeated_names = sorted({name for name in key_names if key_names.count(name) > 1})
        if repeated_names:
            raise ConfigError(
                f"{source_name} names {', '.join(repeated_names)} more than once. Remove one."
            )
        return dict(key_pairs)

    try:
        read_values = json.loads(
            source_text, object_pairs_hook=each_once, parse_constant=_read_constant
        )
    except json.JSONDecodeError as error:
        raise unreadable(source_name, "JSON", error) from error
    except RecursionError as error:
        raise unreadable(source_name, "JSON", "it is nested too deeply") from error
    except ConfigError:
        raise  # from `each_once`; it is a `ValueError`, too
    except ValueError as error:  # NaN, or a number of thousands of digits
        before, found, _ = source_text.partition("NaN")
        line_number = before.count("\n") + 1
        place = f": line {line_number}" if found else ""
        raise unreadable(source_name, "JSON", f"{error}{place}") from error
    if not isinstance(read_values, dict):
        type_name = "null" if read_values is None else type(read_values).__name__
        raise ConfigError(
            f"{source_name} cannot be read from JSON of {type_name}: got {shown(source_text)}. "
            'Write names and values: {"train_batch_size": 8}, for example.'
        )
    return read_values


def json_like(given_value: Any, value_path: str = "", depth: int = 0) -> Any:
    """A value as JSON holds it: lists for tuples, plain numbers for NumPy's, text for paths."""
    given_value = plain_value(given_value)
    text = f" at {value_path}" if value_path else ""
    # A dictionary that contains itself ends here, too.
    if depth > _MAX_JSON_DEPTH:
        raise ValueError(f"{_TOO_DEEP}{text[:60]}")
    if isinstance(given_value, Mapping):
        # `json.dumps` would silently make text of numbers and truth values.
        wrong = [entry_key for entry_key in given_value if not isinstance(entry_key, str)]
        if wrong:
            raise ValueError(f"JSON names settings by text, and {shown(wrong[0])}{text} is none")
        prefix = f"{value_path}." if value_path else ""
        return {
            key: json_like(value, f"{prefix}{key}", depth + 1) for key, value in given_value.items()
        }
    if isinstance(given_value, (list, tuple)):
        return [json_like(list_entry, value_path, depth + 1) for list_entry in given_value]
    if isinstance(given_value, os.PathLike):
        return os.fspath(given_value)
    if isinstance(given_value, int) and given_value.bit_length() > _MAX_BITS:
        raise ValueError(f"a whole number of {given_value.bit_length()} bits{text} is too large")
    if given_value is None or isinstance(given_value, (str, bool, int)):
        return given_value
    if isinstance(given_value, float) and not math.isnan(given_value):  # "never print" is Infinity
        return given_value
    raise ValueError(f"JSON cannot hold {shown(given_value)}{text}")


def plain_object(read_settings: Mapping[str, Any], source_name: str) -> dict[str, Any]:
    """A mapping as JSON holds it."""
    try:
        values: dict[str, Any] = json_like(read_settings)
    except ValueError as error:
        raise ConfigError(
            f"{source_name} cannot be read from {shown(read_settings)}: {error}. "
            "DeepSpeed reads JSON. Give names as text, and plain values."
        ) from error
    return values


def read_source(value: Any, source_name: str) -> Any:
    """Settings out of whatever holds them, as plain JSON values."""
    # `ZeroConfig`, for example, which this package must not import.
    if callable(getattr(value, "to_dict", None)):
        value = value.to_dict()
    # No path begins so in practice; a list is read, too, for the better message.
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return read_object(value, source_name)
    if isinstance(value, (str, Path)):
        return read_file(value)
    return plain_object(value, source_name) if isinstance(value, Mapping) else value


def _read_constant(name: str) -> float:
    # Python's reader takes both; DeepSpeed's users write Infinity, for "never".
    if name == "NaN":
        raise ValueError(f"{name} is no number, and JSON has no word for it")
    return float(name)


_YAML_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""Numbers of YAML 1.2 that are text in YAML 1.1: ``3e-5``, ``1e6``."""


def unreadable(source_name: str, language: str, error: Exception | str) -> ConfigError:
    """The error about a text that is no JSON, or no YAML."""
    return ConfigError(
        f"{source_name} cannot be read from {language}: {str(error).rstrip('.')}. "
        "A setting half read would train something else. Correct the text there."
    )


def read_yaml(text: str) -> Any:
    """Read YAML in which ``3e-5`` is a number, as in JSON and in YAML 1.2."""
    yaml = require("yaml", extra="", why="Reading a configuration file")

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined,misc]  # imported when needed
        """A separate class, because resolvers change their class."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789."))
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def read_yaml_settings(text: str, source_name: str) -> dict[str, Any]:
    """Settings by name, from YAML; none from an empty text."""
    try:
        settings = read_yaml(text)
    except ValueError as error:
        raise unreadable(source_name, "YAML", error) from error
    if not isinstance(settings, (dict, type(None))):
        raise ConfigError(
            f"{source_name} holds no settings: got {shown(settings)}. Settings need names. Write "
            "names and values: num_processes: 2, for example; or have nbaccel config write them."
        )
    return {str(name): value for name, value in (settings or {}).items()}


def changed_settings(model: BaseModel) -> dict[str, Any]:
    """The settings that differ from their defaults, by name."""
    defaults = {name: field.default for name, field in type(model).model_fields.items()}
    return {name: value for name, value in dict(model).items() if value != defaults[name]}


class Plain(BaseModel):
    """A model that tells all mistakes at once, and whose `repr` is code without the defaults."""

    unknown_remedy: ClassVar[str] = ""  # for a setting that there is not; else all are listed

    if not TYPE_CHECKING:  # a type checker must see the fields as keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**{name: plain_value(value) for name, value in settings.items()})
            except ValidationError as error:
                mistakes = explain_mistakes(
                    type(self), error, settings, unknown_remedy=self.unknown_remedy
                )
                raise ConfigError(*mistakes) from error

    def changed(self, **settings: Any) -> Self:
        """A copy with other values, validated like a new one.

        Raises:
            ConfigError: The new settings are wrong.
        """
        # Not pydantic's `model_copy`, which validates nothing.
        return type(self)(**{**dict(self), **settings})

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return changed_settings(self).items()

    def __str__(self) -> str:
        return repr(self)

    def __hash__(self) -> int:
        # pydantic's own hash of a frozen model fails, since some fields are dictionaries.
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))
