"""The parts of IPython and ipykernel without a public name that nbaccel uses.

Seen in IPython 7.34 to 9.18 and ipykernel 6.17 to 7.4; `PRIVATE_NAMES` says in which of them each
name was. When this module is imported, a warning names those that the loaded version should have
and lacks, and what is lost. Each function takes the object that has the name, so nothing is
imported here, and does without the name as its docstring says. No other module uses private names
of IPython; `tests/house` checks it.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SENDING_S = 10.0  # for ipykernel's thread to send what it has; its own limit for a flush


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateName:
    """A private name that some versions of a package have."""

    module: str  # the module with the class
    holder: str
    name: str  # the attribute
    first: tuple[int, int]  # the first version that has it
    # The last version whose private name is used; None where later ones are expected to have it,
    # too.
    last: tuple[int, int] | None = None
    loss: str  # what does not work without it

    def is_missing(self) -> bool:
        """Whether the loaded version should have it and lacks it; False where nothing is loaded."""
        holder = getattr(sys.modules.get(self.module), self.holder, None)
        version = tuple(getattr(self._package(), "version_info", ())[:2])
        if holder is None or not self.first <= version <= (self.last or version):
            return False
        # Some are given to instances by the constructor: its code names them.
        code = getattr(holder.__init__, "__code__", None)
        return not hasattr(holder, self.name) and self.name not in getattr(code, "co_names", ())

    def message(self) -> str:
        """What is missing, what is lost by it, and which versions have it."""
        name = self.module.partition(".")[0]
        version = getattr(self._package(), "__version__", "of unknown version")
        first, last = (".".join(map(str, v)) for v in (self.first, self.last or self.first))
        seen_in = f"{first} to {last}" if self.last else f"{first} and later"
        return (
            f"This {name} ({version}) lacks {self.holder}.{self.name}: {self.loss}. It was "
            f"seen in {name} {seen_in}: install a version that has it, or a newer nbaccel."
        )

    def _package(self) -> Any:
        return sys.modules.get(self.module.partition(".")[0])


_INSPECT = PrivateName(
    module="IPython.core.interactiveshell",
    holder="InteractiveShell",
    name="_inspect",
    first=(7, 34),
    loss="`name?` does not find names that only workers have",
)
_COMPLETE = PrivateName(
    module="IPython.core.completer",
    holder="IPCompleter",
    name="_complete",
    first=(7, 34),
    # From 8.6 on there is a public way.
    last=(8, 5),
    loss="names that only workers have are not completed",
)
PRIVATE_NAMES = (
    _INSPECT,
    _COMPLETE,
    PrivateName(
        module="IPython.core.compilerop",
        holder="CachingCompiler",
        name="_filename_map",
        first=(8, 0),
        loss="lines of cells are shown without the cell's number",
    ),
    PrivateName(
        module="IPython.core.interactiveshell",
        holder="InteractiveShell",
        name="_showtraceback",
        first=(7, 34),
        loss="the report of a failed launch is printed, and not shown as the cell's error",
    ),
    PrivateName(
        module="IPython.core.interactiveshell",
        holder="InteractiveShell",
        name="_tee",
        first=(9, 1),
        loss="live workers keep all that cells print in memory",
    ),
    PrivateName(
        module="ipykernel.iostream",
        holder="OutStream",
        name="_flush_pending",
        first=(6, 17),
        loss="showing the value of a cell in workers takes a third of a millisecond more",
    ),
    PrivateName(
        module="ipykernel.zmqshell",
        holder="ZMQDisplayPublisher",
        name="_flush_streams",
        first=(6, 17),
        loss="showing the value of a cell in workers takes a third of a millisecond more",
    ),
)


def _check_names() -> None:
    for private_name in PRIVATE_NAMES:
        if private_name.is_missing():
            _warn(private_name)


def _warn(name: PrivateName) -> None:
    warnings.warn(name.message(), RuntimeWarning, stacklevel=3)


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


def wrap_completions(
    completer: Any, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace what all completions of IPython before 8.6 come from."""
    return _replace_method(completer, _COMPLETE, wrapper)


def inspect_also(
    shell: Any, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace what `name?` calls."""
    return _replace_method(shell, _INSPECT, wrapper)


def _replace_method(
    owner: Any, name: PrivateName, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    method = getattr(owner, name.name, None)
    if method is None:
        _warn(name)
        return lambda: None
    # In the instance, so that removing it brings the class's method back.
    vars(owner)[name.name] = wrapper(method)
    return lambda: vars(owner).pop(name.name, None)


def show_traceback_lines(shell: Any, kind: type, error: BaseException, lines: list[str]) -> None:
    """Show an error as a shell shows tracebacks: in a kernel, as the cell's error.

    A shell without the method prints the lines.
    """
    show = getattr(shell, "_showtraceback", None)
    if show is None:
        sys.stderr.write("\n".join([*lines, ""]))
    else:
        show(kind, error, lines)


def publish_display(display_publisher: Any, display_content: Mapping[str, Any]) -> None:
    """Publish rich output; without flushing printed text first where there is none.

    ipykernel flushes standard output and error before each output, and waits for its own thread
    twice. Where neither has text, it is enough to know that no flush is under way: one wait.
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


_check_names()
