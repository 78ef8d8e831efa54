"""The environment that engines of one process share ends with its last user, and not before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nbaccel.deepspeed import deepspeed_environment
from nbaccel.deepspeed.environment import Lease
from tests.deepspeed import needs

pytestmark = needs.DEEPSPEED


@pytest.fixture
def leases():
    made = [Lease(torch.device("cpu")) for _ in range(2)]
    yield made
    for lease in made:
        lease.give_up()


def test_it_ends_with_its_last_user(leases):
    first, second = leases
    first.take()
    second.take()
    first.give_up()
    first.give_up()
    assert dist.is_initialized()
    second.give_up()
    assert not dist.is_initialized()


def test_a_user_of_one_that_was_closed_does_not_end_the_next(leases):
    first, second = leases
    first.take()
    deepspeed_environment().close()
    second.take()
    first.give_up()
    assert dist.is_initialized()
    second.give_up()
    assert not dist.is_initialized()
