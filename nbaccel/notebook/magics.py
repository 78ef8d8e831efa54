"""`%%accelerate` and `%accelerate`: read a line and call the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.magic import no_var_expand

from nbaccel.base.errors import ConfigError, WorkerFailed
from nbaccel.calls.pool_planning import CellSource
from nbaccel.config.given_values import closest
from nbaccel.notebook.cells import Cells
from nbaccel.notebook.magic_line import (
    MagicLine,
    cell_manual,
    line_manual,
    read_magic_line,
    subcommand_manual,
)
from nbaccel.notebook.options import SUBCOMMANDS
from nbaccel.notebook.session import Session
from nbaccel.notebook.worker_board import WorkerBoard
from nbaccel.output.panel.facts import ENDED_RUNS
from nbaccel.output.report.comparing import RunComparison
from nbaccel.output.report.run_facts import facts_of
from nbaccel.output.report.run_report import RunReport, report_of

MAGIC_NAME = "accelerate"
_MOST_RUNS = 6  # side by side


def cell_magic(session: Session, recorder: Cells) -> Callable[[str, str], None]:
    """The function behind `%%accelerate`."""

    # IPython would replace braces in the whole line, JSON included; `magic_line` does it by word.
    @no_var_expand
    def accelerate(line: str, cell: str) -> None:
        recorder.as_written()
        magic_line = _read_line(session, line)
        if magic_line.help:
            print(cell_manual())
        elif not cell.strip():
            raise ConfigError(
                f"The cell has no code below %%accelerate: got {cell!r}. The workers have nothing "
                "to run. Write code there, %accelerate restart to start workers now, or "
                "%%accelerate --help for the options."
            )
        else:
            _run_cell(session, magic_line, recorder.source(line, cell))

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
        "pull": lambda line: print(session.pull(_required_names(line, "pull", "loss"), line.ranks)),
        "push": lambda line: print(
            session.push(_required_names(line, "push", "model"), line.ranks)
        ),
        "config": lambda line: _show_config(session, line),
        "report": lambda _: _latest_report(),
        "runs": lambda _: _earlier_runs(),
        "traceback": lambda _: _print_traceback(session),
        "help": lambda _: print(line_manual()),
    }

    @no_var_expand
    def accelerate(line: str) -> Any:
        recorder.as_written()
        typed_word, _, typed_options = line.strip().partition(" ")
        if typed_word in ("-h", "--help"):
            print(line_manual())
            return None
        subcommand_name = typed_word or "status"
        if subcommand_name not in actions:
            raise _unknown_subcommand(subcommand_name, typed_options)
        magic_line = _read_line(session, typed_options, subcommand_name)
        if magic_line.help:
            print(subcommand_manual(subcommand_name))
            return None
        return actions[subcommand_name](magic_line)

    accelerate.__doc__ = line_manual()
    return accelerate


def _run_cell(session: Session, line: MagicLine, source: CellSource) -> None:
    try:
        session.run(line, source)
    except WorkerFailed as error:
        if not isinstance(error, SyntaxError):
            raise
        # IPython shows any SyntaxError with the notebook's frames that raised it, and would leave
        # out the workers' text.
        raise WorkerFailed(
            str(error), failure=error.failure, failures=error.failures
        ) from error.__cause__


def _read_line(session: Session, text: str, subcommand: str = "") -> MagicLine:
    # A cell's options are compared with the settings of the running workers; those of a restart
    # are laid over what `%accelerate config` has set for it.
    pool = None if subcommand else session.living_pool
    config = session.config if pool is None else pool.config
    return read_magic_line(
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
            "are for the memory that its form shows, and with options it shows none. Leave one of "
            "them out."
        )
    session.configure(line)
    print(session.config_text())


def _latest_report() -> RunReport:
    """What IPython shows, or binds: `report = %accelerate report`."""
    runs = ENDED_RUNS
    if not runs:
        raise ConfigError(
            f"%accelerate report tells of the latest of {len(runs)} launches and cells. Run a cell "
            "with %%accelerate, or notebook_launcher(...), first."
        )
    return report_of(runs[-1], "%accelerate report")


def _earlier_runs() -> RunComparison | None:
    runs = [facts_of(run, run.plan) for run in ENDED_RUNS if run.plan is not None]
    if not runs:
        print("No launch and no cell of %%accelerate has run in this notebook.")
        return None
    return RunComparison(runs[-_MOST_RUNS:])


def _print_traceback(session: Session) -> None:
    from nbaccel.calls import outcome  # imports torch, which a notebook may not need
    from nbaccel.notebook.hints import failure_text

    records = outcome.latest_failure()
    if not records:
        print("No launch and no cell of %%accelerate has failed in this notebook.")
        return
    # IPython 9 writes `nocolor`, earlier versions `NoColor`.
    with_colours = str(getattr(session.shell, "colors", "")).lower() != "nocolor"
    print(failure_text(records, with_colours=with_colours))


def _required_names(line: MagicLine, subcommand_name: str, example_names: str) -> tuple[str, ...]:
    if line.names:
        return line.names
    raise ConfigError(
        f"%accelerate {subcommand_name} got no names: nothing would be copied. "
        f"Write for example %accelerate {subcommand_name} {example_names}."
    )


def _unknown_subcommand(word: str, options: str) -> ConfigError:
    if word.startswith("-"):
        return ConfigError(
            f"%accelerate needs a subcommand before its options: got {word!r}. It is "
            f"unclear what to do. Write %accelerate restart {word} {options}".rstrip()
            + ", or %%accelerate above the code of a cell."
        )
    names = [subcommand.name for subcommand in SUBCOMMANDS]
    text = closest(word, names) or f" They are: {', '.join(names)}."
    return ConfigError(f"%accelerate has no subcommand {word!r}: nothing was done.{text}")
