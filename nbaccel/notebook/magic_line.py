"""The options of `%%accelerate` and `%accelerate`; a line of them, read; and their help."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import number_ranges
from nbaccel.config import RunConfig
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import closest, shown
from nbaccel.config.text_forms import changed_settings

# Short or usual names besides the setting's own.
_FLAG_ALIASES = {
    "num_processes": ("-n",),
    "mixed_precision": ("--precision",),
    "zero_stage": ("--zero",),
}


@dataclass(frozen=True, slots=True)
class MagicOption:
    """One option of a magic line."""

    name: str  # the setting of ``RunConfig``, or a name of its own
    flags: tuple[str, ...]
    value: str  # a placeholder for its value, for help: ``N``; empty where it takes none
    meaning: str
    choices: tuple[str, ...] = ()
    negative: str = ""  # the flag that says the opposite: ``--no-share-back``
    none: bool = False  # whether the word ``none`` leaves the choice to the plan
    is_json: bool = False  # then its braces are its own

    @property
    def flag(self) -> str:
        """Its whole name, as messages write it: short names come first."""
        return self.flags[-1]

    @property
    def is_setting(self) -> bool:
        """Whether it is one of `RunConfig`."""
        return self.name in RunConfig.model_fields


class Subcommand(NamedTuple):
    """What `%accelerate` can do, with its options, and whether it takes names of variables."""

    name: str
    meaning: str
    options: tuple[str, ...] = ()  # `*` for all settings, and names of further ones
    names: bool = False


OWN_OPTIONS: tuple[MagicOption, ...] = (
    MagicOption(
        *("ranks", ("--ranks",), "0,2-3"),
        "Only these ranks; the others rest and keep their variables.",
    ),
    MagicOption(
        *("out", ("--out",), "NAME[,NAME]"),
        "Bring these names into the notebook afterwards: a list by rank each, or the value itself "
        "where --ranks names one.",
    ),
    MagicOption(
        *("config", ("--config",), "NAME"),
        "Take all settings from a RunConfig of the notebook, or from what has one as config.",
    ),
    MagicOption(
        *("dist", ("--dist",), ""),
        "Join the workers' process group at once, so that torch.distributed is ready.",
    ),
    MagicOption("help", ("-h", "--help"), "", "Show all options and run nothing."),
)
SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand(
        "status", "The workers: state, memory, process group, names; also without a subcommand."
    ),
    Subcommand(
        "restart",
        "Start new workers, with these settings changed; variables of the old are lost.",
        ("*", "config", "dist"),
    ),
    Subcommand("stop", "End the workers; the next cell starts new ones."),
    Subcommand(
        "pull",
        "Copy names from the workers into the notebook: lists by rank, or a single rank's value.",
        ("ranks",),
        names=True,
    ),
    Subcommand(
        "push", "Copy names of the notebook to the workers, changed or not.", ("ranks",), names=True
    ),
    Subcommand(
        "config",
        "Pick the settings for the next start; NAMES are a model, and a batch, for the memory that "
        "is shown. With options, change them.",
        ("*", "config", "dist"),
        names=True,
    ),
    Subcommand(
        "report",
        "Show curves, each rank's time, memory and warnings of the latest launch or cell, also of "
        "one that failed; report = %accelerate report keeps it, for report.save(...).",
    ),
    Subcommand("runs", "Lay the last launches and cells side by side: figures and curves."),
    Subcommand(
        "traceback", "Show whole tracebacks of the last launch or cell that failed, of all ranks."
    ),
    Subcommand("help", "Show this."),
)


@cache
def setting_options() -> tuple[MagicOption, ...]:
    """An option for each setting of `RunConfig`, in its order."""
    return tuple(_setting_option(name) for name in RunConfig.model_fields)


def options_of(subcommand: str = "") -> tuple[MagicOption, ...]:
    """The options that a line takes."""
    if not subcommand:
        return (*setting_options(), *OWN_OPTIONS)
    names = next(one.options for one in SUBCOMMANDS if one.name == subcommand)
    own = (option for option in OWN_OPTIONS if option.name in (*names, "help"))
    return (*(setting_options() if "*" in names else ()), *own)


def find_option(options: Iterable[MagicOption], flag_name: str) -> MagicOption | None:
    """The option that is written so; underscores stand for dashes, as in the setting's name."""
    # Only long options: a short one such as `-n` has no other spelling.
    flag = flag_name if not flag_name.startswith("--") else flag_name.replace("_", "-")
    return next((one for one in options if flag and flag in (*one.flags, one.negative)), None)


def _setting_option(field_name: str) -> MagicOption:
    model_field = RunConfig.model_fields[field_name]
    kinds = kinds_of(model_field.annotation)
    words = tuple(map(str, words_of(model_field.annotation)))
    meaning = model_field.description or ""
    kebab = field_name.replace("_", "-")
    is_truth = kinds == (bool,)
    # A dict, or settings of its own.
    is_json = any(
        get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))
        for kind in kinds
    )
    number = "SECONDS" if meaning.startswith("Seconds") else "N"
    value = "JSON" if is_json else number if kinds[0] in (int, float) else "TEXT"
    return MagicOption(
        field_name,
        (*_FLAG_ALIASES.get(field_name, ()), f"--{kebab}"),
        "" if is_truth else "|".join(words) or value,
        meaning,
        choices=words,
        negative=f"--no-{kebab}" if is_truth else "",
        none=type(None) in get_args(model_field.annotation),
        is_json=is_json,
    )


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have, None left out."""
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    return tuple(kind for kind in kinds if kind is not type(None))


def words_of(annotation: Any) -> tuple[Any, ...]:
    """The values of a field that takes one of a list; nothing for others."""
    lists = [get_args(kind) for kind in kinds_of(annotation) if get_origin(kind) is Literal]
    return tuple(word for words in lists for word in words)


def flag_of(config: RunConfig, field_name: str) -> str:
    """A setting as an option of a magic's line or of a command."""
    value = getattr(config, field_name)
    option = next(option for option in setting_options() if option.name == field_name)
    if isinstance(value, bool):
        return option.flag if value else option.negative
    text = "none" if value is None else str(value)
    if option.is_json and value is not None:
        # Through JSON, because a nested setting is a model and has no JSON form by itself.
        dumped = config.model_dump_json(include={field_name}, exclude_defaults=True)
        text = json.dumps(json.loads(dumped)[field_name])
    return f"{option.flags[0]} {shlex.quote(text)}"


def changed_flags(config: RunConfig, left_out: Iterable[str] = ()) -> list[str]:
    """The options that give a configuration: of all settings that have not their defaults."""
    return [flag_of(config, name) for name in changed_settings(config) if name not in left_out]


# By its letters --on is nearest to -n, which would start other workers.
_MEANT = {"--on": "--ranks"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MagicLine:
    """What a line means."""

    wanted: RunConfig  # the settings it started from with those of the line over them
    given: tuple[str, ...] = ()  # settings that the line gives, itself or by its ``--config``
    names: tuple[str, ...] = ()  # words that are no options: names of variables
    ranks: tuple[int, ...] | None = None  # none for all
    out: tuple[str, ...] = ()
    dist: bool = False
    help: bool = False


def read_magic_line(
    line_text: str, *, base_config: RunConfig, namespace: Mapping[str, Any], subcommand: str = ""
) -> MagicLine:
    """Read a line."""
    try:
        # As in a shell: values may be quoted, and a comment may follow the options.
        words = deque(shlex.split(line_text, comments=True))
    except ValueError as error:  # a quotation that is not closed
        raise ConfigError(
            f"The line cannot be split into words: {str(error).lower()} in {line_text!r}. "
            "Its options would be guesses. Close the quotation mark."
        ) from error
    reader = _LineReader(options_of(subcommand), subcommand, namespace)
    reader.read(words)
    # Before mistakes are raised: a line that asks for help may be wrong otherwise.
    if "help" in reader.found:
        return MagicLine(wanted=base_config, help=True)
    return reader.line(base_config)


def missing_names(wanted_names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Refuse names that the notebook does not have."""
    names = [name for name in namespace if not name.startswith("_")]
    refuse_mistakes(
        f"The notebook has no variable {name!r}: there is nothing to send."
        + (closest(name, names) or " Give the name of a variable of the notebook.")
        for name in wanted_names
        if name not in namespace
    )


def ranks_as_text(ranks: Sequence[int]) -> str:
    """Ranks as people write them: ``rank 3``, ``ranks 0,2-3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {number_ranges(ranks)}"


@dataclass
class _LineReader:
    options: tuple[MagicOption, ...]
    subcommand: str
    namespace: Mapping[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def read(self, words: deque[str]) -> None:
        """Take all words."""
        while words:
            word = words.popleft()
            if _is_flag(word):
                self._flag(word, words)
            else:
                self._name(self._expanded(word))

    def line(self, base_config: RunConfig) -> MagicLine:
        """The settings that they give, if nothing is wrong."""
        settings = {name: one for name, one in self.found.items() if name in RunConfig.model_fields}
        # Every part adds to `mistakes`; they are raised together at the end.
        ranks = self._ranks(self.found.get("ranks"))
        out_names = self._out(self.found.get("out"))
        named_config = self._config(self.found.get("config"))
        config = base_config if named_config is None else named_config
        try:
            config = config.changed(**settings) if settings else config
        except ConfigError as error:
            self.mistakes += error.mistakes
        if named_config is not None:
            self._compare(named_config, config, settings)
        if self.subcommand in ("pull", "push") and not self.names:
            self.mistakes.append(f"{self._magic_name} got no names. Write {self._magic_name} loss.")
        # Each once: a setting's mistake may be reported by several parts.
        refuse_mistakes(dict.fromkeys(self.mistakes))
        return MagicLine(
            wanted=config,
            # A config that is named gives all settings, so all are compared with the workers'.
            given=tuple(settings) if named_config is None else tuple(RunConfig.model_fields),
            names=tuple(self.names),
            ranks=ranks,
            out=out_names,
            dist=bool(self.found.get("dist")),
        )

    def _flag(self, flag_word: str, words: deque[str]) -> None:
        flag_name, sign, value = flag_word.partition("=")
        option = find_option(self.options, flag_name)
        if option is None and not flag_word.startswith("--"):  # -n4
            flag_name, sign, value = flag_word[:2], "=", flag_word[2:].removeprefix("=")
            option = find_option(self.options, flag_name)
        # A word behind an option is its value, also of an unknown one: no mistake of its own.
        has_next = bool(words) and not _is_flag(words[0])
        if option is None:
            self._unknown(flag_word.partition("=")[0])
            if has_next:
                words.popleft()
        elif not option.value:
            self._switch(option, flag_name, value if sign else None)
        elif sign or has_next:
            self._keep(option, value if sign else words.popleft())
        else:
            self.mistakes.append(
                f"{flag_name} needs a value: got {repr(words[0]) if words else 'nothing'}. "
                f"{option.meaning} Write {flag_name} {option.value}."
            )

    def _switch(self, option: MagicOption, name: str, value: str | None) -> None:
        is_opposite = name.replace("_", "-") == option.negative
        if value is not None and (is_opposite or not option.is_setting):
            self.mistakes.append(
                f"{name} takes no value: got {value!r}. It would mean nothing. Write {name} alone."
            )
        # A value such as `=false` is left to the setting's own validator.
        self.found[option.name] = value if value is not None else not is_opposite

    def _keep(self, option: MagicOption, text: str) -> None:
        # The braces of JSON would be taken for expressions to replace.
        value: Any = json_or_text(text) if option.is_json else self._expanded(text)
        if option.none and str(value).strip().lower() == "none":
            value = None
        earlier = self.found.get(option.name, value)
        if earlier != value:
            self.mistakes.append(
                f"{option.flag} was given twice: {shown(earlier)} and {shown(value)}. Write it "
                "once."
            )
        self.found[option.name] = value

    @property
    def _magic_name(self) -> str:
        return f"%accelerate {self.subcommand}" if self.subcommand else "%%accelerate"

    def _unknown(self, flag_name: str) -> None:
        flags = [flag for option in self.options for flag in (*option.flags, option.negative)]
        text = closest(flag_name.replace("_", "-"), filter(None, flags), _MEANT)
        text = text or f" Its options are shown by {self._magic_name} --help."
        if (other_option := find_option(options_of(), flag_name)) is not None:
            where = "%%accelerate"
            if other_option.is_setting or other_option.name in ("config", "dist"):
                where += ", %accelerate restart and %accelerate config"
            elif other_option.name == "ranks":
                where += ", %accelerate pull and push"
            text = f" {other_option.flag} is for {where}."
        self.mistakes.append(
            f"{self._magic_name} has no option {flag_name!r}: it would silently have no effect."
            f"{text}"
        )

    def _name(self, word: str) -> None:
        takes_names = self.subcommand in ("pull", "push", "config")
        option_name, sign, value = word.partition("=")
        if takes_names and all(part.isidentifier() for part in word.strip(",").split(",")):
            self.names += word.strip(",").split(",")
        elif takes_names:
            self.mistakes.append(
                f"{word!r} is no name of a variable. Bind the value to a name, then give that."
            )
        # `num_processes=2` is how Python and RunConfig write it.
        elif sign and (option := find_option(options_of(), f"--{option_name}")):
            self.mistakes.append(f"{word!r} is no option of the line. Write {option.flag} {value}.")
        else:
            self.mistakes.append(
                f"{self._magic_name} takes options only: got {word!r}, which is none. Code belongs "
                f"on the cell's next line; {self._magic_name} --help shows the options."
            )

    def _ranks(self, text: str | None) -> tuple[int, ...] | None:
        if text is None:
            return None
        ranks: set[int] = set()
        for part in text.split(","):
            found = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
            if first > last:
                self.mistakes.append(
                    f"--ranks must be rank numbers and ranges of them: got {text!r}. They "
                    "say which workers run the cell. Write for example --ranks 0,2-3."
                )
                return None
            # A range up to a billion is refused by its end, without a list of it.
            ranks |= {*range(first, min(last, first + 9999) + 1), last}
        return tuple(sorted(ranks))

    def _out(self, text: str | None) -> tuple[str, ...]:
        names = tuple(part.strip() for part in (text or "").split(",") if part.strip())
        wrong = [name for name in names if not name.isidentifier()]
        if wrong or (text is not None and not names):
            self.mistakes.append(
                "--out must be names of variables: got "
                f"{', '.join(map(repr, wrong)) or repr(text)}. Write for example --out loss."
            )
        return names

    def _config(self, name: str | None) -> RunConfig | None:
        if name is None:
            return None
        value = self.namespace.get(name)
        if isinstance(config := getattr(value, "config", value), RunConfig):
            return config
        got_instead = f"a {type(value).__name__}" if name in self.namespace else "no such variable"
        text = closest(name, config_names(self.namespace))
        self.mistakes.append(
            "--config must name a RunConfig of the notebook, or what has one as .config: "
            f"{name} is {got_instead}.{text or f' Make one: {name} = nbaccel.RunConfig(...).'}"
        )
        return None

    def _compare(
        self, named_config: RunConfig, wanted_config: RunConfig, settings: dict[str, Any]
    ) -> None:
        variable = self.found["config"]
        for name in settings:
            line_value = getattr(wanted_config, name)
            config_value = getattr(named_config, name)
            if line_value != config_value:
                self.mistakes.append(
                    f"{name} is {config_value!r} in {variable} and {line_value!r} on the line: "
                    "one would silently override the other. Leave it out here, or change it there: "
                    f"{variable} = {variable}.changed({name}={line_value!r})."
                )

    def _expanded(self, word: str) -> str:
        """The word with `$name` and `{expression}` replaced, as IPython does in magic lines."""
        # Not at the top: commands have these options, too, and need no IPython.
        from IPython.utils.text import DollarFormatter

        # "${rank}" is a template's own; IPython knows no such form.
        if "${" in word or not set("${") & set(word):
            return word
        try:
            return DollarFormatter().vformat(word, (), dict(self.namespace))
        except Exception:  # as IPython: what cannot be evaluated stays as written
            return word


def config_names(namespace: Mapping[str, Any]) -> list[str]:
    """Variables that `--config` can name."""
    return [name for name, value in namespace.items() if name[:1] != "_" and _has_config(value)]


def _has_config(value: Any) -> bool:
    if isinstance(value, RunConfig):
        return True
    # Of other packages' objects only plain attributes are read: a property may run any code.
    is_ours = type(value).__module__.partition(".")[0] == "nbaccel" and not isinstance(value, type)
    config = getattr(value, "__dict__", {}).get("config")
    return isinstance(getattr(value, "config", None) if is_ours else config, RunConfig)


def _is_flag(word: str) -> bool:
    """Whether a word is an option; a lone dash and a negative number are values."""
    return word.startswith("-") and word != "-" and not word[1].isdecimal()


def json_or_text(text: str) -> Any:
    """What JSON says; other text is left to the setting, which says what it must be."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text


_MANUAL_CHARS = 92
_COLUMN_CHARS = 30

_CELL_MANUAL = """\
Run this cell in worker processes, which keep their variables from cell to cell.

    %%accelerate -n 2 --precision bf16 --out loss
    model = nn.Linear(4, 4)
    loss = step(model)

Variables and functions of the notebook that the cell reads are sent when they are first needed
and when they have changed since. The last expression is shown by rank, once where all agree.
Trained weights of the notebook's own modules are copied back after the cell.

The first cell starts the workers. Their settings stay until %accelerate restart.
"""

_LINE_MANUAL = """\
Manage the workers that %%accelerate cells run in.

    %accelerate restart -n 4 --precision bf16
    %accelerate pull loss model --ranks 0
"""


_VALUES_MANUAL = """\
"none" leaves a choice to the plan. $name and {expression} are replaced by the notebook's values."""


def cell_manual() -> str:
    """The text of `%%accelerate?`."""
    own = _manual_section("Options of the cell:", OWN_OPTIONS)
    settings = _manual_section("Settings of the workers:", setting_options())
    return f"{_CELL_MANUAL}\n{own}\n{settings}\n{_VALUES_MANUAL}"


def line_manual() -> str:
    """The text of `%accelerate?`."""
    subcommands = [_manual_row(_usage_of(one), one.meaning) for one in SUBCOMMANDS]
    others = [option for option in options_of("restart") if not option.is_setting]
    title = "Options of restart and config: all settings of %%accelerate?, and"
    sections = (
        "\n".join(["Subcommands:", *subcommands, ""]),
        _manual_section(title, others),
        _manual_section("Options of pull and push:", options_of("pull")),
    )
    return "\n".join([_LINE_MANUAL, *sections, _VALUES_MANUAL])


def subcommand_manual(name: str) -> str:
    """The text of `%accelerate restart --help`, for example."""
    subcommand = next(subcommand for subcommand in SUBCOMMANDS if subcommand.name == name)
    title = f"%accelerate {_usage_of(subcommand)}\n\n{subcommand.meaning}\n"
    return _manual_section(title, options_of(name)).rstrip("\n")


def _usage_of(subcommand: Subcommand) -> str:
    names = " NAME..." if subcommand.names else ""
    return f"{subcommand.name}{names}{' [options]' if subcommand.options else ''}"


def _manual_section(title: str, options: Iterable[MagicOption]) -> str:
    rows = []
    for option in options:
        names = ", ".join(option.flags)
        head = f"{names}, {option.negative}" if option.negative else f"{names} {option.value}"
        default = RunConfig.model_fields[option.name].default if option.is_setting else None
        if option.negative:
            default = "yes" if default else "no"
        told_default = f" (default {default})" if default not in (None, "") else ""
        rows.append(_manual_row(head.rstrip(), f"{option.meaning}{told_default}"))
    return "\n".join([title, *rows, ""])


def _manual_row(head: str, meaning: str) -> str:
    """One entry: what is written, and next to it or below what it means."""
    width = _MANUAL_CHARS - _COLUMN_CHARS - 2
    lines = textwrap.wrap(meaning, width, break_on_hyphens=False)
    if len(head) <= _COLUMN_CHARS - 2:
        head = f"{head:<{_COLUMN_CHARS}}{lines.pop(0)}"
    return f"\n{' ' * (_COLUMN_CHARS + 2)}".join([f"  {head}", *lines])
