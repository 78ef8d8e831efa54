"""Progress bars of tqdm, told to the panel by tqdm's own methods instead of drawn.

    tqdm(...)       writes nowhere, where it would write to this process's own streams
    bar.display()   how far it is, at tqdm's own pace
    bar.close()     it makes room for the next one

A widget (`tqdm.notebook`) is drawn as ever; its numbers tell how much is left.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbaccel.base.training_metrics import OuterLoop, ProgressBar
from nbaccel.workers.training_loops import RunningLoop

_MOST_KEPT = 16  # a function may leave any number of bars without closing them


@dataclass(kw_only=True, slots=True, eq=False)
class _KnownBar:
    bar: ProgressBar
    rounds: float
    total: float | None
    began_steps: int
    moved_at: float
    """When its number was another one, and what the training had come to then."""
    moved_s: float = 0.0
    moved_steps: int = 0
    is_closed: bool = False


class ProgressBars:
    """The bars of one function."""

    def __init__(self) -> None:
        self._bars: dict[int, _KnownBar] = {}
        """By the id of tqdm's object, the outer one first."""

    def note(self, tqdm_bar: Any, now: float, steps: int, *, is_elsewhere: bool = False) -> bool:
        """A bar would draw itself now; returns whether it is a new one."""
        found = _numbers_of(tqdm_bar, is_elsewhere=is_elsewhere)
        known = self._bars.get(id(tqdm_bar))
        is_new = known is None or known.is_closed
        if known is None or known.is_closed:
            # A loop that is through is of no interest once another one has begun.
            self._bars = {key: one for key, one in self._bars.items() if not one.is_closed}
            known = _KnownBar(
                bar=found,
                rounds=tqdm_bar.n,
                total=tqdm_bar.total,
                began_steps=steps,
                moved_at=now,
                moved_steps=steps,
            )
            self._bars[id(tqdm_bar)] = known
            for oldest in list(self._bars)[:-_MOST_KEPT]:
                del self._bars[oldest]
        elif known.rounds != tqdm_bar.n:
            known.moved_at = now
            known.moved_s = found.elapsed_s
            known.moved_steps = steps
        known.bar = found
        known.rounds = tqdm_bar.n
        known.total = tqdm_bar.total
        return is_new

    def close(self, tqdm_bar: Any) -> None:
        """A bar is through, or was left; it is shown until another one begins."""
        if known := self._bars.get(id(tqdm_bar)):
            known.is_closed = True

    def shown(self) -> tuple[ProgressBar, ...]:
        """The outermost and the innermost."""
        bars = [known.bar for known in self._bars.values()]
        return tuple(bars if len(bars) < 3 else (bars[0], bars[-1]))

    def around(self, loop: RunningLoop, now: float, steps: int) -> OuterLoop | None:
        """How far the loop is whose bar is around the loop over batches; None without one."""
        outer = next(iter(self._bars.values()), None)
        if outer is None or not outer.total or not _is_around(outer, loop, len(self._bars)):
            return None
        return OuterLoop(
            total=int(outer.total),
            done=int(outer.rounds),
            done_s=outer.moved_s,
            round_s=now - outer.moved_at,
            done_steps=outer.moved_steps - outer.began_steps,
            round_steps=steps - outer.moved_steps,
        )


def _is_around(outer: _KnownBar, loop: RunningLoop, num_bars: int) -> bool:
    """Whether it is the bar of a loop around another one, and not one that was left half done."""
    if loop.is_seen and outer.total == loop.total_batches:
        return False  # it is the bar of that loop
    if loop.epoch:
        # An epoch's loop may be over before the bar around it moves.
        return loop.epoch - 1 <= outer.rounds <= loop.epoch
    return num_bars > 1


def _numbers_of(tqdm_bar: Any, *, is_elsewhere: bool) -> ProgressBar:
    facts = tqdm_bar.format_dict
    done = facts["n"]
    total = facts["total"]
    elapsed_s = facts["elapsed"]
    rate = facts["rate"] or ((done - facts["initial"]) / elapsed_s if elapsed_s else None)
    text_of: Callable[[Any], str] = str
    if facts["unit_scale"] is True:
        text_of = functools.partial(tqdm_bar.format_sizeof, divisor=facts["unit_divisor"])
    return ProgressBar(
        description=(facts["prefix"] or "").removesuffix(": "),
        done=text_of(done),
        total=text_of(total) if total else "",
        fraction=min(1.0, done / total) if total else None,
        left_s=max(0.0, (total - done) / rate) if total and rate else None,
        elapsed_s=elapsed_s,
        is_elsewhere=is_elsewhere,
    )


class _Nowhere(io.TextIOBase):
    """Where a bar writes that the panel shows."""

    def write(self, text: str) -> int:
        return len(text)


NOWHERE = _Nowhere()


def release_lock() -> None:
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
