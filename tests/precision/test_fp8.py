"""Training in 8 bits by each backend, as a user asks for it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbaccel
from nbaccel import Accelerator, FullyShardedDataParallelPlugin, Pool, RunConfig, notebook_launcher
from nbaccel.config import Fp8Config
from nbaccel.errors import ConfigError, WorkerFailed
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor
from nbaccel.precision.torchao import has_layers
from nbaccel.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    has_ao_layers,
)
from tests.isolation import isolated
from tests.needs import DEEPSPEED

NATIVE: dict[str, Any] = {"backend": "native"}
DELAYED = {"backend": "native", "recipe": "delayed", "amax_history_len": 8}
AO = {"backend": "ao"}
ROWWISE = {"backend": "ao", "recipe": "rowwise"}
O1 = {"backend": "msamp", "opt_level": "O1"}
O2 = {"backend": "msamp"}
IN_ONE = (NATIVE, DELAYED, AO, ROWWISE, O1, O2)


def name_of(settings: Any) -> str:
    return "-".join(map(str, settings.values())) if isinstance(settings, dict) else str(settings)


def each(*settings: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("settings", settings, ids=name_of)


@pytest.fixture(autouse=True)
def torchao_if_asked(request: pytest.FixtureRequest) -> None:
    if "ao" in str(getattr(request, "param", "")) or "ao" in request.node.name.split("[")[-1]:
        pytest.importorskip("torchao")


def network() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = (32, 64, 64, 64, 16)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.LayerNorm(narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


def batches(rows: int = 512) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 32, generator=generator)
    classes = (inputs @ torch.randn(32, 16, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(inputs, classes), batch_size=64)


def in_fp8(*handlers: Any, made_by: Any = nbaccel) -> Any:
    return made_by.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[*handlers])


@dataclasses.dataclass
class Run:
    """A prepared model that is trained step by step."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any

    @classmethod
    def begin(cls, model: nn.Module, fp8: dict[str, Any] | None, **settings: Any) -> Run:
        if fp8 is not None:
            settings |= {"mixed_precision": "fp8", "kwargs_handlers": [FP8RecipeKwargs(**fp8)]}
        accelerator = Accelerator(cpu=True, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return cls(accelerator, *accelerator.prepare(model, optimizer, batches()))

    def train(self, epochs: int = 4) -> float:
        losses = []
        for inputs, classes in itertools.chain.from_iterable([self.loader] * epochs):
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), classes)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses[-8:]) / 8


@pytest.fixture(scope="module")
def exact_loss() -> float:
    return Run.begin(network(), None).train()


# ---------------------------------------------------------------- one process


@pytest.mark.slow
@each(*IN_ONE)
def test_it_trains_as_well_as_float32_and_goes_on_bit_by_bit(settings, exact_loss, capfd, tmp_path):
    model = network()
    run = Run.begin(model, settings)
    assert run.accelerator.mixed_precision == "fp8"
    assert run.accelerator.fp8_backend == settings["backend"]
    output = run.model(next(iter(batches()))[0])
    assert output.dtype is torch.float32
    assert run.train() == pytest.approx(exact_loss, rel=0.05)
    text = run.accelerator.plan.explain()
    assert "fp8 layers of Sequential" in text
    assert "emulated" in text
    assert capfd.readouterr().err.count("nbaccel: Sequential in fp8") <= 1  # told once
    run.accelerator.save_state(tmp_path / "saved")
    wanted = run.train(epochs=1)
    other = Run.begin(network(), settings)
    other.accelerator.load_state(tmp_path / "saved")
    assert other.train(epochs=1) == wanted
    # An unwrapped model is the user's own again.
    state = run.accelerator.get_state_dict(run.model)
    assert run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False) is model
    assert {type(m) for m in model} == {nn.Linear, nn.LayerNorm, nn.ReLU}
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_what_stays_in_bfloat16_is_told_with_its_reason(capfd):
    Run.begin(network(), NATIVE)
    told = capfd.readouterr().err
    assert "2 of 4 linear layers" in told
    assert "0 (the first layer); 9 (the last layer)" in told
    Run.begin(network(), {**NATIVE, "skip_first_and_last": False})
    assert "nbaccel" not in capfd.readouterr().err


def test_other_optimizers_train_at_o1_and_are_refused_at_o2():
    accelerator = in_fp8(MSAMPRecipeKwargs(opt_level="O1"))
    model = network()
    before = model[3].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(16, 32)).square().mean())
    optimizer.step()
    assert not torch.equal(model[3].weight.dequantize(), before)
    accelerator = in_fp8(MSAMPRecipeKwargs())
    model = network()
    with pytest.raises(ConfigError, match=r"optimizer is SGD.*O1"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_tied_head_keeps_its_embedding():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 32)
            self.inner = nn.Linear(32, 32)
            self.head = nn.Linear(32, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.embed(words)))

    run = Run.begin(Tied(), O2)
    assert run.model.head.weight is run.model.embed.weight
    assert not isinstance(run.model.head.weight, ScaledTensor)
    assert isinstance(run.model.inner.weight, ScaledTensor)
    run.accelerator.backward(run.model(torch.arange(16)).square().mean())
    run.optimizer.step()


@pytest.mark.slow
def test_a_checkpoint_of_another_precision_can_be_loaded(tmp_path):
    plain = Run.begin(network(), None)
    plain.train(epochs=1)
    plain.accelerator.save_state(tmp_path / "saved")
    wanted = plain.train(epochs=1)
    for settings in (DELAYED, O2):
        run = Run.begin(network(), settings)
        run.accelerator.load_state(tmp_path / "saved")
        assert run.train(epochs=1) == pytest.approx(wanted, rel=0.05)
    state = run.accelerator.get_state_dict(run.model)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert {type(value) for value in state.values()} == {torch.Tensor}
    network().load_state_dict(state)


def test_an_optimizer_may_be_prepared_later():
    for settings in (DELAYED, O2):
        accelerator = in_fp8(FP8RecipeKwargs(**settings))
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model = accelerator.prepare(model)
        run = Run(accelerator, model, accelerator.prepare(optimizer), batches())
        assert run.train(epochs=3) < 2.3


# ---------------------------------------------------------------- what was asked


def test_both_spellings_of_both_names_are_taken():
    for handler in (
        FP8RecipeKwargs(backend="msamp", optimization_level="O1"),
        FP8RecipeKwargs(backend="MSAMP", opt_level="O1"),
        MSAMPRecipeKwargs(optimization_level="o1"),
    ):
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwarg_handlers=[handler])
        levels = [c.value for c in accelerator.plan.choices if c.name == "fp8.opt_level"]
        assert levels == ["O1"]
    with pytest.raises(ConfigError, match="only one of them can hold"):
        Accelerator(cpu=True, kwargs_handlers=[], kwarg_handlers=[])
    with pytest.raises(ConfigError, match="two names of one setting"):
        FP8RecipeKwargs(opt_level="O1", optimization_level="O2")


def test_handlers_say_what_their_libraries_are_told(monkeypatch):
    asked = TERecipeKwargs(margin=2, fp8_format="e4m3", amax_history_len=16).to_config()
    assert asked == Fp8Config(backend="te", margin=2, fp8_format="E4M3", amax_history_len=16)
    assert TERecipeKwargs(use_mxfp8_block_scaling=True).to_config().recipe == "mxfp8"
    assert AORecipeKwargs(pad_inner_dim=False).to_config().pad_inner_dim is False
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "NATIVE")
    assert FP8RecipeKwargs().to_config() == Fp8Config(backend="native", margin=3)
    assert FP8RecipeKwargs(margin=1).to_config().margin == 1
    with pytest.raises(ConfigError, match="must be one of O1, O2: got 'O3'"):
        MSAMPRecipeKwargs(opt_level="O3")


def test_handlers_without_fp8_and_two_of_them_are_refused():
    for wrong in ({"mixed_precision": "bf16"}, {}):
        with pytest.raises(ConfigError, match=r"nothing would compute in 8 bits.*'fp8'"):
            Accelerator(cpu=True, kwargs_handlers=[FP8RecipeKwargs()], **wrong)
    with pytest.raises(ConfigError, match=r"AORecipeKwargs.* and MSAMPRecipeKwargs.*one of them"):
        in_fp8(AORecipeKwargs(), MSAMPRecipeKwargs())
    config = RunConfig(mixed_precision="fp8", fp8="native")
    with pytest.raises(ConfigError, match=r"config.fp8=.*only one of them can hold"):
        Accelerator(cpu=True, config=config, kwargs_handlers=[MSAMPRecipeKwargs()])
    assert Accelerator(cpu=True, config=config).fp8_backend == "native"


def test_torchaos_own_objects_are_passed_on():
    float8 = pytest.importorskip("torchao.float8")
    handler = AORecipeKwargs(
        config=float8.Float8LinearConfig(emulate=True),
        module_filter_func=lambda layer, name: name == "3",
    )
    model = in_fp8(handler).prepare(network())
    assert has_ao_layers(model)
    assert [type(m).__name__ for m in model if "Linear" in type(m).__name__] == [
        *("Linear", "Float8Linear", "Linear", "Linear")
    ]


@pytest.mark.slow
@isolated(timeout_s=100)
def test_torchao_is_not_imported_to_look_for_its_layers():
    """Its first import warns of its own source."""
    assert not has_layers(network())
    assert "torchao" not in sys.modules


def test_accelerates_torchao_trains_to_the_same_numbers():
    """The peer that is imported elsewhere: it converts the same layers."""
    pytest.importorskip("torchao")
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import AORecipeKwargs as TheirRecipe
    from torchao.float8 import Float8LinearConfig

    def losses(accelerator: Any) -> list[float]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for inputs, classes in batches():
            loss = nn.functional.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    # Other tests of this process may have asked it for another precision.
    accelerate.state.AcceleratorState._reset_state(True)
    config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
    ours = losses(in_fp8(AORecipeKwargs(config=config)))
    theirs = losses(in_fp8(TheirRecipe(config=config), made_by=accelerate))
    accelerate.state.AcceleratorState._reset_state(True)
    assert ours == theirs


# ---------------------------------------------------------------- launches


def in_worker(model: nn.Module, folder: str | None, plugin: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if plugin else {}
    accelerator = Accelerator(**settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = Run(accelerator, *accelerator.prepare(model, optimizer, batches()))
    first = run.train(epochs=2)
    found: dict[str, Any] = {
        "backend": accelerator.fp8_backend,
        "type": accelerator.distributed_type.value,
        "loss": first,
    }
    state = accelerator.get_state_dict(run.model)
    found["state"] = {name: value.clone() for name, value in state.items()}
    if folder is not None:
        accelerator.save_state(folder)
        wanted = run.train(epochs=1)
        accelerator.load_state(folder)
        found["resumed"] = run.train(epochs=1) == wanted
        accelerator.load_state(folder)
    return found


def launch(fp8: dict[str, Any], folder: Path | None = None, **settings: Any) -> tuple[Any, Any]:
    model = network()
    plugin = settings.pop("fsdp", False)
    config = RunConfig(mixed_precision="fp8", fp8=fp8, device="cpu", **settings)
    where = str(folder) if folder else None
    return model, notebook_launcher(in_worker, (model, where, plugin), config=config)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@each(*IN_ONE)
def test_weights_come_home_in_the_notebooks_format(settings, num_processes, tmp_path, exact_loss):
    model, found = launch(settings, tmp_path / "saved", num_processes=num_processes)
    assert [result["backend"] for result in found] == [settings["backend"]] * num_processes
    assert all(result["resumed"] for result in found)
    assert {type(m) for m in model} == {nn.Linear, nn.LayerNorm, nn.ReLU}
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, found[0]["state"][name]), name
        assert torch.equal(found[-1]["state"][name], found[0]["state"][name]), name
    with torch.no_grad():
        inputs, classes = batches().dataset.tensors
        loss = nn.functional.cross_entropy(model(inputs), classes).item()
    assert loss < 2.4  # log(16) is 2.77


SHARDED = {name_of(settings): settings for settings in (NATIVE, DELAYED, AO)}


@functools.cache
def replicated_loss(name: str) -> float:
    return launch(SHARDED[name], num_processes=2)[1][0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize(
    "way",
    [{"fsdp": True}, *(pytest.param({"zero_stage": stage}, marks=DEEPSPEED) for stage in (1, 3))],
    ids=name_of,
)
def test_sharded_models_compute_in_8_bits(name, way):
    model, found = launch(SHARDED[name], num_processes=2, **way)
    assert {result["type"] for result in found} == {"FSDP" if "fsdp" in way else "DEEPSPEED"}
    assert {type(m) for m in model} == {nn.Linear, nn.LayerNorm, nn.ReLU}
    if "fsdp" in way:
        assert all(torch.equal(p, found[0]["state"][n]) for n, p in model.named_parameters())
    assert found[0]["loss"] == pytest.approx(replicated_loss(name), rel=0.02)


def gathered_in_fp8(model: nn.Module, gathers: bool) -> tuple[str, float, str]:
    handler = AORecipeKwargs(enable_fsdp_float8_all_gather=gathers)
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[handler],
        fsdp_plugin=FullyShardedDataParallelPlugin(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = Run(accelerator, *accelerator.prepare(model, optimizer, batches()))
    loss = run.train(epochs=2)
    weight: Any = run.model[3].weight
    return type(weight.to_local()).__name__, loss, accelerator.plan.explain()


@pytest.mark.slow
def test_fsdp_gathers_weights_in_8_bits_with_torchao():
    pytest.importorskip("torchao")
    model = network()
    before = model[3].weight.detach().clone()
    short = notebook_launcher(gathered_in_fp8, (model, True), num_processes=2)
    plain = notebook_launcher(gathered_in_fp8, (network(), False), num_processes=2)
    assert {kind for kind, _, _ in short} == {"WeightWithDynamicFloat8CastTensor"}
    assert {kind for kind, _, _ in plain} == {"Tensor"}
    assert "gathered in fp8" in " ".join(short[0][2].split())
    assert short[0][1] == pytest.approx(plain[0][1], rel=0.02)
    assert type(model[3].weight) is nn.Parameter
    assert not torch.equal(model[3].weight, before)


def test_a_request_that_nobody_reads_raises():
    def plain(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()

    with pytest.raises(WorkerFailed, match=r"mixed_precision='fp8' was asked for.*fp32"):
        notebook_launcher(plain, (network(),), num_processes=2, mixed_precision="fp8")


def test_live_workers_train_on_from_cell_to_cell():
    model = network()
    names: dict[str, Any] = {"model": model}
    cell = """
import torch
from torch import nn
from nbaccel import Accelerator
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
trained, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(accelerator.process_index)
for _ in range(5):
    inputs = torch.randn(16, 32)
    accelerator.backward((trained(inputs) - inputs[:, :16]).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
    config = RunConfig(mixed_precision="fp8", fp8=O2, num_processes=2)
    with Pool(config=config, namespace=names) as pool:
        states = [copy.deepcopy(model.state_dict())]
        for _ in range(2):  # the same cell again: prepared anew, with the weights it had
            pool.run(cell)
            states.append(copy.deepcopy(model.state_dict()))
            assert all(type(p) is nn.Parameter for p in model.parameters())
        for first, second in itertools.pairwise(states):
            assert not torch.equal(first["3.weight"], second["3.weight"])
