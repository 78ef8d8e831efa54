"""The parts of IPython and ipykernel without a public name that nbaccel uses.

Seen in IPython 7.34 to 9.18 and ipykernel 6.17 to 7.4. Nothing is imported here, and each function
does without the name as its docstring says. No other module uses them; `tests/house` checks it.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_Wrapper: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
_SENDING_S = 10.0  # for ipykernel's thread to send what it has; its own limit for a flush


def cell_numbers(compiler: Any) -> dict[str, int] | None:
    """The numbers of cells by the file names that they were compiled under."""
    numbers: dict[str, int] | None = getattr(compiler, "_filename_map", None)
    return numbers


def number_cell(compiler: Any, file_name: str, number: int) -> None:
    """Let IPython show a cell's frames as `In[number]`; before IPython 8, the name shows it."""
    numbers = cell_numbers(compiler)
    if numbers is not None:
        numbers[file_name] = number


def keep_cell_lines(name: str, entry: Any) -> None:
    """Keep a cell's lines in `linecache` where IPython restores them: 7 does, from its own copy."""
    # Other versions have no such table: the entry goes into a dict that is thrown away.
    getattr(linecache, "_ipython_cache", {})[name] = entry


def keep_no_prints(shell: Any) -> None:
    """Stop IPython 9 from keeping all that cells print for its history; before 9 it does not."""
    if hasattr(shell, "_tee"):
        shell._tee = lambda *_names, **_more: contextlib.nullcontext()


def inspect_also(shell: Any, wrapper: _Wrapper) -> Callable[[], None]:
    """Replace what `name?` calls; without it, names that only workers have are not found."""
    if (method := getattr(shell, "_inspect", None)) is None:
        return lambda: None
    # In the instance, so that removing it brings the class's method back.
    vars(shell)["_inspect"] = wrapper(method)
    return lambda: vars(shell).pop("_inspect", None)


def show_traceback_lines(shell: Any, kind: type, error: BaseException, lines: list[str]) -> None:
    """Show an error as a shell shows tracebacks: in a kernel, as the cell's error."""
    show = getattr(shell, "_showtraceback", None)
    if show is None:
        sys.stderr.write("\n".join([*lines, ""]))
    else:
        show(kind, error, lines)


def publish_display(display_publisher: Any, display_content: Mapping[str, Any]) -> None:
    """Publish rich output; without flushing printed text first where there is none.

    ipykernel flushes both streams before each output, and waits for its own thread twice. Where
    neither has text, it is enough to know that no flush is under way: one wait.
    """
    streams = (sys.stdout, sys.stderr)
    thread = threading.get_ident()
    flush = getattr(display_publisher, "_flush_streams", None)
    if flush is None or any(map(_has_text, streams)) or not _is_thread_through(streams[0]):
        display_publisher.publish(**display_content)
        return

    def flush_for_others() -> None:
        if threading.get_ident() != thread:
            flush()

    # In the instance, so that removing it brings the class's method back.
    vars(display_publisher)["_flush_streams"] = flush_for_others
    try:
        display_publisher.publish(**display_content)
    finally:
        vars(display_publisher).pop("_flush_streams", None)


def is_in_output_widget(kernel: Any) -> bool:
    """Whether an `Output` of ipywidgets takes what is displayed now: it shows no changes of it."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    output_class = getattr(sys.modules.get("ipywidgets.widgets.widget_output"), "Output", None)
    if output_class is None or not hasattr(kernel, "get_parent"):
        return False
    # A property of the class in ipywidgets 8, which warns; in 7 the table itself.
    widgets_of_7 = vars(getattr(module, "Widget", object)).get("widgets")
    all_widgets = getattr(module, "_instances", widgets_of_7)
    message_id = (kernel.get_parent() or {}).get("header", {}).get("msg_id")
    return isinstance(all_widgets, dict) and any(
        isinstance(widget, output_class) and widget.msg_id == message_id
        for widget in list(all_widgets.values())
        if message_id
    )


def _has_text(stream: Any) -> bool:
    """Whether text waits to be flushed; True for a stream of which that is not known."""
    return bool(getattr(stream, "_flush_pending", True))


def _is_thread_through(stream: Any) -> bool:
    """Whether ipykernel's thread has sent all that was flushed, and no text has come meanwhile."""
    thread = getattr(stream, "pub_thread", None)
    if thread is None:
        return False
    through = threading.Event()
    # What a flush hands on is behind it in the same queue, and so before this.
    thread.schedule(through.set)
    return through.wait(_SENDING_S) and not any(map(_has_text, (sys.stdout, sys.stderr)))
