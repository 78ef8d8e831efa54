"""Every choice that a picker offers, from `RunConfig`, `Fp8Config` and the forms of strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, START_METHODS, STRATEGIES
from nbaccel.memory.settings_form import ChoiceOption, Edit, Setting, SettingsForm, settings_forms
from nbaccel.notebook.magic_line import kinds_of, words_of

_PANEL_TITLES = {"precision": "Precision", "launch": "Launch"}
# Names of the choices that come first, in the order in which they are shown.
_COMMON_FIELDS = {
    "precision": ("mixed_precision",),
    "zero": ("gradient_accumulation_steps", "activation_checkpointing"),
    "launch": (
        *("device", "num_processes", "start_method"),
        *("num_nodes", "node_rank", "master_addr", "use_port"),
    ),
}
# Settings whose options are rows of the catalogue, which have meanings.
_ROWS_OF: dict[str, Sequence[Any]] = {
    "mixed_precision": PRECISIONS,
    "fp8.backend": FP8_BACKENDS,
    "device": DEVICES,
    "start_method": START_METHODS,
    "strategy": STRATEGIES,
}
_EVERYDAY_FIELDS = (
    *("gradient_accumulation_steps", "activation_checkpointing", "fp8.backend", "fp8.recipe"),
)
_FIELD_LABELS = {
    "mixed_precision": "Precision",
    "gradient_accumulation_steps": "Accumulation",
    "tpu_driver": "TPU driver",
    "num_processes": "Processes",
    "num_nodes": "Nodes",
    "node_rank": "This node's number",
    "master_addr": "Address of node 0",
    "use_port": "Port",
    "fp8.backend": "FP8 backend",
    "fp8.recipe": "Scaling recipe",
    "fp8.opt_level": "MS-AMP level",
    "fp8.skip_first_and_last": "Leave first and last layer",
    "fp8.pad_inner_dim": "Pad to multiples of 16",
    "fp8.enable_fsdp_float8_all_gather": "Gather weights in FP8",
    "fp8.fp8_format": "Format",
    "fp8.amax_history_len": "Amax history",
    "fp8.amax_compute_algo": "Amax algorithm",
    "fp8.use_autocast_during_eval": "FP8 in evaluation",
    "fp8.override_linear_precision": "Passes in higher precision",
}
# The field's own description says how to write the value; a form shows the values instead.
_FIELD_MEANINGS = {"mixed_precision": "Number format of the forward and backward pass."}
# Of numbers that count something else than what their meaning begins with.
_UNIT_OF = {
    "gradient_accumulation_steps": "batches",
    "fp8.interval": "steps",
    "fp8.amax_history_len": "steps",
    "fp8.margin": "powers of two",
    "num_processes": "processes",
    "num_nodes": "machines",
    "max_restarts": "restarts",
    "threads_per_process": "threads",
    "timeout": "s",
    "monitor_interval": "s",
}
# Where what a setting turns on is documented; nbaccel's own settings are in its documentation.
_DOCS_LINKS = {
    "mixed_precision": "https://docs.pytorch.org/docs/stable/amp.html",
    "activation_checkpointing": "https://docs.pytorch.org/docs/stable/checkpoint.html",
    "gradient_accumulation_steps": (
        "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
    ),
    "num_nodes": "https://docs.pytorch.org/docs/stable/elastic/run.html",
    "rdzv_backend": "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html",
    "rdzv_endpoint": "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html",
}
FP8 = "fp8."  # what names of its settings begin with
PANELS = ("precision", "zero", "launch")


@cache
def _forms_by_setting() -> dict[str, SettingsForm]:
    forms = settings_forms()
    return {setting.name: form for form in forms for setting in form.settings()}


def form_of(name: str) -> SettingsForm | None:
    """The form that a choice belongs to; None for one of the run itself."""
    return _forms_by_setting().get(name)


def title_of(panel: str) -> str:
    """The heading of a panel."""
    if panel == "zero":
        return ", ".join(form.title for form in settings_forms())
    return _PANEL_TITLES[panel]


@cache
def settings(panel: str) -> tuple[Setting, ...]:
    """The choices of a panel: the common ones first, then the rest by section."""
    others = {setting.name: setting for setting in _of_panel(panel)}
    of_forms = [name for form in settings_forms() for name in form.common]
    common = of_forms if panel == "zero" else _COMMON_FIELDS[panel]
    first_settings = [others.pop(name) for name in common]
    sections = list(dict.fromkeys(setting.section for setting in others.values()))
    by_section = sorted(others.values(), key=lambda setting: sections.index(setting.section))
    return (*first_settings, *by_section)


@cache
def by_name() -> dict[str, Setting]:
    """Name → choice, of all panels."""
    return {setting.name: setting for panel in PANELS for setting in settings(panel)}


@cache
def taken_settings() -> tuple[Setting, ...]:
    """The few settings that are shown of whatever is taken, those of its strategy first."""
    everyday_names = [name for settings_form in settings_forms() for name in settings_form.everyday]
    names = dict.fromkeys((*everyday_names, *_EVERYDAY_FIELDS))
    return tuple(by_name()[name] for name in names)


def _of_panel(panel: str) -> Iterator[Setting]:
    run_fields = RunConfig.model_fields
    if panel == "launch":
        elsewhere = {*_COMMON_FIELDS["precision"], *_COMMON_FIELDS["zero"]}
        elsewhere |= {"fp8", "deepspeed", "zero_stage"}
        for name in (name for name in run_fields if name not in elsewhere):
            section = "" if name in _COMMON_FIELDS["launch"] else "Launch"
            yield _of_model(name, run_fields[name], panel, section)
        return
    for name in _COMMON_FIELDS[panel]:
        yield _of_model(name, run_fields[name], panel, "")
    if panel == "precision":
        for name, field in Fp8Config.model_fields.items():
            yield _of_model(FP8 + name, field, panel, "FP8")
    else:
        for settings_form in settings_forms():
            yield from settings_form.settings()


def _options_of(name: str, words: Sequence[Any]) -> tuple[ChoiceOption, ...]:
    rows = _ROWS_OF.get(name)
    if rows is None:
        return tuple(ChoiceOption(word, str(word)) for word in words)
    labels = {"no": "fp32"}
    options = tuple(
        ChoiceOption(
            row.name,
            labels.get(row.name, row.name),
            f"{row.meaning[:1].upper()}{row.meaning[1:].replace('`', '')}.",
        )
        for row in rows
    )
    meaning = "What is installed." if name == "fp8.backend" else "Chosen to suit this machine."
    return (ChoiceOption("auto", "auto", meaning), *options) if "auto" in words else options


def _of_model(name: str, field: FieldInfo, panel: str, section: str) -> Setting:
    words = words_of(field.annotation)
    kind_names = {bool: "truth", int: "whole", float: "number", str: "text"}
    kind = kind_names.get(kinds_of(field.annotation)[0], "table")
    # For None, which a description mentions, a form has an empty field.
    meaning = (field.description or "").replace("; None ", "; empty ")
    meaning = meaning.replace("lets the plan choose", "chooses what suits this machine")
    return Setting(
        name=name,
        label=_FIELD_LABELS.get(name) or name.rpartition(".")[2].replace("_", " ").capitalize(),
        meaning=_FIELD_MEANINGS.get(name, meaning),
        unit=_UNIT_OF.get(name, ""),
        panel=panel,
        section=section,
        kind="one-of" if words else kind,
        options=_options_of(name, words),
        run_field=name,
        # Where it lands in the strategies' own configurations.
        strategy_key=", ".join(filter(None, (one.key_of(name) for one in settings_forms()))),
        default=field.default,
        docs_link=_DOCS_LINKS.get(name, ""),
    )


def value_of(config: RunConfig, setting: Setting) -> Any:
    """The value of a choice in a configuration."""
    form = form_of(setting.name)
    if form is not None:
        return form.value_of(config, setting)
    if setting.name.startswith(FP8):
        return getattr(config.fp8 or Fp8Config(), setting.name.removeprefix(FP8))
    return getattr(config, setting.run_field)


def edit_config(
    config: RunConfig,
    setting: Setting,
    new_value: Any,
    *,
    device: str,
    earlier_configs: Mapping[SettingsForm, RunConfig],
) -> Edit:
    """A configuration with another value for a choice."""
    new_value = _as_typed(setting, new_value)
    form = form_of(setting.name)
    if form is not None:
        edit: Edit = form.edited(config, setting, new_value, before=earlier_configs.get(form))
    else:
        # A cleared field stands for the default, which need not be None.
        value = setting.default if new_value in (None, "") else new_value
        edit = Edit(with_value(config, setting.name, value))
    for other_form in settings_forms():
        # Settings of the run can contradict a strategy's own, so all chosen forms are asked.
        if other_form.is_chosen(edit.config) and not setting.name.startswith(FP8):
            other_form.check(edit.config, device)
    return edit


def with_value(config: RunConfig, name: str, value: Any) -> RunConfig:
    """A configuration with another value for a setting of a run, or of its FP8."""
    if not name.startswith(FP8):
        return config.changed(**{name: value})
    fp8_config = config.fp8 or Fp8Config()
    return config.changed(fp8=fp8_config.changed(**{name.removeprefix(FP8): value}))


def _as_typed(setting: Setting, value: Any) -> Any:
    """A number, in the ways people type one: ``5e8``, ``500_000_000``, ``500,000,000``."""
    if not isinstance(value, str) or setting.kind not in ("whole", "number"):
        return value
    text = value.strip().replace("_", "").replace(",", "")
    try:
        number = float(text)
    except ValueError:
        return value.strip()  # "auto", or something for the validator to refuse
    return int(number) if number.is_integer() and setting.kind == "whole" else number
