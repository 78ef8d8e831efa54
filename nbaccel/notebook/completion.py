"""Completion of magic lines, and of names that only workers have.

It needs a matcher that sees the whole cell, which IPython takes from 8.6 on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from IPython.core import completer

from nbaccel.notebook.cells import is_for_us
from nbaccel.notebook.magic_line import (
    SUBCOMMANDS,
    MagicOption,
    config_names,
    find_option,
    options_of,
)
from nbaccel.notebook.session import Session


class Matches(NamedTuple):
    """Completions at the cursor."""

    words: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    """The kind of each, for the front end: variable, function, ..."""
    part: str = ""
    """The text before the cursor that a word replaces."""
    are_all: bool = False
    """Whether nothing else makes sense there."""


_LINE_MAGIC = re.compile(r"^(?P<before>.*?%accelerate[ \t]+)(?P<rest>.*)$")


class Completion:
    """What can be completed on a magic's line, and in a cell of the workers."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def load(self) -> Callable[[], None]:
        """Add it to the shell's completer; returns what removes it."""
        if not hasattr(completer, "context_matcher"):
            return lambda: None

        @completer.context_matcher(identifier="nbaccel")  # type: ignore[untyped-decorator]
        def matcher(context: completer.CompletionContext) -> completer.SimpleMatcherResult:
            ours = self._matches(context.full_text, context.cursor_line, context.cursor_position)
            return completer.SimpleMatcherResult(
                completions=[
                    completer.SimpleCompletion(text=word, type=word_kind or None)
                    for word, word_kind in zip(ours.words, ours.kinds, strict=False)
                ],
                matched_fragment=ours.part,
                suppress=ours.are_all,
            )

        matchers: Any = self._session.shell.Completer.custom_matchers
        matchers.append(matcher)
        return lambda: matchers.remove(matcher)

    def _matches(self, cell_text: str, cursor_line: int, cursor_column: int) -> Matches:
        cell_lines = cell_text.split("\n")
        # Below blank lines, and perhaps below another magic: `%%time`.
        above = itertools.takewhile(
            lambda line: not is_for_us(line) and (not line.strip() or line.startswith("%%")),
            cell_lines,
        )
        magic_row = len(list(above))
        cell_line = cell_lines[cursor_line][:cursor_column]
        if magic_row < len(cell_lines) and is_for_us(cell_lines[magic_row]):
            row = cursor_line - magic_row
            if row > 0:
                return self._in_workers(cell_lines[magic_row + 1 :], row - 1, cursor_column)
            typed_options = cell_line.partition("accelerate")[2]
            is_option = row == 0 and typed_options[:1].isspace()
            return self._words(typed_options, "") if is_option else Matches()
        line_match = _LINE_MAGIC.match(cell_line)
        if line_match is None or not _is_statement(line_match["before"]):
            return Matches()
        typed_subcommand, blank_after, typed_options = line_match["rest"].partition(" ")
        names = [subcommand.name for subcommand in SUBCOMMANDS]
        if not blank_after:
            return _beginning(names, typed_subcommand, "magic")
        is_known = typed_subcommand in names
        return self._words(typed_options, typed_subcommand) if is_known else Matches()

    def _words(self, typed_options: str, subcommand: str) -> Matches:
        """Completions at the end of a line's options."""
        magic_options = options_of(subcommand)
        *words_before, last_word = re.split(r"\s+", typed_options.lstrip()) or [""]
        typed_flag, sign, typed_part = last_word.partition("=")
        if sign and (magic_option := find_option(magic_options, typed_flag)) and magic_option.value:
            return self._values(magic_option, typed_part)
        previous_option = find_option(magic_options, words_before[-1]) if words_before else None
        if previous_option is not None and previous_option.value:
            return self._values(previous_option, last_word)
        if subcommand in ("pull", "push") and not last_word.startswith("-"):
            # Names may be joined by commas; only the last one is being typed.
            typed_part = last_word.rpartition(",")[2]
            variable_names = (
                self._worker_names(typed_part) if subcommand == "pull" else self._own_names()
            )
            return _beginning(variable_names, typed_part, "variable")
        written = [find_option(magic_options, word) for word in words_before]
        open_flags = [
            flag
            for option in magic_options
            for flag in (*option.flags, option.negative)
            if option not in written and flag.startswith("--")
        ]
        return _beginning(open_flags, last_word, "option")

    def _values(self, option: MagicOption, typed_part: str) -> Matches:
        if option.name == "config":
            return _beginning(config_names(self._session.shell.user_ns), typed_part)
        if option.name == "out":
            typed_part = typed_part.rpartition(",")[2]
            return _beginning(self._worker_names(typed_part), typed_part, "variable")
        return _beginning(option.choices, typed_part)

    def _own_names(self) -> list[str]:
        hidden = self._session.shell.user_ns_hidden
        names = self._session.shell.user_ns
        return [name for name in names if not name.startswith("_") and name not in hidden]

    def _worker_names(self, typed_part: str) -> list[str]:
        pool = self._session.pool
        if pool is None or not typed_part:
            return []
        matches = pool.complete(typed_part, len(typed_part))
        # Whole variables are copied, so attributes and magics are left out.
        return [word for word in matches.matches if word.isidentifier()] if matches else []

    def _in_workers(self, code_lines: Sequence[str], cursor_line: int, column: int) -> Matches:
        pool = self._session.living_pool
        if pool is None:
            return Matches()
        text = "\n".join(code_lines)
        cursor_offset = sum(len(code_line) + 1 for code_line in code_lines[:cursor_line]) + column
        # None while the workers run a cell: completion must not wait for its end.
        matches = pool.complete(text, cursor_offset)
        if matches is None:
            return Matches()
        kinds = tuple(matches.types or [""] * len(matches.matches))
        return Matches(tuple(matches.matches), kinds, text[matches.start : cursor_offset])


def _is_statement(text_before: str) -> bool:
    """Whether the magic stands where a statement or an assignment's value does."""
    head = text_before.rpartition("%accelerate")[0].strip()
    return not head or bool(re.fullmatch(r"[\w.,\s]+=", head))


def _beginning(words: Iterable[str], typed_part: str, kind: str = "text") -> Matches:
    """Matches on a magic's line, where those of other matchers make no sense."""
    matching = tuple(word for word in words if word.startswith(typed_part))
    # Without a match other matchers may still know what is meant.
    return Matches(matching, (kind,) * len(matching), typed_part, are_all=bool(matching))
