"""A training that was killed goes on as if it had not been: bit by bit, dropout included."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import ConfigError, notebook_launcher
from nbaccel.abc.place import Place
from nbaccel.data_loader import skip_first_batches
from nbaccel.train import rng
from nbaccel.train.checkpoint import files
from nbaccel.train.distributed import init_process
from tests.train.data import ALONE, Numbers, prepare

# torchdata 0.11 calls a function that torch 2.13 deprecates, for every loader it makes.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EPOCHS, KILLED_IN_EPOCH = 3, 1


class Drawing(IterableDataset[torch.Tensor]):
    """A stream that shuffles and augments with torch's own generator."""

    def __iter__(self):
        for number in torch.randperm(10).tolist():
            yield number + torch.rand(())


class ByPython:
    """Batches in an order that Python's generator draws, of sizes that numpy's does."""

    def __iter__(self):
        order = random.sample(range(10), 10)
        while order:
            size = int(np.random.randint(1, 4))
            yield order[:size]
            order = order[size:]


def make(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Drawing(), batch_size=3)
    if kind == "python":
        return DataLoader(Numbers(), batch_sampler=ByPython())
    data = Numbers(draws=kind == "augmented")
    generator = torch.Generator().manual_seed(9) if kind == "generator" else None
    workers = {
        "workers": {"num_workers": 1},
        "persistent": {"num_workers": 1, "persistent_workers": True},
    }.get(kind, {})
    return DataLoader(data, batch_size=3, shuffle=True, generator=generator, **workers)


class Run:
    """Everything that training needs, born from one seed."""

    def __init__(self, kind: str, place: Place = ALONE, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.place = place
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = prepare(make(kind), place=place, **settings)
        self.seen: list[Any] = []

    def step(self, batch: torch.Tensor) -> None:
        self.seen.append(batch.tolist())
        self.model(batch.float()[:, None]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": rng.capture_rng_states(self.place),
            "loader": self.loader.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        rng.restore_rng_states(self.place, state["rng"])

    def finish(self) -> None:
        """Take down what two equal runs agree on, the numbers drawn next included."""
        weights = [p.tolist() for p in self.model.parameters()]
        self.end = [weights, torch.rand(3).tolist(), random.random(), np.random.rand()]


def unbroken(run: Run, step: int, path: Any) -> None:
    for epoch in range(EPOCHS):
        for number, batch in enumerate(run.loader):
            run.step(batch)
            if (epoch, number + 1) == (KILLED_IN_EPOCH, step):
                torch.save(run.save(), path)
                run.seen = []
    run.finish()


def resumed(run: Run, path: Any, step: int | None, *, skips: bool = True) -> None:
    run.load(files.read_torch_file(path))
    first = skip_first_batches(run.loader, step) if skips else run.loader
    for epoch in range(KILLED_IN_EPOCH, EPOCHS):
        for batch in first if epoch == KILLED_IN_EPOCH else run.loader:
            run.step(batch)
    run.finish()


def goes_on(
    path: Any, kind: str, step: int, skipped: int | None, *, skips: bool = True, **settings: Any
) -> tuple[Run, Run]:
    """A run that is saved after a step, and another one that goes on from there."""
    whole = Run(kind, **settings)
    unbroken(whole, step, path)
    later = Run(kind, seed=99, **{k: v for k, v in settings.items() if k != "data_seed"})
    resumed(later, path, skipped, skips=skips)
    assert later.seen == whole.seen
    assert later.end == whole.end
    return whole, later


KINDS = ["plain", "augmented", "generator", "stream", "python"]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_bit_by_bit(kind, step, tmp_path):
    _, later = goes_on(tmp_path / "state", kind, step, step)
    assert later.loader.iteration == EPOCHS


@pytest.mark.usefixtures("sigchld")
@pytest.mark.parametrize("kind", ["workers", "persistent"])
def test_worker_processes_change_nothing_about_it(kind, tmp_path):
    """Waiting workers save torch a draw at each epoch but the first: that must be repeated, too."""
    whole, _ = goes_on(tmp_path / "state", kind, 2, 2)
    again = [*whole.seen]
    whole.seen = []
    resumed(whole, tmp_path / "state", 2)  # in the process that wrote it, with workers waiting
    assert whole.seen == again


@pytest.mark.parametrize("kind", ["plain", "augmented", "generator", "stream"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_stateful_loader_goes_on_in_the_middle(kind, step, tmp_path):
    goes_on(tmp_path / "state", kind, step, None, skips=False, use_stateful_dataloader=True)


def test_a_stateful_loader_saved_at_its_last_batch_begins_the_next_epoch(tmp_path):
    whole = Run("plain", use_stateful_dataloader=True)
    unbroken(whole, 4, tmp_path / "state")
    later = Run("plain", seed=99, use_stateful_dataloader=True)
    later.load(files.read_torch_file(tmp_path / "state"))
    assert later.loader.iteration == KILLED_IN_EPOCH + 1
    for _ in range(KILLED_IN_EPOCH + 1, EPOCHS):
        for batch in later.loader:
            later.step(batch)
    later.finish()
    assert later.end == whole.end


@pytest.mark.parametrize(
    ("skipped", "settings"),
    [
        (None, {}),  # the loader knows by itself how many to skip
        (2, {"use_stateful_dataloader": True}),  # left out once
        (2, {"use_seedable_sampler": True, "data_seed": 5}),
    ],
)
def test_skipping_fits_what_was_restored(skipped, settings, tmp_path):
    goes_on(tmp_path / "state", "plain", 2, skipped, **settings)


def test_telling_the_epoch_again_keeps_what_was_restored_and_anothers_state_is_refused(tmp_path):
    whole = Run("plain")
    unbroken(whole, 1, tmp_path / "state")
    later = Run("plain", seed=99)
    later.load(files.read_torch_file(tmp_path / "state"))
    later.loader.set_epoch(KILLED_IN_EPOCH)
    assert later.loader.batches_seen == 1
    assert later.loader.position.is_within_epoch
    later.loader.set_epoch(0)
    assert not later.loader.position.is_within_epoch
    with pytest.raises(ConfigError, match=r"it has '_num_yielded', '_snapshot'"):
        prepare(make("plain")).load_state_dict({"_snapshot": {}, "_num_yielded": 3})


def on_two(path: str, *, kind: str, **settings: Any) -> list[Any]:
    place = init_process(cpu=True)
    mine = f"{path}.{place.rank}"
    whole = Run(kind, place, seed=place.rank, **settings)
    unbroken(whole, 1, mine)
    later = Run(kind, place, seed=50 + place.rank, **settings)
    resumed(later, mine, 1)
    return [later.seen == whole.seen, later.end == whole.end, later.seen]


def several(path: str, cases: Any) -> list[Any]:
    return [on_two(f"{path}{number}", **case) for number, case in enumerate(cases)]


def test_two_killed_processes_go_on_bit_by_bit(tmp_path):
    cases = [
        {"kind": "plain"},
        {"kind": "augmented"},
        {"kind": "plain", "use_seedable_sampler": True},
        {"kind": "plain", "dispatch_batches": True},
        {"kind": "stream"},
    ]
    for found in notebook_launcher(several, (str(tmp_path / "state"), cases), 2):
        for case, (same_data, same_end, seen) in zip(cases, found, strict=True):
            assert seen, case
            assert same_data, case
            assert same_end, case
