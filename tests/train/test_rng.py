"""Random numbers: seeded, kept, given back, and equal on all processes."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch

from nbaccel import debug_launcher
from nbaccel.abc.place import Place
from nbaccel.errors import ConfigError
from nbaccel.train import rng
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from tests.programs import run_program

CPU = Place(device=torch.device("cpu"))


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def draw_seed_and_fail() -> None:
    draw()
    rng.set_seed(99)
    raise KeyError


def test_a_seed_repeats_all_generators_and_a_device_specific_one_adds_the_rank(monkeypatch):
    rng.set_seed(7)
    first = draw()
    assert draw() != first
    rng.set_seed(7)
    assert draw() == first
    monkeypatch.setenv("RANK", "3")
    rng.set_seed(7, device_specific=True)
    specific = draw()
    rng.set_seed(10)
    assert draw() == specific


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7"])
def test_a_seed_that_numpy_could_not_take_is_refused(seed):
    before = random.getstate()
    with pytest.raises(ConfigError, match=r"from 0 to 4294967295"):
        rng.set_seed(seed)
    assert random.getstate() == before, "some generators were seeded, others not"


def test_deterministic_algorithms_can_be_asked_for_and_no_cuda_is_woken():
    try:
        rng.set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    code = (
        "import torch\nfrom nbaccel.abc.place import Place\nfrom nbaccel.train import rng\n"
        "rng.set_seed(3)\nrng.capture_rng_states(Place(device=torch.device('cpu')))\n"
        "with rng.preserve_rng_states(): pass\nassert not torch.cuda.is_initialized()\n"
    )
    run_program([sys.executable, "-c", code])


def test_what_was_captured_or_drawn_in_a_block_comes_back():
    rng.set_seed(1)
    random.gauss(0, 1)  # leaves a half-used pair of numbers in the state
    state = rng.capture_rng_states(CPU)
    first = (*draw(), random.gauss(0, 1), np.random.standard_normal())
    rng.restore_rng_states(CPU, state)
    assert (*draw(), random.gauss(0, 1), np.random.standard_normal()) == first
    rng.set_seed(5)
    expected = draw()
    rng.set_seed(5)
    with pytest.raises(KeyError), rng.preserve_rng_states():
        draw_seed_and_fail()
    assert draw() == expected


@pytest.mark.gpu
def test_cuda_states_come_back():
    place = Place(device=torch.device("cuda", 0))
    rng.set_seed(1)
    state = rng.capture_rng_states(place)
    first = torch.rand(3, device="cuda").tolist()
    rng.restore_rng_states(place, state)
    assert torch.rand(3, device="cuda").tolist() == first


def draws_after_synchronizing(kinds: list[str]) -> list[tuple[float, ...]]:
    collectives = Collectives(init_process())
    rng.set_seed(20, device_specific=True)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    before = (*draw(), torch.rand((), generator=generator).item())
    rng.synchronize_rng_states(kinds, generator, collectives)
    return [before, (*draw(), torch.rand((), generator=generator).item())]


def test_every_process_draws_what_process_0_would():
    first, second = debug_launcher(
        draws_after_synchronizing, args=(["python", "numpy", "torch", "generator"],)
    )
    assert not set(first[0]) & set(second[0]), "device-specific seeds gave the same numbers"
    assert first[1] == second[1]


def test_a_generator_that_is_unknown_or_not_given_is_refused():
    with pytest.raises(ConfigError, match=r"'troch'.*Did you mean 'torch'"):
        rng.synchronize_rng_states(["troch"], None, Collectives(CPU))
    with pytest.raises(ConfigError, match=r"generator=None"):
        rng.synchronize_rng_states(["generator"], None, Collectives(CPU))
