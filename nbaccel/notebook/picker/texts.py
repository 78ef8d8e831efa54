"""A picked configuration as text: JSON, YAML, a magic's line, Python, and a plain table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from nbaccel.config import RunConfig
from nbaccel.notebook.options import settings as options
from nbaccel.notebook.picker.choices import PANELS
from nbaccel.notebook.picker.words import TITLES
from nbaccel.plan.plan import Choice, table

if TYPE_CHECKING:
    from nbaccel.notebook.picker.model import PickerModel

__all__ = ["Face", "faces_of", "flag", "static_html", "static_text"]

_SINGULAR = {"processes": "process", "batches": "batch", "powers of two": "power of two"}


@dataclass(frozen=True, slots=True)
class Face:
    """A configuration in one language.

    Attributes:
        name: ``DeepSpeed JSON``, ``YAML``, ``Command line`` or ``Python``.
        language: For highlighting: ``json``, ``yaml``, ``text``, ``python``.
        text: The text, to be copied as it is.
    """

    name: str
    language: str
    text: str


def faces_of(config: RunConfig, resolved: Mapping[str, Any] | None) -> tuple[Face, ...]:
    """All languages of a configuration.

    Args:
        config: The configuration.
        resolved: DeepSpeed's, with ``"auto"`` filled in where something decides it; None without
            DeepSpeed.

    Returns:
        The faces; DeepSpeed's JSON only where DeepSpeed is to train.
    """
    yaml = config.to_yaml()
    faces = [
        Face("YAML", "yaml", "# all settings have their defaults\n" if yaml == "{}\n" else yaml),
        Face("Command line", "text", f"%%accelerate {' '.join(_flags(config))}".rstrip()),
        Face("Python", "python", _python(config)),
    ]
    if resolved is not None:
        faces.insert(0, Face("DeepSpeed JSON", "json", json.dumps(resolved, indent=2)))
    return tuple(faces)


def flag(config: RunConfig, name: str) -> str:
    """A setting as an option of a magic's line or of a command.

    Args:
        config: The configuration.
        name: The setting.

    Returns:
        The option with its value, quoted for a shell.
    """
    value = getattr(config, name)
    option = next(option for option in options() if option.name == name)
    if isinstance(value, bool):
        return option.flag if value else option.negative
    if option.is_json and value is not None:
        plain = json.loads(config.model_dump_json(include={name}, exclude_defaults=True))[name]
        text = json.dumps(plain)
    else:
        text = "none" if value is None else str(value)
    return f"{option.flags[0]} {shlex.quote(text)}"


def _flags(config: RunConfig) -> Iterator[str]:
    for name, field in RunConfig.model_fields.items():
        if getattr(config, name) != field.default:
            yield flag(config, name)


def _python(config: RunConfig) -> str:
    names = "Fp8Config, RunConfig" if config.fp8 is not None else "RunConfig"
    settings = [f"    {name}={value!r},\n" for name, value in config.__repr_args__()]
    call = f"RunConfig(\n{''.join(settings)})" if settings else "RunConfig()"
    return (
        f"from nbaccel import {names}, notebook_launcher\n\nconfig = {call}\n"
        "notebook_launcher(train, (model,), config=config)\n"
    )


# ---------------------------------------------------------------------- the table for everywhere
def static_text(model: PickerModel, panels: Sequence[str] = PANELS) -> str:
    """The picker for a terminal: what is chosen, what it needs, what it comes to.

    Args:
        model: The picker's model.
        panels: The panels that it has.

    Returns:
        Text for a fixed-width font.
    """
    lines: list[str] = []
    for panel, rows in _rows(model, panels):
        width = max(len(row[0]) for row in rows)
        values = max(len(row[1]) for row in rows)
        lines += [TITLES[panel], *(f"  {a:<{width}}  {b:<{values}}  {c}" for a, b, c in rows), ""]
    lines += ["Memory", *(f"  {line}" for line in _memory(model)), ""]
    if reasons := model.resolved():
        lines += [table("What is left open comes to", reasons, ()), ""]
    for face in model.faces():
        lines += [face.name, *(f"  {line}" for line in face.text.splitlines()), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip()


def static_html(model: PickerModel, panels: Sequence[str] = PANELS) -> str:
    """The same for a saved notebook: plain tables, no script, no style that a filter would miss.

    Args:
        model: The picker's model.
        panels: The panels that it has.

    Returns:
        HTML.
    """
    parts = []
    for panel, rows in _rows(model, panels):
        parts.append(f"<p><b>{escape(TITLES[panel])}</b></p>{_table(rows)}")
    memory = "".join(f"<li>{escape(line)}</li>" for line in _memory(model))
    parts.append(f"<p><b>Memory</b></p><ul>{memory}</ul>")
    if reasons := model.resolved():
        parts.append(f"<p><b>What is left open comes to</b></p>{_table(_reasons(reasons))}")
    parts += [
        f"<p><b>{escape(face.name)}</b></p><pre>{escape(face.text)}</pre>" for face in model.faces()
    ]
    return "".join(parts)


def _rows(
    model: PickerModel, panels: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Per panel, the common choices and of the others those that were made."""
    for panel in panels:
        rows = [
            (setting.label, _shown(model, setting.name), _meaning(model, setting.name))
            for setting in model.settings(panel)
            if model.is_shown(setting.name)
            and (
                (not setting.section and not model.refusal(setting.name))
                or model.value(setting.name) not in (None, setting.default)
            )
        ]
        if rows:
            yield panel, rows


def _shown(model: PickerModel, name: str) -> str:
    value, setting = model.value(name), model.setting(name)
    for option in setting.options:
        if option.value == value:
            return option.label
    if value is None:
        if setting.default is None:
            return "left open"
        return f"{_with_unit(setting.default, setting.unit)} (default)"
    return _with_unit(value, setting.unit if setting.kind != "one-of" else "")


def _with_unit(value: Any, unit: str) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = f"{value:,}" if is_number else str(value)
    if is_number and value == 1:
        unit = _SINGULAR.get(unit, unit.removesuffix("s") if len(unit) > 1 else unit)
    return f"{text} {unit}".rstrip()


def _meaning(model: PickerModel, name: str) -> str:
    value, setting = model.value(name), model.setting(name)
    chosen = next((o.meaning for o in setting.options if o.value == value and o.meaning), "")
    return chosen or setting.meaning


def _memory(model: PickerModel) -> list[str]:
    lines = [bar.told() for bar in model.bars()]
    verdict = model.verdict
    return [*lines, " ".join(filter(None, (verdict.text, verdict.remedy)))]


def _reasons(choices: Sequence[Choice]) -> list[tuple[str, str, str]]:
    return [(choice.name, str(choice.value), choice.reason) for choice in choices]


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    body = "".join(
        f"<tr><th scope='row' style='text-align:left'>{escape(a)}</th>"
        f"<td style='text-align:left'>{escape(b)}</td>"
        f"<td style='text-align:left'>{escape(c)}</td></tr>"
        for a, b, c in rows
    )
    return f"<table><tbody>{body}</tbody></table>"
