"""What trains in the matrix of DeepSpeed's ways, by nbaccel and by Accelerate, on digits.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/harness/zero_training.py OUT

runs in each of two processes first all of Accelerate's trainings, alone, then blocks of steps of
both libraries in turns; process 0 writes what it found to OUT, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
BLOCKS, STEPS_PER_BLOCK = 4, 6
BATCH = 16
WIDTH = 1024  # DeepSpeed keeps smaller parameters in memory, whatever it is told
LIBRARIES = ("nbaccel", "accelerate")


@dataclass(frozen=True)
class Case:
    """One way to train; without a stage it is DDP, or one process alone."""

    stage: int | None
    bf16: bool = False
    offload: str = "none"

    @property
    def name(self) -> str:
        way = "DDP" if self.stage is None else f"ZeRO-{self.stage}"
        return f"{way}, {'bf16' if self.bf16 else 'fp32'}, {self.offload}"

    def config(self, swap: str) -> dict[str, Any]:
        """DeepSpeed's configuration, which both libraries are given."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            # Otherwise parameters this small stay whole, and ZeRO-3 would be run in name only.
            zero["stage3_param_persistence_threshold"] = 0
        if self.offload != "none":
            place = {"device": self.offload}
            if self.offload == "nvme":
                place["nvme_path"] = swap
            zero["offload_optimizer"] = place
            if self.stage == 3:
                zero["offload_param"] = dict(place)
        return {
            "zero_optimization": zero,
            "bf16": {"enabled": self.bf16},
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": 1,
            "train_micro_batch_size_per_gpu": BATCH,
            "train_batch_size": "auto",
        }


def cases(*, disk: bool) -> list[Case]:
    """All rows, DDP first; with NVMe where its operation is built."""
    found = [Case(None), Case(None, bf16=True)]
    for stage in (0, 1, 2, 3):
        places = ["none"] + ["cpu"] * (stage > 0) + ["nvme"] * (stage == 3 and disk)
        found += [Case(stage, bf16, place) for bf16 in (False, True) for place in places]
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def loader() -> DataLoader[Any]:
    values, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(values, dtype=torch.float32) / 16, torch.tensor(labels))
    return DataLoader(data, batch_size=BATCH)


def accelerator(library: str, case: Case, swap: str) -> Any:
    """A fresh one of a library."""
    options: dict[str, Any] = {"cpu": True}
    # Accelerate sets it for good, and both libraries read it.
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if library == "nbaccel":
        import nbaccel as made_by
    else:
        import accelerate as made_by  # type: ignore[no-redef]
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)  # noqa: SLF001 - it has no public way
        GradientState._reset_state()  # noqa: SLF001
        if case.stage is not None:
            # With cpu=True it would leave DeepSpeed out, and without a backend count one process.
            options = {"kwargs_handlers": [made_by.InitProcessGroupKwargs(backend="gloo")]}
    if case.stage is not None:
        options["deepspeed_plugin"] = made_by.DeepSpeedPlugin(
            hf_ds_config=deepcopy(case.config(swap))
        )
    made = made_by.Accelerator(mixed_precision="bf16" if case.bf16 else "no", **options)
    if (made.distributed_type == "DEEPSPEED") != (case.stage is not None):
        raise RuntimeError(f"{library} would train {case.name} with {made.distributed_type}")
    return made


class Training:
    """One model that a library trains, step by step.

    Args:
        library: Whose `Accelerator`.
        case: How.
        swap: Folder for what is offloaded to disk.
        model: What to train; None makes it.
    """

    def __init__(self, library: str, case: Case, swap: str, model: nn.Module | None = None) -> None:
        self.accelerator = accelerator(library, case, swap)
        model = model or net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, loader()
        )
        self._clips = case.stage is None  # DeepSpeed does as its configuration says
        # Accelerate leaves it to the loop that DeepSpeed's engine takes and gives bf16 alone.
        by_hand = library == "accelerate" and case.stage is not None and case.bf16
        self._dtype = torch.bfloat16 if by_hand else torch.float32

    def steps(self, count: int) -> list[float]:
        """Losses, the mean over the processes."""
        losses = []
        for number, (values, labels) in enumerate(self.loader):
            if number == count:
                break
            loss = F.cross_entropy(self.model(values.to(self._dtype)).float(), labels)
            self.accelerator.backward(loss)
            if self._clips:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return self.accelerator.reduce(torch.stack(losses), "mean").tolist()

    def end(self) -> None:
        self.accelerator.free_memory()


def setting_up() -> None:
    """What every process of a measurement does first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def swapped_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


# ------------------------------------------------------------------------- in nbaccel's workers


def train_all(
    models: dict[str, nn.Module], rows: list[Case], swap: Path
) -> dict[str, dict[str, Any]]:
    """All cases, on every process of a launch; what the notebook cannot see for itself.

    Args:
        models: To be trained, by the name of the case.
        rows: The cases.
        swap: Folder on disk, which outlives the launch: weights come home out of it, too.
    """
    setting_up()
    return {case.name: _one(models[case.name], case, str(swap / case.name)) for case in rows}


def _one(model: nn.Module, case: Case, swap: str) -> dict[str, Any]:
    try:
        training = Training("nbaccel", case, swap, model)
        losses = training.steps(STEPS)
    except Exception as error:  # a row that does not run is a result
        return {"error": f"{type(error).__name__}: {error}"}
    state = training.accelerator.get_state_dict(training.model)
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in state.items()},
        "swapped": swapped_bytes(swap),
    }


# ------------------------------------------------------------------------- under torchrun


def peer_losses(case: Case) -> dict[str, Any]:
    """What Accelerate's training gives."""
    with tempfile.TemporaryDirectory() as swap:
        try:
            training = Training("accelerate", case, swap)
            losses = training.steps(STEPS)
        except Exception as error:  # a row that does not run is a result
            return {"error": f"{type(error).__name__}: {error}"}
        training.end()
        return {"losses": losses}


def block_times(case: Case) -> dict[str, list[float]]:
    """Seconds per step of both libraries, taken in turns in this process."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        swaps = dict(zip(LIBRARIES, (one, other), strict=True))
        trainings = {library: Training(library, case, swaps[library]) for library in LIBRARIES}
        for training in trainings.values():
            training.steps(3)
        times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        for number in range(BLOCKS):
            for library in LIBRARIES if number % 2 else LIBRARIES[::-1]:
                times[library].append(_timed(trainings[library].steps))
        for training in trainings.values():
            training.end()
    return times


def _timed(steps: Callable[[int], Any]) -> float:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    begin = time.perf_counter()
    steps(STEPS_PER_BLOCK)
    return (time.perf_counter() - begin) / STEPS_PER_BLOCK


def ratio(times: dict[str, list[float]]) -> float:
    """Median over adjacent blocks: what disturbs one block mostly disturbs its neighbour, too."""
    pairs = zip(times["nbaccel"], times["accelerate"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def main() -> None:
    setting_up()
    rows = cases(disk=sys.argv[2] == "disk")
    found: dict[str, Any] = {}
    for case in rows:
        found[case.name] = peer_losses(case)
    for case in rows:
        if "losses" in found[case.name]:
            found[case.name]["times"] = block_times(case)
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
