"""What a worker imports itself is told to the notebook, so that the template has it next time.

Libraries import much when they are first used: transformers' ``Trainer`` imports DeepSpeed, which
takes longer than a short training. The notebook has none of it, as nothing is trained there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbaccel.base import env
from nbaccel.workers import installed_modules, messaging

__all__ = ["WorkerImports"]


class WorkerImports:
    """Modules that this worker has imported since it was set up.

    Args:
        is_told: Whether the notebook is told: by one worker, of those that a template has forked.
    """

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told
        self._known_names = frozenset(sys.modules) if is_told else frozenset()
        self._num_modules = len(sys.modules)

    def tell(self, send: Callable[[Any], None]) -> None:
        """Tell of installed modules that were imported since the last time, if there are any.

        Args:
            send: Takes the message.
        """
        if not self._is_told or len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        new_names = [name for name in tuple(sys.modules) if name not in self._known_names]
        self._known_names |= frozenset(new_names)
        files = installed_modules.files_of(new_names)
        if files:
            send(messaging.Imported(files, env.snapshot()))
