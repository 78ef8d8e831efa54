"""What a training loop reports, sent to the launch's dashboard.

    worker: accelerator.log, accelerator.progress ─► Reporter ── Metrics ──► notebook: dashboard

Without a launch there is no reporter, and each call costs one comparison. With one, a message goes
out at most four times a second, and never waits: a busy notebook delays no worker. What has not
been sent when the function returns is sent then, so that the last value is never lost.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nbaccel.base import leftovers, spent_time
from nbaccel.plan.contracts.device import Device
from nbaccel.workers import messaging
from nbaccel.workers.training_loops import RunningLoop, TrainingLoops

REPORT_INTERVAL_S = 0.25
_MAX_METRICS = 16
"""Metrics that are shown; a loop that logs a thousand has a tracker for them."""
_MAX_COUNTED = 10_000  # further ones: else endless new names would fill the memory
_MAX_NAMED = 8
_NAME_CHARS = 60


class MetricsChannel(Protocol):
    """Where reports go."""

    def try_send(self, message: Any) -> bool:
        """Send unless that would mean to wait; returns whether it is sent."""

    def send(self, message: Any) -> None:
        """Send, even if that means to wait."""


class Reporter:
    """Collects what the loop reports, and sends it at intervals."""

    def __init__(self, channel: MetricsChannel, hardware: Device, device: str) -> None:
        self._channel = channel
        self.draws_bars = getattr(channel, "draws_bars", False)
        self._hardware = hardware
        self._device = device
        self._pid = os.getpid()
        spent_time.open_account()
        self._values: dict[str, float] = {}
        self._value_steps: dict[str, int] = {}
        self._left_out: dict[str, None] = {}
        self._steps = 0
        self._loops = TrainingLoops()
        self._bar_is_whole = False
        self._samples = 0
        self._counts_batches = False
        self._logs_a_loss = False
        self._is_news = False
        self._phase = ""
        self._programs: int | None = None
        self._compile_s = 0.0
        self._next = 0.0

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Take in what `accelerator.log` was given."""
        # A loop over batches that is not nbaccel's has begun at its first log at the latest.
        spent_time.begin_account()
        if not self._counts_batches:
            self._steps = self._steps + 1 if step is None else int(step)
        for name, value in _finite_numbers(values):
            # Known names always: a full table must still show new values.
            if name not in self._values and len(self._values) == _MAX_METRICS:
                if len(self._left_out) < _MAX_COUNTED:
                    self._left_out[name] = None
                continue
            if name not in self._values:
                # Sent at once: it begins a curve, and is what "1 → 0.02" begins with.
                self._next = 0.0
            self._values[name] = value
            self._value_steps[name] = self._steps
            self._logs_a_loss = self._logs_a_loss or "loss" in name.lower()
        self._tell()

    def loop_begins(self, name: str, total_batches: int | None, epochs: int | None) -> RunningLoop:
        """A loop over batches begins: from now on a step is a batch."""
        spent_time.begin_account()
        if not self._counts_batches:
            self._counts_batches = True
            self._steps = 0
        loop = self._loops.begin(
            name, total_batches, epochs=epochs, current_time=time.monotonic(), steps=self._steps
        )
        # The notebook computes the speed from the first message of a loop.
        self._tell_now()
        return loop

    def step_done(self, num_samples: int, loop: RunningLoop | None) -> None:
        """A batch was used, or an epoch is over."""
        if self._loops.round_done(loop, time.monotonic(), self._steps):
            self._steps += 1
            self._samples += num_samples
        self._tell()

    def loop_ends(self, loop: RunningLoop) -> None:
        """A loop is over, or was left."""
        self._loops.end(loop)

    def note_whole_bar(self, is_drawn: bool) -> None:
        """From now on the bar that is drawn is that of the whole training, or it is not."""
        self._bar_is_whole = is_drawn
        self._tell_now()

    def loss_is(self, value: float) -> None:
        """Take in the loss that the progress bar shows, unless the loop logs one by itself."""
        if not self._logs_a_loss:
            self._values["loss"] = value
            self._value_steps["loss"] = self._steps
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

    def _tell_now(self) -> None:
        self._next = 0.0
        self._tell()

    def _tell(self) -> None:
        self._is_news = True
        now = time.monotonic()
        # A forked DataLoader worker inherits this object, and is not the rank.
        if now < self._next or os.getpid() != self._pid:
            return
        self._next = now + REPORT_INTERVAL_S
        # The notebook is gone: this process ends soon.
        with contextlib.suppress(OSError):
            self._is_news = not self._channel.try_send(self._message(now))

    def flush(self) -> None:
        """The function has returned: send what has not been sent yet, even if that means to wait.

        What follows, until the worker leaves or has another task, is no time of the function's.
        """
        if os.getpid() != self._pid:
            return
        if self._is_news or spent_time.present_spent() is not None:
            self._is_news = False
            # The notebook is gone: this process ends soon.
            with contextlib.suppress(OSError):
                self._channel.send(self._message(time.monotonic()))
        spent_time.use_account(None)

    def _message(self, now: float) -> messaging.Metrics:
        loop = self._loops.latest
        return messaging.Metrics(
            time=now,
            steps=self._steps,
            values=tuple(self._values.items()),
            device_bytes=reserved(self._hardware, self._device),
            phase=self._phase,
            programs=self._programs,
            compile_s=self._compile_s,
            spent=spent_time.present_spent(),
            value_steps=tuple(self._value_steps[name] for name in self._values),
            loop_name=loop.name[:_NAME_CHARS],
            epoch=loop.epoch,
            batches=loop.batches,
            total_batches=loop.total_batches,
            samples=self._samples,
            outer=self._loops.around(now, self._steps),
            bar_is_whole=self._bar_is_whole,
            num_left_out=len(self._left_out),
            left_out=tuple(itertools.islice(self._left_out, _MAX_NAMED)),
        )


_process_reporter: Reporter | None = None


def begin(channel: messaging.Channel, hardware: Device, device: str) -> None:
    """Report to the notebook from now on; steps are counted from here."""
    global _process_reporter  # noqa: PLW0603 - a worker has one notebook, and user code has no handle on it
    _process_reporter = Reporter(channel, hardware, device)
    _count_waits()

    def leave(leftover: leftovers.LeftoverFolders, is_there: bool) -> None:
        # The notebook is gone, so there is no reader.
        with contextlib.suppress(OSError):
            channel.send(messaging.Leaves(leftover, is_there))

    leftovers.listen_for_leftovers(leave)


@contextlib.contextmanager
def reporting_to(channel: MetricsChannel, hardware: Device, device: str) -> Iterator[None]:
    """A block in which loops of this process, which is no worker, report."""
    global _process_reporter  # noqa: PLW0603 - see `begin`
    before = _process_reporter
    account_before = spent_time.present_account()
    reporter = _process_reporter = Reporter(channel, hardware, device)
    try:
        yield
    finally:
        reporter.flush()
        _process_reporter = before
        spent_time.use_account(account_before)


def _count_waits() -> None:
    """Count the time for which this process waits in collectives of torch and of libraries.

    All that are called in Python end in this method, at once or when their result is needed. On a
    GPU it returns when the wait is queued: what the GPU then waits is not seen here.
    """
    plain_wait = dist.Work.wait
    if hasattr(plain_wait, "__wrapped__"):
        return

    @functools.wraps(plain_wait)
    def counted_wait(work: dist.Work, *args: Any, **options: Any) -> Any:
        with spent_time.communicating:
            return plain_wait(work, *args, **options)

    dist.Work.wait = counted_wait  # type: ignore[method-assign, assignment]


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


def reserved(hardware: Device, device: str) -> int | None:
    """Bytes of the device that this process's allocator holds."""
    return hardware.reserved_bytes(torch.device(device))


def _finite_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, numbers.Real):
            yield str(name)[:_NAME_CHARS], float(value)
        # Reading a tensor of a GPU would wait for the GPU.
        elif type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() == 1:
            yield str(name)[:_NAME_CHARS], float(value.detach())
