"""Checkpoints loaded for FSDP and ZeRO-3: equal to reading them, with a share of the memory."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from safetensors.torch import save_file
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, notebook_launcher
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from nbaccel.errors import ConfigError
from nbaccel.strategies import optimizer_shards
from tests.bigmodel import families
from tests.bigmodel.launched import Peak
from tests.needs import DEEPSPEED
from tests.strategies.workers import WORDS, Tower

WIDTH = 7


class Odd(Tower):
    """With frozen parts and a one-element parameter, in any size."""

    def __init__(self, width: int = WIDTH, blocks: int = 3, freezes: bool = True) -> None:
        super().__init__(blocks, width)
        self.gain = nn.Parameter(torch.ones(1))
        if freezes:
            self.blocks[0].requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) * self.gain


def build(seed: int = 0, **sizes: Any) -> Odd:
    torch.manual_seed(seed)
    model = Odd(**sizes)
    model.temperature.fill_(1.5 + seed)
    return model


def on_meta(**sizes: Any) -> Odd:
    with torch.device("meta"):
        return Odd(**sizes)


def accelerator_of(kind: str, precision: str = "no") -> Accelerator:
    if kind == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        return Accelerator(fsdp_plugin=plugin, mixed_precision=precision, cpu=True)
    if kind == "zero":
        settings = {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "train_micro_batch_size_per_gpu": 4,
        }
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
        return Accelerator(deepspeed_plugin=plugin, mixed_precision=precision, cpu=True)
    return Accelerator(mixed_precision=precision, cpu=True)


def state_of(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in accelerator.get_state_dict(model).items()}


def load(model: nn.Module, path: str, how: str) -> None:
    """Give the model its weights before it is prepared, in one of several ways."""
    if how == "mapped":
        load_checkpoint_in_model(model, path, strict=True)
    elif how == "read":
        from safetensors.torch import load_file

        model.load_state_dict(load_file(path), strict=False)


@contextlib.contextmanager
def counted_refills() -> Iterator[list[int]]:
    """Count what process 0 sends of weights that become shards."""
    sent: list[int] = []
    send = optimizer_shards.refill_parameter

    def counting(parameter: torch.Tensor, whole: torch.Tensor) -> None:
        sent.append(whole.numel())
        send(parameter, whole)

    optimizer_shards.refill_parameter = counting
    try:
        yield sent
    finally:
        optimizer_shards.refill_parameter = send


def train(
    model: nn.Module | None, path: str, kind: str, how: str, precision: str = "no"
) -> dict[str, Any]:
    """Load, prepare and train; what came of it."""
    accelerator = accelerator_of(kind, precision)
    if model is None:
        model = on_meta() if how != "read" else build(seed=5 + accelerator.process_index)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    load(model, path, how)
    with counted_refills() as sent:
        prepared, optimizer = accelerator.prepare(model, optimizer)
    start = state_of(accelerator, prepared)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        words = torch.randint(0, WORDS, (4, 5), generator=generator)
        logits = prepared(words).float()
        loss = F.cross_entropy(logits.flatten(0, 1), words.roll(1).flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "losses": losses,
        "sent": sent,
        "start": start,
        "end": state_of(accelerator, prepared),
        "first": tuple(next(prepared.parameters()).shape),
    }


def load_after(path: str, kind: str, broadcast: bool, wrong_path: str) -> dict[str, Any]:
    """Load into a model that is prepared already; a mistake first."""
    accelerator = accelerator_of(kind)
    model = build(seed=3)
    trained = [p for p in model.parameters() if p.requires_grad]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.05))
    before = state_of(accelerator, prepared)
    refused = []
    bad = [(wrong_path, {}), (path + ".none", {}), (path, {"device_map": {"": "cpu"}})]
    for wrong, options in bad[: 2 if broadcast else 3]:
        try:
            load_checkpoint_in_model(prepared, wrong, broadcast_from_rank0=broadcast, **options)
            refused.append("")
        except ConfigError as error:
            refused.append(str(error))
    unchanged = state_of(accelerator, prepared)
    # Of process 0 alone, where it sends.
    own = path if not broadcast or accelerator.is_main_process else "nowhere"
    load_checkpoint_in_model(prepared, own, strict=True, broadcast_from_rank0=broadcast)
    loaded = state_of(accelerator, prepared)
    words = torch.arange(8).view(2, 4)
    loss = F.cross_entropy(prepared(words).flatten(0, 1), words.flatten())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return {
        "refused": refused,
        "before": before,
        "unchanged": unchanged,
        "loaded": loaded,
        "stepped": state_of(accelerator, prepared),
        "loss": accelerator.reduce(loss.detach(), "mean").item(),
    }


def receive_plainly(path: str) -> tuple[dict[str, torch.Tensor], str]:
    """A model that is not sharded, filled by process 0; then one on meta."""
    dist.init_process_group("gloo")
    model = build(seed=dist.get_rank())
    own = path if dist.get_rank() == 0 else "nowhere"
    load_checkpoint_in_model(model, own, broadcast_from_rank0=True)
    second = build() if dist.get_rank() == 0 else on_meta()
    try:
        load_checkpoint_in_model(second, own, broadcast_from_rank0=True)
    except ConfigError as error:
        return model.state_dict(), str(error)
    return model.state_dict(), ""


# ------------------------------------------------------------------------------ memory


def measure(
    path: str, kind: str, sizes: dict[str, int], precision: str, how: str, trains: bool
) -> dict[str, int]:
    """Most anonymous memory while a large model is loaded and prepared."""
    accelerator = accelerator_of(kind, precision)
    # What a first engine costs in any case: threads, code, buffers of gloo.
    small = build()
    accelerator.prepare(small, torch.optim.SGD(small.parameters(), lr=0.1))
    accelerator.free_memory()
    del small
    gc.collect()
    dist.barrier()
    with Peak("Anon") as peak:
        model = on_meta(**sizes, freezes=False) if how == "mapped" else Odd(**sizes, freezes=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        load(model, path, how)
        loaded = peak.bytes
        prepared = accelerator.prepare(model, *([optimizer] if trains else []))
        dist.barrier()
        assert prepared
    return {"loaded": loaded, "peak": peak.bytes}


def train_empty_transformers_model(folder: str) -> dict[str, Any]:
    """As the guide has it: built empty, although transformers is to build models in shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from nbaccel import init_empty_weights

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    built_empty = all(parameter.is_meta for parameter in model.parameters())
    # Outside of the block transformers still cuts what it builds.
    sharded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    is_cut = all(hasattr(parameter, "ds_id") for parameter in sharded.parameters())
    del sharded
    load_checkpoint_in_model(model, folder)
    model = accelerator.prepare(model.train())
    words = torch.arange(8)[None]
    loss = model(words, labels=words).loss
    return {"built empty": built_empty, "cut outside": is_cut, "loss": loss.item()}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo and shared memory of Linux"),
    pytest.mark.filterwarnings("ignore"),
]

KINDS = ["fsdp", pytest.param("zero", marks=DEEPSPEED)]
SIZES = {"width": 700, "blocks": 8}  # 60 MiB in float32


def launch(function: Any, *args: Any) -> Any:
    return notebook_launcher(function, args, num_processes=2, start_method="template", timeout=240)


def save(model: torch.nn.Module, path: Path) -> str:
    state = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    save_file(state, path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(build(seed=1), tmp_path_factory.mktemp("ckpt") / "model.safetensors")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    return save(build(seed=1, **SIZES), path)


def assert_close(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max()
        assert float(difference) <= tolerance, name


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_weights_that_every_process_read(checkpoint, kind, precision):
    mapped = launch(train, None, checkpoint, kind, "mapped", precision)
    read = launch(train, None, checkpoint, kind, "read", precision)
    assert mapped[0]["losses"] == mapped[1]["losses"] == read[0]["losses"]
    assert_close(mapped[0]["start"], read[0]["start"])
    assert_close(mapped[0]["end"], read[0]["end"])
    assert mapped[0]["losses"][0] != mapped[0]["losses"][-1]
    saved = build(seed=1).state_dict()
    tolerance = 0.0 if precision == "no" or kind == "fsdp" else 0.01
    assert_close(mapped[0]["start"], saved, tolerance)
    assert mapped[0]["first"] == ((0,) if kind == "zero" else (1,))
    if kind == "fsdp":
        assert not mapped[0]["sent"]
        assert not mapped[1]["sent"]
        assert read[0]["sent"], "weights in plain memory may differ"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_model_of_the_notebook_come_home(checkpoint, kind):
    content = Path(checkpoint).read_bytes()
    model = on_meta()
    load_checkpoint_in_model(model, checkpoint, strict=True)
    for changes in (False, True):
        if changes:
            with torch.no_grad():
                model.embed.weight[2] = 0.25
        expected = {name: t.clone() for name, t in model.state_dict().items()}
        results = launch(train, model, checkpoint, kind, "as it is")
        assert_close(results[0]["start"], expected)
        assert_close(dict(model.state_dict()), results[0]["end"], 1e-7)
        assert not torch.equal(results[0]["start"]["gain"], model.gain)
        assert model.head.weight is model.embed.weight
    assert Path(checkpoint).read_bytes() == content


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_model_is_filled_and_a_mistake_stops_all(checkpoint, tmp_path, kind, broadcast):
    wrong = save(build(seed=1, width=9), tmp_path / "wrong.safetensors")
    results = launch(load_after, checkpoint, kind, broadcast, wrong)
    saved = build(seed=1).state_dict()
    first = results[0]
    assert_close(first["unchanged"], first["before"])
    assert_close(first["loaded"], saved)
    assert results[1]["refused"] == first["refused"]
    assert "embed.weight has shape [11, 7] in the model and [11, 9]" in first["refused"][0]
    assert "is no file" in first["refused"][1]
    assert first["refused"][2:] == [] or "shards" in first["refused"][2]
    model = build(seed=1)
    words = torch.arange(8).view(2, 4)
    loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    assert first["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert not torch.equal(first["stepped"]["gain"], saved["gain"])
    # One step of AdamW changes no weight by more than its rate.
    for name, tensor in first["stepped"].items():
        assert float((tensor.double() - saved[name].double()).abs().max()) < 0.06, name


def test_models_that_are_not_sharded_are_filled_from_the_first_process(checkpoint):
    results = launch(receive_plainly, checkpoint)
    for state, refused in results:
        assert_close(state, build(seed=1).state_dict())
        assert "to process 1" in refused
        assert "on meta" in refused


@pytest.mark.parametrize(
    ("kind", "precision", "trains", "share"),
    [
        ("fsdp", "no", False, 0.75),
        ("fsdp", "bf16", True, 0.75),
        # An engine that trains needs memory for its optimizer, which is no matter of loading.
        pytest.param("zero", "no", False, 0.9, marks=DEEPSPEED),
        pytest.param("zero", "bf16", False, 0.65, marks=DEEPSPEED),
    ],
)
def test_no_process_ever_holds_the_whole_model(large, kind, precision, trains, share):
    whole = sum(p.nbytes for p in build(**SIZES).parameters())
    for figures in launch(measure, large, kind, SIZES, precision, "mapped", trains):
        assert figures["loaded"] < 0.1 * whole, (figures, whole)
        assert figures["peak"] < share * whole, (figures, whole)


@DEEPSPEED
def test_an_empty_model_of_transformers_is_loaded_although_zero_3_cuts_what_it_builds(tmp_path):
    torch.manual_seed(5)
    model = families.build("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.save_pretrained(tmp_path)
    words = torch.arange(8)[None]
    expected = model(words, labels=words).loss.item()
    for figures in launch(train_empty_transformers_model, str(tmp_path)):
        assert figures["built empty"]
        assert figures["cut outside"]
        assert figures["loss"] == pytest.approx(expected, abs=1e-5)
