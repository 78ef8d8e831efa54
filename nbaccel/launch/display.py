"""`display()`, `plt.show()` and progress bars in a worker.

A worker has no connection to the browser. What it displays becomes a message, and the notebook
process publishes it in the cell. Widgets cannot work that way (their model lives in the notebook
process), so `tqdm.notebook` draws its bar as text.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nbaccel.launch.wire import ClearOutput, Display

Send = Callable[[Any], None]

_WIDGET = "application/vnd.jupyter.widget-view+json"
_WIDGET_BAR = (
    *("__init__", "__iter__", "update", "close", "clear", "reset", "display"),
    *("status_printer", "colour"),
)
"""By what a widget bar of tqdm differs from the text bar that it inherits from."""


def forward(send: Send) -> None:
    """Send rich output to the notebook from now on, if IPython is loaded in this process."""
    text_bars()
    if "IPython" not in sys.modules:
        return
    from IPython.core.interactiveshell import InteractiveShell

    publisher = publisher_class(send)
    if InteractiveShell.initialized():  # forked from a kernel: keep its formatters
        InteractiveShell.instance().display_pub = publisher()
        mute_comms()
    else:
        _start_shell(InteractiveShell, publisher)


def publisher_class(send: Send) -> type[Any]:
    """The class of a shell's `display_pub` that sends what it is given to the notebook."""
    from IPython.core.displaypub import DisplayPublisher

    class Publisher(DisplayPublisher):
        def publish(  # type: ignore[override]  # IPython passes all but these two by name
            self, data: Any, metadata: Any = None, **more: Any
        ) -> None:
            content = {"data": without_widgets(data), "metadata": metadata or {}}
            content |= {k: more[k] for k in ("transient", "update") if more.get(k)}
            _flush()
            send(Display(content))

        def clear_output(self, wait: bool = False) -> None:
            _flush()
            send(ClearOutput(wait))

    return Publisher


def without_widgets(data: Mapping[str, Any]) -> dict[str, Any]:
    """The forms of a rich output that mean something in another process."""
    return {kind: value for kind, value in data.items() if kind != _WIDGET}


def show_figures() -> None:
    """Show what has been drawn and not shown, as IPython does at the end of a cell."""
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    if inline is not None:
        try:
            inline.flush_figures()
        except Exception as error:  # a figure that cannot be drawn is no reason to lose results
            sys.stderr.write(f"nbaccel: a figure cannot be shown: {error!r}\n")


def _flush() -> None:
    """Let what was printed before go out before: text and displays take different ways."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # user code closed it: nothing is in it
            stream.flush()


def _start_shell(base: type[Any], publisher: type[Any]) -> None:
    """A shell with formatters and a publisher and nothing else: no history, no threads."""

    class WorkerShell(base):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            super(base, self).__init__(**kwargs)
            self.configurables: list[Any] = [self]  # what the formatter's set-up adds itself to
            self.user_module, self.user_ns = self.prepare_user_module()
            self.user_ns_hidden: dict[str, Any] = {}
            self.init_events()
            self.init_display_formatter()
            self.display_pub = publisher(parent=self)

    forget_shells(base)
    WorkerShell.instance()


def forget_shells(base: type[Any]) -> None:
    """Let this process have no shell, so that another can be the one."""
    if base.initialized():
        type(base._instance).clear_instance()
    for kind in base._walk_mro():
        kind._instance = None


def mute_comms() -> None:
    """A widget made in a child would write to the notebook's socket, which drops it."""
    comm = sys.modules.get("comm")
    if comm is not None:
        comm.create_comm = comm._create_comm  # type: ignore[attr-defined]


def text_bars() -> None:
    """Let `tqdm.notebook` and `tqdm.auto` draw text bars."""
    loaded = sys.modules.get("tqdm.notebook")
    if loaded is not None:  # forked from a notebook: user code already holds the class
        for name in set(vars(loaded.tqdm_notebook)) & set(_WIDGET_BAR):
            delattr(loaded.tqdm_notebook, name)
    elif not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())


class _TextBars(MetaPathFinder, Loader):
    """Gives a text bar to whoever imports `tqdm.notebook`; tqdm is imported only then."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "tqdm.notebook" else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm import std

        vars(module).update(
            tqdm=std.tqdm, tqdm_notebook=std.tqdm, trange=std.trange, tnrange=std.trange
        )
