"""What a setting must be, beside its type that pydantic checks, and messages about other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from nbaccel.base.errors import ConfigError
from nbaccel.config import given_values
from nbaccel.config.given_values import closest, shown

if TYPE_CHECKING:
    from typing_extensions import Self


_UNKNOWN_SETTING = "extra_forbidden"  # pydantic's type of that error
_CHECK_KEY = "nbaccel.check"  # of a dataclass field's metadata, for its :class:`FieldCheck`


class FieldMistake(str):
    """A message about one setting, with the path of that setting."""

    # A `str`, so that `ConfigError` takes it as any other message.
    __slots__ = ("path",)
    path: str  # dotted path of the setting; empty where the message is about the whole

    def __new__(cls, text: str, path: str = "") -> Self:  # noqa: D102
        new_mistake = super().__new__(cls, text)
        new_mistake.path = path
        return new_mistake

    def under(self, section_path: str) -> FieldMistake:
        """The same message about a setting of a section."""
        separator = "." if self.path else ": "
        setting_path = f"{section_path}.{self.path}" if self.path else section_path
        return FieldMistake(f"{section_path}{separator}{self}", setting_path)


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """What a setting must be: stands in ``Annotated`` beside its type."""

    do: str  # the remedy, as an instruction without a full stop
    must: str = ""  # after "must be"; where it is empty, the type says it: see :meth:`completed`
    why: str = ""  # what the setting does: one clause; else the description of the field says it
    # Converts a given value to the one that the type checks; ValueError refuses more than the type.
    read: Callable[[Any], Any] | None = None
    allowed: tuple[str, ...] = ()  # the words, where only some are allowed
    words: Mapping[str, str] = field(default_factory=dict)  # what people write for an allowed one
    problems: tuple[str, ...] = ()  # added to a refusal: backends that are missing
    value_kind: str = ""  # the form's kind of input, as `Setting.kind`; empty where it has none

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # pydantic calls this for items of `Annotated`: so `read` runs before the type is checked.
        read = self.completed(source).read
        if read is None:
            return handler(source)
        return BeforeValidator(read).__get_pydantic_core_schema__(source, handler)

    def completed(self, annotation: Any, constraints: Iterable[Any] = ()) -> FieldRule:
        """The rule with what the type says of the value, and how it is read."""
        if self.must:
            return self
        is_union = get_origin(annotation) in (Union, UnionType)
        options = get_args(annotation) if is_union else (annotation,)
        or_none = ", or None" if NoneType in options else ""
        value_type = next(option for option in options if option is not NoneType)
        allowed: tuple[str, ...] = ()
        read: Callable[[Any], Any] | None = given_values.read_number
        limits = {
            name: getattr(item, name)
            for item in constraints
            for name in _LIMITS
            if hasattr(item, name)
        }
        if get_origin(value_type) is Literal:
            values = get_args(value_type)
            must = f"one of {', '.join(map(str, values))}"
            allowed = tuple(value for value in values if isinstance(value, str))
            read = given_values.read_word if allowed else given_values.read_whole
        elif value_type is bool:
            must, read = "True or False", None
        elif value_type is float:
            must = f"a number above {limits.get('gt')}"
        elif value_type is int:
            must = f"a whole number of at least {limits.get('ge', 0)}"
        else:
            must = "text" if value_type is str else "a dictionary"
            must += " that is not empty" if "min_length" in limits else ""
            read = None
        return replace(self, must=must + or_none, read=self.read or read, allowed=allowed)

    def refusal(self, setting_name: str, value: object, *, owner: str = "", why: str = "") -> str:
        """The message about a value that the rule does not allow."""
        head = (
            f"{owner}({setting_name}={shown(value)}) must be {self.must}"
            if owner
            else f"{setting_name} must be {self.must}: got {shown(value)}"
        )
        word = closest(value, self.allowed, self.words) if isinstance(value, str) else ""
        reason = (self.why or why).strip().rstrip(".")
        remedy = word.lstrip() or f"{self.do}."
        parts = (f"{head}.", f"{reason}." if reason else "", remedy, *self.problems)
        return " ".join(filter(None, parts))


_LIMITS = ("ge", "gt", "le", "min_length", "pattern")


def setting(default: Any, description: str, **limits_and_rule: Any) -> Any:
    """A field of a model: its default and meaning, pydantic's limits, and what a rule says."""
    limits = {name: limits_and_rule.pop(name) for name in _LIMITS if name in limits_and_rule}
    field_info: FieldInfo = Field(default, description=description, **limits)
    # pydantic treats it as what stands beside the type in `Annotated`.
    do = "Leave it out" if default in (None, "") else f"Leave it at {default!r}"
    field_info.metadata.append(FieldRule(**{"do": do, **limits_and_rule}))
    return field_info


NO_SMALLER = FieldRule(why="A smaller value has no meaning", do="Give one, or leave it out")
OptionalCount = Annotated[int | None, Field(ge=1), NO_SMALLER]


def rule_of(model_field: FieldInfo) -> FieldRule:
    """The rule that stands beside a field's type, completed by it."""
    rule = next(item for item in model_field.metadata if isinstance(item, FieldRule))
    return rule.completed(model_field.annotation, model_field.metadata)


def explain_mistakes(
    model: type[BaseModel],
    error: ValidationError,
    given_settings: Mapping[str, Any],
    *,
    unknown_remedy: str = "",
) -> tuple[FieldMistake, ...]:
    """One message per setting that is wrong."""
    by_name: dict[str, tuple[FieldMistake, ...]] = {}
    for detail in error.errors(include_url=False):
        setting_name = str(detail["loc"][0]) if detail["loc"] else ""
        # A union reports each of its branches, for one mistake of the user.
        if setting_name in by_name:
            continue
        given_value = given_settings.get(setting_name, detail["input"])
        inner_error = detail.get("ctx", {}).get("error")
        if isinstance(inner_error, ConfigError):  # the setting is a section with further settings
            by_name[setting_name] = mistakes_in(inner_error, setting_name)
            continue
        if detail["type"] == _UNKNOWN_SETTING:
            names = tuple(model.model_fields)
            known = f"The settings are: {', '.join(names)}."
            remedy = closest(setting_name, names).lstrip() or unknown_remedy or known
            text = (
                f"{setting_name} is no setting of {model.__name__}: got "
                f"{setting_name}={shown(given_value)}. It would be silently ignored. {remedy}"
            )
        elif setting_name not in model.model_fields:
            text = f"{model.__name__} cannot be built from {shown(given_value)}: {detail['msg']}."
        else:
            model_field = model.model_fields[setting_name]
            meaning = model_field.description or ""
            text = rule_of(model_field).refusal(setting_name, given_value, why=meaning)
        by_name[setting_name] = (FieldMistake(text, setting_name),)
    return tuple(mistake for mistakes in by_name.values() for mistake in mistakes)


def mistakes_in(error: ConfigError, section: str = "") -> tuple[FieldMistake, ...]:
    """The messages of an error with the paths of their settings, which may be of a section."""
    # `ConfigError.mistakes` are plain texts; the messages that were raised are in `args`.
    found = (one if isinstance(one, FieldMistake) else FieldMistake(str(one)) for one in error.args)
    return tuple(one.under(section) if section else one for one in found)


class FieldCheck:
    """The type and the rule of a dataclass field, which dataclasses do not check themselves."""

    def __init__(self, annotated_type: Any) -> None:
        self.annotated = annotated_type
        self.rule = rule_of(FieldInfo.from_annotation(annotated_type))

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Pydantic's validator; made when first used, since building one takes a millisecond."""
        return TypeAdapter(self.annotated)

    def read(self, setting_name: str, value: Any, *, owner: str = "") -> Any:
        """The value as it is stored."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            inner_error = error.errors(include_url=False)[0].get("ctx", {}).get("error")
            if isinstance(inner_error, ConfigError):  # the setting is a section
                raise ConfigError(*mistakes_in(inner_error, setting_name)) from error
            text = self.rule.refusal(setting_name, value, owner=owner)
            raise ConfigError(FieldMistake(text, setting_name)) from error


def checked_as(annotated_type: Any) -> dict[str, FieldCheck]:
    """Metadata of a dataclass field that :func:`field_mistakes` checks."""
    return {_CHECK_KEY: FieldCheck(annotated_type)}


def field_mistakes(settings: Any) -> list[FieldMistake]:
    """Read the fields of a dataclass that have a check, and return what is wrong with them."""
    mistakes: list[FieldMistake] = []
    for dataclass_field in fields(settings):
        if (check := dataclass_field.metadata.get(_CHECK_KEY)) is None:
            continue
        value = getattr(settings, dataclass_field.name)
        try:
            read_value = check.read(dataclass_field.name, value, owner=type(settings).__name__)
        except ConfigError as error:
            mistakes += mistakes_in(error)
        else:
            setattr(settings, dataclass_field.name, read_value)
    return mistakes


def refuse_mistakes(found_mistakes: Iterable[str]) -> None:
    """Raise all mistakes together, if there are any."""
    # One error for all: a user should not have to run a cell once for each mistake.
    if all_mistakes := tuple(found_mistakes):
        raise ConfigError(*all_mistakes)


class Settings:
    """Checks its fields, and gives them as a dictionary."""

    def __post_init__(self) -> None:
        refuse_mistakes(field_mistakes(self))

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, as given."""
        # Not `dataclasses.asdict`, which copies the values deeply.
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Only the settings that differ from their defaults."""
        # A new object, because defaults may depend on the environment.
        settings = type(self)()
        given = self.to_dict().items()
        return {name: value for name, value in given if value != getattr(settings, name)}


class Handler(Settings):
    """Settings that go into ``Accelerator(kwargs_handlers=[...])``, one of each class."""
