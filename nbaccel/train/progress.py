"""One progress bar for all processes: process 0 shows it, with its own samples and losses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from nbaccel.base import spent_time
from nbaccel.base.log import notice_stream, progress_bar
from nbaccel.base.trees import find_batch_size
from nbaccel.loops import loop_watch, metrics_reporter
from nbaccel.plan.contracts.training import Place
from nbaccel.train.loader import PreparedLoader

_SHOWN_EACH_S = 0.5
_LoaderBatch = TypeVar("_LoaderBatch")
_NO_BATCH = object()


class Progress(Generic[_LoaderBatch]):
    """An iterable over a loader, with a bar."""

    def __init__(
        self,
        loader: Iterable[_LoaderBatch],
        place: Place,
        description: str = "",
        epochs: int | None = None,
    ) -> None:
        self._loader = loader
        self._num_processes = place.world_size
        self._last_loss: torch.Tensor | None = None
        self._began_at = time.monotonic()
        self._last_shown_at = 0.0
        self._had_phase = False
        self._description = description
        self._epochs = epochs
        self.samples = 0  # rows that this process has had
        try:
            self._num_batches: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:  # an iterable dataset has no length
            self._num_batches = None
        reporter = metrics_reporter.current()
        # The bar; hidden on other processes than 0.
        self.bar = progress_bar(
            total=self._num_batches,
            desc=description or None,
            disable=not place.is_main or bool(reporter and reporter.shows_bars),
            unit="batch",
            file=notice_stream(),
        )

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_LoaderBatch]:
        self._began_at = time.monotonic()
        loop = None
        if reporter := metrics_reporter.current():
            loop = reporter.loop_begins(self._description, self._num_batches, self._epochs)
        try:
            for batch in self._batches():
                batch_samples = find_batch_size(batch) or 0
                self.samples += batch_samples
                self._show_phase()
                yield batch
                # After the loop's body: the batch counts when it has been trained with.
                self.bar.update(1)
                if reporter := metrics_reporter.current():
                    reporter.step_done(batch_samples, loop)
                if time.monotonic() - self._last_shown_at >= _SHOWN_EACH_S:
                    self._show_numbers()
            self._show_phase()
            self._show_numbers()
        finally:
            if loop is not None and (reporter := metrics_reporter.current()):
                reporter.loop_ends(loop)
            self.bar.close()

    def _batches(self) -> Iterator[_LoaderBatch]:
        """The loader's batches, counting the time that it takes to get each."""
        # A prepared one counts by itself, and has work of the step to do in between.
        is_prepared = isinstance(self._loader, PreparedLoader)
        reading = contextlib.nullcontext() if is_prepared else spent_time.reading_data
        with reading, loop_watch.telling():
            source = iter(self._loader)
        while True:
            if not is_prepared:
                loop_watch.end_step()
            with reading, loop_watch.telling():
                batch = next(source, _NO_BATCH)
            if batch is _NO_BATCH:
                return
            yield batch  # type: ignore[misc]
            if not is_prepared:
                spent_time.end_step()

    def _show_phase(self) -> None:
        """Say why this step takes long, where a device compiles in it."""
        state = getattr(self._loader, "gradient_state", None)
        phase = getattr(state, "compile_phase", "")
        if phase or self._had_phase:
            self.bar.set_postfix_str(phase)
        self._had_phase = bool(phase)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember the last loss; it is read from the device only when the bar is drawn."""
        self._last_loss = loss.detach()

    def _show_numbers(self) -> None:
        self._last_shown_at = time.monotonic()
        if self.bar.disable:
            return
        postfix: dict[str, Any] = {}
        if self._last_loss is not None:
            # Reading it waits for the device, which is why it is done this seldom.
            postfix["loss"] = f"{float(self._last_loss.float().mean()):.4g}"
        if self.samples:  # a loop over numbers has none
            rate = self.samples / max(self._last_shown_at - self._began_at, 1e-9)
            postfix["samples/s"] = f"{rate:.0f}"
        if self._num_processes > 1:
            postfix["processes"] = self._num_processes
        self.bar.set_postfix(postfix)
