from __future__ import annotations

import collections
import copy
import inspect
import io
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch import nn

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.precision import PrecisionSettings
from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
from nbaccel.precision.native import AutocastForward, Bf16, Fp16, Fp32, LossScaler, as_float32

CPU = torch.device("cpu")
LOW = {Bf16: torch.bfloat16, Fp16: torch.float16}
both = pytest.mark.parametrize("kind", [Bf16, Fp16])


def made(kind, **settings):
    given = {"autocast": AutocastKwargs(**settings), "scaler": GradScalerKwargs()}
    return kind(PrecisionSettings(device=CPU, **given))


class Watcher(nn.Module):
    """Says what its layer computed in, and returns it raw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.layer(x) * scale
        self.seen.append(y.dtype)
        return y


@both
def test_layers_compute_in_the_format_and_results_are_float32(kind):
    model = Watcher()
    made(kind).wrap_forward(model)
    y = model(torch.ones(4, 3), scale=2.0)
    assert model.seen == [LOW[kind]]
    assert y.dtype == torch.float32
    with torch.autocast("cpu", LOW[kind]):
        expected = model.layer(torch.ones(4, 3)) * 2.0
    assert torch.equal(y, expected.float())
    y.sum().backward()
    assert model.layer.weight.grad.dtype == torch.float32


def test_float32_leaves_a_model_alone():
    model = Watcher()
    made(Fp32).wrap_forward(model)
    assert model(torch.ones(4, 3)).dtype == torch.float32
    assert "forward" not in vars(model)
    with made(Fp32).autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert made(Fp32).scaler is None
    assert made(Bf16).scaler is None
    bundle = Bundle(models=(model,))
    assert made(Fp32).convert(bundle) is bundle


def test_wrapping_again_replaces_and_unwrapping_restores_exactly():
    model = Watcher()
    before = dict(vars(model))
    own = model.forward
    made(Bf16).wrap_forward(model)
    assert model._original_forward == own
    made(Fp16).wrap_forward(model)
    model(torch.ones(1, 3))
    assert model.seen == [torch.float16]
    assert not isinstance(model.forward.forward, AutocastForward)
    made(Bf16).unwrap_forward(model)
    assert vars(model) == before
    made(Bf16).unwrap_forward(model)
    assert vars(model) == before
    made(Bf16).wrap_forward(model)
    made(Fp32).wrap_forward(model)
    assert vars(model) == before
    model = Watcher()
    expected = inspect.signature(model.forward)
    made(Bf16).wrap_forward(model)
    assert inspect.signature(model.forward) == expected


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, through_a_file, lambda model: pickle.loads(cloudpickle.dumps(model))]
)
def test_a_wrapped_model_travels(way):
    model = Watcher()
    made(Bf16).wrap_forward(model)
    copied = way(model)
    with torch.no_grad():
        copied.layer.weight.zero_()
    assert copied(torch.ones(1, 3)).dtype == torch.float32
    assert torch.equal(copied(torch.ones(1, 3))[0], copied.layer.bias.bfloat16().float())
    assert copied.seen == [torch.bfloat16, torch.bfloat16]
    assert model.seen == []
    made(Bf16).unwrap_forward(copied)
    assert "forward" not in vars(copied)


def test_autocast_obeys_its_settings():
    x = torch.ones(2, 3)
    layer = nn.Linear(3, 2)
    precision = made(Bf16)
    with precision.autocast():
        assert layer(x).dtype == torch.bfloat16
        with precision.autocast(AutocastKwargs(enabled=False)):
            assert layer(x).dtype == torch.float32
    with made(Bf16, enabled=False).autocast():
        assert layer(x).dtype == torch.float32
    with made(Bf16, cache_enabled=False).autocast():
        assert not torch.is_autocast_cache_enabled()
    model = Watcher()
    made(Bf16, enabled=False).wrap_forward(model)
    model(x)
    assert model.seen == [torch.float32]


class Outputs(Watcher):
    """Returns containers."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.layer(x), "more": (self.layer(x), [self.layer(x)])}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_a_wrapped_model_compiles_into_one_graph():
    model = Outputs()
    made(Bf16).wrap_forward(model)
    x = torch.ones(1, 3)
    found = torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    assert found["more"][1][0].dtype == torch.float32
    assert torch.equal(found["y"], model(x)["y"])


def test_a_compiled_model_is_wrapped_and_restored():
    model = Watcher()
    compiled = torch.compile(model, backend="eager")
    before = set(vars(compiled))
    made(Bf16).wrap_forward(compiled)
    assert compiled(torch.ones(1, 3)).dtype == torch.float32
    torch._dynamo.reset()
    assert "forward" not in vars(model)
    assert model.seen == [torch.bfloat16]
    made(Bf16).unwrap_forward(compiled)
    assert set(vars(compiled)) == before


# ------------------------------------------------------------------------- as_float32


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    tensor: Any
    word: str


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


def test_outputs_keep_their_type_and_only_short_floats_change():
    other = SimpleNamespace(tensor=half(1))  # no container that anyone knows
    tree = {
        "list": [half(2), torch.ones(1, dtype=torch.float64), 3, "word", None],
        "pair": Pair(half(1), torch.ones(1, dtype=torch.int64)),
        "tuple": (half(1), (torch.ones(1, dtype=torch.bfloat16),)),
        "record": Record(half(1), "kept"),
        "default": collections.defaultdict(list, key=half(1)),
        "ordered": collections.OrderedDict(b=half(1), a=2),
        "other": other,
        "bool": torch.ones(1, dtype=torch.bool),
    }
    found = as_float32(tree)
    assert [type(value) for value in found.values()] == [type(value) for value in tree.values()]
    assert [t.dtype for t in found["list"][:2]] == [torch.float32, torch.float64]
    assert found["list"][2:] == [3, "word", None]
    assert found["pair"].first.dtype == torch.float32
    assert found["pair"].second is tree["pair"].second
    assert found["tuple"][1][0].dtype == torch.float32
    assert found["record"].tensor.dtype == torch.float32
    assert found["record"].word == "kept"
    assert found["default"]["key"].dtype == torch.float32
    assert found["default"]["missing"] == []
    assert list(found["ordered"]) == ["b", "a"]
    assert found["other"] is other
    assert found["other"].tensor.dtype == torch.float16
    assert found["bool"] is tree["bool"]
    assert tree["record"].tensor.dtype == torch.float16, "the tree given must stay as it was"
    assert tree["default"]["key"].dtype == torch.float16
    from transformers.modeling_outputs import SequenceClassifierOutput

    output = SequenceClassifierOutput(logits=half(2, 2), hidden_states=(half(1), half(1)))
    found = as_float32(output)
    assert type(found) is SequenceClassifierOutput
    assert found.logits.dtype == found["logits"].dtype == torch.float32
    assert found.hidden_states[1].dtype == torch.float32
    assert found.loss is None
    assert list(found.keys()) == ["logits", "hidden_states"]


# ------------------------------------------------------------------------- float16 on the CPU


def two(lr: float = 1.0):
    """Two parameters of one loss, with an optimizer each."""
    values = [nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))]
    return values, [torch.optim.SGD([value], lr=lr) for value in values]


def step(scaler, *optimizers):
    """As a loop for one optimizer does: an update after each."""
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


def test_optimizers_of_one_loss_share_a_factor_that_is_adjusted_once():
    """Torch's own scaler, updated after each, divides the second by the factor that grew."""
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(values[0].sum() + values[1].sum()).backward()
    step(scaler, *optimizers)
    assert [value.item() for value in values] == [1.0, 2.0]
    assert scaler.get_scale() == 16.0
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum() * float("inf") + values[1].sum()).backward()
    step(scaler, *optimizers)
    assert [value.item() for value in values] == [2.0, 2.0]
    assert scaler.get_scale() == 4.0
    values, _ = two()
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(values[0].sum())
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("enabled", [True, False])
def test_its_state_is_torchs_and_what_waits_is_in_it(enabled):
    values, optimizers = two()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=1, enabled=enabled)
    scaler.scale(values[0].sum()).backward()
    step(scaler, optimizers[0])
    plain = torch.amp.GradScaler("cpu", enabled=enabled)
    plain.load_state_dict(scaler.state_dict())
    assert plain.get_scale() == (16.0 if enabled else 1.0)
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert other.get_scale() == plain.get_scale()
    other = LossScaler("cpu", enabled=enabled)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == plain.get_scale()
