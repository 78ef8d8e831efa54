"""Showing rich output in the notebook: in the cell, or as text where there is no IPython.

rank 0  {"text/plain": "0.91"} ─┐          [0-2] 0.91
rank 1  {"text/plain": "0.91"} ─┼──►       [3] 0.87
rank 2  {"text/plain": "0.91"} ─┤
rank 3  {"text/plain": "0.87"} ─┘
"""

from __future__ import annotations

import asyncio
import html
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.base import env, frames, ipython_private
from nbaccel.base.units import count_noun, number_ranges

_RENDER_METHOD = "_render_traceback_"


def publish_display(content: Mapping[str, Any]) -> None:
    """Publish rich output in the current cell; outside IPython, print its text form."""
    shell = frames.running_shell()
    if shell is not None:
        ipython_private.publish_display(shell.display_pub, content)
    elif (text := content["data"].get("text/plain")) is not None:
        sys.stdout.write(f"{text}\n")


def clear(*, wait_for_new: bool) -> None:
    """Clear the cell's output, where there is a cell."""
    shell = frames.running_shell()
    if shell is not None:
        shell.display_pub.clear_output(wait=wait_for_new)


def show_by_its_text(error_class: type[BaseException]) -> None:
    """Let IPython use `_render_traceback_` of the next exception of this class, also of a group."""
    shell = frames.running_shell()
    # IPython has one handler at a time: one of the user's must not be replaced.
    if shell is None or any(not hasattr(one, _RENDER_METHOD) for one in shell.custom_exceptions):
        return

    def show_traceback(
        shell: Any, error_class: type, error: Any, error_traceback: Any, tb_offset: Any = None
    ) -> Any:
        # For one exception only: the user's later ones are shown as ever.
        shell.set_custom_exc((), None)
        lines = error._render_traceback_()
        ipython_private.show_traceback_lines(shell, error_class, error, lines)
        return lines

    shell.set_custom_exc((error_class,), show_traceback)


def has_cells() -> bool:
    """Whether output can be changed after it was shown: there is a kernel, and a browser at it."""
    return getattr(frames.running_shell(), "kernel", None) is not None


def call_later(seconds: float, act: Callable[[], object]) -> asyncio.TimerHandle | None:
    """Do something in a while; None where no loop runs in this thread, so no timer can be set."""
    try:
        return asyncio.get_running_loop().call_later(seconds, act)
    except RuntimeError:
        return None


def request_header(name: str) -> str:
    """Of the message that the kernel works on: `msg_id` of a cell's run, `session` of a page."""
    kernel: Any = getattr(frames.running_shell(), "kernel", None)
    parent = kernel.get_parent() if hasattr(kernel, "get_parent") else None
    return str((parent or {}).get("header", {}).get(name, ""))


def show_results(results: Mapping[int, Mapping[str, Any] | None]) -> None:
    """Show what the ranks' cells ended with: `{"data": ..., "metadata": ...}` each."""
    groups: dict[str, tuple[list[int], Mapping[str, Any]]] = {}
    for rank, bundle in sorted(results.items(), key=lambda result: result[0]):
        if bundle and bundle["data"]:
            groups.setdefault(repr(bundle), ([], bundle))[0].append(rank)
    lines: list[str] = []
    for ranks, bundle in groups.values():
        if len(ranks) == len(results):
            publish_display(bundle)
            return
        label = f"[{number_ranges(ranks)}]"
        data = bundle["data"]
        if set(data) == {"text/plain"} and "\n" not in data["text/plain"]:
            lines.append(f"{label} {data['text/plain']}")
            continue
        _show_lines([*lines, label])
        publish_display(bundle)
        lines = []
    if lines:
        _show_lines(lines)


def _show_lines(lines: list[str]) -> None:
    publish_display({"data": {"text/plain": "\n".join(lines)}})


# Front ends draw it as nothing, and nbconvert knows both forms: it warns of an output without any.
_EMPTY_CONTENT: dict[str, Any] = {"text/plain": "", "text/html": ""}


class CellPlace:
    """The place of a call at the top of its cell's output: one output, which is replaced.

        before anything is printed   without content, which front ends draw as nothing
        0.5 s                        what is being waited for
        1 s                          the panel
        end                          the summary

    What workers print comes below it. A call that is over before it has printed anything, or shown
    anything here, leaves no output at all. An `Output` of ipywidgets ignores changes of what it
    shows, so there is no place within it.
    """

    def __init__(self) -> None:
        kernel = getattr(frames.running_shell(), "kernel", None)
        # Whether there is a cell whose output can be replaced.
        self.is_there = has_cells() and not ipython_private.is_in_output_widget(kernel)
        self.has_panel = self.is_there and env.flag("NBACCEL_DASHBOARD") is not False
        self.display_id = uuid.uuid4().hex  # what the front end knows the output by
        self._content = _EMPTY_CONTENT
        self._stands = False

    def hold(self) -> None:
        """Keep the place, because something is about to be shown below it. Cheap to call often."""
        if self.has_panel and not self._stands:
            self._publish_content()

    def show(self, data: dict[str, Any]) -> None:
        """Show something here, in the place of what was shown before."""
        new_content = data or _EMPTY_CONTENT
        is_other = new_content != self._content
        self._content = new_content
        # A place that is not there yet holds nothing, and need not be made for that.
        if is_other if self._stands else data:
            self._publish_content()

    def note_cleared(self) -> None:
        """The cell has been cleared: the next output comes below a new place."""
        self._stands = False

    def _publish_content(self) -> None:
        # With the same display id, so that the front end replaces the output.
        transient = {"display_id": self.display_id}
        publish_display({"data": self._content, "transient": transient, "update": self._stands})
        self._stands = True


SHOWN_AFTER_S = 0.5  # a start that takes less leaves no trace
_CLEAR_TO_END = "\r\x1b[K"  # ECMA-48: erase in line


class WaitingLine:
    """The line of one start of workers.

    Attributes:
        place: Where in a cell it stands; the call's panel comes there, too.
    """

    def __init__(
        self, num_workers: int, *, read_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._headline = f"starting {count_noun(num_workers, 'worker')}"
        self._clock = read_clock
        self._began_at = read_clock()
        self.place = CellPlace()
        self._is_wanted = self.place.is_there or sys.stderr.isatty()
        self._shown = ""

    def due_in(self) -> float:
        """Seconds until there is something to show; infinite afterwards."""
        if self._shown or not self._is_wanted:
            return float("inf")
        return max(0.0, self._began_at + SHOWN_AFTER_S - self._clock())

    def say(self, waited_for: str) -> None:
        """Show what is being waited for, if it has taken long enough. Cheap to call often."""
        text = f"{self._headline}: {waited_for} …" if waited_for else f"{self._headline} …"
        is_early = self._clock() < self._began_at + SHOWN_AFTER_S
        if self._is_wanted and not is_early and text != self._shown:
            self._show(text)
            self._shown = text

    def close(self, *, is_replaced: bool = False) -> None:
        """Remove it."""
        if self._shown and self._is_wanted and not (is_replaced and self.place.is_there):
            self._show("")
        self._is_wanted = False

    def _show(self, text: str) -> None:
        if self.place.is_there:
            text_html = f'<span style="opacity:0.7">{html.escape(text)}</span>'
            self.place.show({"text/plain": text, "text/html": text_html} if text else {})
            return
        sys.stderr.write(f"{_CLEAR_TO_END}nbaccel: {text}" if text else _CLEAR_TO_END)
        sys.stderr.flush()
