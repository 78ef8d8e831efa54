"""One process on all devices, cut up by XLA's partitioner: four virtual ones on the processor."""

from __future__ import annotations

import pytest

from nbaccel import RunConfig, notebook_launcher
from tests.tpu import bodies

DEVICES = 4


def test_losses_are_those_of_one_replica_and_weights_are_really_cut_up(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver != "torch_xla":
        pytest.skip("only torch_xla has a mode in which one process drives all chips")
    monkeypatch.setenv("CPU_NUM_DEVICES", str(DEVICES))
    expected = bodies.train_whole(bodies.make_net(), 2)
    net = bodies.make_net()
    before = net.body.weight.detach().clone()
    config = RunConfig(device="tpu", strategy="spmd")
    ((losses, specs, rows),) = notebook_launcher(bodies.train_sharded, (net,), config=config)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert specs["embedding.weight"] == f"{{devices=[{DEVICES},1]0,1,2,3}}"
    assert specs["body.weight"] == f"{{devices=[{DEVICES},1]0,1,2,3}}"
    assert specs["body.bias"] == f"{{devices=[{DEVICES}]0,1,2,3}}"
    assert rows == [bodies.WIDTH // DEVICES] * DEVICES
    assert not net.body.weight.detach().equal(before)
