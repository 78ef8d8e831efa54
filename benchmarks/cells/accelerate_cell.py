"""Hugging Face Accelerate: its `Accelerator` makes the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, notebook_launcher


def launch(body: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    def train(*args: Any) -> Any:
        return body(Accelerator().process_index, *args)

    return notebook_launcher(train, args, num_processes=num_processes)
