"""What ``nbaccel test`` tries in the workers: each step a training needs, with a known answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel.accelerator import Accelerator
from nbaccel.base.errors import NbaccelError
from nbaccel.config import RunConfig
from nbaccel.utils.operations import broadcast, gather, pad_across_processes, reduce
from nbaccel.utils.random import set_seed

# Multiples of 16, which products of 8 bits need.
_NUM_FEATURES = 32
_BATCH_SIZE = 16
# No multiple of the batch, nor of any number of processes above one.
_SAMPLE_COUNT = 149
_NUM_STEPS = 20


class SetUpCheckFailed(NbaccelError):
    """A check has found something else than the known answer."""


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise SetUpCheckFailed(problem)


def _targets_of(inputs: torch.Tensor) -> torch.Tensor:
    # Of about the size that an untrained model answers, so that no step is too long.
    return inputs[:, :4].sum(dim=1, keepdim=True)


class _CheckedTraining:
    def __init__(self, config: RunConfig, world_size: int, folder: Path) -> None:
        self.config = config
        self.world_size = world_size
        self.folder = folder
        set_seed(0)
        self.accelerator = Accelerator()
        model = nn.Sequential(
            nn.Linear(_NUM_FEATURES, _NUM_FEATURES),
            nn.ReLU(),
            nn.Linear(_NUM_FEATURES, _NUM_FEATURES),
            nn.ReLU(),
            nn.Linear(_NUM_FEATURES, 1),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        inputs = torch.randn(_SAMPLE_COUNT, _NUM_FEATURES)
        # The number of a sample is its last column, so that a loader's work can be counted.
        dataset = TensorDataset(inputs, _targets_of(inputs), torch.arange(_SAMPLE_COUNT))
        loader = DataLoader(dataset, _BATCH_SIZE)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        num_examples = _SAMPLE_COUNT - _SAMPLE_COUNT % _BATCH_SIZE
        self.examples = inputs[:num_examples].to(self.accelerator.device)

    def checks(self) -> dict[str, Callable[[], str]]:
        """What is checked, by name, in its order."""
        return {
            "processes": self._check_processes,
            "collectives": self._check_collectives,
            "seeds": self._check_seeds,
            "data loader": self._check_loader,
            "precision": self._check_precision,
            "training": self._check_training,
            "checkpoint": self._check_checkpoint,
        }

    def _check_processes(self) -> str:
        found, started = self.accelerator.num_processes, self.world_size
        _require(found == started, f"{found} processes know of each other, {started} were started")
        return f"{started} on {self.accelerator.device.type}"

    def _check_collectives(self) -> str:
        accelerator = self.accelerator
        world_size = self.world_size
        rank = accelerator.process_index
        own_number = torch.tensor([float(rank)], device=accelerator.device)
        ranks = [float(number) for number in range(world_size)]
        _require(gather(own_number).tolist() == ranks, f"gather gave {gather(own_number).tolist()}")
        total = reduce(own_number.clone(), "sum").tolist()
        _require(total == [sum(ranks)], f"reduce gave {total} for the sum of {ranks}")
        last = broadcast(own_number.clone(), from_process=world_size - 1).tolist()
        _require(last == ranks[-1:], f"broadcast gave {last} for {ranks[-1:]}")
        padded = pad_across_processes(own_number.repeat(rank + 1))
        _require(len(padded) == world_size, f"padding gave {len(padded)} values for {world_size}")
        accelerator.wait_for_everyone()
        return "gather, reduce, broadcast, padding, barrier"

    def _check_seeds(self) -> str:
        accelerator = self.accelerator
        set_seed(1)
        drawn = gather(torch.rand(1).to(accelerator.device)).tolist()
        _require(len(set(drawn)) == 1, f"one seed gave {drawn}")
        set_seed(1, device_specific=True)
        drawn = gather(torch.rand(1).to(accelerator.device)).tolist()
        _require(len(set(drawn)) == self.world_size, f"seeds of the ranks gave {drawn}")
        return "equal on all ranks, and of each rank's own"

    def _check_loader(self) -> str:
        samples: list[int] = []
        num_batches = 0
        for *_, numbers in self.loader:
            samples += self.accelerator.gather_for_metrics(numbers).tolist()
            num_batches += 1
        _require(
            sorted(samples) == list(range(_SAMPLE_COUNT)),
            f"{len(samples)} samples came out of {_SAMPLE_COUNT}, "
            f"{len(set(samples))} different ones",
        )
        counts = gather(torch.tensor([num_batches], device=self.accelerator.device)).tolist()
        _require(len(set(counts)) == 1, f"ranks had {counts} batches")
        return f"{_SAMPLE_COUNT} samples once each, {num_batches} batches a rank"

    def _check_precision(self) -> str:
        wanted = self.config.mixed_precision
        found = self.accelerator.mixed_precision
        _require(wanted == found, f"{wanted} was asked for, the Accelerator computes in {found}")
        with torch.no_grad(), self.accelerator.autocast():
            outputs = self.model(self.examples)
        _require(bool(torch.isfinite(outputs).all()), f"a forward pass in {found} is not finite")
        return "float32" if found == "no" else found

    def _train(self) -> None:
        accelerator = self.accelerator
        num_batches = _NUM_STEPS * accelerator.gradient_accumulation_steps
        endless = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for inputs, targets, _ in itertools.islice(endless, num_batches):
            with accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(inputs).float(), targets)
                accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def _check_training(self) -> str:
        loss_before = self._loss()
        self._train()
        loss_after = self._loss()
        _require(loss_after < loss_before, f"the loss went {loss_before:.3g} → {loss_after:.3g}")
        outputs = gather(self._outputs().mean().reshape(1)).tolist()
        _require(
            max(outputs) - min(outputs) <= 1e-4 * max(1.0, abs(outputs[0])),
            f"after training ranks computed {outputs} from the same input",
        )
        return f"loss {loss_before:.3g} → {loss_after:.3g} in {_NUM_STEPS} steps"

    def _check_checkpoint(self) -> str:
        outputs_before = self._outputs()
        folder = self.folder / "checkpoint"
        self.accelerator.save_state(str(folder))
        self._train()
        self.accelerator.load_state(str(folder))
        difference = (self._outputs() - outputs_before).abs().max().item()
        _require(
            difference <= 1e-4,
            f"outputs of the loaded model differ by {difference:.3g} from the saved",
        )
        return "saved, trained on, loaded: outputs as before"

    def _outputs(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.examples).float()  # type: ignore[no-any-return]

    def _loss(self) -> float:
        """On the same examples each time: batches of a loader differ more than a few steps do."""
        return nn.functional.mse_loss(self._outputs(), _targets_of(self.examples)).item()


def run_checks(config: RunConfig, world_size: int, folder: str) -> list[tuple[str, str, float]]:
    """Run every check in this worker."""
    training = _CheckedTraining(config, world_size, Path(folder))
    check_results = []
    for check_name, check in training.checks().items():
        start_time = time.monotonic()
        try:
            text = check()
        except SetUpCheckFailed as error:
            raise SetUpCheckFailed(f"{check_name}: {error}") from None
        except Exception as error:  # whatever a library raises, the check's name is wanted
            raise SetUpCheckFailed(f"{check_name}: {type(error).__name__}: {error}") from error
        check_results.append((check_name, text, time.monotonic() - start_time))
    training.accelerator.end_training()
    return check_results
