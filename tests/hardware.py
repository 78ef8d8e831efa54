"""What this machine can run, asked without waking a device; each skip says what is missing."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.apart import run_forks_apart
from tests.browser import chromium

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def missing_gpu() -> str | None:
    """Why gpu-marked tests cannot run, or None. The driver is asked: torch would open a context."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"needs an NVIDIA GPU: the driver says {error}"
    try:
        return None if pynvml.nvmlDeviceGetCount() else "needs an NVIDIA GPU: the driver sees none"
    finally:
        pynvml.nvmlShutdown()


@functools.cache
def missing_tpu() -> str | None:
    """Why tpu-marked tests cannot run, or None. Device files are asked: a runtime would take them.

    They are the machine's own, also where a lane pretends others.
    """
    if not (any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))):
        return "needs a TPU: no /dev/accel* and no numbered file below /dev/vfio here"
    if not any(importlib.util.find_spec(name) for name in ("torch_tpu", "torch_xla")):
        return "needs a driver of TPUs: pip install torch_tpu, or torch_xla[tpu]"
    return None


@functools.cache
def missing_browser() -> str | None:
    """Why browser-marked tests cannot run, or None."""
    return None if chromium.path() else "needs Chromium on the PATH: apt install chromium"


WHY_NOT: dict[str, Callable[[], str | None]] = {
    "gpu": missing_gpu,
    "tpu": missing_tpu,
    "browser": missing_browser,
}


def skip_what_cannot_run(items: list[pytest.Item]) -> None:
    """Mark as skipped, with the reason, each test whose hardware is not here.

    Those that a GPU may keep from their work are given a process of their own, where one does.
    """
    run_forks_apart(items)
    for item in items:
        for marker, why_not in WHY_NOT.items():
            if item.get_closest_marker(marker) and (reason := why_not()):
                item.add_marker(pytest.mark.skip(reason=reason))
