"""Pickers: a run's settings chosen by looking, and ``configure``, which shows all of them.

A picker is its `RunConfig`, as a trait that can be observed and set; widgets show it where there
are some, and a table of text does everywhere else.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.base.optional_packages import require
from nbaccel.config import RunConfig, run_config_of
from nbaccel.notebook.picker.choices import PANELS
from nbaccel.notebook.picker.form_text import picker_text
from nbaccel.notebook.picker.model import PickerModel
from nbaccel.notebook.picker.picker_display import PickerDisplay

# First, because its message says what to install.
require("traitlets", extra="notebook", why="A picker")
from traitlets import HasTraits, Instance, observe  # noqa: E402 - see above

if TYPE_CHECKING:
    from nbaccel.plan import Inventory


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
        # Reentrant, because a choice sets the trait, whose observer takes the lock again.
        self._lock = threading.RLock()
        self._model = PickerModel(
            config, model=model, sample_batch=sample_batch, inventory=inventory
        )
        # After the model: setting the trait calls `_on_config`, which reads it.
        super().__init__(config=self._model.config)
        self._showing = PickerDisplay(
            self._model,
            self._panels,
            lock=self._lock,
            class_name=uuid.uuid4().hex[:12],
        )
        self._model.observe(self._follow)

    # ---------------------------------------------------------------- from Python
    def choose(self, name: str, value: Any) -> None:
        """Make a choice, as with the mouse.

        Args:
            name: Its name: ``"mixed_precision"``, ``"zero_stage"``, or a key of DeepSpeed.
            value: What to take; None leaves it open.

        Raises:
            ConfigError: It cannot be taken; everything stays as it was.
        """
        with self._lock:
            self._model.choose(name, value)

    def suggest(self) -> str:
        """Take the fastest settings that fit; one `undo` takes them back.

        Returns:
            What was taken, in one line.

        Raises:
            ConfigError: Nothing fits, or no model was given.
        """
        with self._lock:
            return self._model.suggest()

    def undo(self) -> None:
        """Undo the last change, if there is one."""
        with self._lock:
            self._model.undo()

    def load(self, source: str | Path | Mapping[str, Any]) -> None:
        """Take over a DeepSpeed configuration or a `RunConfig`.

        Args:
            source: A path, JSON or YAML as text, or what is in it.

        Raises:
            ConfigError: It cannot be read, or holds mistakes, all of them listed.
        """
        with self._lock:
            self._model.load(source)

    def save(self, path: str | Path, face: str = "YAML") -> None:
        """Write the configuration to a file.

        Args:
            path: The file.
            face: ``"YAML"``, ``"DeepSpeed JSON"``, ``"Python"`` or ``"Command line"``.

        Raises:
            ConfigError: There is no such face now, or the file cannot be written.
        """
        with self._lock:
            self._model.save(path, face)

    def show(self) -> None:
        """Show it here: as widgets, or as text where there are none."""
        self._showing.show()

    # ---------------------------------------------------------------- model and trait
    @observe("config")
    def _on_config(self, change: Mapping[str, Any]) -> None:
        """Set from Python: the model takes it over."""
        with self._lock:
            # Equal when the change came from the model: this ends the circle of notifications.
            if change["new"] != self._model.config:
                self._model.replace(change["new"])

    def _follow(self) -> None:
        """The model has changed: so has the trait."""
        self.config = self._model.config

    # ---------------------------------------------------------------- how it looks
    def __repr__(self) -> str:
        return f"{type(self).__name__}(config={self.config!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker it is its `RunConfig`: nobody could see a form there."""
        return run_config_of, (self.config,)

    def __str__(self) -> str:
        with self._lock:
            return picker_text(self._model, self._panels)

    def _ipython_display_(self) -> None:
        self._showing.show_once()


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
