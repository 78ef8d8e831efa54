"""One progress bar for all processes: process 0 shows it, with the samples and losses of all.

Every process writes its numbers to the rendezvous store twice a second at most, and none waits for
another: a process that is slow, or shows no bar, delays no other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from nbaccel.base import spent_time, torch_private
from nbaccel.base.log import notice_stream, progress_bar
from nbaccel.base.trees import find_batch_size
from nbaccel.loops import loop_watch, metrics_reporter
from nbaccel.plan.contracts.training import Place
from nbaccel.train.loader import PreparedLoader

_POST_INTERVAL_S = 0.5
_LoaderBatch = TypeVar("_LoaderBatch")
# Processes make their bars in the same order, so equal numbers mean the same bar.
_BAR_COUNTER = itertools.count()
_NO_BATCH = object()


@dataclass(eq=False)
class Progress(Generic[_LoaderBatch]):
    """An iterable over a loader, with a bar."""

    _loader: Iterable[_LoaderBatch]
    _place: Place
    _description: str = ""
    _epochs: int | None = None

    def __post_init__(self) -> None:
        self._bar_number = next(_BAR_COUNTER)
        self._last_loss: torch.Tensor | None = None
        # Not the monotonic clock: other processes compare this time with theirs.
        self._start_time = time.time()
        self._last_post_s = 0.0
        self._had_phase = False
        self.samples = 0  # rows that this process has had
        try:
            self._num_batches: int | None = len(self._loader)  # type: ignore[arg-type]
        except TypeError:  # an iterable dataset has no length
            self._num_batches = None
        reporter = metrics_reporter.current()
        # The bar; hidden on other processes than 0. Shown are batches of process 0, the mean of all
        # processes' last losses, and samples per second of all together.
        self.bar = progress_bar(
            total=self._num_batches,
            desc=self._description or None,
            disable=not self._place.is_main or bool(reporter and reporter.shows_bars),
            unit="batch",
            file=notice_stream(),
        )

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_LoaderBatch]:
        self._start_time = time.time()
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
                if time.monotonic() - self._last_post_s >= _POST_INTERVAL_S:
                    self._report_progress()
            self._show_phase()
            self._report_progress()
        finally:
            if loop is not None and (reporter := metrics_reporter.current()):
                reporter.loop_ends(loop)
            self.bar.close()

    def _batches(self) -> Iterator[_LoaderBatch]:
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

    def _report_progress(self) -> None:
        self._last_post_s = time.monotonic()
        # Reading the loss waits for the device, which is why it is done this seldom.
        last_loss = None if self._last_loss is None else float(self._last_loss.float().mean())
        own: dict[str, Any] = {
            "samples": self.samples,
            "loss": last_loss,
            "since": self._start_time,
        }
        all_numbers = [own] if self._place.is_alone else self._exchange_numbers(own)
        if not self._place.is_main:
            return
        # The clock may not have advanced since the start, or may have been set back.
        elapsed_s = max(time.time() - self._start_time, 1e-9)
        all_samples = sum(rank_numbers["samples"] for rank_numbers in all_numbers)
        # A loop over numbers has none.
        postfix = {"samples/s": f"{all_samples / elapsed_s:.0f}"} if all_samples else {}
        losses = [numbers["loss"] for numbers in all_numbers if numbers["loss"] is not None]
        if losses:
            postfix = {"loss": f"{sum(losses) / len(losses):.4g}", **postfix}
        if not self._place.is_alone:
            heard, all_processes = len(all_numbers), self._place.world_size
            # Of those that have said nothing yet no samples are counted.
            before = "" if heard == all_processes else f"{heard} of "
            postfix["processes"] = f"{before}{all_processes}"
        self.bar.set_postfix(postfix)

    def _exchange_numbers(self, own_numbers: dict[str, Any]) -> list[dict[str, Any]]:
        """Write this process's numbers; process 0 also reads those of the others so far."""
        with contextlib.suppress(dist.DistError):  # the store is gone; a bar must not end training
            store = torch_private.default_store()
            store.set(self._store_key(self._place.rank), json.dumps(own_numbers))
            if self._place.is_main:
                store_keys = [self._store_key(rank) for rank in range(1, self._place.world_size)]
                # `get` blocks until a key exists: what has not written anything yet is left out.
                posted = [json.loads(store.get(key)) for key in store_keys if store.check([key])]
                # An earlier run on the same store may have left numbers of its own.
                since = self._start_time - 3600
                return [own_numbers, *(n for n in posted if n["since"] > since)]
        return [own_numbers]

    def _store_key(self, rank: int) -> str:
        return f"nbaccel/progress/{self._bar_number}/{rank}"
