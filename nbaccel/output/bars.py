"""tqdm's bars: read from the text that they draw, and found in the process that draws them.

    inside:  40%|████      | 2/5 [00:01<00:01,  1.9it/s, loss=0.3]
    12it [00:03,  3.8it/s]

A bar of any version, in a process that has imported tqdm before, is read the same way. A line that
is rewritten in place and is no bar of tqdm is shown as its text.

tqdm has no public name for the bars of a process, nor for the functions that write. The set of all
bars that are not closed, `_instances`, and these functions were seen in tqdm 4.42 to 4.70; where
they are missing a bar is not recognised, and drawn as ever. tqdm is not imported here: a process
that has not imported it has no bars.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "BATCH_UNIT",
    "BarText",
    "RankBars",
    "SeenBar",
    "is_bar_writing",
    "living_bars",
    "note_outer_bar",
    "numbers_of_bar",
    "outer_bar_of",
    "read_bar",
    "release_bar_lock",
    "split_bar",
]

BATCH_UNIT = "batch"
"""What the bar of `accelerator.progress` counts."""
_MAX_BAR_CHARS = 1_000
_MAX_BARS = 2
_WITH_TOTAL = re.compile(
    r"(?:(?P<description>.*?):? +)?(?P<percent>\d+)%\|[^|]*\| *"
    r"(?P<done>[^\s/\[]+)/(?P<total>[^\s\[]+)"
    r" \[(?P<elapsed>[\d:]+)<(?P<left>[\d:?]+), *(?P<rate>[^,\]]*)(?:, (?P<postfix>.*?))?\]"
)
_WITHOUT_TOTAL = re.compile(
    r"(?:(?P<description>.*): )?(?P<done>\d[\d.]*[kMGTPEZY]?)[^\s\d]\S* "
    r"\[(?P<elapsed>[\d:]+), *(?P<rate>(?:\?|[\d.]+)[^,\]]*/[^,\]]+)(?:, (?P<postfix>.*))?\]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BarText:
    """A progress bar at one moment."""

    text: str
    """The whole of it, as it was drawn."""
    description: str = ""
    fraction: float | None = None
    """How much is done, from 0 to 1; None where the total is not known."""
    done: str = ""
    """In the bar's own words: `2`, `1.5k`."""
    total: str = ""
    left_s: float | None = None
    """Seconds that are left, as the bar estimates them."""
    elapsed_s: float | None = None
    """Seconds since it began, when it was drawn."""
    rate: str = ""
    """`1.9it/s`, `2.1s/batch`."""
    postfix: str = ""
    """What the loop has added: `loss=0.3`."""
    is_elsewhere: bool = False
    """Whether it is drawn elsewhere in the cell, so that the panel uses its numbers only."""

    @property
    def is_complete(self) -> bool:
        """Whether all is done."""
        return self.fraction is not None and self.fraction >= 1.0


def read_bar(text: str) -> BarText | None:
    """A line as a bar of tqdm; None if it is none."""
    # First what nearly all lines lack: thousands of lines a second are asked.
    if text[-1:] != "]" or len(text) > _MAX_BAR_CHARS:
        return None
    bar_match = (_WITH_TOTAL if "%|" in text else _WITHOUT_TOTAL).fullmatch(text)
    return None if bar_match is None else _bar_of(bar_match)


def split_bar(text: str) -> tuple[BarText | None, str]:
    """A finished line as a bar, and what was printed behind it on the same line."""
    bar = read_bar(text)
    if bar is not None:
        return bar, ""
    bar_match = _WITH_TOTAL.match(text) if "%|" in text[:_MAX_BAR_CHARS] else None
    if bar_match is None:
        return None, text
    return _bar_of(bar_match), text[bar_match.end() :]


def _bar_of(bar_match: re.Match[str]) -> BarText:
    parts = {name: value or "" for name, value in bar_match.groupdict().items()}
    percent = parts.get("percent")
    return BarText(
        text=bar_match[0],
        description=parts["description"].strip(),
        fraction=min(1.0, int(percent) / 100) if percent else None,
        done=parts["done"],
        total=parts.get("total", ""),
        left_s=_clock_seconds(parts.get("left", "")),
        elapsed_s=_clock_seconds(parts["elapsed"]),
        rate=parts["rate"].strip(),
        postfix=parts["postfix"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBar:
    """When an outer bar was first seen as it is now."""

    key: tuple[str, str, str]
    """Its description, and how much of how much is done."""
    seen_at: float


def note_outer_bar(
    seen_bar: SeenBar | None, bars: tuple[BarText, ...], current_time: float
) -> SeenBar | None:
    """What is to be remembered of a rank's outer bar, whose text changes only with its rounds."""
    outer_bar = outer_bar_of(bars)
    if outer_bar is None:
        return seen_bar
    key = (outer_bar.description, outer_bar.done, outer_bar.total)
    is_same = seen_bar is not None and seen_bar.key == key
    return seen_bar if is_same else SeenBar(key=key, seen_at=current_time)


def outer_bar_of(bars: tuple[BarText, ...]) -> BarText | None:
    """The bar of a rank's outermost loop; None where its code draws none."""
    # The bars of `accelerator.progress` are not read: ranks report these loops.
    return next((bar for bar in bars if BATCH_UNIT not in bar.rate), None)


def _clock_seconds(text: str) -> float | None:
    """`1:02:03` in seconds."""
    if not text or "?" in text:
        return None
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part or 0)
    return seconds


class RankBars:
    """The bars of one rank that are of interest now: an inner loop's, and the one around it."""

    def __init__(self) -> None:
        self._bars: dict[tuple[str, str], BarText] = {}
        """By description and total: both of two nested loops may be without a name."""
        self._newest = ("", "")

    def note(self, bar: BarText) -> None:
        """Take in a bar's newest state."""
        bar_key = (bar.description, bar.total)
        if bar_key != self._newest:
            # A loop that is through is of no interest once another one is drawn.
            self._bars = {
                key: known_bar
                for key, known_bar in self._bars.items()
                if key == bar_key or not known_bar.is_complete
            }
        self._newest = bar_key
        self._bars[bar_key] = bar
        while len(self._bars) > _MAX_BARS:
            oldest = next(key for key in self._bars if key != self._newest)
            del self._bars[oldest]

    def shown(self, unfinished_lines: Iterable[str]) -> tuple[BarText, ...]:
        """All of them, the outer one first."""
        other_texts: list[BarText] = []
        for line_text in filter(str.strip, unfinished_lines):
            bar = read_bar(line_text)
            if bar is not None:
                self.note(bar)
            else:
                other_texts.append(BarText(text=line_text))
        return (*self._bars.values(), *other_texts)


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
