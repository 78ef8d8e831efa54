"""`display()`, `plt.show()` and progress bars in a worker.

A worker has no connection to the browser. What it displays becomes a message, and the notebook
process publishes it in the cell. Widgets cannot work that way (their model lives in the notebook
process), so `tqdm.notebook` draws its bar as text.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from nbaccel.base.training_libraries import patch_module
from nbaccel.workers.messaging import ClearOutput, Display

SendMessage = Callable[[Any], None]

_INLINE_BACKEND = "matplotlib_inline.backend_inline"
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_WIDGET_BAR = (
    *("__init__", "__iter__", "update", "close", "clear", "reset", "display"),
    *("status_printer", "colour"),
)
"""What tqdm's widget bar overrides of the text bar that it inherits from."""


def forward_displays(send: SendMessage) -> None:
    """Send rich output to the notebook from now on, if IPython is loaded in this process."""
    text_bars()
    # Importing IPython is slow, and the worker of a script does not need it.
    if "IPython" not in sys.modules:
        return
    from IPython.core.interactiveshell import InteractiveShell

    publisher = publisher_class(send)
    # Forked from a kernel: its shell stays, with the formatters that the user has registered.
    if InteractiveShell.initialized():
        InteractiveShell.instance().display_pub = publisher()
        mute_comms()
    else:
        _start_shell(InteractiveShell, publisher)


def publisher_class(send: SendMessage) -> type[Any]:
    """The class of a shell's `display_pub` that sends what it is given to the notebook."""
    from IPython.core.displaypub import DisplayPublisher

    class Publisher(DisplayPublisher):
        def publish(  # type: ignore[override]  # IPython passes all but these two by name
            self, data: Any, metadata: Any = None, **more: Any
        ) -> None:
            content = {"data": without_widgets(data), "metadata": metadata or {}}
            content |= {k: more[k] for k in ("transient", "update") if more.get(k)}
            flush_streams()
            send(Display(content))

        def clear_output(self, wait: bool = False) -> None:
            flush_streams()
            send(ClearOutput(wait))

        def set_parent(self, parent: Any) -> None:
            """Nothing to do for a forked kernel's shell, which says which cell is running."""

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


def move_handlers(streams: Sequence[Any], stream: Any) -> None:
    """Let handlers, such as those that imports have made, write to this stream instead of these."""
    for logger in (logging.root, *tuple(logging.root.manager.loggerDict.values())):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                handler.setStream(stream)
