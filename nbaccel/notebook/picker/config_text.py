"""A picked configuration as text, and back: JSON, YAML, a magic's line, Python, files."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.text_forms import read_object, read_yaml, unreadable
from nbaccel.memory.settings_form import settings_forms
from nbaccel.notebook.magic_line import changed_flags
from nbaccel.plan import Inventory

_SHARED_NAMES = frozenset({"gradient_accumulation_steps", "activation_checkpointing"})
"""Settings of a run whose names strategies' own configurations have, too."""
_NEAR_ENOUGH = 0.8  # `mixed_precison` is 0.97 like `mixed_precision`


def faces_of(config: RunConfig, documents: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A configuration in all languages: strategies' own as JSON, YAML, a magic's line, Python."""
    yaml_text = config.to_yaml()
    if yaml_text == "{}\n":
        yaml_text = "# all settings have their defaults\n"
    return {
        **{name: json.dumps(document, indent=2) for name, document in documents.items()},
        "YAML": yaml_text,
        "Command line": " ".join(["%%accelerate", *changed_flags(config)]),
        "Python": _python_code(config),
    }


def _python_code(config: RunConfig) -> str:
    names = "Fp8Config, RunConfig" if config.fp8 is not None else "RunConfig"
    lines = [f"    {field_name}={value!r},\n" for field_name, value in config.__repr_args__()]
    call = f"RunConfig(\n{''.join(lines)})" if lines else "RunConfig()"
    return (
        f"from nbaccel import {names}, notebook_launcher\n\nconfig = {call}\n"
        "notebook_launcher(train, (model,), config=config)\n"
    )


def read_settings_source(
    source: str | Path | Mapping[str, Any], config: RunConfig, inventory: Inventory
) -> tuple[RunConfig, tuple[str, ...]]:
    """Read a run's configuration, or a strategy's own."""
    settings = source if isinstance(source, Mapping) else _parse_source(source)
    # Some names exist in both, so the strategies' forms are asked first.
    form = next((form for form in settings_forms() if form.is_document(settings)), None)
    if form is None and _is_run(settings):
        return RunConfig(**{str(name): value for name, value in settings.items()}), ()
    # Else it is meant for the first of them, which says what is wrong.
    form = form or settings_forms()[0]
    run_config, remarks = form.read(settings, config, inventory)
    return run_config, remarks


def _is_run(settings: Mapping[str, Any]) -> bool:
    """Whether these are settings of a run, with some misspelt perhaps, and not a strategy's own."""
    names = set(RunConfig.model_fields)
    foreign = [str(key) for key in settings if key not in names]
    own = set(settings) & names - _SHARED_NAMES
    misspelt = [
        key
        for key in foreign
        if difflib.get_close_matches(key.lower(), names, n=1, cutoff=_NEAR_ENOUGH)
    ]
    return not foreign or len(own) + len(misspelt) > len(foreign) - len(misspelt)


def _parse_source(source: str | Path) -> Mapping[str, Any]:
    text, name = _source_text(source)
    example = 'a DeepSpeed configuration, {"zero_optimization": {"stage": 2}} for example'
    if not text.strip():
        raise ConfigError(
            f"{name} is empty: got {text!r}. Give {example}, or a RunConfig, as JSON or YAML."
        )
    # Text in braces is meant as JSON, whose reader names the place of a mistake.
    if text.lstrip().startswith("{"):
        return read_object(text, name)
    try:
        settings = read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(name, "JSON or YAML", error) from error
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{name} holds no settings: got {str(settings)[:60]!r}. Settings need names. Give "
            f"{example}, or the path of a file."
        )
    return settings


def _source_text(source: str | Path) -> tuple[str, str]:
    """The text, and what to call it."""
    pasted = "What was pasted"
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return source, pasted
    path = Path(source).expanduser()
    # A path that does not exist is reported as a missing file, not as text without settings.
    is_path = isinstance(source, Path) or bool(path.suffix) or "/" in source
    try:
        if is_path or path.is_file():
            return path.read_text(encoding="utf-8"), f"{str(path)!r}"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}. Give another path, or paste its text."
        ) from error
    return str(source), pasted


KeyPath = tuple[str, ...]
TextMistake = tuple[int | None, str]  # line, from 1, or None for no single one; message
_KEY_END = re.compile(r"[\s=:]")
_LINE_IN_MESSAGE = re.compile(r"\bline (\d+)")


def mistakes_in_text(text: str, check: Callable[[str], object]) -> tuple[TextMistake, ...]:
    """Check a configuration's text."""
    try:
        # The end of a line makes it text for the reader, even if it looks like a path.
        check(text + "\n")
    except ConfigError as error:
        syntax_mistake = _syntax_mistake(error, text.count("\n") + 1)
        if syntax_mistake is not None:
            return (syntax_mistake,)
        root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
        lines = dict(_keys_of(root, ()))  # where each key stands
        mistakes = [(_line_of(mistake, lines), str(mistake)) for mistake in error.args]
        return tuple(sorted(mistakes, key=lambda found: found[0] or len(text)))
    except UnicodeError as error:  # half of a pair of surrogates, as some editors paste
        return ((None, str(error)),)
    return ()


def _syntax_mistake(error: ConfigError, num_lines: int) -> TextMistake | None:
    cause = error.__cause__
    if isinstance(cause, json.JSONDecodeError):
        return min(cause.lineno, num_lines), f"{cause.msg} (column {cause.colno})."
    if cause is not None and (found := _LINE_IN_MESSAGE.search(str(cause))):
        return int(found[1]), error.mistakes[0]
    return None


def _keys_of(node: yaml.Node | None, section: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.SequenceNode):  # its items have no name
        for item in node.value:
            yield from _keys_of(item, section)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*section, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _keys_of(value, path)


def _line_of(mistake: str, lines: dict[KeyPath, int]) -> int | None:
    """The line of the key that a mistake is about, or of the nearest section around it."""
    named_path = str(getattr(mistake, "path", "")) or _KEY_END.split(mistake, maxsplit=1)[0]
    wanted = tuple(named_path.strip("`'\".,").split("."))
    for length in range(len(wanted), 0, -1):
        part = wanted[:length]
        # A message may name a key without its section.
        for path, line in lines.items():
            if path[-length:] == part:
                return line
    return None
