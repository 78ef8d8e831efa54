"""What follows a turn, well ended or not: ranks in step again, and weights at home.

GoHome ─► every rank writes what it owes into staging files ─► Staged
          all ranks have: the notebook copies it into the arenas ─► Settle
          a rank failed, died or was stopped: the files are dropped, and nothing has changed
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.errors import LaunchInterrupted, WorkerFailed
from nbaccel.launch import verdict
from nbaccel.launch.sharing import arena
from nbaccel.launch.sharing.homecoming import Homecoming
from nbaccel.launch.template import dispose
from nbaccel.pool import ending, messages
from nbaccel.pool.crew import Crew
from nbaccel.pool.flow import Flow
from nbaccel.pool.modules import Record
from nbaccel.pool.turn import Account

__all__ = ["Aftermath", "Trouble", "staged"]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What went wrong after a cell had ended.

    Attributes:
        told: What is known of the weights.
        account: The turn that failed.
        no_room: What the notebook's own process could not do, where that was it.
    """

    told: str
    account: Account | None = None
    no_room: OSError | None = None

    def error(self, world_size: int) -> BaseException | None:
        """What has to be raised because of it."""
        account = self.account
        if account is None:
            return WorkerFailed(ending.no_room(self.told, self.no_room))
        if account.interrupted:
            return LaunchInterrupted(
                f"the notebook was interrupted. {ending.after_cell(account, self.told)}"
            )
        account.closing = ending.after_cell(account, self.told)
        return verdict.error(account, world_size=world_size, timeout_s=None)


class Aftermath:
    """Puts a crew in order after each turn. One per crew.

    Args:
        crew: The workers.
        flow: What they have of the notebook.
        share_back: Whether weights come home.
    """

    def __init__(self, crew: Crew, flow: Flow, *, share_back: bool) -> None:
        self._crew = crew
        self._flow = flow
        self._share_back = share_back
        self._generation = 0
        self._told: dict[str, str] = {}

    def after_cell(self, account: Account) -> Trouble | None:
        """Put the groups in order and bring the weights home, after a cell that lost no worker.

        The caller holds interrupts back: half of a model is worse than either.

        Returns:
            What went wrong, if anything.
        """
        left = self.keep_in_step(account)
        if left is not None and not left.went_well:
            return Trouble(told=ending.left_behind(account), account=left)
        return self._bring_home(account)

    def keep_in_step(self, account: Account) -> Account | None:
        """Let all ranks leave process groups that are of no more use, and say so if nothing has.

        Returns:
            The turn in which they left; None if there was no need.
        """
        if account.lost or not account.out_of_step:
            return None
        ended_well = all(m.returned is not None for m in account.members)
        self._generation += 1
        reason = "a cell was ended while ranks were waiting for each other"
        left = self._crew.everyone(messages.LeaveGroups(generation=self._generation, reason=reason))
        if ended_well:
            sys.stderr.write(f"nbaccel: {ending.UNEVEN}\n")
        return left

    def _bring_home(self, account: Account) -> Trouble | None:
        """Let the notebook have weights that ranks changed: of all these modules, or of none."""
        if not self._share_back:
            return None
        records = self._flow.records({key for idle in account.idle.values() for key in idle.dirty})
        if not records:
            return None
        paths = sorted(record.path for record in records)
        arenas = {key: found for record in records for key, found in record.arenas().items()}
        try:
            with staged(records, arenas) as homecoming:
                files = [homecoming.staging[key] for key in arenas]
                written = self._crew.everyone(messages.GoHome(arenas=tuple(arenas)), files)
                try:
                    if not written.went_well:
                        told = ending.on_the_way(paths)
                        return Trouble(told=told, account=written)
                    self._apply(records, homecoming, written)
                finally:
                    dispose(written.take_files())
        except OSError as error:  # no memory or no descriptors: nothing has been written yet
            return Trouble(told=ending.on_the_way(paths), no_room=error)
        self._crew.post(messages.Settle())
        return None

    def _apply(self, records: Sequence[Record], homecoming: Homecoming, written: Account) -> None:
        reports = [written.staged[rank].report for rank in sorted(written.staged)]
        differing = homecoming.differing(reports)
        with self._flow.coming_home(records):
            homecoming.apply(reports, written.whole_files())
        for report in reports:
            for path, why in report.stranded.items():
                self._tell(path, ending.stays_behind(path, why))
            for path, what in report.changes.items():
                self._tell(path, ending.came_changed(path, what))
        for path, line in differing.items():
            self._tell(path, f"nbaccel: {line}\n")

    def _tell(self, path: str, line: str) -> None:
        """Write a line out, unless it was the last one about this module."""
        if self._told.get(path) != line:
            sys.stderr.write(line)
        self._told[path] = line


@contextlib.contextmanager
def staged(records: Collection[Record], arenas: Mapping[str, arena.Arena]) -> Iterator[Homecoming]:
    """Staging files for these arenas, as long as the block lasts."""
    parts = [record.sharing for record in records]
    sharing = arena.Sharing(
        modules=tuple(shared for part in parts for shared in part.modules),
        stand_ins={at: place for part in parts for at, place in part.stand_ins.items()},
    )
    homecoming = Homecoming(sharing, arenas)
    try:
        yield homecoming
    finally:
        homecoming.close(dispose)
