"""Runs a function on several processes that compare their calls in a given way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbaccel import notebook_launcher
from nbaccel.base import env
from nbaccel.train import page_setup
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process

TWO_HOSTS = "two hosts"
"""The way of several hosts: as if the first half of the processes could not see the other one's
memory."""


def together(
    body: Callable[[Collectives], Any], *, timeout_s: float = 30, n: int = 2, route: str = "memory"
) -> list[Any]:
    """What `body` returns on each of `n` processes."""

    def run() -> Any:
        place = init_process(cpu=True)
        if route == TWO_HOSTS:
            page_setup._suggest_host = lambda: f"host {2 * place.rank // n}"
        else:
            env.update({page_setup.ROUTE_VARIABLE: route})
        return body(Collectives(place, timeout_s))

    return notebook_launcher(run, num_processes=n)
