"""The walk: every rung is reached by some budget; its configuration is one that DeepSpeed takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbaccel import advise
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.errors import ConfigError
from nbaccel.memory import ways
from tests.deepspeed import needs
from tests.deepspeed.advisor.models import GIB, LIBAIO, WIDTH, Blocks, machine

pytestmark = needs.DEEPSPEED

HOPPER, TURING, NO_GPU = machine(1), machine(1, (7, 5)), machine(0)


def chosen(asked="auto", config=(), model=None, inventory=HOPPER):
    return advise(
        model or nn.Linear(8, 8), config=dict(config), precision=asked, inventory=inventory
    )


def test_the_format_that_was_asked_for_is_taken_or_the_best_of_the_device():
    assert chosen().precision == "bf16"
    assert chosen(inventory=TURING).precision == "fp16"
    assert chosen("float32").precision == "fp32"
    assert chosen(config={"fp16": {"enabled": True}}).precision == "fp16"
    assert chosen(config={"bf16": {"enabled": False}}, inventory=TURING).precision == "fp16"
    with pytest.raises(ConfigError, match=r"mixed_precision='no' contradicts .*'fp16'"):
        chosen("fp32", config={"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"precision='int8' is no precision.*bf16"):
        chosen("int8")


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp32")])
def test_a_cpu_trains_in_bf16_where_it_has_instructions(monkeypatch, has_bf16, name):
    monkeypatch.setattr(ways, "computes_in_bf16", lambda: has_bf16)
    assert chosen(inventory=NO_GPU).precision == name
    assert chosen(model=nn.Linear(8, 8).half(), inventory=NO_GPU).precision == "bf16"


PUBLISHED = [
    "ZeRO-0",
    "ZeRO-0, gradient checkpointing",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-2, optimizer on the CPU",
    "ZeRO-3",
    "ZeRO-3, optimizer on the CPU",
    "ZeRO-3, parameters on the CPU",
    "ZeRO-3, all on the CPU",
    "ZeRO-3, optimizer on disk, parameters on the CPU",
    "ZeRO-3, all on disk",
]
GPUS = machine(2)
# So that ZeRO-3 keeps little whole and NVMe little in between, which would hide their savings.
TIGHT = {
    "stage3_max_live_parameters": 10**6,
    "sub_group_size": 10**6,
    "stage3_param_persistence_threshold": 0,
}
NAMES = [pytest.param(n, marks=[LIBAIO] if "disk" in n else []) for n in PUBLISHED]


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return Blocks(24, 2048)


@pytest.fixture(scope="module")
def batch():
    return torch.empty(4096, 2048, device="meta")


@pytest.fixture(scope="module")
def ask(model, batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvme")

    def ask(**more):
        asked = {"config": {"zero_optimization": TIGHT}, "inventory": GPUS, "nvme_path": folder}
        return advise(more.pop("model", model), more.pop("batch", batch), **{**asked, **more})

    return ask


@pytest.fixture(scope="module")
def all_rungs(ask):
    """Everything fits, so each rung of the first batch is there with what it needs."""
    return {rung.name: rung for rung in ask().rungs}


def needed(rung):
    return {
        "device_memory": rung.estimate.device.peak,
        "host_memory": rung.estimate.host.peak,
        "nvme_memory": rung.estimate.nvme.peak,
    }


@LIBAIO
def test_with_much_memory_nothing_is_changed(ask):
    found = ask()
    assert found.chosen.name == "ZeRO-0"
    assert not found.gradient_checkpointing
    assert found.config["zero_optimization"]["stage"] == 0
    assert (found.batch_size, found.accumulation_steps, found.num_processes) == (4096, 1, 2)
    assert [rung.name for rung in found.rungs] == PUBLISHED
    assert all(rung.verdict == "fits" for rung in found.rungs)
    assert "slower than what was chosen" in found.rungs[-1].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_rung_is_reached_by_a_budget_of_what_it_needs(ask, all_rungs, name):
    if needed(all_rungs[name]) == needed(all_rungs["ZeRO-1"]):
        name = "ZeRO-1"  # as ZeRO-2 here: nothing is gained by it
    found = ask(**needed(all_rungs[name]))
    assert found.chosen.name == name
    before = PUBLISHED[: PUBLISHED.index(name)]
    assert [r.verdict for r in found.rungs[: len(before)]] == ["does not fit"] * len(before)
    assert found.gradient_checkpointing == (name != "ZeRO-0")


@pytest.mark.parametrize("name", NAMES)
def test_each_configuration_is_one_that_deepspeed_takes(all_rungs, name):
    rung = all_rungs[name]
    check_config(rung.config, world_size=2, inventory=GPUS)
    zero = ZeroConfig.from_dict(rung.config)
    assert name.startswith(f"ZeRO-{zero.zero_stage}")
    assert zero.to_dict() == rung.config


def test_a_byte_too_little_goes_one_rung_further_or_to_smaller_batches(ask, all_rungs):
    budget = needed(all_rungs["ZeRO-2"])
    found = ask(**budget | {"device_memory": budget["device_memory"] - 1, "host_memory": 9 * GIB})
    assert found.chosen.name == "ZeRO-2, optimizer on the CPU"
    rung = found.rungs[PUBLISHED.index("ZeRO-2")]
    assert rung.estimate.lacking == {"device": 1}
    assert rung.reason.startswith("1 B too little on each of cuda:0 to cuda:1")
    budget = needed(all_rungs["ZeRO-3"])
    found = ask(nvme_path=None, **budget | {"device_memory": budget["device_memory"] - 2**20})
    assert (found.batch_size, found.accumulation_steps) == (2048, 2)
    assert found.chosen.name == "ZeRO-1", "the fastest with which that batch fits"
    assert found.config["train_micro_batch_size_per_gpu"] == 2048
    assert found.config["gradient_accumulation_steps"] == 2
    assert {rung.batch_size for rung in found.rungs} == {2048}


def test_where_nothing_fits_it_says_what_comes_nearest_and_what_is_missing(ask):
    found = ask(device_memory="10 MiB", host_memory="1 GiB", nvme_path=None)
    assert (found.config, found.zero, found.chosen, found.batch_size) == (None,) * 4
    lacking = found.nearest.estimate.lacking
    assert lacking == {"device": found.nearest.estimate.device.peak - 10 * 2**20}
    least = min(sum(r.estimate.lacking.values()) for r in found.rungs if r.estimate)
    assert least == sum(lacking.values())
    assert found.headline().startswith(f"Nothing fits: {found.nearest.name} with a batch of ")
    assert found.headline().endswith("per device")


def test_what_is_lacking_is_said(ask):
    found = ask(nvme_path=None, model=nn.Linear(2048, 8))
    by_name = {rung.name: rung for rung in found.rungs}
    assert by_name[PUBLISHED[1]].verdict == "not available"
    assert "Linear has no gradient_checkpointing_enable()" in by_name[PUBLISHED[1]].reason
    assert "Needs a folder on a fast disk" in by_name[PUBLISHED[-1]].reason
    assert not by_name["ZeRO-2"].gradient_checkpointing
    found = ask(batch=None)
    assert found.chosen.estimate.device.activations == 0
    assert any("Give sample_batch" in warning for warning in found.warnings)
    nothing = ask(batch=None, device_memory=1, nvme_path=None)
    assert len(nothing.rungs) == len(PUBLISHED), "a smaller batch would change nothing"
    found = advise(Blocks(), torch.empty(8, WIDTH), num_processes=2, inventory=machine(0))
    assert found.chosen.estimate.device_free is None
    assert found.chosen.estimate.host_needed == 2 * found.chosen.estimate.device.peak


def test_the_configuration_given_is_kept_and_auto_is_decided_by_the_model(ask):
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "gradient_clipping": 0.3,
        "train_batch_size": 4096 * 2 * 3,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "reduce_bucket_size": 7},
    }
    found = ask(config=config)
    assert found.accumulation_steps == 3
    assert found.config["optimizer"]["params"]["lr"] == 0.5
    assert found.config["gradient_clipping"] == 0.3
    assert found.config["zero_optimization"]["round_robin_gradients"] is True
    assert config["zero_optimization"]["stage"] == 2, "the user's own is as it was"
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"reduce_bucket_size": "auto"}}
    rung = ask(config={**config, "train_batch_size": "auto"}).rungs[2]
    assert rung.config["bf16"]["enabled"] is True
    assert rung.config["zero_optimization"]["reduce_bucket_size"] == 2048**2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "gpt2"}, r"model='gpt2' is no module.*may be on meta"),
        ({"device_memory": "16 bananas"}, r"'16 bananas'"),
        ({"num_nodes": 0}, r"num_nodes=0 means no machine"),
        ({"try_it": True}, r"try_it=True cannot run Blocks, which is on meta"),
        ({"try_it": True, "batch": None, "num_nodes": 2}, r"(?s)needs a.*meta.*num_nodes=2"),
        ({"config": {"train_batch_size": 100}}, r"train_batch_size=100 is no multiple of .*=4096"),
        ({"config": {"train_micro_batch_size_per_gpu": 4}}, r"=4, and sample_batch has 4096"),
        ({"config": {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}}, r"give learning_"),
        ({"config": {"gradient_cliping": 1.0}}, r"gradient_cliping is no key.*gradient_clipping"),
    ],
)  # fmt: skip
def test_a_mistake_says_what_to_give(ask, more, words):
    with pytest.raises(ConfigError, match=words):
        ask(**more)


# ---------------------------------------------------------------- how it is told
def test_the_table_has_a_line_and_a_reason_for_each_rung_also_in_a_cell(ask):
    found = ask()
    text = found.explain()
    assert text.startswith("ZeRO-0, bf16, batch 4096, 2 processes: fits by estimate\n")
    assert str(found) == text
    for rung in found.rungs:
        assert rung.name in text
        assert rung.reason.split()[-1] in text
    assert sum(line.startswith("→") for line in text.splitlines()) == 1
    found = ask(device_memory="1 MiB", nvme_path=None)
    shown = found._repr_mimebundle_()
    assert shown["text/plain"] == found.explain()
    assert shown["text/html"].count("<tr>") == 1 + len(found.rungs)
    assert "Nothing fits" in shown["text/html"]
    assert "→" not in shown["text/html"]


def test_what_zero_3_has_at_once_is_lowered_before_nothing_fits(model, batch):
    ask = {"inventory": GPUS, "num_processes": 2, "host_memory": 9 * GIB}
    plain = advise(model, batch, **ask)
    rung = next(rung for rung in plain.rungs if rung.name == "ZeRO-3")
    assert "sub_group_size" not in rung.config["zero_optimization"], "it fits as DeepSpeed has it"

    found = advise(model, batch, device_memory=rung.estimate.device.peak - 2**20, **ask)
    lowered = next(rung for rung in found.rungs if rung.name == "ZeRO-3")
    zero = lowered.config["zero_optimization"]
    assert zero["sub_group_size"] < 10**9
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] < 10**9
    assert lowered.estimate.device.peak < rung.estimate.device.peak
    assert found.chosen is not None
    check_config(lowered.config, world_size=2, inventory=GPUS)

    own = {"zero_optimization": {"sub_group_size": 10**9}}
    kept = advise(model, batch, config=own, device_memory=2**20, **ask)
    held = [rung.config["zero_optimization"] for rung in kept.rungs if rung.name == "ZeRO-3"]
    assert all(zero["sub_group_size"] == 10**9 for zero in held), "what was given is not changed"


@pytest.mark.slow
def test_what_is_to_be_turned_on_is_told(model, batch, ask, all_rungs):
    told = "model.gradient_checkpointing_enable()"
    assert told not in str(ask())
    found = ask(**needed(all_rungs["ZeRO-1"]))
    assert "ZeRO-1 counts with gradient checkpointing" in str(found)
    assert told in str(found)
    assert told in str(ask(device_memory=1, host_memory=1, nvme_memory=1)), "where nothing fits too"
