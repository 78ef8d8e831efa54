"""Runs a function on several processes that compare the calls they are told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbaccel import notebook_launcher
from nbaccel.base import env
from nbaccel.train.call_check import CHECK_VARIABLE
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process


def together(
    body: Callable[[Collectives], Any], *, timeout_s: float = 30, n: int = 2, check: str = "first"
) -> list[Any]:
    """What `body` returns on each of `n` processes."""

    def run() -> Any:
        place = init_process(cpu=True)
        env.update({CHECK_VARIABLE: check})
        return body(Collectives(place, timeout_s))

    return notebook_launcher(run, num_processes=n)
