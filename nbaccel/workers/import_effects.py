"""What imports do to a process beside loading modules, where that has to reach workers.

to the thread that imports    context variables (decimal, numpy), gradients on or off, values of
                              `threading.local`: the main thread gets them, as workers use it
to the environment            done again in each worker, which gets the notebook's environment
to what workers set anew      the import path, the working folder, streams, random numbers: the
                              package is left out, and each worker imports it
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base import env

__all__ = ["SetAnew", "ThreadEffects", "apply_variables", "note_variables"]


def _thread_locals() -> list[threading.local]:
    """All that the garbage collector looks at: what was there before a template is frozen."""
    classes: list[type] = [threading.local]
    for known_class in classes:
        classes.extend(known_class.__subclasses__())
    return [held for held in gc.get_referrers(*classes) if issubclass(type(held), threading.local)]


@dataclass
class ThreadEffects:
    """What a function has done to the thread that it ran in.

    Made in the main thread, before the other one begins.
    """

    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    known_locals: list[threading.local] = field(default_factory=_thread_locals)
    local_values: list[tuple[threading.local, dict[str, Any]]] = field(default_factory=list)
    has_gradients: bool | None = None
    """Whether torch records gradients, if the function has changed that."""

    def run(self, function: Callable[[], None]) -> None:
        """Run a function in this thread, and note what it has done to the thread.

        Args:
            function: Takes nothing; what it raises is raised.
        """
        gradients_before = _torch_says("is_grad_enabled")
        try:
            self.context.run(function)
        finally:
            if (gradients_after := _torch_says("is_grad_enabled")) != gradients_before:
                self.has_gradients = gradients_after
            ids = {id(known) for known in self.known_locals}
            for thread_local in _thread_locals():
                # A class of its own sets itself up when a thread asks first: that is no effect.
                if type(thread_local) is threading.local or id(thread_local) not in ids:
                    # Code of other packages, as the class may be theirs.
                    with contextlib.suppress(Exception):
                        self.local_values.append((thread_local, dict(vars(thread_local))))

    def take_over(self) -> None:
        """Let this thread be as if the function had run in it."""
        for variable, value in self.context.items():
            if variable.get(_MISSING) is not value:
                variable.set(value)
        if self.has_gradients is not None:
            sys.modules["torch"].set_grad_enabled(self.has_gradients)
        for thread_local, values in self.local_values:
            with contextlib.suppress(Exception):
                vars(thread_local).update(values)


_MISSING = object()


def _torch_says(name: str) -> Any:
    """What a function of torch returns; None where that is not loaded."""
    module = sys.modules.get("torch")
    return None if module is None else getattr(module, name)()


@dataclass(frozen=True, kw_only=True)
class SetAnew:
    """What of this process a worker sets when it is set up, so that it loses what an import did."""

    import_path: tuple[str, ...]
    folder: str
    streams: tuple[Any, ...]
    random_states: tuple[bytes, ...]
    number_type: Any
    """What torch computes with unless told otherwise."""
    logging: tuple[Any, ...]
    """The root logger's handlers and level."""

    @classmethod
    def now(cls) -> SetAnew:
        """As it is now."""
        return cls(
            import_path=tuple(map(str, sys.path)),
            folder=_folder_or_nothing(),
            streams=(sys.stdin, sys.stdout, sys.stderr),
            random_states=_random_states(),
            number_type=_torch_says("get_default_dtype"),
            logging=(*logging.root.handlers, logging.root.level),
        )

    def changes_since(self, earlier: SetAnew) -> list[str]:
        """What is otherwise than it was: clauses with "it".

        Args:
            earlier: The state before.
        """
        changes = []
        if self.import_path != earlier.import_path:
            changes.append("it changes sys.path")
        if self.folder != earlier.folder:
            changes.append("it changes the working folder")
        if any(
            now is not before for now, before in zip(self.streams, earlier.streams, strict=True)
        ):
            changes.append("it replaces sys.stdout or sys.stderr")
        if self.number_type != earlier.number_type:
            changes.append("it changes torch's default dtype")
        if self.logging != earlier.logging:
            changes.append("it configures logging")
        # A library that was loaded meanwhile has a state from then on.
        if any(
            now != before
            for now, before in zip(self.random_states, earlier.random_states, strict=False)
        ):
            changes.append("it draws random numbers or sets a seed")
        return changes


def _folder_or_nothing() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been deleted
        return ""


def _random_states() -> tuple[bytes, ...]:
    # Not Python's own: packages draw from it when they are imported (rich does), and set no seed.
    states = []
    if (module := sys.modules.get("torch")) is not None:
        states.append(bytes(module.get_rng_state().numpy()))
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        states.append(bytes(numpy_random.get_state()[1]))
    return tuple(states)


_SET_VARIABLES: dict[str, tuple[str | None, str | None]] = {}
"""Variable → its value before the imports of this template, and after them."""


def note_variables(before: Mapping[str, str]) -> None:
    """Note which variables have changed, for the workers that will be forked from this process.

    Args:
        before: The environment before the imports.
    """
    now = env.snapshot()
    _SET_VARIABLES.update(
        {
            name: (before.get(name), now.get(name))
            for name in before.keys() | now.keys()
            if before.get(name) != now.get(name)
        }
    )


def apply_variables() -> None:
    """Set in this worker what imports have set in its template, unless it is otherwise here."""
    env.update(
        {
            name: value_after
            for name, (value_before, value_after) in _SET_VARIABLES.items()
            if env.read(name) == value_before
        }
    )
