"""Every choice that a picker offers: its meaning, its unit, and where it lands.

Nothing is listed twice: settings of a run come from `RunConfig`, those of FP8 from `Fp8Config`,
DeepSpeed's from `ZeroConfig`, each with its own description. What stands here is which come first,
what they are called in plain words, and the unit of a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nbaccel.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, START_METHODS
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.deepspeed import kinds
from nbaccel.deepspeed.auto import AUTO_KEYS
from nbaccel.deepspeed.config import ZERO, ZERO_KEYS, ZeroConfig
from nbaccel.deepspeed.section import kind_of, section_of
from nbaccel.notebook.options import kinds_of, words_of
from nbaccel.notebook.picker.words import (
    COMMON,
    DEFAULTS,
    LABELS,
    MEANINGS,
    OPTIMIZER_PLACE,
    OPTIMIZERS,
    PARAM_PLACE,
    PASSES,
    PLACES,
    SCHEDULES,
    SECTIONS,
    STAGES,
    UNIT_OF,
    YOURS,
    Option,
)
from nbaccel.plan.matrix import markdown_table

__all__ = [
    "OPTIMIZER_PLACE",
    "PANELS",
    "PARAM_PLACE",
    "README_BEGIN",
    "README_END",
    "Option",
    "Setting",
    "by_name",
    "readme_choices",
    "settings",
]

PANELS = ("precision", "zero", "launch")
README_BEGIN = "<!-- choices:begin -->"
README_END = "<!-- choices:end -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One choice.

    Attributes:
        name: Its name among all choices; for a key of DeepSpeed that key, with dots.
        label: How it is called.
        meaning: What it does, in one line.
        unit: Of a number: ``elements``, ``samples``; empty where it counts nothing.
        panel: ``precision``, ``zero`` or ``launch``.
        section: Its heading among the advanced; empty where it is shown at once.
        kind: ``one-of``, ``whole``, ``number``, ``truth``, ``text``, ``words`` or ``table``.
        options: The values of ``one-of``.
        run_field: Where it lands in `RunConfig`, with dots.
        deepspeed_key: Where it lands in DeepSpeed's JSON, with dots; empty where it does not.
        default: What is in force where nothing is chosen; None where that depends.
        takes_auto: Whether ``"auto"`` may stand there.
    """

    name: str
    label: str
    meaning: str
    panel: str
    kind: str
    run_field: str
    unit: str = ""
    section: str = ""
    options: tuple[Option, ...] = ()
    deepspeed_key: str = ""
    default: Any = None
    takes_auto: bool = False


_KINDS = {
    id(get_args(alias)[-1]): name
    for name, aliases in {
        "whole": (kinds.Whole, kinds.WholeFromOne, kinds.Steps, kinds.Depth),
        "number": (kinds.Number, kinds.Fraction),
        "truth": (kinds.Truth,),
        "text": (kinds.Text,),
        "words": (kinds.Words,),
        "table": (kinds.Table,),
    }.items()
    for alias in aliases
}


@cache
def settings(panel: str) -> tuple[Setting, ...]:
    """The choices of a panel: the common ones first, then the rest by section.

    Args:
        panel: One of `PANELS`.

    Returns:
        All of them.
    """
    makers = {"precision": _of_precision, "zero": _of_zero, "launch": _of_launch}
    found = {setting.name: setting for setting in makers[panel]()}
    first = [found.pop(name) for name in COMMON[panel]]
    sections: dict[str, list[Setting]] = {}
    for setting in found.values():
        sections.setdefault(setting.section, []).append(setting)
    return (*first, *(setting for group in sections.values() for setting in group))


@cache
def by_name() -> dict[str, Setting]:
    """Name → choice, of all panels."""
    return {setting.name: setting for panel in PANELS for setting in settings(panel)}


def _of_precision() -> Iterator[Setting]:
    field = RunConfig.model_fields["mixed_precision"]
    labels = {"no": "fp32"}
    yield Setting(
        name="mixed_precision",
        label=LABELS["mixed_precision"],
        meaning=_meaning("mixed_precision", field),
        panel="precision",
        kind="one-of",
        options=tuple(
            Option(row.name, labels.get(row.name, row.name), _sentence(row.meaning))
            for row in PRECISIONS
        ),
        run_field="mixed_precision",
        deepspeed_key="bf16.enabled, fp16.enabled",
        default="no",
    )
    for name, entry in Fp8Config.model_fields.items():
        if name == "override_linear_precision":
            yield from _overrides()
            continue
        setting = _of_model("fp8." + name, entry, panel="precision", section="FP8")
        if name == "backend":
            rows = (Option(r.name, r.name, _sentence(r.meaning)) for r in FP8_BACKENDS)
            auto = Option("auto", "auto", "What is installed.")
            setting = replace(setting, options=(auto, *rows))
        yield setting


def _overrides() -> Iterator[Setting]:
    for name, what in PASSES.items():
        yield Setting(
            name=f"fp8.override_{name}",
            label=f"Higher precision: {what}",
            meaning=f"Whether the product of the {what} is computed in higher precision.",
            panel="precision",
            section="FP8",
            kind="truth",
            run_field="fp8.override_linear_precision",
            default=False,
        )


def _of_launch() -> Iterator[Setting]:
    elsewhere = {"mixed_precision", "fp8", "deepspeed", "zero_stage"}
    elsewhere |= {"gradient_accumulation_steps", "activation_checkpointing"}
    rows = {
        "device": [(row.name, row.meaning) for row in DEVICES],
        "start_method": [(row.name, row.meaning) for row in START_METHODS],
    }
    for name, entry in RunConfig.model_fields.items():
        if name in elsewhere:
            continue
        section = "" if name in COMMON["launch"] else "Launch"
        setting = _of_model(name, entry, panel="launch", section=section)
        if name in rows:
            options = (Option(word, word, _sentence(meaning)) for word, meaning in rows[name])
            auto = Option("auto", "auto", "What the plan chooses.")
            setting = replace(setting, options=(auto, *options))
        yield setting


def _of_model(name: str, entry: FieldInfo, *, panel: str, section: str) -> Setting:
    """A setting of `RunConfig` or `Fp8Config`, by its type."""
    words = words_of(entry.annotation)
    plain = {bool: "truth", int: "whole", float: "number", str: "text"}
    return Setting(
        name=name,
        label=_label(name),
        meaning=_meaning(name, entry),
        unit=UNIT_OF.get(name, ""),
        panel=panel,
        section=section,
        kind="one-of" if words else plain.get(kinds_of(entry.annotation)[0], "table"),
        options=tuple(Option(word, str(word)) for word in words),
        run_field=name,
        default=entry.default,
    )


def _of_zero() -> Iterator[Setting]:
    stage = RunConfig.model_fields["zero_stage"]
    yield Setting(
        name="zero_stage",
        label=LABELS["zero_stage"],
        meaning=_meaning("zero_stage", stage),
        panel="zero",
        kind="one-of",
        options=STAGES,
        run_field="zero_stage",
        deepspeed_key=f"{ZERO}.stage",
    )
    for name, key in (("activation_checkpointing", ""), ("gradient_accumulation_steps",) * 2):
        entry = RunConfig.model_fields[name]
        setting = _of_model(name, entry, panel="zero", section="")
        yield replace(setting, deepspeed_key=key)
    yield from _of_section(ZeroConfig, "")


def _of_section(model: type[BaseModel], path: str) -> Iterator[Setting]:
    said = {f"{ZERO}.stage", "gradient_accumulation_steps", "fp16.enabled", "bf16.enabled"}
    for name, entry in model.model_fields.items():
        place = ZERO if not path and name in ZERO_KEYS else path
        key = f"{place}.{name}" if place else name
        inner = section_of(entry)
        if inner is not None:
            yield from _of_section(inner, key)
        elif name != "extra" and key not in said:
            yield _of_key(key, place, entry)


def _of_key(key: str, place: str, entry: FieldInfo) -> Setting:
    kind = kind_of(entry)
    words = kind.allowed if kind is not None else ()
    special = {
        OPTIMIZER_PLACE: PLACES,
        PARAM_PLACE: PLACES,
        "optimizer.type": (YOURS, *(Option(name, name) for name in OPTIMIZERS)),
        "scheduler.type": (YOURS, *(Option(name, name) for name in SCHEDULES)),
    }
    options = special.get(key, ())
    if words and not options:
        options = (Option(None, "default"), *(Option(word, word) for word in words))
    meaning = _meaning(key, entry)
    named = "elements" if "element" in meaning.lower() else ""
    return Setting(
        name=key,
        label=_label(key),
        meaning=meaning,
        unit=UNIT_OF.get(key, named),
        panel="zero",
        section="" if key in COMMON["zero"] else SECTIONS[place],
        kind="one-of" if options else _KINDS[id(kind)],
        options=options,
        run_field="deepspeed",
        deepspeed_key=key,
        default=DEFAULTS.get(key),
        takes_auto=key in AUTO_KEYS,
    )


def _meaning(name: str, entry: FieldInfo) -> str:
    """Its description; where that speaks of Python's None, a form has an empty field."""
    return MEANINGS.get(name) or (entry.description or "").replace("; None ", "; empty ")


def _label(name: str) -> str:
    last = name.rpartition(".")[2]
    return LABELS.get(name, last.replace("_", " ").capitalize())


def _sentence(meaning: str) -> str:
    return meaning[:1].upper() + meaning[1:].replace("`", "") + "."


# ------------------------------------------------------------------------------ README
def readme_choices() -> str:
    """The table of the README: each choice, and where it lands.

    Returns:
        What stands between the two markers, without them.
    """
    everything = list(by_name().values())
    common = [setting for setting in everything if not setting.section]
    rest = [setting for setting in everything if setting.section]
    head = ("Choice", "Meaning", "`RunConfig` field", "DeepSpeed key")
    more = f"<details><summary>The other {len(rest)}, under “Advanced”</summary>"
    return "\n\n".join(
        [
            markdown_table(head, [_row(setting) for setting in common]),
            more,
            markdown_table(head, [_row(setting) for setting in rest]),
            "</details>",
        ]
    )


def _row(setting: Setting) -> tuple[str, str, str, str]:
    unit = f" [{setting.unit}]" if setting.unit else ""
    keys = setting.deepspeed_key.split(", ") if setting.deepspeed_key else []
    where = f"{setting.section}: " if setting.section else ""
    return (
        f"{where}{setting.label}{unit}",
        setting.meaning.replace("|", "\\|"),
        f"`{setting.run_field}`",
        ", ".join(f"`{key}`" for key in keys),
    )
