"""torch's profiler around a block of a training loop, with one trace per process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nbaccel.config.handlers import ProfileKwargs
from nbaccel.plan import registry
from nbaccel.train.collectives import Collectives


@contextlib.contextmanager
def profile_block(
    settings: ProfileKwargs, collectives: Collectives
) -> Iterator[torch.profiler.profile]:
    """Profile what this process does in the block."""
    place = collectives.place
    device_activities = registry.device(place.device_name).profiler_activities()
    settings = replace(settings, activities=settings.activities or device_activities)
    with settings.build() as profiler:
        yield profiler
    if settings.output_trace_dir is not None:
        folder = Path(settings.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{place.rank}.json"))
        # After it, any process may read all traces.
        collectives.barrier()
