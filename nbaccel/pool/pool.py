"""`Pool`: workers that stay, and take code, names and calls from the notebook.

    run ─► names the cell needs ─► Take ─► RunCell ─► weights home ─► results ─► out
           (flow)                          (turn)     (GoHome, Settle)

The pool decides what a turn's end means: go on, leave the process groups, or start anew.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbaccel.config import Configured, RunConfig, run_config_of
from nbaccel.config.calls import check_call
from nbaccel.errors import ConfigError, LaunchInterrupted, UnsafeMoment
from nbaccel.launch import loggers, required, verdict
from nbaccel.launch.edited import tell_of_edits
from nbaccel.launch.outcome import Outcome
from nbaccel.launch.system import uninterrupted
from nbaccel.pool import calling, ending, messages, showing, status
from nbaccel.pool.aftermath import Aftermath
from nbaccel.pool.crew import Crew
from nbaccel.pool.flow import Flow, Shipment
from nbaccel.pool.names import Names, names_of
from nbaccel.pool.planning import plan_pool, ranks_of
from nbaccel.pool.settings import Footsteps, notebook_names, source_of
from nbaccel.pool.source import Source
from nbaccel.pool.states import PoolState
from nbaccel.pool.travel import open_parcel
from nbaccel.pool.turn import Account

if TYPE_CHECKING:
    from typing_extensions import Self

    from nbaccel.pool.shell import Completions

__all__ = ["CellResult", "Pool"]


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What a cell gave.

    Attributes:
        shown: Rank → mime bundle of the cell's last expression, or None.
        out: Name → what `out` asked for: a list by rank, or the value where one rank was asked.
        seconds: How long the workers took.
    """

    shown: dict[int, dict[str, Any] | None] = field(repr=False)
    out: dict[str, Any] = field(repr=False)
    seconds: float


class Pool:
    """Workers that persist between cells, with a namespace of their own.

    They are started at the first use. Names that a cell reads and the notebook has are sent when
    first needed and when changed since; modules are shared, and have rank 0's weights after each
    cell.

    Args:
        num_processes: Workers. None: one per GPU, or one without GPUs.
        config: All settings as one object, or a picker; then give none of the others but `dist`.
        namespace: Where names come from and go to; by default the notebook's own.
        dist: Join the process group at once rather than at the first collective.
        **settings: Further settings of `RunConfig`.

    Raises:
        ConfigError: If settings are wrong, or do not fit this machine or a pool.

    Example:
        >>> with Pool(2) as pool:
        ...     pool.run("rank = int(os.environ['RANK'])")
        ...     pool.pull("rank")
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        config: RunConfig | Configured | None = None,
        namespace: dict[str, Any] | None = None,
        dist: bool = False,
        **settings: Any,
    ) -> None:
        if num_processes is not None:
            settings["num_processes"] = num_processes
        if config is not None and settings:
            raise ConfigError(
                f"config and {', '.join(settings)} were both given, and one would silently win. "
                "Use config.changed(...) or leave config out."
            )
        self.config = RunConfig(**settings) if config is None else run_config_of(config)
        self.plan = plan_pool(self.config)
        self.reason = ""
        """Why the pool is broken or stopped, if so."""
        self._namespace = notebook_names() if namespace is None else namespace
        self._dist = dist
        self._state = PoolState.NEW
        self._crew: Crew | None = None
        self._end: Callable[[], object] = lambda: None
        self._flow = Flow(self._namespace, range(self.plan.num_processes))
        self._aftermath: Aftermath | None = None
        self._lock = threading.Lock()
        self._footsteps = Footsteps()

    # ---- what it is

    @property
    def state(self) -> PoolState:
        """How the pool stands."""
        return self._state

    @property
    def num_processes(self) -> int:
        """How many workers it has, or will have."""
        return self.plan.num_processes

    def __repr__(self) -> str:
        what = f"{self.plan.headline()}; {self._state.name.lower()}"
        return f"<Pool: {what}{f': {self.reason}' if self.reason else ''}>"

    # ---- life

    def start(self) -> None:
        """Start the workers, if none are running.

        Raises:
            PortTaken, UnsafeFork: Before any process is started.
            WorkerFailed: A worker could not take up its post.
        """
        with self._turn_of_mine():
            self._ready()

    def restart(self, config: RunConfig | Configured | None = None) -> None:
        """End the workers and start new ones; variables in the workers are lost.

        Args:
            config: Other settings for the new ones.
        """
        plan = self.plan if config is None else plan_pool(run_config_of(config))
        self.stop()
        with self._turn_of_mine():
            self.config, self.plan = plan.config, plan
            self._ready()

    def stop(self) -> None:
        """End the workers. The next use starts new ones."""
        with self._turn_of_mine():
            if self._crew is not None:
                self._dissolve(PoolState.STOPPED, "it was stopped on request")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- work

    def run(
        self, code: str | Source, *, ranks: Sequence[int] | None = None, out: Sequence[str] = ()
    ) -> CellResult:
        """Run a cell's code in the workers, and show what they print and give.

        Args:
            code: The code; IPython's syntax and top-level `await` are understood.
            ranks: Which workers run it; None for all.
            out: Names whose values are brought back afterwards.

        Returns:
            What it gave.

        Raises:
            NotSendable, ModelNotShareable: A name that the cell reads cannot be sent; nothing ran.
            WorkerFailed: A worker raised, or died; of the worker's exception type too.
            KeyboardInterrupt: The notebook was interrupted; the workers live on.
        """
        __tracebackhide__ = True
        source = code if isinstance(code, Source) else source_of(code)
        source.publish()
        with self._turn_of_mine():
            asked = ranks_of(ranks, self.num_processes)
            self._ready()
            names = names_of(source.text)
            self._send(self._flow.prepare(names, asked))
            began = time.monotonic()
            with uninterrupted():  # the turn itself can be; what follows it must not be torn
                account = self._cell(source, asked)
                seconds = time.monotonic() - began
                failed = self._judgement(account)  # before another turn makes the members forget
                trouble = self._after_cell(account)
            ending.raise_first(failed, trouble)
            showing.show_results(account.shown)
            found = self._fetch(tuple(out), asked, single=ranks is not None) if out else {}
        return CellResult(shown=account.shown, out=found, seconds=seconds)

    def call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call a function in the workers, as `notebook_launcher` does, and return its values.

        It gets its arguments and what it reads as a launch does, not from the workers' namespace.

        Args:
            function: What each worker calls.
            *args: Its arguments; modules among them are shared, and come home trained.
            ranks: Which workers call it; None for all.

        Returns:
            The values, in the order of the ranks.
        """
        __tracebackhide__ = True
        check_call(function, args)
        return self.launch(function, args, ranks=ranks).values

    def launch(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        ranks: Sequence[int] | None = None,
    ) -> Outcome:
        """What `notebook_launcher(..., pool=pool)` does: `call`, with the whole outcome."""
        with self._turn_of_mine():
            asked, crew = ranks_of(ranks, self.num_processes), self._ready()
            with calling.prepared(self.plan, function, args) as call, uninterrupted():
                account = crew.turn(
                    {rank: call.task() for rank in asked},
                    timeout_s=self.config.timeout,
                    is_shown=True,
                )
                self._note_lost(account)
                try:
                    return call.conclude(account)
                finally:
                    left = self._aftermath.keep_in_step(account) if self._aftermath else None
                    if left is not None:
                        self._note_lost(left)

    def push(self, *names: str, ranks: Sequence[int] | None = None) -> int:
        """Send names to the workers, whether or not they have changed.

        Args:
            *names: Names that the notebook has.
            ranks: Which workers get them; None for all.

        Returns:
            Bytes that were copied; modules are shared and cost none.
        """
        missing = [name for name in names if name not in self._namespace]
        if missing or not names:
            raise NameError(ending.unknown(missing, self._namespace, where="the notebook"))
        with self._turn_of_mine():
            asked = ranks_of(ranks, self.num_processes)
            self._ready()
            wanted = Names(needed=frozenset(names), possible=frozenset())
            shipment = self._flow.prepare(wanted, asked, force=True)
            self._send(shipment)
            return shipment.nbytes if shipment is not None else 0

    def pull(self, *names: str, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """Bring values of the workers' names into the notebook's process.

        Args:
            *names: Names that the workers have.
            ranks: Whose; None for all.

        Returns:
            Name → list of values by rank, or the value itself where exactly one rank was asked by
            number. Tensors are on the CPU.

        Raises:
            WorkerFailed: A worker has no such name (it is a `NameError`, too), or its value cannot
                be sent.
        """
        if not names:
            raise NameError(ending.unknown([], self._namespace, where="the workers"))
        with self._turn_of_mine():
            asked = ranks_of(ranks, self.num_processes)
            self._ready()
            return self._fetch(names, asked, single=ranks is not None)

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Completions from rank 0's namespace; None if the pool is not idle."""
        return self._ask(messages.Complete(code=code, cursor=cursor))  # type: ignore[no-any-return]

    def inspect(self, name: str, detail: int = 0) -> dict[str, str] | None:
        """What an object of rank 0 is, as mime data; None if unknown or if the pool is not idle."""
        return self._ask(messages.Inspect(name=name, detail=detail))  # type: ignore[no-any-return]

    def status(self) -> status.StatusTable:
        """What each worker is doing and what it has in memory."""
        places = (
            self._crew.look() if self._crew is not None and self._state is PoolState.IDLE else {}
        )
        members = self._crew.members if self._crew is not None else []
        return ending.status_table(self._state, self.reason, self.plan, members, places)

    # ---- a cell

    def _cell(self, source: Source, ranks: Sequence[int]) -> Account:
        crew = self._ready()
        body = messages.RunCell(
            source=source,
            directory=self._footsteps.directory(),
            environment=self._footsteps.environment(),
            logging=loggers.as_configured(),
        )
        return crew.turn(
            dict.fromkeys(ranks, (body, ())), timeout_s=self.config.timeout, is_shown=True
        )

    def _after_cell(self, account: Account) -> BaseException | None:
        """Who owns which name, weights, process groups; returns what is to be raised for it."""
        for rank, idle in account.idle.items():
            self._flow.bound(rank, idle.bound)
        self._note_lost(account)
        if self._aftermath is None or account.lost:
            return None
        trouble = self._aftermath.after_cell(account)
        failed = trouble.error(self.plan.world_size) if trouble is not None else None
        if trouble is not None and trouble.account is not None:
            self._note_lost(trouble.account)
        return failed

    def _note_lost(self, account: Account) -> None:
        if account.lost:
            self._dissolve(PoolState.BROKEN, ending.why_lost(account))

    def _judgement(self, account: Account) -> BaseException | None:
        """What a turn has to raise, if it did not end well."""
        if account.interrupted:
            return LaunchInterrupted(ending.stopped(account))
        account.closing = ending.closing(account, self._flow.reasons)
        return verdict.error(
            account, world_size=self.plan.world_size, timeout_s=self.config.timeout
        )

    def _settle(self, account: Account) -> None:
        """The end of a turn that is no cell: raise if it did not end well."""
        __tracebackhide__ = True
        failed = self._judgement(account)
        self._note_lost(account)
        if failed is not None:
            raise failed

    # ---- names

    def _send(self, shipment: Shipment | None) -> None:
        if shipment is None or self._crew is None:
            return
        tell_of_edits()
        with contextlib.closing(shipment):
            tasks = {
                rank: (messages.Take(cargo=shipment.message, wanted=wanted), shipment.fds)
                for rank, wanted in shipment.wanted.items()
            }
            with uninterrupted():
                self._settle(self._crew.turn(tasks))
                self._flow.taken(shipment)

    def _fetch(
        self, names: tuple[str, ...], ranks: Sequence[int], *, single: bool
    ) -> dict[str, Any]:
        crew = self._ready()
        account = crew.turn({rank: (messages.Pull(names=names), ()) for rank in ranks})
        self._settle(account)
        found = []
        for member in account.members:
            packed = member.returned.parcel if member.returned is not None else None
            if packed is not None and member.result_fd is not None:
                found.append(open_parcel(packed, member.result_fd, self._namespace))
        one = single and len(ranks) == 1
        return {name: found[0][name] if one else [f[name] for f in found] for name in names}

    def bound_here(self, names: Sequence[str]) -> None:
        """These names of the notebook hold what was pulled: that is no change of the user's."""
        for rank in range(self.num_processes):
            self._flow.bound(rank, names)

    # ---- inside

    def _ask(self, body: Any) -> Any:
        if self._state is not PoolState.IDLE or not self._lock.acquire(blocking=False):
            return None
        try:
            crew = self._crew
            account = crew.turn({0: (body, ())}, timeout_s=1.0) if crew is not None else None
        finally:
            self._lock.release()
        if account is not None:
            self._note_lost(account)
        return account.shown.get(0) if account is not None else None

    @contextlib.contextmanager
    def _turn_of_mine(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise UnsafeMoment(
                f"The pool is busy ({self._state.value}): another thread of this notebook is using "
                "it. Its workers do one thing at a time; wait until that is through."
            )
        try:
            yield
        finally:
            if self._state in (PoolState.RUNNING, PoolState.STARTING):
                self._state = PoolState.IDLE if self._crew is not None else PoolState.NEW
            self._lock.release()

    def _ready(self) -> Crew:
        """The crew; started, or started anew, if there is none."""
        if self._crew is None:
            if self._state is PoolState.BROKEN:
                sys.stderr.write(ending.anew(self.num_processes, self.reason))
            self._state = PoolState.STARTING
            self._crew = crew = Crew.start(required.prepared(self.plan, live=True))
            self._end = weakref.finalize(self, crew.end)
            self._flow = Flow(self._namespace, range(self.num_processes))
            self._aftermath = Aftermath(crew, self._flow, share_back=self.config.share_back)
            self.reason = ""
            self._footsteps = Footsteps()
            if self._dist:
                crew.everyone(messages.JoinAll())
        self._state = PoolState.RUNNING
        return self._crew

    def _dissolve(self, state: PoolState, reason: str) -> None:
        self._crew = self._aftermath = None
        self._state, self.reason = state, reason
        self._end()
