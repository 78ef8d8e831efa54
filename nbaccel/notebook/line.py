"""A magic's line, read: every mistake in it is found before anything is done."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from IPython.utils.text import DollarFormatter

from nbaccel.config import RunConfig
from nbaccel.config.mistakes import closest, shown
from nbaccel.errors import ConfigError
from nbaccel.notebook.options import Option, find, options_of
from nbaccel.units import counted, spans

__all__ = ["Line", "check_ranks", "config_names", "missing_names", "read", "told_ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What a line asks for.

    Attributes:
        wanted: The settings it started from with those of the line over them.
        given: Names of the settings that the line gives, itself or by its ``--config``.
        names: Words that are no options: names of variables.
        ranks: The ranks it names; None for all.
        out: The names to bring into the notebook.
        dist: Whether the workers are to join their process group at once.
        autoreload: Whether changed source is to be loaded; None leaves that as it is.
        help: Whether it asks for help only.
    """

    wanted: RunConfig
    given: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    out: tuple[str, ...] = ()
    dist: bool = False
    autoreload: bool | None = None
    help: bool = False


def read(text: str, *, base: RunConfig, namespace: Mapping[str, Any], subcommand: str = "") -> Line:
    """Read a line.

    Args:
        text: What stands behind the magic's name, or behind the subcommand.
        base: The settings that the line's own are laid over.
        namespace: The notebook's variables, for ``--config NAME``, ``$name`` and ``{name}``.
        subcommand: A word of `%accelerate`; empty for `%%accelerate`.

    Returns:
        What it asks for.

    Raises:
        ConfigError: Something in it is wrong; every mistake is listed.
    """
    reader = _Reader(options_of(subcommand), subcommand, namespace)
    reader.read(_words(text))
    if "help" in reader.found:
        return Line(wanted=base, help=True)
    return reader.line(base)


def check_ranks(ranks: Sequence[int] | None, world_size: int) -> None:
    """Refuse ranks that no worker has.

    Args:
        ranks: The ranks that a line names; None for all.
        world_size: How many workers there are.

    Raises:
        ConfigError: At least one of them is not there.
    """
    if beyond := [rank for rank in ranks or () if rank >= world_size]:
        last = world_size - 1
        raise ConfigError(
            f"--ranks names {told_ranks(beyond)}: there {_are(world_size)}, "
            f"{'rank 0' if last == 0 else f'ranks 0-{last}'}. Nobody would run the cell. "
            f"Name ranks up to {last}, or start more with %accelerate restart "
            f"-n {max(beyond) + 1}."
        )


def missing_names(names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Refuse names that the notebook does not have.

    Args:
        names: What is to be sent.
        namespace: The notebook's variables.

    Raises:
        ConfigError: At least one of them is not there.
    """
    known = [name for name in namespace if not name.startswith("_")]
    mistakes = [
        f"The notebook has no variable {name!r}: there is nothing to send."
        f"{closest(name, known) or ' Give the name of a variable of the notebook.'}"
        for name in names
        if name not in namespace
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def told_ranks(ranks: Sequence[int]) -> str:
    """Ranks as people write them: ``rank 3``, ``ranks 0,2-3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


@dataclass
class _Reader:
    """Takes words one by one, and notes what is wrong with them."""

    options: tuple[Option, ...]
    subcommand: str
    namespace: Mapping[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def read(self, words: Iterator[str]) -> None:
        """Take all words."""
        for word in words:
            if _is_flag(word):
                self._flag(word, words)
            else:
                self._name(self._expanded(word))

    def line(self, base: RunConfig) -> Line:
        """What they ask for, if nothing is wrong."""
        mine = {name: value for name, value in self.found.items() if name in RunConfig.model_fields}
        ranks = self._ranks(self.found.get("ranks"))
        out = self._out(self.found.get("out"))
        config = self._config(self.found.get("config"))
        wanted = self._wanted(base if config is None else config, mine)
        if config is not None:
            self._compare(config, wanted, mine)
        if self.mistakes:
            raise ConfigError(*dict.fromkeys(self.mistakes))
        return Line(
            wanted=wanted,
            given=tuple(mine) if config is None else tuple(RunConfig.model_fields),
            names=tuple(self.names),
            ranks=ranks,
            out=out,
            dist=bool(self.found.get("dist")),
            autoreload=self.found.get("autoreload"),
        )

    def _flag(self, word: str, words: Iterator[str]) -> None:
        flag, equals, value = word.partition("=")
        option = find(self.options, flag)
        if option is None and not word.startswith("--"):  # -n4
            flag, equals, value = word[:2], "=", word[2:].removeprefix("=")
            option = find(self.options, flag)
        if option is None:
            self._unknown(word.partition("=")[0], words)
        elif not option.value:
            self._switch(option, flag, value if equals else None)
        elif equals:
            self._keep(option, value)
        else:
            # An iterator's next may be an option: then this one's value was forgotten.
            after = next(words, None)
            if after is None or _is_flag(after):
                self.mistakes.append(
                    f"{flag} needs a value: got {'nothing' if after is None else repr(after)} "
                    f"behind it. {option.meaning} Write {flag} {option.value}."
                )
            else:
                self._keep(option, after)
            if after is not None and _is_flag(after):
                self._flag(after, words)

    def _switch(self, option: Option, flag: str, value: str | None) -> None:
        opposite = flag.replace("_", "-") == option.negative
        if value is not None and (opposite or not option.is_setting):
            self.mistakes.append(
                f"{flag} takes no value: got {value!r}. It would mean nothing. Write {flag} alone."
            )
        self.found[option.name] = value if value is not None else not opposite

    def _keep(self, option: Option, text: str) -> None:
        text = text if option.is_json else self._expanded(text)
        value: Any = text
        if option.none and text.strip().lower() == "none":
            value = None
        elif option.is_json:
            value = _from_json(text)
        elif option.name == "autoreload":
            value = self._on_off(option, text)
        before = self.found.get(option.name, value)
        if before != value:
            self.mistakes.append(
                f"{option.flag} was given twice: got {shown(before)} and {shown(value)}. "
                "One would silently beat the other. Write it once."
            )
        self.found[option.name] = value

    def _on_off(self, option: Option, text: str) -> bool:
        if text.lower() not in option.choices:
            self.mistakes.append(
                f"{option.flag} must be on or off: got {text!r}. {option.meaning}"
                f"{closest(text, option.choices)}"
            )
        return text.lower() == "on"

    def _unknown(self, flag: str, words: Iterator[str]) -> None:
        magic = f"%accelerate {self.subcommand}" if self.subcommand else "%%accelerate"
        flags = [flag for option in self.options for flag in (*option.flags, option.negative)]
        elsewhere = find(options_of(), flag)
        if elsewhere is not None:
            remedy = f" {elsewhere.flag} is for {_where(elsewhere)}."
        else:
            remedy = closest(flag.replace("_", "-"), filter(None, flags)) or (
                f" Its options are shown by {magic} --help."
            )
        self.mistakes.append(
            f"{magic} has no option {flag!r}: it would change nothing, without a word.{remedy}"
        )
        self._skip_value(words)

    def _skip_value(self, words: Iterator[str]) -> None:
        """A word behind an unknown option is its value, and no mistake of its own."""
        for after in words:
            if _is_flag(after):
                self._flag(after, words)
            return

    def _name(self, word: str) -> None:
        takes = self.subcommand in ("pull", "push", "config")
        name, equals, value = word.partition("=")
        if takes and all(part.isidentifier() for part in word.strip(",").split(",")):
            self.names += word.strip(",").split(",")
        elif takes:
            self.mistakes.append(
                f"{word!r} is no name of a variable: only whole variables are copied. "
                "Bind the value to a name first, then give that name."
            )
        elif equals and (option := find(options_of(), f"--{name}")):
            self.mistakes.append(
                f"{word!r} is no option of the line: it would change nothing, without a word. "
                f"Write {option.flag} {value}."
            )
        else:
            magic = f"%accelerate {self.subcommand}" if self.subcommand else "%%accelerate"
            self.mistakes.append(
                f"{magic} takes options only: got {word!r}, which says nothing to it. "
                f"Code belongs into the cell's next line; {magic} --help shows the options."
            )

    def _ranks(self, text: str | None) -> tuple[int, ...] | None:
        if text is None:
            return None
        ranks: set[int] = set()
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            numbers = (first, last if dash else first)
            if not all(n.isdecimal() for n in numbers) or int(numbers[0]) > int(numbers[1]):
                self.mistakes.append(
                    f"--ranks must be rank numbers and ranges of them: got {text!r}. They say "
                    "which workers run the cell. Write for example --ranks 0,2-3."
                )
                return None
            # A range up to a billion is refused by its end, without a list of it.
            ranks.update(range(int(numbers[0]), min(int(numbers[1]), int(numbers[0]) + 9999) + 1))
            ranks.add(int(numbers[1]))
        return tuple(sorted(ranks))

    def _out(self, text: str | None) -> tuple[str, ...]:
        names = tuple(part.strip() for part in (text or "").split(",") if part.strip())
        if wrong := [name for name in names if not name.isidentifier()]:
            self.mistakes.append(
                f"--out must be names of variables: got {', '.join(map(repr, wrong))}. They are "
                "bound in the notebook after the cell. Write for example --out loss,accuracy."
            )
        elif text is not None and not names:
            self.mistakes.append(
                f"--out must be names of variables: got {text!r}. They are bound in the notebook "
                "after the cell. Write for example --out loss,accuracy."
            )
        return names

    def _config(self, name: str | None) -> RunConfig | None:
        if name is None:
            return None
        value = self.namespace.get(name)
        if isinstance(found := getattr(value, "config", value), RunConfig):
            return found
        candidates = config_names(self.namespace)
        got = f"a {type(value).__name__}" if name in self.namespace else "no such variable"
        remedy = closest(name, candidates) or f" Make one: {name} = nbaccel.RunConfig(...)."
        self.mistakes.append(
            f"--config must name a RunConfig of the notebook, or what has one as .config: {name} "
            f"is {got}. All settings are taken from it.{remedy}"
        )
        return None

    def _wanted(self, base: RunConfig, mine: dict[str, Any]) -> RunConfig:
        if not mine:  # most cells: to validate again what is valid takes a tenth of a millisecond
            return base
        try:
            return base.changed(**mine)
        except ConfigError as error:
            self.mistakes += error.mistakes
            return base

    def _compare(self, config: RunConfig, wanted: RunConfig, mine: dict[str, Any]) -> None:
        for name in mine:
            ours, theirs = getattr(wanted, name), getattr(config, name)
            if ours != theirs:
                source = self.found["config"]
                self.mistakes.append(
                    f"{name} is {theirs!r} in {source} and {ours!r} on the line: one would "
                    f"silently beat the other. Leave it out here, or make it so there: {source} = "
                    f"{source}.changed({name}={ours!r})."
                )

    def _expanded(self, word: str) -> str:
        """The word with `$name` and `{expression}` replaced, as IPython does in magic lines."""
        # "${rank}" is a template's own; IPython knows no such form.
        if "${" in word or not set("${") & set(word):
            return word
        try:
            return DollarFormatter().vformat(word, (), dict(self.namespace))
        except Exception:  # as IPython: what cannot be evaluated stays as written
            return word


def config_names(namespace: Mapping[str, Any]) -> list[str]:
    """Variables that `--config` can name."""
    return [
        name for name, value in namespace.items() if not name.startswith("_") and _has_config(value)
    ]


def _has_config(value: Any) -> bool:
    if isinstance(value, RunConfig):
        return True
    # Of strangers only plain attributes are read: a property of theirs could do anything.
    ours = type(value).__module__.partition(".")[0] == "nbaccel" and not isinstance(value, type)
    return isinstance(
        getattr(value, "config", None) if ours else getattr(value, "__dict__", {}).get("config"),
        RunConfig,
    )


def _words(text: str) -> Iterator[str]:
    try:
        return iter(shlex.split(text, comments=True))
    except ValueError as error:  # a quotation that is not closed
        raise ConfigError(
            f"The line cannot be split into words: {str(error).lower()} in {text!r}. Nothing of "
            "it could be trusted. Close the quotation mark."
        ) from error


def _is_flag(word: str) -> bool:
    """Whether a word is an option; a lone dash and a negative number are values."""
    return word.startswith("-") and word != "-" and not word[1].isdecimal()


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # the setting itself says what it must be


def _where(option: Option) -> str:
    if option.is_setting or option.name in ("config", "dist"):
        return "%%accelerate, %accelerate restart and %accelerate config"
    return "%%accelerate, %accelerate pull and push" if option.name == "ranks" else "%%accelerate"


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {counted(count, 'worker')}"
