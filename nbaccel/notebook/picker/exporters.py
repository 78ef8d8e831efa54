"""A picked configuration as text, and back: JSON, YAML, a magic's line, Python, files."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.base import atomic
from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.text_forms import each_once, read_yaml
from nbaccel.notebook.options import setting_options as options
from nbaccel.notebook.picker.choices import by_name, settings_forms
from nbaccel.plan import Inventory

__all__ = [
    "ConfigFace",
    "faces_of",
    "flag_of",
    "mistakes_by_setting",
    "read_settings_source",
    "save_face",
]

_SHARED_NAMES = frozenset({"gradient_accumulation_steps", "activation_checkpointing"})
"""Settings of a run whose names strategies' own configurations have, too."""
_NEAR_ENOUGH = 0.8  # `mixed_precison` is 0.97 like `mixed_precision`


@dataclass(frozen=True, slots=True)
class ConfigFace:
    """A configuration in one language.

    Attributes:
        name: ``YAML``, ``Command line``, ``Python``, or a strategy's ``DeepSpeed JSON``.
        language: For highlighting: ``json``, ``yaml``, ``text``, ``python``.
        text: The text, to be copied as it is.
    """

    name: str
    language: str
    text: str


def faces_of(
    config: RunConfig, documents: Mapping[str, Mapping[str, Any]]
) -> tuple[ConfigFace, ...]:
    """All languages of a configuration."""
    yaml_text = config.to_yaml()
    config_faces = [
        ConfigFace(
            "YAML",
            "yaml",
            "# all settings have their defaults\n" if yaml_text == "{}\n" else yaml_text,
        ),
        ConfigFace(
            "Command line", "text", f"%%accelerate {' '.join(_command_flags(config))}".rstrip()
        ),
        ConfigFace("Python", "python", _python_code(config)),
    ]
    document_faces = (
        ConfigFace(file_name, "json", json.dumps(document_text, indent=2))
        for file_name, document_text in documents.items()
    )
    return (*document_faces, *config_faces)


def save_face(config_faces: Sequence[ConfigFace], path: str | Path, face_name: str) -> None:
    """Write one of the languages to a file, whole or not at all."""
    face_texts = {config_face.name: config_face.text for config_face in config_faces}
    if face_name not in face_texts:
        raise ConfigError(
            f"There is no {face_name!r} to save: at present there are {', '.join(face_texts)}. "
            "Name one of them; DeepSpeed's JSON needs a ZeRO stage."
        )
    try:
        atomic.write_text(Path(path).expanduser(), face_texts[face_name].rstrip("\n") + "\n")
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written: {error}. The configuration would be lost with "
            "the notebook. Give another path."
        ) from error


def flag_of(config: RunConfig, field_name: str) -> str:
    """A setting as an option of a magic's line or of a command."""
    field_value = getattr(config, field_name)
    magic_option = next(
        magic_option for magic_option in options() if magic_option.name == field_name
    )
    if isinstance(field_value, bool):
        return magic_option.flag if field_value else magic_option.negative
    if magic_option.is_json and field_value is not None:
        # Through JSON, because a nested setting is a model and has no JSON form by itself.
        plain_value = json.loads(
            config.model_dump_json(include={field_name}, exclude_defaults=True)
        )[field_name]
        json_text = json.dumps(plain_value)
    else:
        json_text = "none" if field_value is None else str(field_value)
    return f"{magic_option.flags[0]} {shlex.quote(json_text)}"


def _command_flags(config: RunConfig) -> Iterator[str]:
    for name, field in RunConfig.model_fields.items():
        if getattr(config, name) != field.default:
            yield flag_of(config, name)


def _python_code(config: RunConfig) -> str:
    imported_names = "Fp8Config, RunConfig" if config.fp8 is not None else "RunConfig"
    lines = [f"    {field_name}={value!r},\n" for field_name, value in config.__repr_args__()]
    call = f"RunConfig(\n{''.join(lines)})" if lines else "RunConfig()"
    return (
        f"from nbaccel import {imported_names}, notebook_launcher\n\nconfig = {call}\n"
        "notebook_launcher(train, (model,), config=config)\n"
    )


# ---------------------------------------------------------------------- reading
def read_settings_source(
    source: str | Path | Mapping[str, Any], config: RunConfig, inventory: Inventory
) -> tuple[RunConfig, tuple[str, ...]]:
    """Read a run's configuration, or a strategy's own."""
    settings = source if isinstance(source, Mapping) else _parse_source(source)
    document_form = next(
        (
            settings_form
            for settings_form in settings_forms()
            if settings_form.is_document(settings)
        ),
        None,
    )
    # Some names exist in both, so the strategies' forms are asked first.
    if document_form is None and _is_run(settings):
        return RunConfig(
            **{str(field_name): field_value for field_name, field_value in settings.items()}
        ), ()
    document_form = document_form or next(iter(settings_forms()), None)
    if document_form is None:
        keys = ", ".join(sorted(map(str, set(settings) - set(RunConfig.model_fields))))
        raise ConfigError(
            f"{keys} are no settings of RunConfig, and no strategy that is installed has a "
            "configuration of its own. They would have no effect. Leave them out."
        )
    return document_form.read(settings, config, inventory)


def _is_run(settings: Mapping[str, Any]) -> bool:
    """Whether these are settings of a run, with some misspelt perhaps, and not a strategy's own."""
    names = set(RunConfig.model_fields)
    foreign_keys = [str(key) for key in settings if key not in names]
    keys = set(settings) & names - _SHARED_NAMES
    misspelt_keys = [
        key
        for key in foreign_keys
        if difflib.get_close_matches(key.lower(), names, n=1, cutoff=_NEAR_ENOUGH)
    ]
    return len(keys) + len(misspelt_keys) > len(foreign_keys) - len(misspelt_keys) or (
        not foreign_keys
    )


def mistakes_by_setting(error: ConfigError) -> dict[str, list[str]]:
    """Mistakes, by the choice that each names first."""
    # A strategy's messages may name a key without its section; whole names below override these.
    # Reversed, so that of equal last parts the first choice is kept.
    names_by_key = {
        setting_name.rpartition(".")[2]: setting_name
        for setting_name in reversed(by_name())
        if "." in setting_name
    }
    names_by_key |= {
        setting_key: setting_name
        for setting_name in by_name()
        for setting_key in (setting_name, by_name()[setting_name].strategy_key)
    }
    mistakes: dict[str, list[str]] = {}
    for text in error.mistakes:
        first_word = re.split(r"[\s=:]", text, maxsplit=1)[0].rstrip(".,")
        mistakes.setdefault(names_by_key.get(first_word, "") if first_word else "", []).append(text)
    return mistakes


def _parse_source(source: str | Path) -> Mapping[str, Any]:
    source_text, source_name = _source_text(source)
    if not source_text.strip():
        raise ConfigError(
            f"{source_name} is empty: got {source_text!r}. It would change nothing. Give a "
            "DeepSpeed configuration or a RunConfig, as JSON or YAML."
        )
    try:
        # By itself `json` silently keeps the last of two equal keys.
        settings = json.loads(source_text, object_pairs_hook=each_once(source_name))
    except (json.JSONDecodeError, RecursionError) as error:
        # Text in braces is meant as JSON, whose message names the place of the mistake.
        if source_text.lstrip().startswith("{"):
            raise ConfigError(
                f"{source_name} is no JSON: {error}. A setting half read would train something "
                "else. Correct the text there."
            ) from error
        try:
            settings = read_yaml(source_text)
        except ValueError as trouble:
            raise ConfigError(
                f"{source_name} is neither JSON nor YAML: {trouble}. A setting half read would "
                "train something else. Correct the text there."
            ) from trouble
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{source_name} holds no settings: got {str(settings)[:60]!r}. Settings need "
            'names. Give a DeepSpeed configuration, {"zero_optimization": {"stage": 2}} for '
            "example, or the path of a file."
        )
    return settings


def _source_text(source: str | Path) -> tuple[str, str]:
    """The text, and what to call it."""
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return source, "What was pasted"
    source_path = Path(source).expanduser()
    # A path that does not exist is reported as a missing file, not as text without settings.
    looks_like_path = isinstance(source, Path) or bool(source_path.suffix) or "/" in source
    try:
        if source_path.is_file() or looks_like_path:
            return source_path.read_text(encoding="utf-8"), f"{str(source_path)!r}"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(source_path)!r} cannot be read: {error}. Nothing was changed. Give the path of "
            "a JSON or YAML file, or paste its text."
        ) from error
    return str(source), "What was pasted"
