"""The panel as widgets, for front ends whose clicks arrive while a cell runs.

    ┌ 2 ranks · 8.0 s · step 412 …           [Log scale] [■ Stop] ┐
    │ rank  progress  state  memory …    [loss] [lr] [grad norm]  │
    │ 0     ▬▬▬▬▬──   …                  chart                    │
    │ [all ranks] [rank 0] [rank 1]                               │
    │ newest lines, once there are many                           │
    └─────────────────────────────────────────────────────────────┘

Clicks are handled in a thread of the front end's (see [Note: who handles a click] in `display`).
They only note what was chosen: the main thread, which has the facts, draws.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nbaccel.base import ipython_private
from nbaccel.output.panel import live_html
from nbaccel.output.panel.advice import advice_of
from nbaccel.output.panel.curves import is_logarithmic, metric_chart, smoothed_value
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.rank_times import mean_time_html
from nbaccel.output.panel.words import number_text, plain_text

__all__ = ["RunPanel", "may_take_clicks"]

_STOP_LABEL = "■ Stop"
_STOPPING_LABEL = "■ Stopping… press again to end at once"
_STOP_TOOLTIP = (
    "Interrupts all ranks, as interrupting the cell does. Pressed again, it ends them at once."
)
_LOG_LABEL = "Log scale"
_LOG_TOOLTIP = "Draws the chart with a logarithmic axis, or with a linear one."
_ALL_RANKS = "all ranks"
_CHART_INTERVAL_S = 1.0
_METRIC_CHARS = 24
_MAX_METRIC_BUTTONS = 16  # as many as ranks report
_MAX_RANK_BUTTONS = 16
# In JupyterLab and Notebook 7 the panel stays in sight while the output below it is scrolled, if
# the window is high enough for both. Elsewhere no such elements exist, and that has no effect.
_STYLE_SHEET = """<style>
.nbaccel-panel { border: 1px solid rgba(128,128,128,0.3); border-radius: 6px;
  padding: 0.3em 0.8em; max-width: 100%; box-sizing: border-box; }
.nbaccel-panel .widget-html-content { line-height: 1.45; min-width: 0; overflow-x: auto; }
@media (min-height: 36em) {
  .jp-OutputArea:has(> .jp-OutputArea-child .nbaccel-panel) { overflow: visible; min-width: 0; }
  .jp-OutputArea-child:has(.nbaccel-panel) { position: sticky; top: 0; z-index: 2;
    overflow: visible; background: var(--jp-layout-color0, Canvas); }
}
</style>"""


def may_take_clicks() -> bool:
    """Whether kernel and front end support subshells, and there are widgets."""
    running_kernel = _running_kernel()
    return (
        running_kernel is not None
        and threading.current_thread() is threading.main_thread()
        and _subshell_lister(running_kernel) is not None
        and "subshell_id" in (running_kernel.get_parent("shell") or {}).get("header", {})
        and importlib.util.find_spec("ipywidgets") is not None
    )


class RunPanel:
    """The widgets of one call.

    They exist from now on; `takes_clicks` says whether they can be shown.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        on_stop: Callable[[], None],
        on_choice: Callable[[], None],
    ) -> None:
        self._library = library = importlib.import_module("ipywidgets")
        self._on_choice = on_choice
        self._head, self._table, self._chart, self._caption, self._lines, self._notes = (
            library.HTML() for _ in range(6)
        )
        # No icon: a server refuses Notebook 7 the font of its icons.
        self._button = library.Button(
            description=_STOP_LABEL, button_style="danger", tooltip=_STOP_TOOLTIP
        )
        self._button.add_class("nbaccel-stop")
        self._button.on_click(lambda _: on_stop())
        self._log = library.ToggleButton(description=_LOG_LABEL, tooltip=_LOG_TOOLTIP)
        self._metrics = self._choice([], "nbaccel-metrics")
        rank_options = [(_ALL_RANKS, -1)]
        if len(ranks) > 1:
            rank_options += [(f"rank {rank}", rank) for rank in ranks[:_MAX_RANK_BUTTONS]]
        self._ranks = self._choice(rank_options, "nbaccel-ranks")
        self._metric_names: list[str] = []
        self._log_chosen: bool | None = None
        self._log_shown = False
        self._drawn_choice: tuple[str, bool | None] | None = None
        self._drawn_at = 0.0
        self._arrange()
        # Without a choice of the user's the chart decides about its axis.
        self._log.observe(self._note_scale, "value")
        for choice in (self._metrics, self._ranks):
            choice.observe(lambda _: on_choice(), "value")
        for clicked in (self._button, self._log, self._metrics, self._ranks):
            ipython_private.reply_where_sent(clicked.comm)

    def _choice(self, options: Sequence[tuple[str, Any]], css_class: str) -> Any:
        choice = self._library.ToggleButtons(options=options)
        choice.style.button_width = "auto"
        choice.add_class(css_class)
        return choice

    def _arrange(self) -> None:
        boxes = self._library
        self._button.layout.width = self._log.layout.width = "auto"
        self._head.layout.flex = "1 1 20em"
        self._head.layout.min_width = "0"
        self._chart_part = boxes.VBox(
            [boxes.HBox([self._metrics, self._caption]), self._chart],
        )
        self._lines_part = boxes.VBox([self._ranks, self._lines])
        self._part_boxes = [
            head_row := boxes.HBox([self._head, self._log, self._button]),
            middle_row := boxes.HBox([self._table, self._chart_part]),
        ]
        sheet = boxes.HTML(_STYLE_SHEET)
        sheet.layout.display = "none"
        self._box = boxes.VBox([sheet, head_row, middle_row, self._lines_part, self._notes])
        self._box.add_class("nbaccel-panel")
        for row in (head_row, middle_row, self._chart_part.children[0]):
            # Side by side where there is room, below each other where there is not.
            row.layout.flex_flow = "row wrap"
        head_row.layout.align_items = "center"
        self._table.layout.flex = "1 1 auto"
        self._table.layout.min_width = "0"
        self._table.layout.max_width = "100%"
        self._chart_part.layout.flex = "1 1 24em"
        self._chart_part.layout.max_width = "36em"
        self._part_boxes += [
            sheet,
            self._chart_part,
            self._lines_part,
            self._chart_part.children[0],
        ]
        for part in (self._log, self._chart_part, self._lines_part):
            part.layout.display = "none"

    def _note_scale(self, change: dict[str, Any]) -> None:
        # Else it is the chart's own choice that the button shows.
        if bool(change["new"]) != self._log_shown:
            self._log_shown = self._log_chosen = bool(change["new"])
            self._on_choice()

    @property
    def takes_clicks(self) -> bool:
        """Whether the front end has opened a subshell, which takes clicks while the cell runs."""
        running_kernel = _running_kernel()
        subshell_ids = _subshell_lister(running_kernel) if running_kernel is not None else None
        return bool(subshell_ids and subshell_ids())

    @property
    def view(self) -> dict[str, Any]:
        """What shows it, as the content of `VIEW_MIME`."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, board: RunBoard, *, is_stopping: bool) -> None:
        """Change what it shows."""
        self._head.value = live_html.headline_html(board) + live_html.advice_html(advice_of(board))
        self._table.value = live_html.ranks_html(board, with_metrics=False) + mean_time_html(
            board.times.by_rank()
        )
        self._notes.value = live_html.left_out_html(board) + live_html.library_html(board)
        self._button.description = _STOPPING_LABEL if is_stopping else _STOP_LABEL
        self._show_chart(board)
        if live_html.is_long(board):
            rank = self._ranks.value
            self._lines.value = live_html.lines_html(board, None if rank in (None, -1) else rank)
            self._lines_part.layout.display = None

    def _show_chart(self, board: RunBoard) -> None:
        metric_names = board.metric_names()[:_MAX_METRIC_BUTTONS]
        if not metric_names:
            return
        if metric_names != self._metric_names:
            chosen_name = self._metrics.value
            self._metric_names = metric_names
            self._metrics.options = [
                (plain_text(name, _METRIC_CHARS) or "metric", name) for name in metric_names
            ]
            self._metrics.value = chosen_name if chosen_name in metric_names else metric_names[0]
        metric_name = self._metrics.value or metric_names[0]
        # A chart is the largest part of what is sent: once a second, or when another is wanted.
        choice = (metric_name, self._log_chosen)
        if choice == self._drawn_choice and board.now < self._drawn_at + _CHART_INTERVAL_S:
            return
        self._drawn_choice = choice
        self._drawn_at = board.now
        if self._log_chosen is None:
            self._log_shown = is_logarithmic(board, metric_name)
            self._log.value = self._log_shown
        chart = metric_chart(board, metric_name, log_y=self._log_shown)
        self._chart.value = chart
        smooth_value = smoothed_value(board, metric_name)
        self._caption.value = (
            "" if smooth_value is None else f"{number_text(smooth_value)} smoothed"
        )
        if chart:
            self._chart_part.layout.display = self._log.layout.display = None

    def close(self) -> None:
        """Close its widgets, here and in the front end."""
        for widget in (
            self._button,
            self._log,
            self._metrics,
            self._ranks,
            self._head,
            self._table,
            self._chart,
            self._caption,
            self._lines,
            self._notes,
            *self._part_boxes,
            self._box,
        ):
            for part in (
                widget,
                widget.layout,
                getattr(widget, "style", None),
            ):
                if part is not None:
                    # A front end that is gone may raise anything.
                    with contextlib.suppress(Exception):
                        part.close()


def _running_kernel() -> Any:
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None)


def _subshell_lister(kernel: Any) -> Callable[[], list[str]] | None:
    """What lists the kernel's subshells; None in a kernel without them."""
    thread = getattr(kernel, "shell_channel_thread", None)
    return getattr(getattr(thread, "manager", None), "list_subshell", None)
