"""tqdm's bars in the process that draws them: which there are, and which text is theirs.

tqdm has no public name for either. The set of all bars that are not closed, `_instances`, and the
functions that write were seen in tqdm 4.42 to 4.70; where they are missing a bar is not recognised,
and drawn as ever. Nothing is imported here: a process that has not imported tqdm has no bars.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nbaccel.output.tqdm_text import BarText, read_bar

__all__ = ["is_bar_writing", "living_bars", "numbers_of_bar", "release_bar_lock"]

_WRITING_FUNCTIONS = frozenset({"inner", "fp_write", "moveto", "clear"})
"""Those of tqdm that write a bar's text; `tqdm.write` writes what the user has to say."""
_MOST_FRAMES = 5  # of others that pass the text on: a stream that also writes to a log


def living_bars() -> Sequence[Any]:
    """All bars of this process that are not closed, the one that began first in front."""
    bar_class = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    try:
        all_bars = list(getattr(bar_class, "_instances", ()))
    except RuntimeError:  # another thread is making a bar; the next look will find it
        return []
    # The constructor sets `start_t` last, so one that has it has all attributes.
    open_bars = [bar for bar in all_bars if hasattr(bar, "start_t") and not bar.disable]
    return sorted(open_bars, key=lambda bar: float(bar.start_t))


def numbers_of_bar(bar: Any) -> BarText | None:
    """How far a bar was when it was last drawn, whatever it looks like."""
    try:
        elapsed_s = bar.last_print_t - bar.start_t
        facts = bar.format_dict | {"n": bar.last_print_n, "elapsed": elapsed_s}
        form = {"bar_format": None, "ncols": None, "colour": None}
        found_bar = read_bar(bar.format_meter(**facts | form).rstrip())
        return None if found_bar is None else replace(found_bar, elapsed_s=elapsed_s)
    except Exception:  # a bar of an unknown kind must not end the training
        return None


def is_bar_writing() -> bool:
    """Whether the caller's caller is a bar of tqdm that draws itself, or passes on its text."""
    frame = sys._getframe(2)  # noqa: SLF001 - the only way to the frames above
    for _ in range(_MOST_FRAMES):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tqdm":
            return frame.f_code.co_name in _WRITING_FUNCTIONS
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def release_bar_lock() -> None:
    """Give back the lock of all bars, where an exception in a bar has left it to this thread.

    tqdm 4.70 does not release it when drawing is interrupted (`tqdm.refresh` in its `std.py`): bars
    of other threads and of forked processes then wait forever. No bar of this thread may be drawing
    itself now.
    """
    bar_class = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    # A lock that the user has set is the user's own.
    for lock in getattr(bar_class.get_lock(), "locks", ()) if bar_class is not None else ():
        # Each kind has its own error for a lock that this thread does not hold.
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):
            while True:
                lock.release()
