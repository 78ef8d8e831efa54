"""How IPython's completer is given one more source of completions, whatever IPython's version.

From IPython 8.6 on it takes matchers that see the whole cell. Earlier ones, such as the 7.34 of
Colab and Kaggle, give a matcher no more than the word at the cursor: there the method behind all
completions is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core import completer

__all__ = ["Ask", "Matches", "ask_also"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """What could stand at the cursor."""

    words: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    """What each is, for the front end: variable, function, ..."""
    part: str = ""
    """The text before the cursor that a word replaces."""
    are_all: bool = False
    """Whether nothing else makes sense there."""


Ask = Callable[[str, int, int], Matches]
"""Called with the cell's text, the cursor's line (from 0) and its column."""


def ask_also(own: Any, ask: Ask) -> Callable[[], None]:
    """Let a shell's completer ask us, too.

    Args:
        own: The shell's `IPCompleter`.
        ask: What knows our completions.

    Returns:
        What takes it back.
    """
    return (_match if hasattr(completer, "context_matcher") else _wrap)(own, ask)


def _match(own: Any, ask: Ask) -> Callable[[], None]:
    """IPython 8.6 and later."""

    @completer.context_matcher(identifier="nbaccel")  # type: ignore[untyped-decorator]
    def matcher(context: completer.CompletionContext) -> completer.SimpleMatcherResult:
        found = ask(context.full_text, context.cursor_line, context.cursor_position)
        return completer.SimpleMatcherResult(
            completions=[
                completer.SimpleCompletion(text=word, type=kind or None)
                for word, kind in zip(found.words, found.kinds, strict=False)
            ],
            matched_fragment=found.part,
            suppress=found.are_all,
        )

    own.custom_matchers.append(matcher)
    return lambda: own.custom_matchers.remove(matcher)


def _wrap(own: Any, ask: Ask) -> Callable[[], None]:
    """IPython before 8.6: text replaced, words, where they are from, and Jedi's."""
    earlier = own._complete  # noqa: SLF001 - what all of its completions come from

    def _complete(*, cursor_line: int, cursor_pos: int, **more: Any) -> tuple[Any, ...]:
        text = more.get("full_text")
        found = ask(text, cursor_line, cursor_pos) if text and cursor_pos is not None else Matches()
        if found.are_all:
            return found.part, list(found.words), ["nbaccel"] * len(found.words), ()
        theirs = earlier(cursor_line=cursor_line, cursor_pos=cursor_pos, **more)
        return _joined(found, *theirs) if found.words else theirs

    vars(own)["_complete"] = _complete
    return lambda: vars(own).pop("_complete", None)


def _joined(
    found: Matches, part: str, words: list[str], origins: list[str], jedi: Any
) -> tuple[str, list[str], list[str], Any]:
    """Ours and theirs, as replacements of the same text: the longer of the two."""
    longer = max(part, found.part, key=len)
    theirs = [longer.removesuffix(part) + word for word in words]
    new = [longer.removesuffix(found.part) + word for word in found.words]
    new = [word for word in new if word not in theirs]
    return longer, [*new, *theirs], ["nbaccel"] * len(new) + list(origins), jedi
