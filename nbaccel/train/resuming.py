"""Going on where a Stop has ended an earlier launch of the same function.

[Note: the same loops again] The function begins anew, and so do its loops. Rounds of
`accelerator.progress(range(...))` that were done are left out; without it, prepared loaders give no
batch in the loops that were done. Until the stopped loop goes on, optimizers, schedulers, logs and
checkpoints do nothing, so that what surrounds these loops counts nothing twice.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

from nbaccel.base import atomic, env
from nbaccel.base.errors import ConfigError
from nbaccel.base.log import write_notice
from nbaccel.loops import loop_watch
from nbaccel.plan.contracts.training import Place
from nbaccel.plan.topology import FOLDER_VARIABLE
from nbaccel.train import rng

_POSITION_FILE = "position.json"
_Item = TypeVar("_Item")


@dataclass(eq=False)
class Resuming:
    """What an accelerator keeps of a launch that is stopped, and how the next one goes on."""

    _folder: Path  # where it is kept
    _place: Place  # this process among the others
    _loaders: Sequence[Any]  # prepared loaders, in the order in which they were prepared
    _: KW_ONLY
    save: Callable[[Path], Any]  # saves the accelerator's state to a folder; a collective
    load: Callable[[Path], Any]  # loads it; a collective
    # A loader without the batches that its restored position has seen.
    rest_of: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        self.is_skipping = False  # what the function does now was done before it was stopped
        self._has_begun = False
        self._epoch_loops = 0  # over epochs that have ended, where that is known
        self._round: int | None = None  # of a loop over epochs, if one is under way
        # Whether in this round or outside of all → number of a loader → loops over it that ended.
        self._ended: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self._to_skip: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self._running: list[int] = []  # numbers of loaders that are iterated over, innermost last
        self._stopped_at = (0, 0)  # which loop over epochs, and which of its rounds
        self._generators: dict[str, Any] | None = None

    @classmethod
    def asked_for(cls, place: Place, loaders: Sequence[Any], **how: Any) -> Resuming | None:
        """The one of a new accelerator; None where the launch was not asked to go on."""
        folder = env.read(FOLDER_VARIABLE)
        if not folder:
            return None
        savers = loop_watch.savers()
        resuming = cls(Path(folder) / str(len(savers)), place, loaders, **how)
        savers.append(resuming.keep)
        return resuming

    def keep(self) -> None:
        """Keep the state: the function is stopped between two steps of all ranks."""
        if not self._loaders:
            write_notice(
                "nbaccel: resume was asked for, and no loader is prepared by accelerator.prepare() "
                "that would know where it is: the next launch begins anew.\n"
            )
            return
        position_file = self._folder / _POSITION_FILE
        if self._place.is_local_main:
            # What was kept of an earlier Stop is behind the weights that come home now: where there
            # is no room for the new state, the next launch must not go on from that.
            position_file.unlink(missing_ok=True)
        self.save(self._folder)
        if self._place.is_local_main:
            position = {
                "stopped_at": (self._epoch_loops, self._round or 0),
                "ended_in_round": self._ended[True] if self._round is not None else {},
                "ended_outside": self._ended[False],
                "running": self._running,
                "processes": self._place.world_size,
            }
            atomic.write_text(position_file, json.dumps(position))

    def _begin(self) -> None:
        """Load the state, once: all that it is of has been prepared."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            position = json.loads((self._folder / _POSITION_FILE).read_text())
        except FileNotFoundError:  # nothing was stopped
            return
        if position["processes"] != self._place.world_size:
            raise ConfigError(
                f"The launch that was stopped had {position['processes']} processes, and this one "
                f"has {self._place.world_size}, which would read other batches. Launch with "
                f"num_processes={position['processes']}, or without resume to begin anew."
            )
        self.load(self._folder)
        self._generators = rng.capture_rng_states(self._place)
        self._stopped_at = tuple(position["stopped_at"])
        for is_in_round, name in ((True, "ended_in_round"), (False, "ended_outside")):
            counts = {int(number): count for number, count in position[name].items()}
            self._to_skip[is_in_round] = Counter(counts)
        for number, loader in enumerate(self._loaders):
            # Of a loop that was left early the next one is another.
            if number not in position["running"]:
                loader.position.leave_epoch()
        self.is_skipping = True
        if self._place.is_main:
            write_notice(
                "nbaccel: goes on where it was stopped. Epochs that were done give no batches; in "
                "`for epoch in accelerator.progress(range(...))` they are left out.\n"
            )

    def rounds(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The rounds of a loop over epochs that are left."""
        self._begin()
        is_outer = self._round is None
        try:
            for number, item in enumerate(items):
                if is_outer:
                    if (self._epoch_loops, number) < self._stopped_at:
                        continue
                    self._round = number
                    self._ended[True].clear()
                yield item
        finally:  # a loop may be left early
            if is_outer:
                self._round = None
                self._epoch_loops += 1

    def batches_left(self, loader: Any) -> Iterable[Any] | None:
        """What a loop over a loader reads: itself if it was not stopped, None if it was done."""
        self._begin()
        number = self._number_of(loader)
        if number is None:
            return loader  # type: ignore[no-any-return]
        to_skip = self._to_skip[self._round is not None]
        if to_skip[number] > 0:
            to_skip[number] -= 1
            self._note_end(number)
            return None
        if self.is_skipping:
            self.is_skipping = False
            # Code between the loops that were left out may have drawn numbers.
            rng.restore_rng_states(self._place, self._generators or {})
        is_within = loader.position.restored_state is not None
        return self.rest_of(loader) if is_within and loader.batches_seen else loader

    @contextlib.contextmanager
    def looping(self, loader: Any) -> Iterator[None]:
        """A block in which a loop over a prepared loader reads, to its end or until it is left."""
        number = self._number_of(loader)
        if number is None:
            yield
            return
        self._running.append(number)
        try:
            yield
        finally:
            self._running.remove(number)
            self._note_end(number)

    def _note_end(self, number: int) -> None:
        self._ended[self._round is not None][number] += 1

    def _number_of(self, loader: Any) -> int | None:
        return next((n for n, known in enumerate(self._loaders) if known is loader), None)
