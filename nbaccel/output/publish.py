"""Showing rich output in the notebook: in the cell, or as text where there is no IPython.

rank 0  {"text/plain": "0.91"} ─┐          [0-2] 0.91
rank 1  {"text/plain": "0.91"} ─┼──►       [3] 0.87
rank 2  {"text/plain": "0.91"} ─┤
rank 3  {"text/plain": "0.87"} ─┘
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.base import frames, ipython_private
from nbaccel.base.units import number_ranges

_RENDER_METHOD = "_render_traceback_"


def show_message(output_message: Any) -> None:
    """Show or clear output as a worker requested."""
    # Here because it imports numpy, which whoever made the message has loaded anyway.
    from nbaccel.workers import messaging

    if isinstance(output_message, messaging.ClearOutput):
        clear(wait_for_new=output_message.wait)
    elif isinstance(output_message, messaging.Display):
        publish_display(output_message.content)


def publish_display(content: Mapping[str, Any]) -> None:
    """Publish rich output in the current cell; outside IPython, print its text form."""
    shell = frames.running_shell()
    if shell is not None:
        ipython_private.publish_display(shell.display_pub, content)
    elif (text := content["data"].get("text/plain")) is not None:
        sys.stdout.write(f"{text}\n")


def widget_bundle(widget: Any) -> dict[str, Any]:
    """A widget as rich output, without its repr as text."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"text/plain": "", "application/vnd.jupyter.widget-view+json": view}


def clear(*, wait_for_new: bool) -> None:
    """Clear the cell's output, where there is a cell."""
    shell = frames.running_shell()
    if shell is not None:
        shell.display_pub.clear_output(wait=wait_for_new)


def show_by_its_text(error_class: type[BaseException]) -> None:
    """Let IPython use `_render_traceback_` of the next exception of this class.

    It does so for all exceptions but groups, of which it prints every frame.
    """
    shell = frames.running_shell()
    # IPython has one handler at a time: one of the user's must not be replaced.
    if shell is None or any(
        not hasattr(custom_class, _RENDER_METHOD) for custom_class in shell.custom_exceptions
    ):
        return

    def show_traceback(
        shell: Any,
        error_class: type,
        error: Any,
        error_traceback: Any,
        tb_offset: Any = None,
    ) -> Any:
        # For one exception only: the user's later ones are shown as ever.
        shell.set_custom_exc((), None)
        text_lines = error._render_traceback_()
        ipython_private.show_traceback_lines(shell, error_class, error, text_lines)
        return text_lines

    shell.set_custom_exc((error_class,), show_traceback)


def has_cells() -> bool:
    """Whether output can be changed after it was shown: there is a kernel, and a browser at it."""
    return getattr(frames.running_shell(), "kernel", None) is not None


def request_id() -> str:
    """The number of the message that the kernel is working on: one per run of a cell; or empty."""
    return _request_header("msg_id")


def page_id() -> str:
    """The number of the page that has sent that message: a reloaded page has another; or empty."""
    return _request_header("session")


def _request_header(name: str) -> str:
    kernel: Any = getattr(frames.running_shell(), "kernel", None)
    parent = kernel.get_parent() if hasattr(kernel, "get_parent") else None
    return str((parent or {}).get("header", {}).get(name, ""))


def is_watched() -> bool:
    """Whether output goes to a notebook or a terminal, not to a file or another program."""
    return frames.running_shell() is not None or sys.stderr.isatty()


PublishBundle = Callable[[Mapping[str, Any]], None]
"""Shows `{"data": ..., "metadata": ...}`."""


def show_results(
    rank_results: Mapping[int, Mapping[str, Any] | None],
    publish_bundle: PublishBundle = publish_display,
) -> None:
    """Show what the ranks' cells ended with."""
    result_groups = _equal_groups(rank_results)
    text_lines: list[str] = []
    for group_ranks, mime_bundle in result_groups:
        if len(group_ranks) == len(rank_results):
            publish_bundle(mime_bundle)
            return
        rank_label = f"[{number_ranges(group_ranks)}]"
        data = mime_bundle["data"]
        if set(data) == {"text/plain"} and "\n" not in data["text/plain"]:
            text_lines.append(f"{rank_label} {data['text/plain']}")
            continue
        publish_bundle(_plain_text([*text_lines, rank_label]))
        publish_bundle(mime_bundle)
        text_lines = []
    if text_lines:
        publish_bundle(_plain_text(text_lines))


def _equal_groups(
    results: Mapping[int, Mapping[str, Any] | None],
) -> list[tuple[list[int], Mapping[str, Any]]]:
    """Ranks with the same bundle, by their lowest; ranks without one are left out."""
    groups: list[tuple[list[int], Mapping[str, Any]]] = []
    for rank, bundle in sorted(results.items(), key=lambda result: result[0]):
        if bundle and bundle["data"]:
            # Compared one by one: bundles are dicts, which cannot be keys.
            twins = next((ranks for ranks, other in groups if other == bundle), None)
            if twins is None:
                groups.append(([rank], bundle))
            else:
                twins.append(rank)
    return groups


def _plain_text(lines: list[str]) -> dict[str, Any]:
    return {"data": {"text/plain": "\n".join(lines)}, "metadata": {}}
