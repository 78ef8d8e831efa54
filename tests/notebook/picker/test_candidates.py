"""The ways to train that a picker shows, their memory, and what Suggest proposes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.memory.ways import rank_of
from nbaccel.notebook.picker.model import PickerModel
from nbaccel.plan import Inventory
from tests import needs
from tests.notebook.machines import GIB, WITHOUT_GPU, with_gpus

TOKENS = {"input_ids": torch.zeros(4, 256, dtype=torch.long)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(values)))


class Language(nn.Module):
    """A model of tokens whose blocks FSDP wraps, as transformers' models name them."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int = 4096, layers: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32000)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(input_ids)
        for block in self.blocks:
            values = block(values)
        return self.head(values)


class Recomputing(Language):
    """One whose activations can be computed again."""

    supports_gradient_checkpointing = True

    def gradient_checkpointing_enable(self, **options: object) -> None:
        """As transformers' models: here only asked for."""


def language(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return Language(**sizes)


def of_language(
    inventory: Inventory | None = None, config: RunConfig | None = None, **sizes: int
) -> PickerModel:
    """3.5 billion parameters on two GPUs of 40 GiB, unless it is said otherwise."""
    inventory = inventory or with_gpus(2, total=40, free=39)
    model = language(**sizes)
    return PickerModel(config, model=model, sample_batch=TOKENS, inventory=inventory)


def found(picker: PickerModel) -> dict[str, object]:
    return {candidate.name: candidate for candidate in picker.candidates()}


@pytest.fixture(scope="module")
def picker() -> PickerModel:
    return of_language()


def test_each_way_has_its_memory_and_one_is_the_best_and_says_why(picker):
    ways = found(picker)
    assert list(ways)[:3] == ["one copy each (DDP)", "FSDP", "FSDP, all on the CPU"]
    copies, sharded, on_host = list(ways.values())[:3]
    assert copies.fits is False
    assert copies.spare < 0
    assert copies.verdict.endswith("too little on each of cuda:0 to cuda:1")
    assert sharded.spare > copies.spare
    kinds = {segment.kind: segment.bytes for segment in on_host.need.bars[0].segments}
    assert "optimizer" not in kinds, "it is in host memory"
    assert on_host.need.bars[-1].needed > 12 * 3.5e9

    best = [way for way in picker.candidates() if way.is_best]
    assert len(best) == 1
    assert best[0].can_be_taken
    assert "to spare" in best[0].reason
    fitting = [way for way in picker.candidates() if way.can_be_taken]
    assert rank_of(best[0]) == min(map(rank_of, fitting))
    slower = [way for way in fitting if way.placement.leaves_device]
    assert slower
    assert all("the CPU" in way.reason for way in slower)

    first, *others = picker.proposals()
    assert first.title.startswith("2 processes, bf16, ")
    assert first.title.endswith("batch 4 each")
    assert any("one per GPU" in why for why in first.why)
    assert any(why.startswith("bf16: NVIDIA H100") for why in first.why)
    assert first.candidate.can_be_taken
    assert first.not_chosen
    assert len(others) <= 2


def test_taking_one_is_one_change(picker):
    own = of_language()
    before = own.config
    own.take("FSDP")
    assert own.config.strategy == "fsdp"
    assert own.plan.strategy == "fsdp"
    assert [way.name for way in own.candidates() if way.is_taken] == ["FSDP"]
    assert own.need.bars == found(own)["FSDP"].need.bars, "the bar is that of what is chosen"
    own.undo()
    assert own.config == before
    with pytest.raises(ConfigError, match="Did you mean 'FSDP'"):
        own.take("FSPD")


@needs.DEEPSPEED_ROW
def test_zero_s_ways_keep_what_was_chosen_and_size_their_buckets():
    config = RunConfig(deepspeed={"gradient_clipping": 1.0}, zero_stage=1)
    own = of_language(with_gpus(2), config, width=512, layers=4)
    assert [way.name for way in own.candidates() if way.is_taken] == ["ZeRO-1"]
    own.take("ZeRO-2, optimizer on the CPU")
    section = own.config.deepspeed["zero_optimization"]
    assert own.config.zero_stage == 2
    assert own.config.deepspeed["gradient_clipping"] == 1.0
    assert section["offload_optimizer"] == {"device": "cpu"}
    assert section["reduce_bucket_size"] < 5e8, "DeepSpeed's default is larger than the model"
    own.take("ZeRO-3")
    assert "offload_optimizer" not in own.config.deepspeed["zero_optimization"]
    disk = found(own)["ZeRO-3, all on disk"]
    assert "folder on a fast disk" in disk.refusal
    with pytest.raises(ConfigError, match="folder on a fast disk"):
        own.take("ZeRO-3, all on disk")


@needs.DEEPSPEED_ROW
def test_what_does_not_fit_is_compared_as_asked_for_and_a_tight_fit_with_one_that_leaves_more():
    with torch.device("meta"):
        model = Recomputing()
    ways = found(
        PickerModel(model=model, sample_batch=TOKENS, inventory=with_gpus(2, total=9, free=8))
    )
    lacking = [way for way in ways.values() if way.fits is False]
    assert lacking
    assert not any(way.config.activation_checkpointing for way in lacking)

    with torch.device("meta"):
        model = Recomputing()
    own = PickerModel(model=model, sample_batch=TOKENS, inventory=with_gpus(2, total=40, free=40))
    first, second = own.proposals()[:2]
    assert second.candidate.spare > first.candidate.spare
    assert rank_of(second.candidate) >= rank_of(first.candidate)
    assert any("more free" in why for why in second.why)


@pytest.mark.parametrize(
    ("machine", "best"),
    [
        (with_gpus(2, capability=(8, 0)), "bf16"),
        (with_gpus(1, capability=(7, 5)), "fp16"),  # it only imitates bfloat16
    ],
)
def test_the_fastest_precision_that_needs_no_care_is_proposed_and_a_choice_is_kept(machine, best):
    own = of_language(machine, width=1024, layers=4)
    assert own.proposals()[0].config.mixed_precision == best
    config = RunConfig(mixed_precision="bf16", num_processes=1)
    kept = of_language(machine, config, width=256, layers=2)
    assert kept.proposals()[0].config.num_processes == 1


def test_on_cores_it_proposes_a_process_for_each(picker):
    own = of_language(WITHOUT_GPU, width=64, layers=1)
    proposal = own.proposals()[0]
    assert proposal.config.num_processes == WITHOUT_GPU.cpu_cores
    assert "4 processes, one per core" in proposal.why
    tight = replace(WITHOUT_GPU, host_available_bytes=2 * GIB)
    own = of_language(tight, width=512, layers=1)
    fewer = own.proposals()[0]
    assert fewer.config.num_processes < WITHOUT_GPU.cpu_cores
    assert any("no room for one per core" in why for why in fewer.why)


def test_a_batch_that_does_not_fit_is_halved_and_accumulated():
    batch = {"input_ids": torch.zeros(64, 2048, dtype=torch.long)}
    own = PickerModel(
        model=language(width=2048, layers=8),
        sample_batch=batch,
        inventory=with_gpus(1, total=40, free=39),
    )
    proposal = own.proposals()[0]
    assert proposal.accumulation > 1
    assert proposal.batch_size * proposal.accumulation == 64
    assert proposal.config.gradient_accumulation_steps == proposal.accumulation
    assert f"batch_size={proposal.batch_size}" in proposal.advice[0]
    own.take_proposal(proposal)
    assert proposal.advice[0] in own.remarks
