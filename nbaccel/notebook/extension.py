"""`%load_ext nbaccel`: `%%accelerate` and `%accelerate`, and what else is added to a notebook.

The board of live workers is renewed while a cell runs, after it, and by a timer of the kernel's own
loop: what a thread displays would get the running cell as its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import no_var_expand
from IPython.display import display

from nbaccel.base import frames
from nbaccel.base.errors import ConfigError, WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.calls.pool_planning import CellSource
from nbaccel.config.given_values import closest
from nbaccel.notebook import magic_line
from nbaccel.notebook.cells import Cells
from nbaccel.notebook.completion import Completion, inspect_workers
from nbaccel.notebook.magic_line import MagicLine, cell_manual, line_manual
from nbaccel.notebook.session import Session, import_with_torch
from nbaccel.output import publish
from nbaccel.output.panel.facts import ENDED_RUNS
from nbaccel.output.report import RunComparison, RunReport, facts_of, report_of
from nbaccel.plan import registry
from nbaccel.workers import template

if TYPE_CHECKING:  # it would import torch, which loading the extension does not
    from nbaccel.calls.status_table import StatusTable

_POLL_INTERVAL_S = 2.0


class WorkerBoard:
    """The newest board of a notebook: a plain table, which is replaced where outputs can be."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events = session.shell.events
        self._handle: Any = None
        self._pool: Any = None
        self._shown: StatusTable | None = None
        self._timer: asyncio.TimerHandle | None = None

    def show(self) -> None:
        """Show the workers, and keep them up to date from now on."""
        pool = self._session.pool
        # A board that is captured is not seen: the one before stays the newest.
        if pool is not None and (self._is_captured() or not publish.has_cells()):
            display(pool.status())  # type: ignore[no-untyped-call]
            return
        self.unload()
        if pool is None:
            print(self._session.absence_text())
            return
        status = pool.status()
        self._handle = display(status, display_id=True)  # type: ignore[no-untyped-call]
        self._pool = pool
        self._shown = status
        self._events.register("post_run_cell", self._renew)
        self._session.on_poll = self._renew
        self._poll_later()

    def tell_end(self) -> None:
        """Show what has become of workers that were ended for good."""
        if self._handle is not None:
            self._renew()
        self.unload()

    def unload(self) -> None:
        """Leave the board as it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._handle is not None:
            self._handle = None
            self._session.on_poll = None
            self._events.unregister("post_run_cell", self._renew)

    def _is_captured(self) -> bool:
        return isinstance(self._session.shell.display_pub, CapturingDisplayPublisher)

    def _poll_later(self) -> None:
        # None in a kernel without a loop: then it is renewed by cells only.
        self._timer = publish.call_later(_POLL_INTERVAL_S, self._poll_between_cells)

    def _poll_between_cells(self) -> None:
        self._timer = None
        self._renew()
        if self._handle is not None:
            self._poll_later()

    def _renew(self, _result: object = None) -> None:
        # A cell that captures its output would get the board, too.
        if self._is_captured():
            return
        # After a restart it is another one; after a stop, which is told for ever, the last one.
        pool = self._pool = self._session.pool or self._pool
        status = pool.status()
        if self._session.pool is None and self._shown is not None and self._shown.rows:
            # The saved notebook keeps what the workers were.
            headline = f"{status.headline.rstrip('.')}. Before that:"
            status = dataclasses.replace(self._shown, headline=headline)
        if str(status) != str(self._shown):
            self._shown = status
            self._handle.update(status)
        if self._session.pool is None:
            self.unload()


def hint_after_cells(session: Session) -> Callable[[], None]:
    """Look at each cell's error after IPython has shown it; returns what ends that."""
    events = session.shell.events

    def on_cell_end(result: Any = None) -> None:
        error = getattr(result, "error_in_exec", None)
        # Not one of a worker, which lacks the name itself (see ipython/ipyparallel#897).
        if not isinstance(error, NameError) or isinstance(error, WorkerFailed):
            return
        name = getattr(error, "name", None)
        pool = session.living_pool
        if name and name not in session.shell.user_ns and pool is not None and pool.inspect(name):
            write_notice(
                f"nbaccel: {name} exists in the workers of %%accelerate. To copy it "
                f"here: %accelerate pull {name}\n"
            )

    events.register("post_run_cell", on_cell_end)
    return lambda: events.unregister("post_run_cell", on_cell_end)


MAGIC_NAME = "accelerate"
_MOST_RUNS = 6  # side by side


def cell_magic(session: Session, recorder: Cells) -> Callable[[str, str], None]:
    """The function behind `%%accelerate`."""

    # IPython would replace braces in the whole line, JSON included; `magic_line` does it by word.
    @no_var_expand
    def accelerate(line: str, cell: str) -> None:
        recorder.as_written()
        asked = _read_line(session, line)
        if asked.help:
            print(cell_manual())
        elif not cell.strip():
            raise ConfigError(
                f"The cell has no code below %%accelerate: got {cell!r}. Write code there, "
                "%accelerate restart to start workers now, or %%accelerate --help for the options."
            )
        else:
            _run_cell(session, asked, recorder.source(line, cell))

    accelerate.__doc__ = cell_manual()
    return accelerate


def line_magic(session: Session, recorder: Cells, board: WorkerBoard) -> Callable[[str], Any]:
    """The function behind `%accelerate`."""
    actions: dict[str, Callable[[MagicLine], Any]] = {
        "status": lambda _: board.show(),
        "restart": session.restart,
        "stop": lambda _: print(
            "Workers stopped." if session.stop() else "There are no workers to stop."
        ),
        "pull": lambda line: print(session.pull(line.names, line.ranks)),
        "push": lambda line: print(session.push(line.names, line.ranks)),
        "config": lambda line: _show_config(session, line),
        "report": _latest_report,
        "runs": _earlier_runs,
        "traceback": _print_traceback,
        "help": lambda _: print(line_manual()),
    }

    @no_var_expand
    def accelerate(line: str) -> Any:
        recorder.as_written()
        typed_word, _, typed_options = line.strip().partition(" ")
        if typed_word in ("-h", "--help"):
            print(line_manual())
            return None
        name = typed_word or "status"
        if name not in actions:
            raise _unknown_subcommand(name, typed_options)
        asked = _read_line(session, typed_options, name)
        if asked.help:
            print(magic_line.subcommand_manual(name))
            return None
        return actions[name](asked)

    accelerate.__doc__ = line_manual()
    return accelerate


def _run_cell(session: Session, line: MagicLine, source: CellSource) -> None:
    try:
        session.run(line, source)
    except WorkerFailed as error:
        if not isinstance(error, SyntaxError):
            raise
        # IPython shows a SyntaxError with the notebook's frames, and without the workers' text.
        raise WorkerFailed(
            str(error), failure=error.failure, failures=error.failures
        ) from error.__cause__


def _read_line(session: Session, text: str, subcommand: str = "") -> MagicLine:
    # A cell's options are compared with the running workers', a restart's with the next start's.
    pool = None if subcommand else session.living_pool
    config = session.config if pool is None else pool.config
    return magic_line.read_magic_line(
        text, base_config=config, namespace=session.shell.user_ns, subcommand=subcommand
    )


def _show_config(session: Session, line: MagicLine) -> None:
    if not (line.given or line.dist):
        picker = session.open_picker(line.names)
        print(session.settings_text())
        picker.show()
        return
    if line.names:
        raise ConfigError(
            f"%accelerate config got {', '.join(line.names)} together with options: names "
            "are for the memory that its form shows, and with options it shows none. Leave one out."
        )
    session.configure(line)
    print(session.config_text())


def _latest_report(_line: MagicLine) -> RunReport:
    """What IPython shows, or binds: `report = %accelerate report`."""
    if not ENDED_RUNS:
        raise ConfigError(
            f"%accelerate report tells of the latest of {len(ENDED_RUNS)} launches and cells. Run "
            "a cell with %%accelerate, or notebook_launcher(...), first."
        )
    return report_of(ENDED_RUNS[-1], "%accelerate report")


def _earlier_runs(_line: MagicLine) -> RunComparison | None:
    runs = [facts_of(run, run.plan) for run in ENDED_RUNS if run.plan is not None]
    if not runs:
        print("No launch and no cell of %%accelerate has run in this notebook.")
        return None
    return RunComparison(runs[-_MOST_RUNS:])


def _print_traceback(_line: MagicLine) -> None:
    from nbaccel.calls import outcome  # imports torch, which a notebook may not need

    if not outcome.LATEST_FAILURE:
        print("No launch and no cell of %%accelerate has failed in this notebook.")
        return
    for record in outcome.LATEST_FAILURE:
        if record.raised is not None:
            print(record.full_traceback)
            continue
        print(f"rank {record.rank}:")
        for frame in reversed(record.stack):
            place = f"  {frames.place(frame)}, in {frame.function}"
            print("\n".join((place, *frames.source(frame, num_around=0))))
        print(record.headline)


def _unknown_subcommand(word: str, options: str) -> ConfigError:
    if word.startswith("-"):
        return ConfigError(
            f"%accelerate needs a subcommand before its options: got {word!r}. It is "
            f"unclear what to do. Write %accelerate restart {word} {options}".rstrip()
            + ", or %%accelerate above the code of a cell."
        )
    names = [subcommand.name for subcommand in magic_line.SUBCOMMANDS]
    text = closest(word, names) or f" They are: {', '.join(names)}."
    return ConfigError(f"%accelerate has no subcommand {word!r}: nothing was done.{text}")


_LOADED: dict[int, ExitStack] = {}  # shell → what removes all that was added to it


def load_extension(shell: InteractiveShell) -> None:
    """Add the magics to a shell, unless it has them."""
    if id(shell) in _LOADED:
        return
    added = ExitStack()
    undo = added.callback
    session = Session(shell)
    # A template that somebody else started must survive `%unload_ext`.
    if not template.running():
        # Now, so that its imports are done by the time the first cell is run.
        template.template_for(registry.prepare_notebook()).start_ahead()
        undo(template.stop)
        undo(template.unfollow_cells)
    template.follow_cells()
    board = WorkerBoard(session)
    undo(board.tell_end)
    undo(session.stop)
    cells = Cells(shell)
    magics = {"cell": cell_magic(session, cells), "line": line_magic(session, cells, board)}
    for magic_kind, magic in magics.items():
        shell.magics_manager.register_function(magic, magic_kind, MAGIC_NAME)
        undo(shell.magics_manager.magics[magic_kind].pop, MAGIC_NAME, None)
    for load in (cells.load, Completion(session).load):
        undo(load())
    undo(inspect_workers(session))
    undo(hint_after_cells(session))
    undo(import_with_torch(shell))
    atexit.register(session.stop)
    undo(atexit.unregister, session.stop)
    _LOADED[id(shell)] = added


def unload_extension(shell: InteractiveShell) -> None:
    """Remove the magics from a shell, and end its workers."""
    if added := _LOADED.pop(id(shell), None):
        added.close()
