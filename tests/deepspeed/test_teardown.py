"""What DeepSpeed keeps is let go in every version, also in those that have no function for it."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from nbaccel.deepspeed import deepspeed_environment, environment
from nbaccel.deepspeed.environment import Lease
from tests.deepspeed import engines, needs
from tests.isolation import isolated

pytestmark = needs.DEEPSPEED


@pytest.mark.parametrize("version", ["as installed", "before 0.19.8"])
def test_groups_of_which_torch_knows_nothing_more_are_forgotten(monkeypatch, version):
    groups = import_module("deepspeed.utils.groups")
    if version != "as installed":
        monkeypatch.delattr(groups, "_release_process_group_references", raising=False)
    monkeypatch.setattr(groups, "_WORLD_GROUP", "gone")
    monkeypatch.setattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "gone")
    monkeypatch.setattr(groups, "expert_tensor_parallel_world_size", 4)
    monkeypatch.setitem(groups._EXPERT_PARALLEL_GROUP, "ep_size_2", "gone")
    environment.forget_groups()
    assert groups._WORLD_GROUP is None
    assert groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None
    assert groups.expert_tensor_parallel_world_size == 1
    assert groups._EXPERT_PARALLEL_GROUP == {}


def test_an_engine_that_is_collected_late_is_not_destroyed_again():
    class Engine:
        count = 0

        def destroy(self) -> None:
            Engine.count += 1

        def __del__(self) -> None:
            self.destroy()

    engine = Engine()
    environment.destroy(engine)
    del engine
    assert Engine.count == 1


# The environment that engines of one process share ends with its last user, and not before.


@pytest.fixture
def leases():
    made = [Lease(torch.device("cpu")) for _ in range(2)]
    yield made
    for lease in made:
        lease.give_up()


def test_the_environment_ends_with_its_last_user_and_not_with_one_of_a_closed_one(leases):
    first, second = leases
    first.take()
    second.take()
    first.give_up()
    first.give_up()
    assert dist.is_initialized()
    second.give_up()
    assert not dist.is_initialized()
    first, second = leases
    first.take()
    deepspeed_environment().close()
    second.take()
    first.give_up()
    assert dist.is_initialized()
    second.give_up()
    assert not dist.is_initialized()


@pytest.mark.slow
@needs.marked
@isolated(timeout_s=240)
def test_each_workaround_is_still_needed():
    """Where this fails, DeepSpeed does no longer what the function that is named undoes."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.utils import groups

    def interrupted(*_: object) -> None:
        raise InterruptedError

    def three_steps() -> None:
        for _ in range(3):
            engine.backward(engine(rows).sum())
            engine.step()

    model, rows = engines.model(), torch.ones(4, engines.WIDTH)
    with deepspeed_environment(device="cpu"):
        engine, *_ = deepspeed.initialize(model=model, config=engines.config(3))
        with pytest.warns(FutureWarning, match=r"torch\.distributed\.\w+` is deprecated"):
            three_steps()  # `ignore_old_names`
        engine.destroy()
        assert model[0].weight.shape == (0,), "local_shards.take_back"
        kept = weakref.ref(model[0])
        del engine, model
        gc.collect()
        assert kept() is not None, "the cache in forget_modules"
        model = engines.model()
        engine, *_ = deepspeed.initialize(model=model, config=engines.config(3))
        model[1].register_forward_pre_hook(interrupted)
        with pytest.raises(InterruptedError):
            engine(rows)
        engine.destroy()
        assert FWD_MODULE_STACK, "the stack in forget_modules"
        dist.destroy_process_group()
        assert comm.cdb is not None, "comm.cdb in forget_groups"
        assert groups._WORLD_GROUP is not None, "forget_group_references"
