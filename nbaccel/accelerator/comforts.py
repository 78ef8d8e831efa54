"""What helps while training: a shared progress bar, a check for drift, a profiler."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from nbaccel.accelerator.facts import Facts
from nbaccel.config.handlers import ProfileKwargs
from nbaccel.train.in_sync import differences, parameter_facts
from nbaccel.train.loading import skip_first_batches
from nbaccel.train.progress import Progress

__all__ = ["Comforts"]

_Batch = TypeVar("_Batch")
_MOST_LINES = 10


class Comforts(Facts):
    """What an accelerator offers beside the loop."""

    def progress(self, loader: Iterable[_Batch], description: str = "") -> Iterator[_Batch]:
        """Iterate over a loader under one bar for all processes.

        Process 0 shows it, with the mean of all processes' losses (as `backward` sees them) and
        the samples per second of all together. Call it on every process.

        Args:
            loader: What to iterate over.
            description: Text before the bar.

        Yields:
            The loader's batches.
        """
        before, shown = self._progress, Progress(loader, self._place, description)
        self._progress = shown
        try:
            yield from shown
        finally:
            self._progress = before

    def check_in_sync(self) -> bool:
        """Whether the processes still train the same model; warns by name where they do not.

        Compared are all parameters of prepared models (bit by bit), learning rates, and how many
        batches of each prepared loader were used. Sharded parameters differ by design and are
        left out. A collective; it reads every parameter once.

        Returns:
            True where everything is equal, on all processes alike.
        """
        facts: dict[str, Any] = dict(
            parameter_facts(self._strategy.unwrap(model) for model in self._models)
        )
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                facts[f"learning rate of optimizer {i}, group {j}"] = float(group["lr"])
        for i, loader in enumerate(self._dataloaders):
            facts[f"batches used of loader {i}"] = (
                f"{loader.batches_seen} (epoch {loader.iteration})"
            )
        found = differences(facts, self._collectives)
        if found and self.is_main_process:
            more = f"\n  and {len(found) - _MOST_LINES} more" if len(found) > _MOST_LINES else ""
            warnings.warn(
                "The processes have drifted apart:\n  "
                + "\n  ".join(found[:_MOST_LINES])
                + f"{more}\nThey train different models from here on. Look for code that changes "
                "weights on one process only, different seeds before the model was built, or a "
                "`break` that only some take.",
                stacklevel=2,
            )
        return not found

    @contextlib.contextmanager
    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> Iterator[torch.profiler.profile]:
        """Profile the block with torch's profiler.

        Args:
            profile_handler: Its settings; None takes those of the constructor.

        Yields:
            The profiler.

        Raises:
            ConfigError: An activity is unknown.
        """
        settings = profile_handler or self._request.handlers.profile
        kinds = ["cpu", "cuda"] if self.device.type == "cuda" else ["cpu"]
        wanted = replace(settings, activities=settings.activities or kinds)
        with wanted.build() as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            folder = Path(settings.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """A loader without the first batches, to go on where a saved state was.

        Args:
            dataloader: A prepared loader, or a plain one.
            num_batches: How many to leave out; None for as many as the loaded state had used.

        Returns:
            A new loader; the one given is unchanged.
        """
        return skip_first_batches(dataloader, num_batches)
