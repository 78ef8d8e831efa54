"""Completion and `name?`: of magic lines, and of names that only workers have."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from IPython.core import completer, page

from nbaccel.base import ipython_private
from nbaccel.notebook import magic_line
from nbaccel.notebook.cells import is_for_us
from nbaccel.notebook.session import Session


class Matches(NamedTuple):
    """Completions at the cursor."""

    words: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()  # the kind of each, for the front end: variable, function, …
    part: str = ""  # the text before the cursor that a word replaces
    are_all: bool = False  # whether nothing else makes sense there


_LINE_MAGIC = re.compile(r"^(?P<before>.*?%accelerate[ \t]+)(?P<rest>.*)$")


class Completion:
    """What can be completed on a magic's line, and in a cell of the workers."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def load(self) -> Callable[[], None]:
        """Add it to the shell's completer; returns what removes it."""
        shell_completer: Any = self._session.shell.Completer
        shell_method = shell_completer.completions

        def completions(text: str, offset: int) -> Iterator[completer.Completion]:
            ours = self._matches(text, *completer.position_to_cursor(text, offset))
            start = offset - len(ours.part)
            # Front ends let all replace the same text, by `rectify_completions`.
            found = [
                completer.Completion(start, offset, word, type=kind or None)
                for word, kind in zip(ours.words, ours.kinds, strict=True)
            ]
            yield from found
            # IPython and Jedi would add Python names, which mean nothing on a magic's line.
            theirs = () if ours.are_all else shell_method(text, offset)
            yield from (other for other in theirs if other not in found)

        # In the instance, so that removing it brings the class's method back.
        vars(shell_completer)["completions"] = completions
        return lambda: vars(shell_completer).pop("completions", None)

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
        if line_match is None:
            return Matches()
        # It stands where a statement or an assignment's value does.
        head = line_match["before"].rpartition("%accelerate")[0].strip()
        if head and not re.fullmatch(r"[\w.,\s]+=", head):
            return Matches()
        typed_subcommand, blank_after, typed_options = line_match["rest"].partition(" ")
        names = [subcommand.name for subcommand in magic_line.SUBCOMMANDS]
        if not blank_after:
            return _beginning(names, typed_subcommand, "magic")
        is_known = typed_subcommand in names
        return self._words(typed_options, typed_subcommand) if is_known else Matches()

    def _words(self, typed_options: str, subcommand: str) -> Matches:
        options = magic_line.options_of(subcommand)
        *words_before, last_word = re.split(r"\s+", typed_options.lstrip()) or [""]
        typed_flag, sign, typed_part = last_word.partition("=")
        if sign and (option := magic_line.find_option(options, typed_flag)) and option.value:
            return self._values(option, typed_part)
        previous = magic_line.find_option(options, words_before[-1]) if words_before else None
        if previous is not None and previous.value:
            return self._values(previous, last_word)
        if subcommand in ("pull", "push") and not last_word.startswith("-"):
            # Names may be joined by commas; only the last one is being typed.
            typed_part = last_word.rpartition(",")[2]
            names = self._worker_names(typed_part) if subcommand == "pull" else self._own_names()
            return _beginning(names, typed_part, "variable")
        written = [magic_line.find_option(options, word) for word in words_before]
        unwritten = [one for one in options if one not in written]
        flags = [flag for one in unwritten for flag in (*one.flags, one.negative)]
        return _beginning([flag for flag in flags if flag.startswith("--")], last_word, "option")

    def _values(self, option: magic_line.MagicOption, typed_part: str) -> Matches:
        if option.name == "config":
            return _beginning(magic_line.config_names(self._session.shell.user_ns), typed_part)
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
        matches = pool.complete(typed_part, len(typed_part)) if pool and typed_part else None
        # Whole variables are copied, so attributes and magics are left out.
        return [word for word in matches.matches if word.isidentifier()] if matches else []

    def _in_workers(self, code_lines: Sequence[str], cursor_line: int, column: int) -> Matches:
        pool = self._session.living_pool
        text = "\n".join(code_lines)
        cursor_offset = sum(len(code_line) + 1 for code_line in code_lines[:cursor_line]) + column
        # None while the workers run a cell: completion must not wait for its end.
        matches = None if pool is None else pool.complete(text, cursor_offset)
        if matches is None:
            return Matches()
        kinds = tuple(matches.types or [""] * len(matches.matches))
        return Matches(tuple(matches.matches), kinds, text[matches.start : cursor_offset])


def _beginning(words: Iterable[str], typed_part: str, kind: str = "text") -> Matches:
    """Matches on a magic's line, where those of other matchers make no sense."""
    matching = tuple(word for word in words if word.startswith(typed_part))
    # Without a match other matchers may still know what is meant.
    return Matches(matching, (kind,) * len(matching), typed_part, are_all=bool(matching))


def inspect_workers(session: Session) -> Callable[[], None]:
    """Inspect names in the workers that the notebook does not have; returns what undoes that."""
    # The shell's methods are replaced on the instance.
    shell: Any = session.shell
    shell_method = shell.object_inspect_mime

    def object_inspect_mime(oname: str, detail_level: int = 0, **more: Any) -> Any:
        try:
            return shell_method(oname, detail_level, **more)
        # IPython raises KeyError for a name that it does not find.
        except KeyError:
            bundle = _asked_bundle(session, oname, detail_level)
            if bundle is None:
                raise
            return bundle

    def also_inspect(shell_inspect: Callable[..., Any]) -> Callable[..., Any]:
        def inspect(meth: str, oname: str, namespaces: Any = None, **more: Any) -> Any:
            # `pinfo` is `name?`; other requests, such as `%pdoc`, need the object itself.
            is_known = meth != "pinfo" or shell.object_inspect(oname)["found"]
            detail_level = int(more.get("detail_level", 0))
            bundle = None if is_known else _asked_bundle(session, oname, detail_level)
            if bundle is None:
                return shell_inspect(meth, oname, namespaces, **more)
            page.page(bundle)
            return None

        return inspect

    vars(shell)["object_inspect_mime"] = object_inspect_mime
    restore_inspect = ipython_private.inspect_also(shell, also_inspect)

    def restore() -> None:
        vars(shell).pop("object_inspect_mime", None)
        restore_inspect()

    return restore


def _asked_bundle(session: Session, name: str, detail_level: int) -> dict[str, str] | None:
    pool = session.living_pool
    bundle = pool.inspect(name, detail_level) if pool is not None and name else None
    if bundle is None:
        return None
    text = bundle.get("text/plain", "")
    # ipykernel removes the key `text/html` where it is not wanted, so it must exist.
    return {"text/html": f"<pre>{html.escape(text)}</pre>", **bundle, "text/plain": text}
