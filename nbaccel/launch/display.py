"""`display()`, `plt.show()` and progress bars in a worker.

A worker has no connection to the browser. What it displays becomes a message, and the notebook
process publishes it in the cell. Widgets cannot work that way (their model lives in the notebook
process), so `tqdm.notebook` draws its bar as text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    _text_bars()
    if "IPython" not in sys.modules:
        return
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    class Publisher(DisplayPublisher):
        def publish(  # type: ignore[override]  # IPython passes all but these two by name
            self, data: Any, metadata: Any = None, **more: Any
        ) -> None:
            shown = {kind: value for kind, value in data.items() if kind != _WIDGET}
            content = {"data": shown, "metadata": metadata or {}}
            content |= {k: more[k] for k in ("transient", "update") if more.get(k)}
            send(Display(content))

        def clear_output(self, wait: bool = False) -> None:
            send(ClearOutput(wait))

    if InteractiveShell.initialized():  # forked from a kernel: keep its formatters
        InteractiveShell.instance().display_pub = Publisher()  # type: ignore[no-untyped-call]
        _mute_comms()
    else:
        _start_shell(InteractiveShell, Publisher)


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

    for kind in base._walk_mro():
        kind._instance = None
    WorkerShell.instance()


def _mute_comms() -> None:
    """A widget made in a child would write to the notebook's socket, which drops it."""
    comm = sys.modules.get("comm")
    if comm is not None:
        comm.create_comm = comm._create_comm  # type: ignore[attr-defined]


def _text_bars() -> None:
    """Let `tqdm.notebook` and `tqdm.auto` draw text bars."""
    loaded = sys.modules.get("tqdm.notebook")
    if loaded is not None:  # forked from a notebook: user code already holds the class
        for name in set(vars(loaded.tqdm_notebook)) & set(_WIDGET_BAR):
            delattr(loaded.tqdm_notebook, name)
    else:
        sys.modules["tqdm.notebook"] = _LazyTextTqdm("tqdm.notebook")


class _LazyTextTqdm(ModuleType):
    """Stands in for `tqdm.notebook`; tqdm itself is imported only if somebody asks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from tqdm import std

        names = {"tqdm": std.tqdm, "tqdm_notebook": std.tqdm, "trange": std.trange}
        names["tnrange"] = std.trange
        if name not in names:
            raise AttributeError(f"tqdm.notebook in a worker has no {name!r}")
        return names[name]
