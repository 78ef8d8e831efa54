"""One progress bar for all processes: process 0 shows it, with everybody's samples and losses.

Every process posts its numbers to the rendezvous store twice a second at most, and nobody waits for
anybody: a process that is slow, or shows no bar, holds no other up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from nbaccel.abc.place import Place
from nbaccel.bars import Bar
from nbaccel.launch import reporting
from nbaccel.train.trees import find_batch_size

__all__ = ["Progress"]

_POST_S = 0.5
_Batch = TypeVar("_Batch")
_COUNT = itertools.count()  # of bars in this process: so that processes mean the same one


class Progress(Generic[_Batch]):
    """An iterable over a loader, with a bar.

    Args:
        loader: What to iterate over.
        place: This process among the others.
        description: Text before the bar.

    Attributes:
        samples: Rows that this process has had.
        bar: The bar; hidden on other processes than 0. Shown are batches of process 0, the mean of
            all processes' last losses, and samples per second of all together.
    """

    def __init__(self, loader: Iterable[_Batch], place: Place, description: str = "") -> None:
        self._loader = loader
        self._place = place
        self._number = next(_COUNT)
        self._loss: torch.Tensor | None = None
        self._start = time.time()
        self._posted = 0.0
        self.samples = 0
        try:
            total = len(loader)  # type: ignore[arg-type]
        except TypeError:  # an iterable dataset has no length
            total = None
        self.bar = Bar(
            total=total, desc=description or None, disable=not place.is_main, unit="batch"
        )

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_Batch]:
        self._start = time.time()
        reporting.loop_begins()
        try:
            for batch in self._loader:
                self.samples += find_batch_size(batch) or 0
                yield batch
                self.bar.update(1)
                reporting.step_done()
                if time.monotonic() - self._posted >= _POST_S:
                    self._report()
            self._report()
        finally:
            self.bar.close()

    def note(self, loss: torch.Tensor) -> None:
        """Remember the last loss; it is read from the device only when the bar is drawn."""
        self._loss = loss.detach()

    def _report(self) -> None:
        self._posted = time.monotonic()
        loss = None if self._loss is None else float(self._loss.float().mean())
        if loss is not None:
            reporting.loss_is(loss)
        mine: dict[str, Any] = {"samples": self.samples, "loss": loss, "since": self._start}
        everybody = [mine] if self._place.is_alone else self._exchange(mine)
        if not self._place.is_main:
            return
        seconds = max(time.time() - self._start, 1e-9)
        shown = {"samples/s": f"{sum(one['samples'] for one in everybody) / seconds:.0f}"}
        losses = [one["loss"] for one in everybody if one["loss"] is not None]
        if losses:
            shown = {"loss": f"{sum(losses) / len(losses):.4g}", **shown}
        if len(everybody) > 1:
            shown["processes"] = str(len(everybody))
        self.bar.set_postfix(shown)

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Post one's numbers; process 0 also reads what the others have posted so far."""
        with contextlib.suppress(dist.DistError):  # the store is gone: no bar is worth a failure
            store = dist.distributed_c10d._get_default_store()
            store.set(self._key(self._place.rank), json.dumps(mine))
            if self._place.is_main:
                keys = [self._key(rank) for rank in range(1, self._place.world_size)]
                posted = [json.loads(store.get(key)) for key in keys if store.check([key])]
                # An earlier run on the same store may have left numbers of its own.
                return [mine, *(one for one in posted if one["since"] > self._start - 3600)]
        return [mine]

    def _key(self, rank: int) -> str:
        return f"nbaccel/progress/{self._number}/{rank}"
