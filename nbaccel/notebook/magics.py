"""`%%accelerate` and `%accelerate`: what is written becomes what the session does."""

from __future__ import annotations

from collections.abc import Callable

from IPython.core.magic import no_var_expand
from IPython.display import display

from nbaccel.config.mistakes import closest
from nbaccel.errors import ConfigError, WorkerFailed
from nbaccel.notebook.cells import Cells
from nbaccel.notebook.line import Line, read
from nbaccel.notebook.manual import cell_manual, line_manual, subcommand_manual
from nbaccel.notebook.options import SUBCOMMANDS
from nbaccel.notebook.session import Session
from nbaccel.pool.source import Source

__all__ = ["NAME", "cell_magic", "line_magic"]

NAME = "accelerate"


def cell_magic(session: Session, cells: Cells) -> Callable[[str, str], None]:
    """The function behind `%%accelerate`.

    Args:
        session: The notebook's workers.
        cells: Knows the cell as it was written.
    """

    @no_var_expand
    def accelerate(line: str, cell: str) -> None:
        cells.as_written()
        asked = _read(session, line)
        if asked.help:
            print(cell_manual())
        elif not cell.strip():
            raise ConfigError(
                f"The cell has no code below %%accelerate: got {cell!r}. The workers have nothing "
                "to run. Write code there, %accelerate restart to start workers now, or "
                "%%accelerate --help for the options."
            )
        else:
            _run(session, asked, cells.source(line, cell))

    accelerate.__doc__ = cell_manual()
    return accelerate


def line_magic(session: Session, cells: Cells) -> Callable[[str], None]:
    """The function behind `%accelerate`.

    Args:
        session: The notebook's workers.
        cells: Knows the cell as it was written.
    """
    doers = {
        "status": _status,
        "restart": _restart,
        "stop": _stop,
        "pull": _pull,
        "push": _push,
        "config": _config,
        "traceback": _traceback,
        "help": _help,
    }

    @no_var_expand
    def accelerate(line: str) -> None:
        cells.as_written()
        word, _, rest = line.strip().partition(" ")
        if word in ("-h", "--help"):
            print(line_manual())
            return
        name = word or "status"
        if name not in doers:
            raise _unknown(name, rest)
        asked = _read(session, rest, name)
        if asked.help:
            print(subcommand_manual(name))
        else:
            doers[name](session, asked)

    accelerate.__doc__ = line_manual()
    return accelerate


def _run(session: Session, line: Line, source: Source) -> None:
    try:
        session.run(line, source)
    except WorkerFailed as error:
        if not isinstance(error, SyntaxError):
            raise
        # IPython has a way of its own to show every SyntaxError: the frames that raised this one
        # here, not the workers' text.
        raise WorkerFailed(
            str(error), failure=error.failure, failures=error.failures
        ) from error.__cause__


def _read(session: Session, text: str, subcommand: str = "") -> Line:
    # A cell's options are compared with the settings of the workers there are; those of a restart
    # go over what `%accelerate config` has settled for it.
    pool = session.pool
    live = pool is not None and session.is_live() and not subcommand
    base = pool.config if pool is not None and live else session.config
    return read(text, base=base, namespace=session.shell.user_ns, subcommand=subcommand)


def _status(session: Session, line: Line) -> None:
    if session.pool is None:
        print(session.told_absence())
    else:
        display(session.pool.status())  # type: ignore[no-untyped-call]


def _restart(session: Session, line: Line) -> None:
    session.restart(line)


def _stop(session: Session, line: Line) -> None:
    print("Workers stopped." if session.stop() else "There are no workers to stop.")


def _pull(session: Session, line: Line) -> None:
    print(session.pull(_names(line, "pull", "loss"), line.ranks))


def _push(session: Session, line: Line) -> None:
    print(session.push(_names(line, "push", "model"), line.ranks))


def _config(session: Session, line: Line) -> None:
    if not (line.given or line.dist):
        picker = session.open_picker(line.names)
        print(session.told_settings())
        picker.show()
        return
    if line.names:
        raise ConfigError(
            f"%accelerate config got {', '.join(line.names)} beside options: names are for the "
            "memory that its form shows, and with options it shows none. Leave one of them out."
        )
    session.configure(line)
    print(session.told_config())


def _traceback(session: Session, line: Line) -> None:
    from nbaccel.launch import verdict  # it brings torch, which a notebook may do without
    from nbaccel.notebook.tracebacks import told

    records = verdict.latest()
    if not records:
        print("No launch and no cell of %%accelerate has failed in this notebook.")
        return
    colours = str(getattr(session.shell, "colors", "")).lower() != "nocolor"
    print(told(records, colours=colours))


def _help(session: Session, line: Line) -> None:
    print(line_manual())


def _names(line: Line, word: str, example: str) -> tuple[str, ...]:
    if line.names:
        return line.names
    raise ConfigError(
        f"%accelerate {word} got no names: nothing would be copied. "
        f"Write for example %accelerate {word} {example}."
    )


def _unknown(word: str, rest: str) -> ConfigError:
    if word.startswith("-"):
        return ConfigError(
            f"%accelerate needs a subcommand before its options: got {word!r}. Nothing says what "
            f"to do with it. Write %accelerate restart {word} {rest}".rstrip()
            + ", or %%accelerate above the code of a cell."
        )
    names = [sub.name for sub in SUBCOMMANDS]
    remedy = closest(word, names) or f" They are: {', '.join(names)}."
    return ConfigError(f"%accelerate has no subcommand {word!r}: nothing was done.{remedy}")
