"""CONTRIBUTING's steps, gone by a package of its own: a class and a row, and no other file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.programs import run_program

HERE = Path(__file__).parent
ENTRY_POINTS = {
    "nbaccel.devices": {"abacus": "added_backends.rows:DEVICE"},
    "nbaccel.precisions": {"bead16": "added_backends.rows:PRECISION"},
    "nbaccel.strategies": {"averaging": "added_backends.rows:STRATEGY"},
    "nbaccel.fp8_backends": {
        "bead8": "added_backends.rows:FP8",
        "lost8": "added_backends.rows:FP8_ELSEWHERE",
    },
}

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a process of its own that has the package; gives what it prints."""

    def run(code: str, *, groups: dict[str, dict[str, str]] | None = None, **more: str) -> str:
        site = tmp_path / "site"
        metadata = site / "added_backends-1.0.dist-info"
        if not site.exists():
            shutil.copytree(HERE / "added_backends", site / "added_backends")
            metadata.mkdir()
            (metadata / "METADATA").write_text(
                "Metadata-Version: 2.1\nName: added-backends\nVersion: 1.0\n"
            )
        lines = []
        for group, points in (ENTRY_POINTS | (groups or {})).items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join([str(site), str(ROOT)])
        environ = {**os.environ, "PYTHONPATH": path, **more}
        words = [sys.executable, str(script)]
        done = run_program(words, env=environ, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


# What a user's cell would do: a model trained by an accelerator, and facts of how.
TRAINING = """
import torch
from torch import nn
from nbaccel import Accelerator, RunConfig, notebook_launcher

def train(model, handlers=()):
    from added_backends import device

    torch.manual_seed(0)
    accelerator = Accelerator(kwargs_handlers=list(handlers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(8, 4) + accelerator.process_index
    losses = []
    for _ in range(5):
        loss = (model(inputs) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    unwrapped = accelerator.unwrap_model(model)
    same = accelerator.gather(unwrapped[0].weight.detach()[None])
    assert all(torch.equal(same[0], other) for other in same), "ranks train different models"
    assert losses[-1] < losses[0]
    facts = {
        "device": accelerator.plan.device,
        "strategy": accelerator.plan.strategy,
        "precision": accelerator.mixed_precision,
        "fp8": accelerator.fp8_backend,
        "torch": accelerator.device.type,
        "layer": type(unwrapped[0]).__name__,
        "margin": getattr(unwrapped[0], "margin", None),
        "dtype": str(accelerator._run.precision.dtype),
        "explained": accelerator.plan.explain(),
    }
    with accelerator.profile():
        pass
    accelerator.free_memory()
    return facts | {"calls": device.CALLS}

def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
"""


def test_its_words_are_known_before_anything_is_imported(run):
    run(
        """
        import sys
        from nbaccel import RunConfig, resolve
        from nbaccel.config import Fp8Config

        config = RunConfig(device="abacus", mixed_precision="bead16", strategy="averaging")
        assert config == RunConfig.from_yaml(config.to_yaml())
        assert Fp8Config(backend="bead8").backend == "bead8"
        try:
            RunConfig(device="beads", mixed_precision="beads16", strategy="average")
        except ValueError as error:
            told = str(error)
        assert "one of auto, cpu, cuda, xpu, mps, tpu, abacus: got 'beads'" in told
        assert "Did you mean 'abacus'?" in told
        assert "Did you mean 'bead16'?" in told
        assert "Did you mean 'averaging'?" in told

        plan = resolve(config)
        assert plan.device == "abacus" and plan.num_processes == 2, plan
        assert "2 bead frames (Suanpan)" not in plan.explain()
        assert "one per bead frame, 2 found" in plan.explain()
        assert "every process holds the model" in plan.explain()
        assert "bead frame worker" in plan.headline() and "bead16" in plan.headline()
        assert "torch" not in sys.modules
        """
    )


@pytest.mark.slow
def test_workers_train_with_all_of_it(run):
    run(
        TRAINING
        + """
config = RunConfig(
    device="abacus", mixed_precision="bead16", strategy="averaging", num_processes=2
)
net = model()
before = net[0].weight.clone()
for facts in notebook_launcher(train, (net,), config=config):
    assert facts["device"] == "abacus" and facts["torch"] == "cpu", facts
    assert facts["strategy"] == "averaging", facts
    assert facts["precision"] == "bead16" and facts["dtype"] == "torch.bfloat16", facts
    assert "averaged, 2 processes, on ABACUS, bead16" in facts["explained"], facts
    assert "weight" in facts["explained"]
    assert {"make_current", "empty_cache"} <= set(facts["calls"]), facts
assert not torch.equal(before, net[0].weight), "trained weights come home"

# Its settings ask for the strategy, and live workers know it.
from added_backends.settings import AveragingSettings
from nbaccel import Pool
handlers = (AveragingSettings(weight=0.5),)
for facts in notebook_launcher(train, (model(), handlers), num_processes=2):
    assert facts["strategy"] == "averaging", facts
    assert "AveragingSettings was given" in facts["explained"], facts["explained"]
    assert "0.5" in facts["explained"]
with Pool(config=RunConfig(num_processes=2, device="abacus", strategy="averaging")) as pool:
    for facts in pool.call(train, model()):
        assert (facts["device"], facts["strategy"]) == ("abacus", "averaging"), facts

# Its FP8 backend trains through `convert`.
config = RunConfig(
    device="abacus", mixed_precision="fp8", fp8={"backend": "bead8", "margin": 2}, num_processes=2
)
for facts in notebook_launcher(train, (model(),), config=config):
    assert facts["strategy"] == "ddp" and facts["precision"] == "fp8", facts
    assert facts["fp8"] == "bead8" and facts["layer"] == "Rounded", facts
    assert facts["margin"] == 2, facts
# Where nothing more is said: the device that is there, the first backend that is installed.
for facts in notebook_launcher(train, (model(),), config=RunConfig(mixed_precision="fp8")):
    assert facts["fp8"] == "bead8" and facts["margin"] == 0 and facts["device"] == "abacus", facts

from nbaccel.errors import PrecisionMismatch
def nobody_reads_it(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
try:
    notebook_launcher(nobody_reads_it, (model(),), config=config)
except PrecisionMismatch as error:
    assert "mixed_precision='fp8' was asked for" in str(error) and "fp32" in str(error), error
else:
    raise AssertionError("float32 in the place of fp8, without a word")

# Without a launcher the configuration is told to the Accelerator itself.
config_here = RunConfig(mixed_precision="fp8", fp8={"backend": "bead8", "margin": 1})
alone = Accelerator(config=config_here, cpu=True)
assert alone.prepare(model())[0].margin == 1 and alone.plan.strategy == "single"
"""
    )


def test_what_cannot_be_had_is_refused_with_its_reason(run):
    run(
        """
        from nbaccel import RunConfig, resolve
        from nbaccel.errors import ConfigError

        def refused(**settings):
            try:
                resolve(RunConfig(**settings))
            except ConfigError as error:
                return str(error)
            raise AssertionError(f"{settings} is not refused")

        told = refused(mixed_precision="fp8", fp8="lost8", device="abacus")
        assert "'lost8' needs lost_beads, which is not installed" in told, told
        told = refused(mixed_precision="fp8", fp8="te", device="abacus")
        assert "'te' needs transformer_engine, which is not installed" in told, told
        told = refused(mixed_precision="fp16", device="abacus")
        assert "is not supported on abacus" in told, told
        told = refused(strategy="fsdp", device="abacus")
        assert 'strategy="fsdp" is not supported on abacus' in told, told
        told = refused(strategy="averaging", zero_stage=2, num_processes=2, device="cpu")
        assert 'zero_stage=2 and strategy="averaging" were both given' in told, told
        told = refused(strategy="averaging", num_processes=1, device="abacus")
        assert "is not supported with one process" in told, told
        """
    )
    device = "added_backends.rows:DEVICE"
    run(
        """
        from nbaccel import RunConfig, resolve
        from nbaccel.config.capabilities import ENTRY_POINT_PROBLEMS, device_row
        try:
            resolve(RunConfig(device="abacus"))
        except ValueError as error:
            assert 'device="abacus" needs an abacus: none was found' in str(error)
        else:
            raise AssertionError("no abacus is there")
        (problem,) = ENTRY_POINT_PROBLEMS
        assert "'abacus'" in problem and "already" in problem, problem
        """,
        groups={"nbaccel.devices": {"abacus": device, "other": "added_backends.other_rows:DEVICE"}},
        NO_ABACUS="1",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("added_backends.nowhere:DEVICE", "ModuleNotFoundError"),
        ("added_backends.rows:NONE", "AttributeError"),
        ("added_backends.rows:NO_ROW", "must be a DeviceRow: got 'a text'"),
        ("added_backends.rows:PRECISION", "must be a DeviceRow"),
    ],
)
def test_a_broken_entry_point_is_named_and_costs_only_its_row(run, point, said):
    run(
        f"""
        from nbaccel import RunConfig, resolve
        plan = resolve(RunConfig(mixed_precision="bead16"))
        (warning,) = [text for text in plan.warnings if "abacus" in text]
        assert "Entry point abacus = {point} (nbaccel.devices)" in warning, warning
        assert "of the package added-backends" in warning, warning
        assert {said!r} in warning, warning
        assert "Repair or uninstall" in warning, warning
        try:
            RunConfig(device="abacus")
        except ValueError as error:
            assert "must be one of auto, cpu" in str(error) and {said!r} in str(error), error
        else:
            raise AssertionError("there is no such device")
        """,
        groups={"nbaccel.devices": {"abacus": point}},
    )
