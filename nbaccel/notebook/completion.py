"""Completion of our lines, and of names that live in workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from nbaccel.notebook.cells import is_for_us
from nbaccel.notebook.completer import Matches, ask_also
from nbaccel.notebook.line import config_names
from nbaccel.notebook.options import SUBCOMMANDS, Option, find, options_of
from nbaccel.notebook.session import Session

__all__ = ["Completion"]

_LINE = re.compile(r"^(?P<before>.*?%accelerate[ \t]+)(?P<rest>.*)$")
_IDENTIFIER = re.compile(r"\w*$")


class Completion:
    """A matcher of IPython's completer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ask_no_more: Callable[[], None] | None = None

    def load(self) -> None:
        """Let the completer ask."""
        self._ask_no_more = ask_also(self._session.shell.Completer, self._matches)

    def unload(self) -> None:
        """Let it ask no more."""
        if self._ask_no_more is not None:
            self._ask_no_more()

    def _matches(self, text: str, cursor_line: int, cursor: int) -> Matches:
        lines = text.split("\n")
        magic = next((n for n, line in enumerate(lines) if line.strip()), 0)
        while magic + 1 < len(lines) and lines[magic].startswith("%%"):
            if is_for_us(lines[magic]):
                break
            magic += 1  # `%%time` above us
        line = lines[cursor_line][:cursor]
        if is_for_us(lines[magic]) and cursor_line > magic:
            return self._in_workers(lines[magic + 1 :], cursor_line - magic - 1, cursor)
        if is_for_us(lines[magic]) and cursor_line == magic:
            rest = line.partition("accelerate")[2]
            return self._words(rest, "") if rest[:1].isspace() else Matches()
        found = _LINE.match(line)
        if found is None or not _is_statement(found["before"]):
            return Matches()
        word, blank, rest = found["rest"].partition(" ")
        if not blank:
            names = [sub.name for sub in SUBCOMMANDS]
            return _result(_beginning(names, word), word, kind="magic")
        known = word in {sub.name for sub in SUBCOMMANDS}
        return self._words(rest, word) if known else Matches()

    def _words(self, rest: str, subcommand: str) -> Matches:
        """What can stand at the end of a line's options."""
        options = options_of(subcommand)
        *before, last = re.split(r"\s+", rest.lstrip()) or [""]
        flag, equals, part = last.partition("=")
        if equals and (option := find(options, flag)) and option.value:
            return self._values(option, part)
        previous = find(options, before[-1]) if before else None
        if previous is not None and previous.value:
            return self._values(previous, last)
        if subcommand in ("pull", "push") and not last.startswith("-"):
            part = last.rpartition(",")[2]
            names = self._worker_names(part) if subcommand == "pull" else self._own_names()
            return _result(_beginning(names, part), part, kind="variable")
        written = {option.name for word in before if (option := find(options, word))}
        flags = [
            flag
            for option in options
            if option.name not in written
            for flag in (*option.flags, option.negative)
            if flag.startswith("--")
        ]
        return _result(_beginning(flags, last), last, kind="option")

    def _values(self, option: Option, part: str) -> Matches:
        if option.name == "config":
            return _result(_beginning(config_names(self._session.shell.user_ns), part), part)
        if option.name == "out":
            part = part.rpartition(",")[2]
            return _result(_beginning(self._worker_names(part), part), part, kind="variable")
        return _result(_beginning(option.choices, part), part)

    def _own_names(self) -> list[str]:
        shell = self._session.shell
        hidden = shell.user_ns_hidden
        return [n for n in shell.user_ns if not n.startswith("_") and n not in hidden]

    def _worker_names(self, part: str) -> list[str]:
        pool = self._session.pool
        found = pool.complete(part, len(part)) if pool is not None and part else None
        return [match for match in found.matches if match.isidentifier()] if found else []

    def _in_workers(self, lines: Sequence[str], cursor_line: int, cursor: int) -> Matches:
        pool = self._session.pool
        if pool is None or not self._session.is_live():
            return Matches()
        code = "\n".join(lines)
        offset = sum(len(line) + 1 for line in lines[:cursor_line]) + cursor
        found = pool.complete(code, offset)
        if found is None:
            return Matches()
        kinds = tuple(found.types or [""] * len(found.matches))
        return Matches(words=tuple(found.matches), kinds=kinds, part=code[found.start : offset])


def _is_statement(before: str) -> bool:
    """Whether the magic stands where a statement or an assignment's value does."""
    head = before.rpartition("%accelerate")[0].strip()
    return not head or bool(re.fullmatch(r"[\w.,\s]+=", head))


def _beginning(words: Iterable[str], part: str) -> list[str]:
    return [word for word in words if word.startswith(part)]


def _result(words: Sequence[str], part: str, *, kind: str = "text") -> Matches:
    """On a line of ours nobody else has anything to add."""
    return Matches(words=tuple(words), kinds=(kind,) * len(words), part=part, are_all=bool(words))
