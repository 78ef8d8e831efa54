"""Hugging Face Accelerate: its `Accelerator` makes the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, notebook_launcher


def worker(body: Callable[..., Any]) -> Callable[..., Any]:
    def train(*args: Any) -> Any:
        return body(Accelerator().process_index, *args)

    return train


def launch(body: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    return notebook_launcher(worker(body), args, num_processes=num_processes)
