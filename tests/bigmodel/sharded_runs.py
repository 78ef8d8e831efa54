"""What launches of sharded models run in their workers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from nbaccel.errors import ConfigError
from nbaccel.strategies import optimizer_shards
from tests.bigmodel.launched import Peak
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
