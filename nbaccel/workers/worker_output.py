"""`display()`, `plt.show()`, progress bars and logging in a worker.

A worker has no connection to the browser. What it displays becomes a message, and the notebook
process publishes it in the cell. Widgets cannot work that way (their model lives in the notebook
process), so `tqdm.notebook` draws its bar as text.

    notebook: levels, propagation, handlers ─► bytes ─► worker: the same, on its own streams

Handlers that write to stderr or stdout write to the worker's; those that write to a file append to
the same one, from all ranks. Rotating files are appended to without rotation: two processes would
rename each other's files. Handlers of any other kind stay with the notebook.

A library that configures its own logger does so again when a worker imports it: of those only the
levels are carried over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle

from nbaccel.base.frames import Frame
from nbaccel.base.import_patches import patch_module
from nbaccel.workers.messaging import ClearOutput, Display

SendMessage = Callable[[Any], None]

_INLINE_BACKEND = "matplotlib_inline.backend_inline"
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_WIDGET_BAR = (
    *("__init__", "__iter__", "update", "close", "clear", "reset", "display"),
    *("status_printer", "colour"),
)
"""What tqdm's widget bar overrides of the text bar that it inherits from."""


# ------------------------------------------------------------------------- displays


def forward_displays(send_message: SendMessage) -> None:
    """Send rich output to the notebook from now on, if IPython is loaded in this process."""
    text_bars()
    # Importing IPython is slow, and the worker of a script does not need it.
    if "IPython" not in sys.modules:
        return
    from IPython.core.interactiveshell import InteractiveShell

    publisher = publisher_class(send_message)
    # Forked from a kernel: its shell stays, with the formatters that the user has registered.
    if InteractiveShell.initialized():
        InteractiveShell.instance().display_pub = publisher()
        mute_comms()
    else:
        _start_shell(InteractiveShell, publisher)


def publisher_class(send_message: SendMessage) -> type[Any]:
    """The class of a shell's `display_pub` that sends what it is given to the notebook."""
    from IPython.core.displaypub import DisplayPublisher

    class Publisher(DisplayPublisher):
        def publish(  # type: ignore[override]  # IPython passes all but these two by name
            self, data: Any, metadata: Any = None, **more: Any
        ) -> None:
            content = {"data": without_widgets(data), "metadata": metadata or {}}
            content |= {k: more[k] for k in ("transient", "update") if more.get(k)}
            flush_streams()
            send_message(Display(content))

        def clear_output(self, wait: bool = False) -> None:
            flush_streams()
            send_message(ClearOutput(wait))

    return Publisher


def without_widgets(data: Mapping[str, Any]) -> dict[str, Any]:
    """The forms of a rich output that mean something in another process."""
    return {kind: value for kind, value in data.items() if kind != _WIDGET_MIME}


def show_figures() -> None:
    """Show what has been drawn and not shown, as IPython does at the end of a cell."""
    backend = sys.modules.get(_INLINE_BACKEND)
    if backend is not None:
        try:
            backend.flush_figures()
        except Exception as error:  # drawing may raise anything, and must not lose the results
            sys.stderr.write(f"nbaccel: a figure cannot be shown: {error!r}\n")


def flush_streams() -> None:
    """Send printed text: before a display, as both take different ways to the notebook."""
    for stream in (sys.stdout, sys.stderr):
        # User code has closed the stream, or the reader is gone: nothing is left to save.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _start_shell(shell_class: type[Any], publisher_class: type[Any]) -> None:
    """A shell with formatters and a publisher and nothing else: no history, no threads."""

    class WorkerShell(shell_class):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            # Past InteractiveShell.__init__, which opens the history database and starts a thread.
            super(shell_class, self).__init__(**kwargs)
            # The formatter's set-up adds itself to this list.
            self.configurables: list[Any] = [self]
            self.user_module, self.user_ns = self.prepare_user_module()
            self.user_ns_hidden: dict[str, Any] = {}
            self.init_events()
            self.init_display_formatter()
            self.display_pub = publisher_class(parent=self)

    forget_shells(shell_class)
    connect_inline_figures(WorkerShell.instance())
    mute_comms()


def connect_inline_figures(worker_shell: Any) -> None:
    """Connect figures to this shell, if matplotlib was set up for the notebook's."""
    backend = sys.modules.get(_INLINE_BACKEND)
    if backend is None:
        return
    # The formats are the old shell's.
    backend.configure_inline_support.current_backend = "unset"
    backend.InlineBackend.clear_instance()
    backend.configure_inline_support(worker_shell, f"module://{_INLINE_BACKEND}")


def forget_shells(shell_class: type[Any]) -> None:
    """Remove the shell of this process, so that another can become its singleton."""
    if shell_class.initialized():
        type(shell_class.instance()).clear_instance()


def forget_prompts() -> None:
    """Let nobody seem to type here: a kernel has prompts, as an interactive interpreter has.

    Libraries ask for them when they are imported. Lightning then refuses whatever starts a process
    for each rank, also where these run already.
    """
    for name in ("ps1", "ps2", "ps3"):
        vars(sys).pop(name, None)


def mute_comms() -> None:
    """A widget made in a child would write to the notebook's socket, which drops it."""
    module = sys.modules.get("comm")
    if module is not None:
        module.create_comm = module.DummyComm  # type: ignore[attr-defined]


def text_bars() -> None:
    """Let `tqdm.notebook` draw text bars."""
    patch_module("tqdm.notebook", _without_widgets)


def _without_widgets(module: ModuleType) -> None:
    # The class itself is changed: user code may hold it.
    for name in set(vars(module.tqdm_notebook)) & set(_WIDGET_BAR):
        delattr(module.tqdm_notebook, name)


# ------------------------------------------------------------------------- logging


@dataclass(frozen=True, kw_only=True)
class _HandlerSettings:
    """A handler, without what belongs to one process."""

    stream: str
    """`stderr` or `stdout`; empty for a file."""
    file: str
    encoding: str | None
    level: int
    formatter: bytes
    filters: bytes

    def made(self) -> logging.Handler:
        """The same in this process."""
        handler: logging.Handler
        if self.stream:
            handler = logging.StreamHandler(getattr(sys, self.stream))
        else:
            # delay: a worker that logs nothing must not create or touch the file.
            handler = logging.FileHandler(self.file, "a", self.encoding, delay=True)
        handler.setLevel(self.level)
        handler.setFormatter(_unpickled(self.formatter))
        for log_filter in _unpickled(self.filters) or ():
            handler.addFilter(log_filter)
        handler.is_from_nbaccel = True  # type: ignore[union-attr]
        return handler


@dataclass(frozen=True, kw_only=True)
class _LoggerSettings:
    """What was set at one logger."""

    level: int = logging.NOTSET
    propagate: bool = True
    disabled: bool = False
    handlers: tuple[_HandlerSettings, ...] = ()


# Where an installed package lies does not change in the life of a process, and a cell asks for all.
_LIBRARY_LOGGERS: set[str] = set()


def as_configured() -> bytes:
    """How logging is configured in this process."""
    carried: dict[str | None, _LoggerSettings] = {None: _describe(logging.root)}
    # A copy, because another thread may make a logger meanwhile.
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # Libraries make hundreds, most of which nobody has configured.
        if not isinstance(logger, logging.Logger) or not (
            logger.level or logger.handlers or logger.disabled or not logger.propagate
        ):
            continue
        if name not in _LIBRARY_LOGGERS and not _is_librarys(name):
            carried[name] = _describe(logger)
        elif logger.level:
            carried[name] = _LoggerSettings(level=logger.level)
    # Pickled here, so that workers can compare it as bytes and skip what has not changed.
    return pickle.dumps((logging.root.manager.disable, carried))


def _describe(logger: logging.Logger) -> _LoggerSettings:
    return _LoggerSettings(
        level=logger.level,
        propagate=logger.propagate,
        disabled=logger.disabled,
        handlers=tuple(_handler_settings(logger)),
    )


def _is_librarys(name: str) -> bool:
    """Whether a logger has the name of an installed package that is in use."""
    package = name.partition(".")[0]
    module = sys.modules.get(package) or sys.modules.get(package.lower())
    file = getattr(module, "__file__", None) or ""
    if package == "__main__" or not file:
        return False
    is_library = Frame(file=file, line=0, function="").is_library
    if is_library:
        _LIBRARY_LOGGERS.add(name)
    return is_library


def _handler_settings(logger: logging.Logger) -> Iterator[_HandlerSettings]:
    for handler in logger.handlers:
        if not _is_notebook_handler(handler):
            continue
        file = getattr(handler, "baseFilename", "")
        stream = "" if file else _stream_of(handler)
        if file:
            _append_only(handler)
        elif not stream:
            continue
        yield _HandlerSettings(
            stream=stream,
            file=file,
            encoding=getattr(handler, "encoding", None),
            level=handler.level,
            formatter=_pickled_or_empty(handler.formatter),
            filters=_pickled_or_empty(handler.filters),
        )


def _is_notebook_handler(handler: logging.Handler) -> bool:
    """Whether it is of a kind that workers are given."""
    return isinstance(handler, logging.FileHandler) or type(handler) is logging.StreamHandler


def _stream_of(handler: Any) -> str:
    """Which stream of this process a handler writes to; empty if none of them."""
    stream = getattr(handler, "stream", None)
    for name in ("stderr", "stdout"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    return ""


def move_handlers(streams: Sequence[Any], stream: Any) -> None:
    """Let handlers that write to one of these streams write to this one.

    transformers and others make theirs when they are imported, with the stream of that process.
    """
    loggers = (logging.root, *tuple(logging.root.manager.loggerDict.values()))
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                handler.setStream(stream)


def _append_only(handler: Any) -> None:
    """Let the notebook write behind what the workers will have written, not over it."""
    import fcntl  # Windows has none, where nbaccel can be imported, too

    stream = getattr(handler, "stream", None)
    if stream is not None:
        # The stream is closed, or has no descriptor.
        with contextlib.suppress(OSError, ValueError):
            flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)


def _pickled_or_empty(value: Any) -> bytes:
    if not value:
        return b""
    # cloudpickle takes ten times as long, and each cell asks.
    by_name = type(value) is logging.Formatter
    try:
        settings: bytes = (pickle if by_name else cloudpickle).dumps(value)
    # The handler works without its formatter.
    except Exception:  # the user's own class may raise anything
        return b""
    return settings


def _unpickled(value: bytes) -> Any:
    try:
        return pickle.loads(value) if value else None
    except Exception:  # its class cannot be imported here; the handler works without it
        return None


class LoggingSettings:
    """The notebook's logging in one worker."""

    def __init__(self) -> None:
        self._given = b""
        self._names: set[str | None] = set()

    def follow(self, given: bytes) -> None:
        """Configure this process as the notebook is, unless that has not changed since."""
        if given == self._given:
            return
        self._given = given
        logging.root.manager.disable, settings = pickle.loads(given)
        for name in self._names - settings.keys():
            _configure(logging.getLogger(name), _LoggerSettings())
        for name, wanted in settings.items():
            _configure(logging.getLogger(name), wanted)
        self._names = set(settings)


def _configure(logger: logging.Logger, wanted: _LoggerSettings) -> None:
    # A copy, because the loop removes handlers.
    for handler in tuple(logger.handlers):
        # A fork has the notebook's handlers already: without this, each line would be logged twice.
        if getattr(handler, "is_from_nbaccel", False) or (
            wanted.handlers and _is_notebook_handler(handler)
        ):
            logger.removeHandler(handler)
    logger.setLevel(wanted.level)
    # A logger that a library has configured here keeps its own handlers and propagation.
    if wanted.handlers or not logger.handlers:
        logger.propagate = wanted.propagate
        logger.disabled = wanted.disabled
    for handler_settings in wanted.handlers:
        logger.addHandler(handler_settings.made())
