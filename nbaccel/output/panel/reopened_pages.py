"""Pages that are reloaded, or opened again, while a run goes on or after it.

A page that is loaded has of a running cell what the file has. JupyterLab does not pass on what the
kernel sends to that cell: it knows requests by number, and those of the page before are not its
own. Widgets of that page cannot be had from a kernel that is busy. So a panel is HTML, which always
draws, and a script in it asks the server for the kernel's messages (`panel_script.js`).

    panel in the file ── the script: kernel's messages ──► renewed once a second, with Stop
                     └── comm `nbaccel.run`, answered when the cell has ended ──► the summary
    not saved, or not trusted ── the next cell that is run ──► what has ended meanwhile
"""

from __future__ import annotations

import datetime as dt
import functools
import html
import importlib.resources
import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.base import frames
from nbaccel.output import publish

_COMM_TARGET = "nbaccel.run"
_MAX_KEPT = 50


@dataclass
class _ShownRun:
    """A run that has had a panel."""

    cell: str
    page: str
    """The number of the page that ran the cell, which has another one once it is reloaded."""
    summary: dict[str, Any] | None = None
    """As HTML and as text; None while it goes on."""
    is_told: bool = False
    """Whether the page that ran a cell after its end has been told."""


_RUNS: dict[str, _ShownRun] = {}
"""By the id of its place, the oldest first."""


def note_run(place_id: str) -> None:
    """A run has its panel at a place in a cell."""
    shell: Any = frames.running_shell()
    if place_id in _RUNS or shell is None:
        return
    _listen_to(shell)
    _RUNS[place_id] = _ShownRun(_running_cell(), publish.request_header("session"))
    for oldest in list(_RUNS)[:-_MAX_KEPT]:
        del _RUNS[oldest]


def note_end(place_id: str, summary: dict[str, Any]) -> None:
    """A run has left its summary."""
    if run := _RUNS.get(place_id):
        run.summary = summary


def followed_html(panel_html: str, place_id: str) -> str:
    """A panel with the script that gives it its button, and renews it where nothing else does."""
    kernel_id = _kernel_id()
    arguments = json.dumps([place_id, kernel_id])
    script = f"<script>{_script()}(...{arguments})</script>" if kernel_id else ""
    seen = f"{dt.datetime.now().astimezone():%d %B, %H:%M:%S}"
    return (
        f'<div class="nbaccel-panel" data-place="{place_id}" data-seen="{seen}">'
        f"{panel_html}{script}</div>"
    )


@functools.cache
def _script() -> str:
    source = importlib.resources.files("nbaccel.output.panel").joinpath("panel_script.js")
    return source.read_text(encoding="utf-8").rstrip()


def _kernel_id() -> str:
    """What the Jupyter server calls this kernel; empty where no server has started it."""
    kernel = getattr(frames.running_shell(), "kernel", None)
    name = Path(getattr(getattr(kernel, "parent", None), "connection_file", "")).stem
    return name.removeprefix("kernel-") if name.startswith("kernel-") else ""


def _running_cell() -> str:
    """`In[5]`, as the notebook numbers the cell that runs."""
    # IPython's own counter is one further in some versions.
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    numbers = (frames.cell_number(file) for file in files)
    number = next((number for number in numbers if number is not None), None)
    return "A cell" if number is None else f"In[{number}]"


def _listen_to(shell: Any) -> None:
    """Answer reloaded pages, and look who runs the next cells."""
    manager = getattr(getattr(shell, "kernel", None), "comm_manager", None)
    if manager is not None and _COMM_TARGET not in manager.targets:
        manager.register_target(_COMM_TARGET, _answer)
        shell.events.register("pre_run_cell", _tell_what_has_ended)


def _answer(comm: Any, message: dict[str, Any]) -> None:
    """A reloaded page asks what has become of a run."""
    place_id = message["content"]["data"].get("place")
    run = _RUNS.get(place_id)
    if run is None or run.summary is None:
        comm.close()
        return
    # As it was shown at the end, which the script waits for, too. The comm stays open: pages are
    # told of its end, and complain of one that only the script knows.
    transient = {"display_id": place_id}
    publish.publish_display({"data": run.summary, "transient": transient, "update": True})


def _tell_what_has_ended(_info: object) -> None:
    """Show the summaries of runs that another page, or this one before it was reloaded, has run."""
    page = publish.request_header("session")
    ended = [run for run in _RUNS.values() if run.summary is not None and not run.is_told]
    for run in ended:
        run.is_told = True
        if page == run.page or run.summary is None:
            continue
        words = f"{run.cell} has ended since its page was closed or reloaded:"
        data = {
            "text/plain": f"{words} {run.summary['text/plain']}",
            "text/html": f"<div>{html.escape(words)}</div>{run.summary['text/html']}",
        }
        publish.publish_display({"data": data})
