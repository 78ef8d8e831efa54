"""What a training loop reports, sent to the launch's dashboard.

    accelerator.log, accelerator.progress ─┐
    loops that are only seen (`loop_watch`) ┴► Reporter ── Metrics ──► notebook: panel

Without a launch there is no reporter, and each call costs one comparison. With one, a message goes
out at most four times a second, and never waits: a busy notebook delays no worker. What has not
been sent when the function returns is sent then, so that the last value is never lost.
"""

from __future__ import annotations

import contextlib
import itertools
import numbers
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nbaccel.base import spent_time
from nbaccel.base.metric_history import MetricHistory
from nbaccel.base.training_metrics import Metrics
from nbaccel.plan.contracts.device import Device
from nbaccel.workers.training_loops import ProgressBars, RunningLoop, TrainingLoops

REPORT_INTERVAL_S = 0.25
_MAX_METRICS = 16
"""Metrics that are shown; a loop that logs a thousand has a tracker for them."""
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

    def send(self, message: Any) -> None:
        """Send, even if that means to wait."""


class Reporter:
    """Collects what the loop reports, and sends it at intervals."""

    def __init__(
        self, channel: MetricsChannel, hardware: Device, device: str, *, shows_bars: bool = False
    ) -> None:
        self._channel = channel
        self.shows_bars = shows_bars
        """Whether a panel shows loops and bars, so that nothing else need draw them."""
        self._hardware = hardware
        self._device = torch.device(device)
        self.process_id = os.getpid()
        """The process that it reports of; a forked DataLoader worker inherits it."""
        spent_time.open_account()
        self._new_points: defaultdict[str, MetricHistory] = defaultdict(MetricHistory)
        self._names: dict[str, None] = {}
        self._logged: set[str] = set()
        self._unread: list[tuple[str, float, torch.Tensor]] = []
        """Metric, step, and value on its device."""
        self._num_older = 0
        """How many of these were there at the last message: their device has computed them."""
        self._replaced: set[str] = set()
        self._left_out: dict[str, None] = {}
        self._loops = TrainingLoops()
        self._bars = ProgressBars()
        self._bar_is_whole = False
        self._samples = 0
        self._batches = 0
        self._told_steps: int | None = None
        """Batches of loops that say when they begin, or the latest step that was logged."""
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

    # ---- what the function says

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
                self._replace_seen(str(name))
                self._note(str(name)[:_NAME_CHARS], value, at_step or 0)
        self._tell()

    def loop_begins(
        self,
        name: str,
        total_batches: int | None,
        epochs: int | None,
        source: str | None = None,
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
        now = time.monotonic()
        if self._bars.note(tqdm_bar, now, self.steps or 0, is_elsewhere=is_elsewhere):
            self._next = 0.0
        self._tell()

    def close_bar(self, tqdm_bar: Any) -> None:
        """A bar of tqdm is through."""
        self._bars.close(tqdm_bar)

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

    # ---- what is seen of it

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

    # ---- points

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

    def _replace_seen(self, name: str) -> None:
        """The function logs this by itself: what was seen of the same is not drawn beside it."""
        for seen, words in _SEEN_WORDS.items():
            if seen in self._logged or not words.search(name.lower()):
                continue
            self._logged.add(seen)
            if seen in self._names:
                del self._names[seen]
                self._new_points.pop(seen, None)
                self._unread = [point for point in self._unread if point[0] != seen]
                self._num_older = 0
                self._replaced.add(seen)

    def _read_values(self, *, is_last: bool) -> None:
        """Read what devices have computed: what was there at the last message, or all."""
        num_read = len(self._unread) if is_last else self._num_older
        for name, step, value in self._unread[:num_read]:
            self._new_points[name].add(float(value), step)
        del self._unread[:num_read]
        self._num_older = len(self._unread)

    # ---- messages

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
        self._read_values(is_last=is_last)
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
            or self._bars.around(loop, now, self.steps or 0),
            bars=self._bars.shown(),
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
