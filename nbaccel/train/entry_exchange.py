"""How the entries of all processes reach each other.

    one host         a page of memory that all share: an entry is there when it is written
    several hosts    on each host, the first process reads the entries of its host from the page,
                     sets them in the rendezvous store under one key, reads the other hosts' keys
                     in one request, and leaves what they hold in the page
    no such memory   each process is a host of its own

`page_setup` finds out which processes share memory.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbaccel.train.announced_calls import NOT_SEEN, Entry
from nbaccel.train.page_setup import Meeting
from nbaccel.train.shared_page import DATA_BYTES, SharedPage

__all__ = ["EntryExchange"]

_LOOK_AROUND_S = 0.05  # how often a process that waits does something else
_MOST_READ_BYTES = 1 << 23  # of data, by each process in a call: what its caches may hold
_MOST_POLL_S = 0.02  # at most, between two reads of the store
# Of the time already waited: a short wait ends with little delay, a long one uses little CPU.
_POLL_SHARE = 0.1
_LONG_MARK = b"@"  # before a key of the store; other texts are JSON


class EntryExchange:
    """The entries of a group's processes.

    Args:
        rank: This process's number.
        meeting: What the processes have found out about each other.
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank = rank
        self._store = meeting.store
        self._page = meeting.page
        self._hosts = meeting.hosts
        self._host = next(host for host in meeting.hosts if rank in host)
        self._position = self._host.index(rank)
        self._long_keys: dict[str, int] = {}  # with the number of the call
        if self._page is not None:
            # At the end of the group or of the interpreter, whichever comes first.
            weakref.finalize(self, self._page.close, self._position)
        if self.has_other_hosts:
            # `multi_get` blocks until all its keys exist. With these entries it returns even if a
            # process never reaches a collective, so that process can be named.
            for parity in (0, 1):
                self._store.set(_own_key(parity, rank), _as_text([NOT_SEEN]))
                if self._position == 0:
                    texts = _as_text([NOT_SEEN] * len(self._host))
                    self._store.set(_host_key(parity, self._host), texts)

    @property
    def has_other_hosts(self) -> bool:
        """Whether some processes do not share this one's memory."""
        return len(self._hosts) > 1

    @property
    def data_bytes(self) -> int:
        """How much data can go along with an entry; 0 where not all processes share memory."""
        if self._page is None or self.has_other_hosts:
            return 0
        return min(DATA_BYTES, _MOST_READ_BYTES // len(self._host))

    def exchange(
        self, own_entry: Entry, data: Sequence[memoryview] | None, while_waiting: Callable[[], None]
    ) -> list[Entry]:
        """Give this process's entry to all, and wait for theirs.

        Args:
            own_entry: The entry.
            data: Up to `data_bytes` to give along; None for none.
            while_waiting: Called from time to time; it may raise to end the wait.

        Returns:
            The entries of all processes for this call, by rank.
        """
        if self._page is None:
            host = [own_entry]
        else:
            self._write(self._page, self._position, own_entry, data)
            if self.has_other_hosts and self._position > 0:
                return self._await_summary(self._page, own_entry.call_number, while_waiting)
            host = self._await_host(self._page, own_entry.call_number, while_waiting)
        if not self.has_other_hosts:
            return host
        entries = self._exchange_with_hosts(host, while_waiting)
        if self._page is not None:
            summary = Entry(own_entry.call_number, _as_text(entries), b"")
            self._write(self._page, self._page.common_position, summary, None)
        return entries

    def _await_host(
        self, page: SharedPage, call_number: int, while_waiting: Callable[[], None]
    ) -> list[Entry]:
        return [
            self._await_entry(page, position, call_number, while_waiting)
            for position in range(len(self._host))
        ]

    def _await_summary(
        self, page: SharedPage, call_number: int, while_waiting: Callable[[], None]
    ) -> list[Entry]:
        position = page.common_position
        summary = self._await_entry(page, position, call_number, while_waiting)
        return _from_text(summary.call_text)

    def _await_entry(
        self,
        page: SharedPage,
        position: int,
        call_number: int,
        while_waiting: Callable[[], None],
    ) -> Entry:
        return self._with_text(page.await_call(position, call_number, while_waiting))

    def _exchange_with_hosts(
        self, own_host: list[Entry], while_waiting: Callable[[], None]
    ) -> list[Entry]:
        """All entries, by rank; given those of this host."""
        call_number = own_host[0].call_number
        self._store.set(_host_key(call_number % 2, self._host), _as_text(own_host))
        entries = dict(zip(self._host, own_host, strict=True))
        missing_hosts = [host for host in self._hosts if host != self._host]
        start_time = looked_at = time.monotonic()
        while True:
            keys = [_host_key(call_number % 2, host) for host in missing_hosts]
            for host, text in zip(missing_hosts, self._store.multi_get(keys), strict=True):
                host_entries = _from_text(text)
                if host_entries[0].call_number == call_number:
                    entries.update(zip(host, host_entries, strict=True))
            missing_hosts = [host for host in missing_hosts if host[0] not in entries]
            if not missing_hosts:
                return [entries[rank] for rank in sorted(entries)]
            now = time.monotonic()
            if now - looked_at >= _LOOK_AROUND_S:
                looked_at = now
                while_waiting()
            time.sleep(min(_MOST_POLL_S, (now - start_time) * _POLL_SHARE))

    # --------------------------------------------------------------------- who is missing

    def show(self, own_entry: Entry) -> None:
        """Let other hosts see this process's entry though others of this host are missing."""
        if self.has_other_hosts:
            self._store.set(_own_key(own_entry.call_number % 2, self._rank), _as_text([own_entry]))

    def ended_rank(self, call_number: int) -> int | None:
        """A process of this host that has left or ended without having done its part of a call."""
        if self._page is None:
            return None
        for position, rank in enumerate(self._host):
            # The part of the first one is to say what the other hosts announced.
            is_speaker = self.has_other_hosts and position == 0
            awaited = self._page.common_position if is_speaker else position
            # Asked again, because it may have done so just before it left.
            if (
                self._page.read_call(awaited, call_number) is None
                and self._page.has_left(position)
                and self._page.read_call(awaited, call_number) is None
            ):
                return rank
        return None

    def known_entries(self, call_number: int) -> list[Entry]:
        """For each process its entry of this call, or else the last one that is known."""
        known: dict[int, list[Entry]] = {rank: [NOT_SEEN] for host in self._hosts for rank in host}
        for position, rank in enumerate(self._host if self._page is not None else ()):
            known[rank] += self._page_entries(self._page, position)
        if self.has_other_hosts:
            for parity in (0, 1):
                self._add_stored_entries(parity, known)
        return [
            max(
                known[rank], key=lambda entry: (entry.call_number == call_number, entry.call_number)
            )
            for rank in sorted(known)
        ]

    def _page_entries(self, page: SharedPage | None, position: int) -> list[Entry]:
        found = [page.read(position, parity) for parity in (0, 1)] if page is not None else []
        # A text that is gone is that of an entry which has just been replaced.
        return [
            self._with_text(entry)
            for entry in found
            if entry is not None and (not _is_long(entry) or self._store.check([_long_key(entry)]))
        ]

    def _add_stored_entries(self, parity: int, known: dict[int, list[Entry]]) -> None:
        keys = [_own_key(parity, rank) for rank in known]
        keys += [_host_key(parity, host) for host in self._hosts]
        texts = self._store.multi_get(keys)
        ranks = [(rank,) for rank in known] + list(self._hosts)
        for members, text in zip(ranks, texts, strict=True):
            for rank, entry in zip(members, _from_text(text), strict=True):
                known[rank].append(entry)

    # --------------------------------------------------------------------- long texts

    def _write(
        self, page: SharedPage, position: int, entry: Entry, data: Sequence[memoryview] | None
    ) -> None:
        """Write an entry into the page; its text into the store if it is too long."""
        call_number = entry.call_number
        # No process reads the entries of two calls ago: see [Note: two entries].
        for old_key in [key for key, number in self._long_keys.items() if number < call_number - 1]:
            self._store.delete_key(old_key)
            del self._long_keys[old_key]
        if not page.has_room(entry):
            key = f"long/{call_number}/{position}/{self._rank}"
            self._store.set(key, entry.call_text)
            self._long_keys[key] = call_number
            entry = entry._replace(call_text=_LONG_MARK + key.encode())
        page.write(position, entry, data)

    def _with_text(self, entry: Entry) -> Entry:
        """An entry as it was before `_write`."""
        if not _is_long(entry):
            return entry
        # It was set before the entry was written, and `get` waits for what is on its way.
        return entry._replace(call_text=self._store.get(_long_key(entry)))


def _is_long(entry: Entry) -> bool:
    return entry.call_text.startswith(_LONG_MARK)


def _long_key(entry: Entry) -> str:
    return entry.call_text.removeprefix(_LONG_MARK).decode()


def _own_key(parity: int, rank: int) -> str:
    return f"process/{parity}/{rank}"


def _host_key(parity: int, host: tuple[int, ...]) -> str:
    return f"host/{parity}/{host[0]}"


def _as_text(entries: Iterable[Entry]) -> bytes:
    return json.dumps([entry.as_json() for entry in entries]).encode()


def _from_text(text: bytes) -> list[Entry]:
    values: list[Any] = json.loads(text)
    return [Entry.from_json(value) for value in values]
