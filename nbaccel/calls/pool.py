"""`Pool`: workers that stay, and take code, names and calls from the notebook.

    run ─► names the cell needs ─► bind_names ─► run_cell ─► weights back ─► results ─► out
           (namespace_sync)

The pool decides what a task's end means: go on, leave the process groups, or start anew.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbaccel.base import env, errors, frames
from nbaccel.base.log import write_notice
from nbaccel.base.processes import uninterrupted
from nbaccel.base.units import count_noun
from nbaccel.calls import outcome
from nbaccel.calls.changed_packages import FOLLOWS_CELLS, sendable_changes, tell_of_edits
from nbaccel.calls.group import Group
from nbaccel.calls.launch import (
    CallOutcome,
    conclude_call,
    pack_for_running_workers,
    staged,
    weights_lines,
)
from nbaccel.calls.pool_planning import CellSource, PoolState, plan_pool, ranks_of
from nbaccel.calls.status_table import StatusTable, status_table
from nbaccel.calls.supervisor import CallResult, RankTasks
from nbaccel.config import Configured, RunConfig, run_config_of
from nbaccel.config.call_arguments import call_title, check_call
from nbaccel.config.given_values import shown
from nbaccel.output import publish
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.publish import CellPlace
from nbaccel.output.report import RunReport, report_of
from nbaccel.transfer.arena import Sharing
from nbaccel.transfer.free_names import Names, names_of
from nbaccel.transfer.library_settings import library_settings
from nbaccel.transfer.memfd import closing_files
from nbaccel.transfer.namespace_snapshot import ModuleRecord
from nbaccel.transfer.namespace_sync import NamespaceSync, PreparedUpdate
from nbaccel.transfer.package_changes import PACKAGE_CHANGES
from nbaccel.transfer.pickling import unpack
from nbaccel.transfer.weight_sync import WeightReceiver
from nbaccel.workers.messaging import Completions, FileHints, GroupWanted, PoolTask, Task
from nbaccel.workers.template import current_folder
from nbaccel.workers.worker_processes import check_requirements, dispose

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What a cell gave.

    Attributes:
        shown: Rank → mime bundle of the cell's last expression, or None.
        out: Name → its value for each name in `out`: a list by rank, or the value of a single rank.
        seconds: How long the workers took.
        observed: What was seen while they ran it.
    """

    shown: dict[int, dict[str, Any] | None] = field(repr=False)
    out: dict[str, Any] = field(repr=False)
    seconds: float
    observed: RunBoard | None = field(default=None, repr=False)

    def report(self, path: str | os.PathLike[str] | None = None) -> RunReport:
        """What the cell's run can tell of itself, as `results.report()` of a launch does."""
        return report_of(self.observed, repr(self), path)


class Pool:
    """Workers that persist between cells, with a namespace of their own.

    They are started at the first use. Names that a cell reads and the notebook has are sent when
    first needed and when changed since; modules are shared, and have rank 0's weights after each
    cell.

    Args:
        num_processes: Workers. None: one per GPU or TPU chip, or one.
        config: All settings as one object, or a picker; then give none of the others but `dist`.
        namespace: Where names come from and go to; by default the notebook's own.
        dist: Join the process group at once rather than at the first collective.
        **settings: Further settings of `RunConfig`.

    Raises:
        ConfigError: If settings are wrong, or do not fit this machine or a pool.

    Examples:
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
            raise errors.ConfigError(
                f"config and {', '.join(settings)} were both given, and one would silently win. "
                "Use config.changed(...) or leave config out."
            )
        self.config = RunConfig(**settings) if config is None else run_config_of(config)
        self.plan = plan_pool(self.config)
        self.reason = ""  # why the pool is broken or stopped, if so
        if namespace is None:
            shell = frames.running_shell()
            # The notebook's; outside of one, that of the main module.
            namespace = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
        self._namespace: dict[str, Any] = namespace
        self._dist = dist
        self._state = PoolState.NEW
        self._lock = threading.Lock()
        self._workers: Group | None = None
        self._end: Callable[[], object] = lambda: None
        self._observed: RunBoard | None = None
        self._activity = ""
        self._forget_workers()
        self.on_poll: Callable[[], None] | None = None  # called each second while a cell runs

    def _forget_workers(self) -> None:
        """Know of new workers that they have received nothing."""
        self._namespace_sync = NamespaceSync(self._namespace, range(self.plan.num_processes))
        self._generation = 0  # of process groups: how often all ranks have left theirs
        self._told_of_weights: dict[tuple[str, str], str] = {}
        self._num_calls = 0
        self._has_sent_changes = False
        # Rank → the folder, environment and settings that the notebook had at its last cell.
        told = current_folder(), env.snapshot(), b""
        self._told = dict.fromkeys(range(self.plan.num_processes), told)

    @property
    def state(self) -> PoolState:
        """How the pool stands."""
        return self._state

    @property
    def num_processes(self) -> int:
        """How many workers it has, or will have."""
        return self.plan.num_processes

    def __repr__(self) -> str:
        words = f"{self.plan.headline()}; {self._state.name.lower()}"
        return f"<Pool: {words}{f': {self.reason}' if self.reason else ''}>"

    def start(self) -> None:
        """Start the workers, if none are running.

        Raises:
            PortTaken, UnsafeFork: Before any process is started.
            WorkerFailed: A worker could not be set up.
        """
        with self._working():
            pass

    def restart(self, config: RunConfig | Configured | None = None) -> None:
        """End the workers and start new ones; variables in the workers are lost.

        Args:
            config: Other settings for the new ones.
        """
        plan = self.plan if config is None else plan_pool(run_config_of(config))
        self.stop()
        with self._undisturbed():
            self.config = plan.config
            self.plan = plan
            self._start_workers()

    def stop(self) -> None:
        """End the workers. The next use starts new ones."""
        with self._undisturbed():
            if self._workers is not None:
                self._workers.let_exit()
                self._dissolve(PoolState.STOPPED, "it was stopped on request")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- work

    def run(
        self, code: str | CellSource, *, ranks: Sequence[int] | None = None, out: Sequence[str] = ()
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
        source = code if isinstance(code, CellSource) else _source_of(code)
        source.publish()
        with self._working(ranks) as (group, asked):
            with self._package_changes(names_of(source.text)) as wanted:
                update = self._namespace_sync.prepare(wanted, asked)
            self._send(group, update)
            start_time = time.monotonic()
            # The task itself handles interrupts; what follows it must not be left half done.
            with uninterrupted():
                result = self._run_cell(group, source, asked)
                seconds = time.monotonic() - start_time
                # Before another task makes the members forget this one.
                error: BaseException | None = outcome.task_error(
                    result, self.plan, self._namespace_sync.reasons
                )
                for rank, idle in result.idle.items():
                    self._namespace_sync.bound(rank, idle.bound)
                trouble = None if result.lost else self._after_cell(group, result)
            if error is None:
                error = trouble
            elif trouble is not None:
                sys.stderr.write(f"nbaccel: {trouble}\n")
            if error is not None:
                raise error
            publish.show_results(result.shown)
            values = self._fetch(group, tuple(out), asked, by_rank=ranks is None) if out else {}
        return CellResult(shown=result.shown, out=values, seconds=seconds, observed=result.observed)

    def call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Call a function in the workers, as `notebook_launcher` does, and return its values.

        It gets its arguments and what it reads as a launch does, not from the workers' namespace.

        Args:
            function: What each worker calls.
            *args: Its arguments; modules among them are shared, and get the trained weights.
            ranks: Which workers call it; None for all.

        Returns:
            The values, in the order of the ranks.
        """
        __tracebackhide__ = True
        check_call(function, args)
        called = self.launch(function, args, ranks=ranks)
        if called.stopped is not None:
            raise called.stopped
        return called.values

    def launch(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        ranks: Sequence[int] | None = None,
    ) -> CallOutcome:
        """What `notebook_launcher(..., pool=pool)` does: `call`, with the whole outcome."""
        with self._working(ranks) as (group, asked), contextlib.ExitStack() as clean_up:
            # It brings its own copies of changed functions: cells get theirs again.
            self._num_calls += 1
            tell_of_edits()
            packed = pack_for_running_workers(function, args)
            clean_up.enter_context(closing_files(*packed.payload_fds))
            receiver = clean_up.enter_context(packed.staged(share_back=self.config.share_back))
            clean_up.enter_context(uninterrupted())
            # It brings the settings of now.
            self._told |= {rank: (*self._told[rank][:2], b"") for rank in asked}
            tasks = dict.fromkeys(asked, packed.task(receiver))
            result = self._show_tasks(group, tasks, title=call_title(function, args))
            try:
                return conclude_call(self.plan, result, receiver, outcome.after_call(result))
            finally:
                self._keep_in_step(group, result)

    def report(self, path: str | os.PathLike[str] | None = None) -> RunReport:
        """The report of the latest cell or call, also of one that failed or was stopped.

        Args:
            path: Where it is saved, too: a name that ends with .html or .json.

        Returns:
            Its curves, times, memory, warnings and plan; see `CellResult.report`.

        Raises:
            ConfigError: Nothing has run yet.
        """
        return report_of(self._observed, repr(self), path)

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
            raise NameError(outcome.unknown_names(missing, self._namespace, "the notebook"))
        with self._working(ranks) as (group, asked):
            wanted = Names(needed=frozenset(names), possible=frozenset())
            update = self._namespace_sync.prepare(wanted, asked, force_send=True)
            self._send(group, update)
            return update.nbytes if update is not None else 0

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
            raise NameError(outcome.unknown_names([], self._namespace, "the workers"))
        with self._working(ranks) as (group, asked):
            return self._fetch(group, names, asked, by_rank=ranks is None)

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Completions from rank 0's namespace; None if the pool is not idle."""
        return self._ask("completions_at", code=code, cursor=cursor)  # type: ignore[no-any-return]

    def inspect(self, name: str, detail: int = 0) -> dict[str, str] | None:
        """What an object of rank 0 is, as mime data; None if unknown or if the pool is not idle."""
        return self._ask("describe", name=name, detail=detail)  # type: ignore[no-any-return]

    def status(self) -> StatusTable:
        """What each worker is doing, and what it had in memory when its last task had ended.

        While a cell runs, workers are asked about once a second.
        """
        rows = self._workers.rank_rows() if self._workers is not None else []
        return status_table(self._state, self.reason, self.plan, rows, self._activity)

    # ---- tasks

    def _run_cell(self, group: Group, source: CellSource, ranks: Sequence[int]) -> CallResult:
        folder, variables, settings = now = current_folder(), env.snapshot(), library_settings()
        tasks: dict[int, tuple[PoolTask, Sequence[int]]] = {}
        for told in {id(self._told[rank]): self._told[rank] for rank in ranks}.values():
            arguments = {
                "source": source,
                # What has changed since these ranks' last cell; None for a variable that is gone.
                "directory": folder if folder != told[0] else None,
                "environment": dict.fromkeys(told[1].keys() - variables.keys())
                | dict(variables.items() - told[1].items()),
                "settings": settings if settings != told[2] else b"",
            }
            task = PoolTask("run_cell", arguments)
            tasks |= {rank: (task, ()) for rank in ranks if self._told[rank] is told}
        self._told |= dict.fromkeys(ranks, now)
        self._activity = f"cell In[{source.count}]" if source.count else ""
        try:
            return self._show_tasks(group, tasks, title=self._activity)
        finally:
            self._activity = ""

    def _show_tasks(self, group: Group, tasks: RankTasks, *, title: str) -> CallResult:
        result = group.run_tasks(
            tasks,
            timeout_s=self.config.timeout,
            place=CellPlace(),
            on_poll=self.on_poll,
            title=title,
        )
        self._observed = result.observed
        return result

    def _run_tasks(self, group: Group, tasks: RankTasks) -> CallResult:
        """Run tasks that are no cell; raise if they did not end well."""
        __tracebackhide__ = True
        result = group.run_tasks(tasks)
        error = outcome.task_error(result, self.plan, self._namespace_sync.reasons)
        if error is not None:
            raise error
        return result

    @contextlib.contextmanager
    def _package_changes(self, cell_names: Names) -> Iterator[Names]:
        """Let the notebook have its changes of packages as one of the names that a cell reads."""
        changes = sendable_changes(looks_anew=not FOLLOWS_CELLS)
        self._has_sent_changes |= bool(changes)
        if not self._has_sent_changes:
            yield cell_names
            return
        self._namespace[PACKAGE_CHANGES] = (self._num_calls, changes)
        try:
            yield replace(cell_names, possible=cell_names.possible | {PACKAGE_CHANGES})
        finally:
            del self._namespace[PACKAGE_CHANGES]

    def _send(self, group: Group, update: PreparedUpdate | None) -> None:
        if update is None:
            return
        tell_of_edits()
        with contextlib.closing(update), uninterrupted():
            tasks: dict[int, tuple[PoolTask, list[int]]] = {}
            for part in update.parts:
                hints = FileHints(
                    arenas=tuple(key for key, _ in part.message.arenas),
                    reads_arenas=part.message.reads_arenas,
                    forgets=part.message.forget_arenas,
                )
                task = PoolTask("bind_names", {"update": part.message}, hints)
                tasks |= dict.fromkeys(part.ranks, (task, part.fds))
            self._run_tasks(group, tasks)
            self._namespace_sync.taken(update)

    def _fetch(
        self, group: Group, names: tuple[str, ...], ranks: Sequence[int], *, by_rank: bool
    ) -> dict[str, Any]:
        pull = PoolTask("pull", {"names": names})
        result = self._run_tasks(group, dict.fromkeys(ranks, (pull, ())))
        values = [
            unpack(member.returned.payload, member.handed_fds[0], {}, namespace=self._namespace)
            for member in result.members
            if member.returned is not None and member.returned.payload is not None
        ]
        if len(ranks) == 1 and not by_rank:
            return {name: values[0][name] for name in names}
        return {name: [of_rank[name] for of_rank in values] for name in names}

    def bound_here(self, names: Sequence[str]) -> None:
        """Note that these names of the notebook hold what was pulled, which is not to be sent."""
        for rank in range(self.num_processes):
            self._namespace_sync.bound(rank, names)

    def _ask(self, question: str, **arguments: Any) -> Any:
        # Never waits: completion is requested by a key press, while a cell may run for hours.
        if self._state is not PoolState.IDLE:
            return None
        with contextlib.suppress(errors.UnsafeMoment), self._working() as (group, _):
            # A completion that takes longer is of no use, and the pool is held meanwhile.
            task = PoolTask("ask_shell", {"question": question, **arguments})
            return group.run_tasks({0: (task, ())}, timeout_s=1.0).shown.get(0)
        return None

    # ---- what follows a task

    def _keep_in_step(self, group: Group, result: CallResult) -> CallResult | None:
        """Let all ranks leave unusable process groups, with a message if there has been none."""
        # After a loss all workers are ended, and their groups with them.
        if result.lost or not result.out_of_step:
            return None
        # Taken first, because the next task makes the members forget this one.
        ended_well = all(member.returned is not None for member in result.members)
        self._generation += 1
        closed = group.everyone(PoolTask("close_groups", {"generation": self._generation}))
        if ended_well:
            write_notice(outcome.UNEVEN_COLLECTIVES)
        return closed

    def _after_cell(self, group: Group, result: CallResult) -> BaseException | None:
        """Put the groups in order and copy the weights back; returns what went wrong with that."""
        # The caller holds interrupts back: a model with half of the new weights is useless.
        closed = self._keep_in_step(group, result)
        if closed is not None and not closed.went_well:
            words = "This was after the cell, while its process groups were ended."
            if any(idle.dirty for idle in result.idle.values()):
                words += " The weights that it trained were not written back."
            return _error_after_cell(group, closed, words)
        if not group.plan.config.share_back:
            return None
        keys = {key for idle in result.idle.values() for key in idle.dirty}
        records = self._namespace_sync.records(keys)
        return self._copy_weights_back(group, records) if records else None

    def _copy_weights_back(self, group: Group, records: list[ModuleRecord]) -> BaseException | None:
        """Copy back the weights that ranks changed: of all these modules, or of none."""
        names = ", ".join(sorted(record.path for record in records))
        unchanged = (
            f"This was after the cell, while the weights that it trained in {names} were written "
            "back: in the notebook each model is as before the cell."
        )
        sharing = Sharing.joined(record.sharing for record in records)
        try:
            with staged(sharing, sharing.arenas) as receiver:
                keys = tuple(receiver.staging)
                task = PoolTask("write_weights", {"arenas": keys}, FileHints(staging=keys))
                result = group.everyone(task, list(receiver.staging.values()))
                try:
                    if not result.went_well:
                        return _error_after_cell(group, result, unchanged)
                    self._apply(records, receiver, result)
                finally:
                    # Closed by the template process: freeing gigabytes would delay the next cell.
                    for member in result.members:
                        dispose(member.handed_fds)
                        member.handed_fds = []
        # No memory or no descriptors: nothing has been written yet.
        except OSError as error:
            return errors.WorkerFailed(
                f"The notebook has no room for the trained weights: {error.strerror or error}. "
                f"{unchanged} The workers live on and have the trained weights: close what holds "
                "memory or files open, and the next cell writes them back."
            )
        hints = FileHints(reads_arenas=True, ends_staging=True)
        # Not waited for: it is done before the next task.
        for member in group.members:
            member.tell(Task(number=0, body=PoolTask("share_equal_pages", hints=hints)))
        return None

    def _apply(
        self, records: Sequence[ModuleRecord], receiver: WeightReceiver, result: CallResult
    ) -> None:
        written = [(member, member.returned) for member in result.members if member.returned]
        reports = [returned.weight_report for _, returned in written]
        whole_files = {
            key: fd
            for member, returned in written
            for key, fd in zip(returned.whole, member.handed_fds, strict=True)
        }
        # Before `apply`, which overwrites the values that the ranks are compared with.
        differing = receiver.differing(reports)
        # Otherwise these new values would count as the notebook's change and be sent to all ranks.
        with self._namespace_sync.taking_weights(records):
            receiver.apply(reports, whole_files)
        lines = weights_lines(reports, "Pull what you need, for example its state_dict.")
        # The next module of the same path is another one: a cell that makes it is run again.
        keys = {record.path: record.key for record in records}
        for path, line in (*lines.items(), *differing.items()):
            module = (path, keys.get(path, ""))
            if self._told_of_weights.get(module) != line:
                write_notice(f"nbaccel: {line}\n")
            self._told_of_weights[module] = line

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise errors.UnsafeMoment(
                f"The pool is busy ({self._state.value}): another thread of this notebook is using "
                "it. Its workers do one thing at a time; wait until that has finished."
            )
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._lock.release)
            at_end.callback(self._settle_state)
            yield

    def _settle_state(self) -> None:
        if self._workers is not None and self._workers.why_lost:
            with uninterrupted():
                self._dissolve(PoolState.BROKEN, self._workers.why_lost)
        elif self._state in (PoolState.RUNNING, PoolState.STARTING):
            self._state = PoolState.IDLE if self._workers is not None else PoolState.NEW

    @contextlib.contextmanager
    def _working(self, ranks: Sequence[int] | None = None) -> Iterator[tuple[Group, Sequence[int]]]:
        """A block with the workers, started if there are none, and the ranks that are meant."""
        with self._undisturbed():
            asked = ranks_of(ranks, self.num_processes)
            group = self._workers or self._start_workers()
            self._state = PoolState.RUNNING
            yield group, asked

    def _start_workers(self) -> Group:
        if self._state is PoolState.BROKEN:
            write_notice(
                f"nbaccel: {count_noun(self.num_processes, 'new worker')} started, because "
                f"{self.reason}; what the cells before had defined in them is gone.\n"
            )
        self._state = PoolState.STARTING
        group, end = Group.ready(check_requirements(self.plan))
        self._workers = group
        # With an engine, what its hosts have is known only now.
        self.plan = group.plan
        # A finalizer, so that a pool that is dropped without stop() ends its workers too.
        self._end = weakref.finalize(self, end)
        self.reason = ""
        self._forget_workers()
        if self._dist:
            group.everyone(PoolTask("join_group", {"wanted": GroupWanted()}))
        return group

    def _dissolve(self, state: PoolState, reason: str) -> None:
        # First, so that an interrupt while workers end leaves no pool that seems alive.
        self._workers = None
        self._state = state
        self.reason = reason
        self._end()


def _source_of(text: str) -> CellSource:
    if not isinstance(text, str):
        raise errors.WrongArguments(
            f"Pool.run takes a cell's code as text: got {shown(text)}. There is nothing to "
            "parse. Give text, or pool.call(function, ...) for a function."
        )
    # Equal code gets an equal name, so that linecache does not grow with each call.
    name = f"<pool code {abs(hash(text)):x}>"
    lines = tuple(f"{line}\n" for line in text.splitlines())
    return CellSource(text=text, filename=name, cell=lines)


def _error_after_cell(group: Group, result: CallResult, words: str) -> BaseException:
    if result.lost:
        because = [result.lost_because] if result.lost_because else []
        words = "\n".join([words, *because, outcome.WORKERS_LOST])
    else:
        words += (
            " The workers live on and have the trained weights: remove the cause, and the next "
            "cell writes them back."
        )
    if result.interrupted:
        return errors.LaunchInterrupted(f"the notebook was interrupted. {words}")
    return outcome.call_error(result, group.plan, closing_lines=words)
