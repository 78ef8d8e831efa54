"""Pickers: a run's settings chosen by looking, and ``configure``, which shows all of them.

    cell's outputs   [ widgets, live             ]   hide the other as long as they are there
                     [ the same table, and text  ]   what GitHub, nbconvert and a reader see

Both are shown before the memory is estimated; what is kept is renewed after each change.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.base import frames
from nbaccel.base.optional_packages import install_line, is_installed, require
from nbaccel.config import RunConfig, run_config_of
from nbaccel.notebook.picker import rendering
from nbaccel.notebook.picker.choices import PANELS
from nbaccel.notebook.picker.model import PickerModel
from nbaccel.output import publish

# First, because its message says what to install.
require("traitlets", extra="notebook", why="A picker")
from traitlets import HasTraits, Instance, observe  # noqa: E402 - see above

if TYPE_CHECKING:
    from nbaccel.notebook.picker.widgets import PickerView
    from nbaccel.plan import Inventory


# Several changes in a row renew them once.
_RENEWAL_PAUSE_S = 0.3
_LOCK_PAUSE_S = 0.01


def _running_cell(shell: Any) -> object:
    """Which execution of which cell this is."""
    return publish.request_header("msg_id") or shell.execution_count


def _missing_widget_part(shell: Any) -> str:
    """Why there are no widgets, with what to do; empty where there are."""
    if not hasattr(shell, "kernel"):
        return "In a notebook this is a form. Here: picker.choose(name, value)."
    if not is_installed("ipywidgets"):
        return f"In a notebook with ipywidgets this is a form: {install_line('notebook')}"
    return ""


class Picker(HasTraits):
    """All settings of a run, to be chosen by looking.

    Give it as ``config`` wherever a `RunConfig` is taken; as the last line of a cell it shows
    itself. What is chosen with the mouse, from Python (`choose`) or by setting ``config`` is the
    same everywhere at once.

    Args:
        config: Where to begin, a `RunConfig` or another picker; None: the defaults.
        model: The module whose memory is shown; it may be on ``meta``.
        sample_batch: A batch of one process, for the activations.
        inventory: The machine; None looks at this one.

    Attributes:
        config: The chosen settings.

    Examples:
        >>> picker = configure(model)
        >>> notebook_launcher(train, (model,), config=picker)
    """

    config: Any = Instance(RunConfig)

    _panels: ClassVar[tuple[str, ...]] = PANELS

    def __init__(
        self,
        config: Any = None,
        *,
        model: Any = None,
        sample_batch: Any = None,
        inventory: Inventory | None = None,
    ) -> None:
        inputs = {"model": model, "sample_batch": sample_batch, "inventory": inventory}
        self._model = PickerModel(config, **inputs)
        # After the model: setting the trait calls `_on_config`, which reads it.
        super().__init__(config=self._model.config)
        self._css_class = f"nbaccel-static-{uuid.uuid4().hex[:12]}"
        self._view: PickerView | None = None
        self._shown_in: object = None
        self._is_stale = False
        self._model.observe(self._follow)

    def choose(self, name: str, value: Any) -> None:
        """Make a choice, as with the mouse.

        Args:
            name: Its name: ``"mixed_precision"``, ``"zero_stage"``, or a key of DeepSpeed.
            value: What to take; None leaves it open.

        Raises:
            ConfigError: It cannot be taken; everything stays as it was.
        """
        with self._model.lock:
            self._model.choose(name, value)

    def suggest(self) -> str:
        """Take the fastest settings that fit; one `undo` takes them back.

        Returns:
            What was taken, in one line.

        Raises:
            ConfigError: Nothing fits, or no model was given.
        """
        with self._model.lock:
            return self._model.suggest()

    def undo(self) -> None:
        """Undo the last change, if there is one."""
        with self._model.lock:
            self._model.undo()

    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """Take over a DeepSpeed configuration or a `RunConfig`.

        Args:
            source: A path, JSON or YAML as text, or what is in it.

        Raises:
            ConfigError: It cannot be read, or holds mistakes, all of them listed.
        """
        with self._model.lock:
            self._model.load(source)

    def save(self, path: str | Path, face: str = "YAML") -> None:
        """Write the configuration to a file.

        Args:
            path: The file.
            face: ``"YAML"``, ``"DeepSpeed JSON"``, ``"Python"`` or ``"Command line"``.

        Raises:
            ConfigError: There is no such face now, or the file cannot be written.
        """
        with self._model.lock:
            self._model.save(path, face)

    def show(self) -> None:
        """Show it here: as widgets, or as text where there are none."""
        shell = frames.running_shell()
        if shell is None:
            return  # a script, which can print the picker
        self._shown_in = _running_cell(shell)
        missing = _missing_widget_part(shell)
        if missing:
            # Each as soon as it is known: to measure a large model takes seconds.
            for section in rendering.picker_sections(self._model, self._panels):
                print(f"{section}\n", flush=True)
            print(missing)
        else:
            shell.events.register("post_run_cell", self._tell_variable)
            self._show_widgets()

    @observe("config")
    def _on_config(self, change: Mapping[str, Any]) -> None:
        with self._model.lock:
            # Equal when the change came from the model: this ends the circle of notifications.
            if change["new"] != self._model.config:
                self._model.replace(change["new"])

    def _follow(self) -> None:
        self.config = self._model.config

    def __repr__(self) -> str:
        return f"{type(self).__name__}(config={self.config!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker it is its `RunConfig`: nobody could see a form there."""
        return run_config_of, (self.config,)

    def __str__(self) -> str:
        with self._model.lock:
            return rendering.picker_text(self._model, self._panels)

    def _ipython_display_(self) -> None:
        """Show it, unless this cell has done so: `configure(model)` is often its last line."""
        shell = frames.running_shell()
        if shell is None or self._shown_in != _running_cell(shell):
            self.show()

    def _show_widgets(self) -> None:
        from IPython.display import display

        with self._model.lock:
            self._model.postpone_memory()
            # `display(widget)` would add the widget's repr as text; what is below has all of it.
            view = {"version_major": 2, "version_minor": 0}
            view["model_id"] = self._live_view().root.model_id
            bundle = {"text/plain": "", "application/vnd.jupyter.widget-view+json": view}
            display(bundle, raw=True)  # type: ignore[no-untyped-call]
            # The same id in all cells that show this picker, so that an update reaches each.
            kept = self._kept_output()
            display(kept, raw=True, display_id=self._css_class)  # type: ignore[no-untyped-call]
        # Waits until the form is sent: its thread gets little of the processor meanwhile.
        sys.stdout.flush()
        # What takes seconds for a large model comes after the form, while the user reads it.
        model = self._model
        with self._model.lock:
            estimates = (model.estimate_memory, *model.later_estimates())
        for make_estimate in estimates:
            with self._model.lock:
                make_estimate()
            # Else this thread would have the lock again before one that waits with a click.
            time.sleep(_LOCK_PAUSE_S)

    def _tell_variable(self, _result: object = None) -> None:
        """Say how it is used by the name that the cell has given it: known when the cell ends."""
        shell = frames.running_shell()
        shell.events.unregister("post_run_cell", self._tell_variable)
        for name, value in shell.user_ns.items():
            if value is self and not name.startswith("_") and self._view and self._view.actions:
                self._view.actions.tell_variable(name)
                return

    def _live_view(self) -> PickerView:
        if self._view is None:
            # Not at the top: it imports ipywidgets, which need not be installed.
            from nbaccel.notebook.picker.widgets import PickerView

            self._view = PickerView(self._model, self._panels, hidden_class=self._css_class)
            self._model.observe(self._view.sync)
            self._model.observe(self._changed)
        return self._view

    def _kept_output(self) -> dict[str, str]:
        model = self._model
        text = rendering.picker_text(model, self._panels)
        parts = []
        if tuple(self._panels) == PANELS:
            parts += [rendering.trained_html(model), rendering.machine_html(model)]
            parts.append(rendering.fits_html(model, is_live=False))
            if rows := [*rendering.shown_rows(model)]:
                parts.append(rendering.table_html(rows))
            parts.append(rendering.taken_html(model))
        return {"text/html": rendering.kept_html(self._css_class, parts, text), "text/plain": text}

    def _changed(self) -> None:
        shell = frames.running_shell()
        if self._is_stale or shell is None:
            return
        self._is_stale = True
        # The timer below needs a running loop; after the notebook's last cell it may never fire.
        shell.events.register("post_run_cell", self._renew)
        if publish.call_later(_RENEWAL_PAUSE_S, self._renew) is None:
            self._renew()

    def _renew(self, _result: object = None) -> None:
        from IPython.display import update_display

        with self._model.lock:
            # Both the event and the timer call this; the first one renews them.
            if not self._is_stale:
                return
            self._is_stale = False
            shell = frames.running_shell()
            if shell is not None:
                shell.events.unregister("post_run_cell", self._renew)
            kept = self._kept_output()
            update_display(kept, raw=True, display_id=self._css_class)  # type: ignore[no-untyped-call]


class PrecisionPicker(Picker):
    """Number formats: fp32, fp16, bf16, and FP8 with its backends and recipes."""

    _panels = ("precision",)


class ZeroPicker(Picker):
    """ZeRO stage, offload, buckets, and every other key of DeepSpeed."""

    _panels = ("zero",)


class LaunchPicker(Picker):
    """Devices, processes, start method and nodes."""

    _panels = ("launch",)


def configure(model: Any = None, sample_batch: Any = None, *, config: Any = None) -> Picker:
    """Show all settings of a run, with what they need of this machine's memory.

    Args:
        model: The module that is to be trained; it may be on ``meta``. None shows no memory.
        sample_batch: A batch of one process, for the activations.
        config: Where to begin, a `RunConfig` or another picker; None: the defaults.

    Returns:
        The picker: give it as ``config`` to a launch, or read its ``config``.

    Raises:
        ConfigError: What was given is no module, no batch or no configuration.
    """
    picker = Picker(config, model=model, sample_batch=sample_batch)
    picker.show()
    return picker
