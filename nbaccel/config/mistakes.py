"""Words for messages about a wrong value: the value itself, and what was probably meant."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping

_MAX_SHOWN_CHARS = 80
_MAX_TEXT_CHARS = 400


def closest(word: str, allowed: Iterable[str], words: Mapping[str, str] | None = None) -> str:
    """The allowed name that was probably meant."""
    lowered_word = word.strip().lower()
    names_by_lower = {allowed_name.lower(): allowed_name for allowed_name in allowed}
    # A known synonym first: by its letters "gpu", which means "cuda", is nearest to "cpu".
    meant_word = dict(words or {}).get(lowered_word)
    if meant_word is None:
        near_names = difflib.get_close_matches(lowered_word, names_by_lower, n=1, cutoff=0.6)
        meant_word = names_by_lower[near_names[0]] if near_names else None
    return f" Did you mean {meant_word!r}?" if meant_word else ""


def shown(value: object) -> str:
    """A value as it appears in a message."""
    # Not `repr`: a tensor or a large dictionary would fill the message, and take long.
    short_repr = reprlib.Repr()
    short_repr.maxstring = short_repr.maxother = _MAX_SHOWN_CHARS
    try:
        text = " ".join(short_repr.repr(value).split())
    except ValueError:  # Python refuses to write numbers of thousands of digits
        return f"a {type(value).__name__} too large to show"
    # A few entries on each of several levels are still thousands of characters.
    if len(text) > _MAX_TEXT_CHARS:
        text = f"{text[:_MAX_TEXT_CHARS]}…"
    return text
