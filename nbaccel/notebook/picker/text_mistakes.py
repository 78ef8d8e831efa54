"""Mistakes of a configuration at the lines of its text.

A syntax error knows its line from the decoder; a mistake in a value names its key, which YAML's
parser finds in the text: JSON is YAML, too, once its tabs are spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import yaml

from nbaccel.base.errors import ConfigError
from nbaccel.config.text_forms import likely_reason

KeyPath = tuple[str, ...]
_KEY_END = re.compile(r"[\s=:]")
_LINE_IN_MESSAGE = re.compile(r"\bline (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMistake:
    """A mistake and where it is."""

    line: int | None
    """From 1; None where the mistake is in no single line."""
    message: str


def mistakes_in_text(text: str, check: Callable[[str], object]) -> tuple[TextMistake, ...]:
    """Check a configuration's text."""
    try:
        # The end of a line makes it text for the reader, even if it looks like a path.
        check(text + "\n")
    except ConfigError as error:
        syntax_mistake = _syntax_mistake(error, text.count("\n") + 1)
        if syntax_mistake is not None:
            return (syntax_mistake,)
        lines = key_lines(text)
        mistakes = [
            TextMistake(line=_line_of(mistake, lines), message=str(mistake))
            for mistake in error.args
        ]
        return tuple(sorted(mistakes, key=lambda found: found.line or len(text)))
    except UnicodeError as error:  # half of a pair of surrogates, as some editors paste
        return (TextMistake(line=None, message=str(error)),)
    return ()


def key_lines(text: str) -> dict[KeyPath, int]:
    """Where each key stands."""
    return dict(_keys_of(yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader), ()))


def _syntax_mistake(error: ConfigError, num_lines: int) -> TextMistake | None:
    cause = error.__cause__
    if isinstance(cause, json.JSONDecodeError):
        line, reason = likely_reason(cause)
        words = reason.rstrip() or f"{cause.msg} (column {cause.colno})."
        return TextMistake(line=min(line, num_lines), message=words)
    if cause is not None and (line_match := _LINE_IN_MESSAGE.search(str(cause))):
        return TextMistake(line=int(line_match[1]), message=error.mistakes[0])
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
