"""What the notebook's process has done before a launch on TPUs, and who holds the chips."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from nbaccel.plan import Plan
from tests.isolation import ROOT
from tests.kernel.kernel import Kernel
from tests.programs import run_program

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
BUSY_CELL = """
import os, sys
import torch
from torch import nn
import nbaccel
torch.manual_seed(0)
a = torch.randn(600, 600)
a @ a
nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()
"""
LAUNCH_CELL = """
from tests.tpu import bodies
model = nn.Linear(bodies.WIDTH, 1)
before = model.weight.detach().clone()
config = nbaccel.RunConfig(device="tpu", num_processes=2)
seen = nbaccel.notebook_launcher(bodies.step_on_chip, (model,), config=config)
print(*(device for device, _ in seen), not torch.equal(before, model.weight))
"""


@pytest.fixture
def undecided_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """A kernel in whose environment nobody has said whether torch may load its extensions."""
    monkeypatch.delenv(AUTOLOAD, raising=False)
    with Kernel() as found:
        yield found


def run_code(code: str, **variables: str) -> str:
    """Run a program of its own, whose torch loads its extensions; what it printed."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environ.pop(AUTOLOAD, None)
    done = run_program([sys.executable, "-c", code], check=False, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_kernel_that_loads_nbaccel_first_stays_asleep_and_launches(
    driver: str, undecided_kernel: Kernel
) -> None:
    undecided_kernel.run("%load_ext nbaccel").check()
    undecided_kernel.run(BUSY_CELL).check()
    asked = "from nbaccel.plan import registry; print(registry.device('tpu').is_awake())"
    assert undecided_kernel.run(asked).check().stdout.split() == ["False"]
    if driver == "torch_tpu":
        asked = f"print('torch_tpu' in sys.modules, os.environ[{AUTOLOAD!r}])"
        assert undecided_kernel.run(asked).check().stdout.split() == ["False", "0"]
    device = {"torch_tpu": "tpu:0", "torch_xla": "xla:0"}[driver]
    launched = undecided_kernel.run(LAUNCH_CELL).check()
    assert [device, device, "True"] == launched.stdout.split()[-3:]


FORK_WITH_AN_AWAKE_RUNTIME = """
import torch
{wake}
import nbaccel
config = nbaccel.RunConfig(device="tpu", num_processes=2, start_method="fork")
try:
    nbaccel.notebook_launcher(print, ("launched",), config=config)
except nbaccel.errors.UnsafeMoment as error:
    print(error)
from nbaccel.plan import registry
print(*registry.device("tpu").hazards())
"""
WAKING = {"torch_tpu": "torch.manual_seed(0)", "torch_xla": "import torch_xla; torch_xla.device()"}


def test_a_fork_of_a_runtime_that_is_awake_is_refused_with_the_reason(driver: str) -> None:
    said = run_code(FORK_WITH_AN_AWAKE_RUNTIME.format(wake=WAKING[driver]))
    assert f"the runtime of {driver} is initialised in the notebook" in said
    assert "launched" not in said
    if driver == "torch_xla":  # without chips; with some, that they are held comes first
        assert "a forked worker hangs or fails in its first operation on a chip" in said


LAUNCH_FROM_AN_AWAKE_KERNEL = """
import torch
torch.manual_seed(0)
import nbaccel
from tests.tpu import bodies
config = nbaccel.RunConfig(device="tpu", num_processes=2)
try:
    nbaccel.notebook_launcher(bodies.step_on_chip, (bodies.make_net(),), config=config)
except nbaccel.errors.UnsafeMoment as error:
    print(error)
"""


def test_a_kernel_that_a_seed_has_woken_is_told_that_it_holds_the_chips(
    driver: str, plan: Plan
) -> None:
    host = plan.inventory.tpu
    if driver != "torch_tpu" or host is None or not host.chips:
        pytest.skip("needs torch_tpu and chips: with torch_xla a seed wakes nothing")
    said = run_code(LAUNCH_FROM_AN_AWAKE_KERNEL)
    files = ", ".join(host.device_files)
    assert f"The TPU chips ({files}) are held by this notebook's kernel" in said
    assert "With torch_tpu, torch.manual_seed or one backward pass on the CPU takes them" in said
    assert "Restart the kernel, and run %load_ext nbaccel before torch is imported" in said
