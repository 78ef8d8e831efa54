"""What a training loop reports, sent to the launch's dashboard: metrics, loops, progress bars.

    accelerator.log, accelerator.progress ─┐
    loops that are only seen (`loop_watch`) ┴► Reporter ── Metrics ──► notebook: panel

Without a launch there is no reporter, and each call costs one comparison. With one, a message goes
out at most twice a second, and never waits. What has not been sent when the function returns is
sent then, so that the last value is never lost.

A loop within which another one begins (`for epoch in accelerator.progress(range(14))`) is over
epochs, and its rounds are no batches. One that is told `epochs=14` begins anew for each epoch. Bars
of tqdm tell the panel how far they are instead of being drawn; widgets are drawn as ever.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import numbers
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nbaccel.base import spent_time
from nbaccel.base.training_metrics import MetricHistory, Metrics, OuterLoop, ProgressBar
from nbaccel.plan.contracts.device import Device

REPORT_INTERVAL_S = 0.5
_MAX_METRICS = 16  # metrics that are shown; a loop that logs a thousand has a tracker for them
_MAX_COUNTED = 10_000  # further ones: else endless new names would fill the memory
_MAX_NAMED = 8
_NAME_CHARS = 60
_MAX_UNREAD = 256
_RATE = "learning rate"
_SEEN_WORDS = {
    # That of an evaluation is another one.
    "loss": re.compile(r"^(?!.*(?:val|test)).*loss"),
    _RATE: re.compile(r"\blr\b|learning.rate|_lr\b|\blr_"),
}
"""What is seen → names under which functions log the same."""


class MetricsChannel(Protocol):
    """Where reports go."""

    def try_send(self, message: Any) -> bool:
        """Send unless that would mean to wait; returns whether it is sent."""

    def send(self, message: Any) -> object:
        """Send, even if that means to wait."""


class Reporter:
    """Collects what the loop reports, and sends it at intervals."""

    def __init__(
        self, channel: MetricsChannel, hardware: Device, device: str, *, shows_bars: bool = False
    ) -> None:
        self._channel = channel
        # Whether a panel shows loops and bars, so that nothing else need draw them.
        self.shows_bars = shows_bars
        self._hardware = hardware
        self._device = torch.device(device)
        # The process that it reports of; a forked DataLoader worker inherits it.
        self.process_id = os.getpid()
        spent_time.open_account()
        self._new_points: defaultdict[str, MetricHistory] = defaultdict(MetricHistory)
        self._names: dict[str, None] = {}
        self._logged: set[str] = set()
        # Metric, step, and value on its device.
        self._unread: list[tuple[str, float, torch.Tensor]] = []
        # How many of these were there at the last message: their device has computed them.
        self._num_older = 0
        self._replaced: set[str] = set()
        self._left_out: dict[str, None] = {}
        self._loops = TrainingLoops()
        self.bars = ProgressBars()
        self._bar_is_whole = False
        self._samples = 0
        self._batches = 0
        # Batches of loops that say when they begin, or the latest step that was logged.
        self._told_steps: int | None = None
        self._counts_batches = False
        self._optimizer_steps: dict[int, int] = {}
        self._learning_rate: float | None = None
        self._had_group = False
        self._is_news = False
        self._phase = ""
        self._programs: int | None = None
        self._compile_s = 0.0
        self._next = 0.0

    @property
    def steps(self) -> int | None:
        """Batches of loops that say when they begin; else steps of an optimizer, or of the log."""
        # One over epochs counts none where the loops within it were only seen.
        holds_seen = self._loops.latest.is_seen and not self._told_steps
        if (self._counts_batches and not holds_seen) or not self._optimizer_steps:
            return self._told_steps if self._told_steps is not None else self._batches or None
        return max(self._optimizer_steps.values())

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Take in what `accelerator.log` was given."""
        # A loop over batches that nobody has seen has begun at its first log at the latest.
        spent_time.begin_account()
        if not self._counts_batches:
            self._told_steps = (self._told_steps or 0) + 1 if step is None else int(step)
        at_step = self.steps if step is None else int(step)
        for name, value in values.items():
            # It is what the curves are drawn over.
            if str(name).lower() != "epoch":
                # The function logs it by itself: what was seen of the same is not drawn, too.
                for seen, words in _SEEN_WORDS.items():
                    if seen in self._logged or not words.search(str(name).lower()):
                        continue
                    self._logged.add(seen)
                    if seen in self._names:
                        del self._names[seen]
                        self._new_points.pop(seen, None)
                        self._unread = [point for point in self._unread if point[0] != seen]
                        self._num_older = 0
                        self._replaced.add(seen)
                self._note(str(name)[:_NAME_CHARS], value, at_step or 0)
        self._tell()

    def loop_begins(
        self, name: str, total_batches: int | None, epochs: int | None, source: str | None = None
    ) -> RunningLoop:
        """A loop over batches begins: a step is a batch, unless it was only seen."""
        spent_time.begin_account()
        if source is None and not self._counts_batches:
            self._counts_batches = True
            self._told_steps = 0
        loop = self._loops.begin(
            name,
            total_batches,
            epochs=epochs,
            current_time=time.monotonic(),
            steps=self.steps or 0,
            source=source,
        )
        # The notebook computes the speed from the first message of a loop.
        self._tell_now()
        return loop

    def step_done(self, num_samples: int, loop: RunningLoop | None) -> None:
        """A batch was used, or an epoch is over."""
        if self._loops.round_done(loop, time.monotonic(), self.steps or 0):
            self._batches += 1
            self._samples += num_samples
            if self._counts_batches and (loop is None or not loop.is_seen):
                self._told_steps = (self._told_steps or 0) + 1
        self._tell()

    def loop_ends(self, loop: RunningLoop) -> None:
        """A loop is over, or was left."""
        self._loops.end(loop)

    def note_whole_bar(self, is_drawn: bool) -> None:
        """From now on the bar that is drawn is that of the whole training, or it is not."""
        self._bar_is_whole = is_drawn
        self._tell_now()

    def note_bar(self, tqdm_bar: Any, *, is_elsewhere: bool = False) -> None:
        """A bar of tqdm would draw itself now, or is drawn elsewhere."""
        if self.bars.note(tqdm_bar, time.monotonic(), self.steps or 0, is_elsewhere=is_elsewhere):
            self._next = 0.0
        self._tell()

    def note_phase(self, phase: str) -> None:
        """What the step that begins will do beside training; empty for nothing."""
        if phase != self._phase:
            self._phase = phase
            # The step may take minutes, and that is what it is said for.
            self._tell_now()

    def note_compiled(self, programs: int, seconds: float) -> None:
        """What the device's compiler has done so far."""
        self._programs = programs
        self._compile_s = seconds

    def loss_seen(self, loss: torch.Tensor) -> None:
        """A backward pass begins from this 0-d tensor."""
        if "loss" not in self._logged:
            self._note("loss", loss, (self.steps or 0) + 1)

    def stepped(self, optimizer_id: int, learning_rate: Any) -> None:
        """An optimizer has stepped, with this rate."""
        spent_time.begin_account()
        self._optimizer_steps[optimizer_id] = self._optimizer_steps.get(optimizer_id, 0) + 1
        # One that stays as it is makes no curve; one on a device is a setting of few.
        if isinstance(learning_rate, float) and learning_rate != self._learning_rate:
            if self._learning_rate is not None and _RATE not in self._logged:
                self._note(_RATE, learning_rate, self.steps or 0)
            self._learning_rate = learning_rate
        self._tell()

    def _note(self, name: str, value: Any, step: float) -> None:
        is_tensor = type(value) is torch.Tensor
        if not is_tensor and not isinstance(value, numbers.Real):
            return
        if is_tensor and (value.numel() != 1 or value.is_meta):
            return
        # Known names always: a full table must still show new values.
        if name not in self._names and len(self._names) == _MAX_METRICS:
            if len(self._left_out) < _MAX_COUNTED:
                self._left_out[name] = None
            return
        if name not in self._names:
            # It begins a curve, and is what "1 → 0.02" begins with.
            self._next = 0.0
            self._names[name] = None
        if is_tensor and not value.is_cpu:
            # Reading it now would wait for the device.
            self._unread.append((name, step, value.detach()))
            if len(self._unread) > _MAX_UNREAD:
                del self._unread[::2]
                self._num_older //= 2
        else:
            self._new_points[name].add(value.item() if is_tensor else float(value), step)

    def _tell_now(self) -> None:
        self._next = 0.0
        self._tell()

    def _tell(self) -> None:
        self._is_news = True
        now = time.monotonic()
        # A forked DataLoader worker inherits this object, and is not the rank.
        if now < self._next or os.getpid() != self.process_id:
            return
        self._next = now + REPORT_INTERVAL_S
        # The notebook is gone: this process ends soon.
        with contextlib.suppress(OSError):
            if self._channel.try_send(self._message(now)):
                self._note_sent()

    def _note_sent(self) -> None:
        self._is_news = False
        self._new_points.clear()
        self._replaced = set()

    def flush(self) -> None:
        """The function has returned: send the rest, and count no more time as the function's."""
        if os.getpid() != self.process_id:
            return
        if self._is_news or self._unread or spent_time.present_spent() is not None:
            # The notebook is gone: this process ends soon.
            with contextlib.suppress(OSError):
                self._channel.send(self._message(time.monotonic(), is_last=True))
            self._note_sent()
        spent_time.use_account(None)

    def _message(self, now: float, *, is_last: bool = False) -> Metrics:
        # Read what devices have computed: what was there at the last message, or all.
        num_read = len(self._unread) if is_last else self._num_older
        for name, step, value in self._unread[:num_read]:
            self._new_points[name].add(float(value), step)
        del self._unread[:num_read]
        self._num_older = len(self._unread)
        self._had_group = self._had_group or dist.is_initialized()
        loop = self._loops.latest
        return Metrics(
            time=now,
            steps=self.steps,
            points=tuple(
                (name, tuple(self._new_points[name].points()))
                for name in self._names
                if name in self._new_points
            ),
            replaced=tuple(self._replaced),
            device_bytes=self._hardware.reserved_bytes(self._device),
            phase=self._phase,
            programs=self._programs,
            compile_s=self._compile_s,
            spent=spent_time.present_spent(),
            had_group=self._had_group,
            loop_name=loop.name[:_NAME_CHARS],
            loop_began_at_step=loop.began_at_step,
            loop_is_seen=loop.is_seen,
            epoch=loop.epoch,
            batches=loop.batches,
            total_batches=loop.total_batches,
            batches_in_all=self._batches,
            samples=self._samples,
            outer=self._loops.around(now, self.steps or 0)
            or self.bars.around(loop, now, self.steps or 0),
            bars=self.bars.shown(),
            bar_is_whole=self._bar_is_whole,
            num_left_out=len(self._left_out),
            left_out=tuple(itertools.islice(self._left_out, _MAX_NAMED)),
        )


_process_reporter: Reporter | None = None


def report_by(reporter: Reporter | None) -> Reporter | None:
    """Let this process report by another one from now on; returns the one until now."""
    global _process_reporter  # noqa: PLW0603 - a process has one notebook, and user code has no handle on it
    before = _process_reporter
    _process_reporter = reporter
    return before


def current() -> Reporter | None:
    """What reports of this process are given to, if there is a launch."""
    return _process_reporter


@contextlib.contextmanager
def drawing_whole_bar() -> Iterator[None]:
    """A block whose outer bar is that of a whole training, with all its epochs."""
    reporter = _process_reporter
    if reporter is not None:
        reporter.note_whole_bar(True)
    try:
        yield
    finally:
        if reporter is not None:
            reporter.note_whole_bar(False)


def flush() -> None:
    """Send the last values."""
    if _process_reporter is not None:
        _process_reporter.flush()


_MOST_LOOPS = 2  # other loops that an epoch may have beside its first one
_DIGITS = re.compile(r"\d+")

_LoopKey = tuple[int, str, "int | None", "str | None"]  # depth, name without numbers, length


class EpochCount:
    """Counts the epochs of one training, or rounds of a bar, by the clock of this process."""

    def __init__(self, total: float, began_at: float, began_steps: int) -> None:
        self.total = total
        self.done = 0.0
        self._began_at = self._done_at = began_at
        self._began_steps = self._done_steps = began_steps

    def note_done(self, current_time: float, steps: int) -> None:
        """One more is over."""
        self.done = self.done + 1
        self._done_at = current_time
        self._done_steps = steps

    def progress(self, current_time: float, steps: int) -> OuterLoop:
        """How far it is."""
        return OuterLoop(
            total=int(self.total),
            done=int(self.done),
            done_s=self._done_at - self._began_at,
            round_s=current_time - self._done_at,
            done_steps=self._done_steps - self._began_steps,
            round_steps=steps - self._done_steps,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class RunningLoop:
    """A loop that is under way, or was last."""

    name: str = ""
    is_seen: bool = False  # whether it was seen from outside, and did not say itself that it begins
    began_at_step: int = 0
    epoch: int = 0  # how many of its kind have begun, this one included
    batches: int = 0
    total_batches: int | None = None
    # Of a loop of known length: for the case that other loops begin within it.
    epochs: EpochCount | None = None
    holds_loops: bool = False  # whether its rounds are no batches, as others have begun within them
    had_loops: bool = False
    uncounted: int = 0


class TrainingLoops:
    """All loops of one function that have a bar."""

    def __init__(self) -> None:
        self.latest = RunningLoop()
        self._open: list[RunningLoop] = []
        self._begun: dict[_LoopKey, int] = {}
        self._around: EpochCount | None = None
        # The loop whose number of epochs was given, if that is where it is known from.
        self._given_key: _LoopKey | None = None
        self._since_given = 0  # other loops since that one has begun last

    def begin(
        self,
        name: str,
        total_batches: int | None,
        *,
        epochs: int | None,
        current_time: float,
        steps: int,
        source: str | None = None,
    ) -> RunningLoop:
        """A loop begins; one that was only seen is told by what it reads from."""
        if self._open:
            parent = self._open[-1]
            was_plain = not parent.had_loops and not parent.holds_loops
            if parent.batches and parent.total_batches and was_plain:
                # Rounds without others: batches, or epochs that are skipped. The next one tells.
                rounds_left = parent.total_batches - parent.batches
                parent.epochs = EpochCount(rounds_left, current_time, steps)
            parent.had_loops = True
            parent.holds_loops = parent.holds_loops or not parent.batches
        around = self._epochs_around()
        # Not by the loader, of which there may be a new one for each epoch, nor by its number.
        key = (len(self._open), _DIGITS.sub("#", name), total_batches, source)
        self._begun[key] = self._begun.get(key, 0) + 1
        if around is not None:
            self._around = around
            self._given_key = None
        elif epochs:
            self._count_given(key, epochs, current_time, steps)
        elif self._given_key is not None and key[0] == self._given_key[0]:
            self._since_given += 1
        elif self._given_key is None and not self._open:
            self._around = None  # an earlier loop over epochs is over
        loop = RunningLoop(
            name=name,
            is_seen=source is not None,
            began_at_step=steps,
            epoch=self._begun[key],
            total_batches=total_batches,
            epochs=EpochCount(total_batches, current_time, steps) if total_batches else None,
        )
        self._open.append(loop)
        self.latest = loop
        return loop

    def _epochs_around(self) -> EpochCount | None:
        """Those of the innermost loop over epochs of known number; of folds, those of one."""
        holding = (loop.epochs for loop in reversed(self._open) if loop.holds_loops)
        return next((epochs for epochs in holding if epochs is not None), None)

    def _count_given(self, key: _LoopKey, epochs: int, current_time: float, steps: int) -> None:
        self._since_given += 1
        is_resumed = self._begun[key] == 2 and self._given_key and self._begun[self._given_key] == 1
        if is_resumed and self._around is not None:
            # The first one was the rest of an epoch, and shorter.
            self._given_key = key
            self._around.done = 1
        if key == self._given_key and self._around is not None:
            self._since_given = 0
            self._around.note_done(current_time, steps)
            is_over = self._around.done >= epochs
        else:
            # A loop for validation says the same number, and begins as often as the first one.
            is_over = self._given_key is None or (
                self._begun[key] == 1
                and self._around is not None
                and self._around.done + 1 >= self._around.total
                and self._around.total > 1
            )
        if is_over:
            self._begun[key] = 1
            self._given_key = key
            self._since_given = 0
            self._around = EpochCount(epochs, current_time, steps)

    def round_done(self, loop: RunningLoop | None, current_time: float, steps: int) -> bool:
        """A round of a loop is over."""
        done = loop or self.latest
        had_loops = done.had_loops
        done.had_loops = False
        # One that has begun later may run on at the end of a round (`zip`, threads).
        if done in self._open and self._open[-1] is not done:
            self._let_be_over_batches(done)
            return False
        if had_loops and done.epochs is not None:
            done.epochs.note_done(current_time, steps)
        if done.holds_loops and had_loops:
            done.uncounted += 1
            return False
        if had_loops:
            # One with a validation now and then, or one over epochs of which some were skipped.
            done.holds_loops = True
        elif done.holds_loops:
            self._let_be_over_batches(done)
        done.batches += 1
        if loop in self._open:
            self.latest = done
        return True

    def _let_be_over_batches(self, loop: RunningLoop) -> None:
        """Its rounds are no epochs, though other loops have begun within one."""
        was_around = loop.epochs is not None and self._around is loop.epochs
        loop.batches += loop.uncounted
        loop.holds_loops = False
        loop.epochs = None
        loop.uncounted = 0
        if was_around:
            self._around = self._epochs_around()

    def end(self, loop: RunningLoop) -> None:
        """A loop is over, or was left."""
        if loop in self._open:
            # Loops within it that were left without an end are over, too.
            del self._open[self._open.index(loop) :]

    def around(self, current_time: float, steps: int) -> OuterLoop | None:
        """How far the epochs of the training are; None where it is not known how many there are."""
        if self._around is None:
            return None
        if self._given_key and not self._around.done and self._since_given > _MOST_LOOPS:
            return None  # no loop is like another one: none tells when an epoch is over
        return self._around.progress(current_time, steps)


@dataclass(kw_only=True, slots=True, eq=False)
class _KnownBar:
    bar: ProgressBar
    count: EpochCount  # of its rounds
    is_closed: bool = False


class ProgressBars:
    """The bars of one function."""

    def __init__(self) -> None:
        self._bars: dict[int, _KnownBar] = {}  # by the id of tqdm's object, the outer one first

    def note(self, tqdm_bar: Any, now: float, steps: int, *, is_elsewhere: bool = False) -> bool:
        """A bar would draw itself now; returns whether it is a new one."""
        found = _numbers_of(tqdm_bar, is_elsewhere=is_elsewhere)
        known = self._bars.get(id(tqdm_bar))
        is_new = known is None or known.is_closed
        if known is None or known.is_closed:
            # A loop that is through is of no interest once another one has begun.
            self._bars = {key: one for key, one in self._bars.items() if not one.is_closed}
            known = _KnownBar(bar=found, count=EpochCount(0, now - found.elapsed_s, steps))
            self._bars[id(tqdm_bar)] = known
        elif known.count.done != tqdm_bar.n:
            known.count.note_done(now, steps)
        known.bar = found
        known.count.done = tqdm_bar.n
        known.count.total = tqdm_bar.total or 0
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
        if outer is None or not outer.count.total:
            return None
        if loop.is_seen and outer.count.total == loop.total_batches:
            return None  # it is the bar of that loop
        # An epoch's loop may be over before the bar around it moves; others were left half done.
        is_around = len(self._bars) > 1
        if loop.epoch:
            is_around = loop.epoch - 1 <= outer.count.done <= loop.epoch
        return outer.count.progress(now, steps) if is_around else None


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

    tqdm 4.70 does not release it when drawing is interrupted (`refresh` in its `std.py`): bars of
    other threads and forks then wait forever. No bar of this thread may be drawing itself now.
    """
    bar_class = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    # A lock that the user has set is the user's own.
    for lock in getattr(bar_class.get_lock(), "locks", ()) if bar_class is not None else ():
        # Each kind has its own error for a lock that this thread does not hold.
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):
            while True:
                lock.release()
