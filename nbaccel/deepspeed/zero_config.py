"""``ZeroConfig``: a DeepSpeed configuration as an immutable object, read from and written as JSON.

A key has a field where it means something to a person, nbaccel computes with it, or DeepSpeed takes
whatever stands there. All others are kept as they stand, in ``extra``: what they are is known to
the installed DeepSpeed, and the check asks its models. Names are those of DeepSpeed's JSON; what
``zero_optimization`` holds there are settings like any other here. ``None`` leaves a key to
DeepSpeed, and ``"auto"`` is allowed everywhere, because a file may hold it until it is resolved.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, Strict
from pydantic.fields import FieldInfo

from nbaccel.base.errors import ConfigError
from nbaccel.config import given_values, text_forms
from nbaccel.config.deepspeed_document import DOCUMENT_NAME, SECTION_RULES
from nbaccel.config.field_rules import FieldMistake, FieldRule, mistakes_in
from nbaccel.config.given_values import dotted_items, numbers_read, read_number, shown, value_at
from nbaccel.config.text_forms import json_like

if TYPE_CHECKING:
    from typing_extensions import Self


AUTO = "auto"
ZERO = "zero_optimization"
_EXTRA_FIELD = "extra"
# Here "auto" is a value that DeepSpeed itself defines.
_OWN_AUTO = frozenset({"data_types.keep_in_fp32_modules", "pipeline.stages"})


def _number_or_auto(value: Any) -> Any:
    return numbers_read(read_number(value))


def _read_word(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _read_truth(value: Any) -> Any:
    word = _read_word(value)
    return word == "true" if word in ("true", "false") else value


def _rule(kind: str, read: Callable[[Any], Any], must: str, do: str) -> FieldRule:
    return FieldRule(read=read, must=must, do=do, value_kind=kind)


_Auto = Literal["auto"]
_WHOLE_REMEDY = "Give a number, such as 1 or 5e8"
Whole = Annotated[
    Annotated[int, Field(ge=0)] | _Auto | None,
    _rule("whole", _number_or_auto, "a whole number of at least 0", _WHOLE_REMEDY),
]
WholeFromOne = Annotated[
    Annotated[int, Field(ge=1)] | _Auto | None,
    _rule("whole", _number_or_auto, "a whole number of at least 1", _WHOLE_REMEDY),
]
Number = Annotated[
    Annotated[float, Field(ge=0, allow_inf_nan=False)] | _Auto | None,
    _rule("number", _number_or_auto, "a number of at least 0", "Give a number, such as 1.0"),
]
Truth = Annotated[
    Annotated[bool, Strict()] | _Auto | None,
    _rule("truth", _read_truth, "true or false", "Give one of them"),
]
Text = Annotated[
    Annotated[str, Field(min_length=1)] | None,
    _rule("text", given_values.read_path, "text that is not empty", "Write it in quotes"),
]
_TABLE_RULE = _rule(
    "table", json_like, "a mapping of names to JSON values", 'Write for example {"lr": 0.001}'
)
Params = Annotated[
    dict[str, Any] | None, replace(_TABLE_RULE, read=lambda value: numbers_read(json_like(value)))
]
DeviceField = Annotated[
    Literal["none", "cpu", "nvme", "auto"] | None,
    FieldRule(
        read=_read_word,
        must="one of none, cpu, nvme",
        do='"none" keeps them on the device that computes',
        allowed=("none", "cpu", "nvme"),
        words={"gpu": "none", "cuda": "none", "disk": "nvme", "ssd": "nvme"},
    ),
]
Stage = Annotated[
    Literal[0, 1, 2, 3, "auto"] | None,
    FieldRule(read=given_values.read_whole, must="one of 0, 1, 2, 3", do="Give 0 to shard nothing"),
]


def _holds(section: type[Section], short_key: str = "") -> FieldRule:
    """The rule of a field that holds a section, for which a word may be short."""

    def read(value: Any) -> Any:
        return {short_key: value} if isinstance(value, str) and short_key else value

    do = f"Give a mapping with some of its keys: {', '.join(section.model_fields)}"
    return FieldRule(read=read, must="a section", do=do)


def section_of(model_field: FieldInfo) -> type[Section] | None:
    """The section that a field holds."""
    options = [one for one in get_args(model_field.annotation) if isinstance(one, type)]
    return next((one for one in options if issubclass(one, Section)), None)


class Section(text_forms.Plain):
    """A part of a configuration, as far as nbaccel names its keys.

    All settings are keyword-only; ``None`` leaves one to DeepSpeed. Wrong ones raise
    :class:`~nbaccel.base.errors.ConfigError`, which lists every mistake at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    unknown_remedy: ClassVar[str] = "Give keys that only DeepSpeed knows in `extra`."

    def named(self) -> dict[str, Any]:
        """The keys that are not left to DeepSpeed, as plain values."""
        return self.model_dump(exclude_none=True, exclude={_EXTRA_FIELD})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return ((key, value) for key, value in self if value is not None and value != {})


def _split(
    settings: Mapping[str, Any], section: type[Section]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that a section names, and all others, which are kept as they stand."""
    named: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in settings.items():
        field = section.model_fields.get(key)
        inner = section_of(field) if field is not None else None
        if value is None:
            continue  # it is left to DeepSpeed, as one that is not there
        if field is None:
            others[key] = value
        elif inner is not None and isinstance(value, Mapping):
            named[key], rest = _split(value, inner)
            others |= {key: rest} if rest else {}
        else:
            named[key] = value
    return named, others


def _merged(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings as one, level by level: a section that is in both keeps the keys of both."""
    for key, value in second.items():
        if isinstance(first.get(key), dict) and isinstance(value, Mapping):
            _merged(first[key], value)
        else:
            first[key] = copy.deepcopy(value)
    return first


def _meant(description: str) -> Any:
    """A field that is left to DeepSpeed where it is not given."""
    return Field(None, description=description)


class OffloadOptimizer(Section):
    """Where the optimizer's state is kept, and its step is computed (ZeRO 1, 2 and 3)."""

    device: DeviceField = _meant("Where optimizer state is kept; nvme needs stage 3.")
    nvme_path: Text = _meant("Folder for optimizer state on the fast disk.")
    buffer_count: Whole = _meant("Buffers for swapping, one per state at least.")


class OffloadParam(Section):
    """Where parameters are kept while they are not used (ZeRO 3)."""

    device: DeviceField = _meant("Where parameters are kept; needs stage 3.")
    nvme_path: Text = _meant("Folder for parameters on the fast disk.")
    buffer_count: Whole = _meant("Buffers for swapping parameters.")
    buffer_size: Whole = _meant("Size of each of those buffers, in elements.")


class HalfPrecision(Section):
    """Training in a format of 16 bits."""

    enabled: Truth = _meant("Whether to train in it.")


class Maker(Section):
    """The optimizer, or the schedule, that DeepSpeed makes."""

    type: Text = _meant("The name of its class: AdamW, WarmupLR, ...")
    params: Params = _meant("Its constructor's arguments: lr, betas, ...; counts are in steps.")


AnyMaker = Annotated[Maker | None, _holds(Maker, "type")]
AnyHalf = Annotated[HalfPrecision | None, _holds(HalfPrecision)]


class _ZeroSection(Section):
    """What JSON holds under ``zero_optimization``."""

    stage: Stage = _meant("ZeRO stage; 1 shards the optimizer, 2 gradients, 3 weights too.")
    offload_optimizer: Annotated[OffloadOptimizer | None, _holds(OffloadOptimizer, "device")] = (
        _meant("Where optimizer state lives (stages 1 to 3).")
    )
    offload_param: Annotated[OffloadParam | None, _holds(OffloadParam, "device")] = _meant(
        "Where parameters live (stage 3)."
    )
    overlap_comm: Truth = _meant("Reduce gradients while others are computed.")
    contiguous_gradients: Truth = _meant("Gradients in one buffer.")
    reduce_bucket_size: WholeFromOne = _meant("Elements of gradients reduced at a time.")
    allgather_bucket_size: Whole = _meant("Elements gathered at a time.")
    sub_group_size: Whole = _meant("Elements the optimizer steps at a time.")
    stage3_max_live_parameters: Whole = _meant("Elements a device holds gathered.")
    stage3_prefetch_bucket_size: Whole = _meant("Elements fetched ahead of use.")
    stage3_param_persistence_threshold: Whole = _meant("Smaller ones, in elements, stay whole.")
    stage3_model_persistence_threshold: Whole = _meant("Elements that may stay unsharded in all.")
    stage3_gather_16bit_weights_on_model_save: Truth = _meant("Let save_16bit_model write.")


# A class beside `ZeroConfig`, so that its fields are the keys that JSON has under that section.
ZERO_KEYS = tuple(_ZeroSection.model_fields)


class ZeroConfig(_ZeroSection):
    """A DeepSpeed configuration: what nbaccel names, and in ``extra`` what it does not.

    All settings are keyword-only; ``None`` leaves one to DeepSpeed.

    Examples:
        >>> ZeroConfig(stage=2, offload_optimizer="cpu", train_batch_size=8).to_json()
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 8}'
    """  # noqa: E501 - one line of output

    train_batch_size: WholeFromOne = _meant("Samples per optimizer step, over all processes.")
    train_micro_batch_size_per_gpu: WholeFromOne = _meant("Samples per process and forward pass.")
    gradient_accumulation_steps: WholeFromOne = _meant("Forward passes per optimizer step.")
    gradient_clipping: Number = _meant("Largest norm of the gradients; 0 does not clip.")
    optimizer: AnyMaker = _meant("The optimizer that DeepSpeed makes.")
    scheduler: AnyMaker = _meant("The schedule that DeepSpeed makes.")
    fp16: AnyHalf = _meant("Training in float16.")
    bf16: AnyHalf = _meant("Training in bfloat16.")
    sequence_parallel_size: WholeFromOne = _meant("Ranks that share a sequence.")
    zero_allow_untested_optimizer: Truth = _meant("ZeRO with any optimizer.")
    zero_force_ds_cpu_optimizer: Truth = _meant("Offload DeepSpeed's optimizers only.")
    extra: Annotated[
        dict[str, Any],
        Field(description="Further keys, at any depth, given to DeepSpeed as they are."),
        replace(_TABLE_RULE, do="Leave it out, or give a dictionary"),
    ] = Field(default_factory=dict)

    @property
    def zero_stage(self) -> int:
        """The stage as DeepSpeed reads it: 0 where none is given."""
        return self.stage if isinstance(self.stage, int) else 0

    def is_on(self, section_name: str) -> bool:
        """Whether a section is there and turned on."""
        return self.get(f"{section_name}.enabled") is True

    def get(self, key: str) -> Any:
        """The value of a dotted key of DeepSpeed's JSON; None where there is none."""
        return value_at(self.to_dict(), key)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read a DeepSpeed configuration; keys without a field are kept in ``extra``.

        Old forms that DeepSpeed still reads (``bfloat16``, ``cpu_offload``, ...) become today's.

        Raises:
            ConfigError: Values are wrong, all of them listed.
        """
        given, _ = old_forms(text_forms.plain_object(settings, "A ZeroConfig"))
        extra: dict[str, Any] = given.pop(_EXTRA_FIELD, None) or {}
        # DeepSpeed ignores a key of `zero_optimization` at the top: kept there, for the check.
        extra |= {key: given.pop(key) for key in ZERO_KEYS if key in given}
        zero = given.pop(ZERO, None)
        if not isinstance(zero, (dict, NoneType)):
            raise ConfigError(FieldMistake(SECTION_RULES[ZERO].refusal(ZERO, zero), ZERO))
        named, others = _split(given, cls)
        zero_named, zero_others = _split(zero or {}, _ZeroSection)
        # An empty section is kept, too, so that a round trip loses nothing.
        if zero_others or zero == {}:
            others = {ZERO: numbers_read(zero_others), **others}
        try:
            return cls(**named, **zero_named, extra=_merged(others, extra))
        except ConfigError as error:
            mistakes = (
                mistake.under(ZERO) if mistake.path.partition(".")[0] in ZERO_KEYS else mistake
                for mistake in mistakes_in(error)
            )
            raise ConfigError(*mistakes) from error

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a JSON file with a DeepSpeed configuration.

        Raises:
            ConfigError: There is no such file, or what it holds is wrong.
        """
        return cls.from_dict(text_forms.read_file(path))

    def to_dict(self) -> dict[str, Any]:
        """What ``deepspeed.initialize(config=...)`` takes; changing it changes nothing here.

        Keys that are left to DeepSpeed are not in it.
        """
        settings = self.named()
        zero = {key: settings.pop(key) for key in ZERO_KEYS if key in settings}
        return _merged({**({ZERO: zero} if zero else {}), **settings}, self.extra)

    def to_json(self) -> str:
        """The configuration as a JSON object, which :meth:`from_json` reads."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, or any DeepSpeed configuration.

        Raises:
            ConfigError: The text is no JSON object, names a key twice, or values are wrong.
        """
        return cls.from_dict(text_forms.read_object(text, cls.__name__))

    def to_file(self, path: str | Path) -> None:
        """Write the configuration as a JSON file; one that is there is replaced."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def config_fields(
    section: type[Section] = ZeroConfig, path: str = ""
) -> Iterator[tuple[str, str, FieldInfo]]:
    """Each field: the path of the section that JSON has it in, its key there, and the field."""
    for name, model_field in section.model_fields.items():
        if name == _EXTRA_FIELD:
            continue
        place = ZERO if section is ZeroConfig and name in ZERO_KEYS else path
        yield place, name, model_field
        inner = section_of(model_field)
        if inner is not None:
            yield from config_fields(inner, f"{place}.{name}".lstrip("."))


def load_settings(config: Mapping[str, Any] | str | Path | ZeroConfig) -> dict[str, Any]:
    """The settings as they stand, as plain values, wherever they come from."""
    settings = text_forms.read_source(config, DOCUMENT_NAME)
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{DOCUMENT_NAME} cannot be {shown(config)}. Give a dictionary, a path or a ZeroConfig."
        )
    return settings


def todays_settings(
    config: Mapping[str, Any] | str | Path | ZeroConfig,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings in today's form, and what is said of older ones."""
    return old_forms(load_settings(config))


def auto_keys(settings: Mapping[str, Any]) -> list[str]:
    """The keys whose value is ``"auto"``, except where DeepSpeed itself defines that value."""
    texts = ((key, value) for key, value in dotted_items(settings) if isinstance(value, str))
    return [key for key, text in texts if text == AUTO and key not in _OWN_AUTO]


_RENAMED_IN_ZERO = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{key.removeprefix("stage3_"): key for key in ZERO_KEYS if key.startswith("stage3_")},
}
_PLACES_AS_TRUTH = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def old_forms(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Today's form of what DeepSpeed still reads in an older one."""
    # Copies, since the given configuration must stay as it is.
    todays: dict[str, Any] = {
        key: dict(one) if isinstance(one, dict) else one for key, one in settings.items()
    }
    notes: list[str] = []

    def moved(holder: dict[str, Any], old_key: str, key: str, value: Any) -> None:
        del holder[old_key]
        holder.setdefault(key, value)
        notes.append(f"{old_key} is an old form: write {key}={holder[key]!r}.")

    if "bfloat16" in todays:
        moved(todays, "bfloat16", "bf16", todays["bfloat16"])
    if isinstance(todays.get(ZERO), bool):
        todays[ZERO] = {"stage": int(todays[ZERO])}
        notes.append(f"{ZERO} was true or false in an old form: write {todays[ZERO]!r}.")
    zero, aio = todays.get(ZERO), todays.get("aio")
    if isinstance(zero, dict):
        for old_key, key in _PLACES_AS_TRUTH.items():
            if isinstance(zero.get(old_key), bool):
                moved(zero, old_key, key, {"device": "cpu" if zero[old_key] else "none"})
        for old_key, key in _RENAMED_IN_ZERO.items():
            if old_key in zero:
                moved(zero, old_key, key, zero[old_key])
    if isinstance(aio, dict) and "thread_count" in aio:
        # DeepSpeed's documentation still has the old name, which DeepSpeed ignores.
        moved(aio, "thread_count", "intra_op_parallelism", aio["thread_count"])
    return todays, tuple(notes)
