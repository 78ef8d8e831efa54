"""``"auto"`` becomes what transformers makes of it, with a reason; the file and the run agree."""

from __future__ import annotations

import copy
import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from nbaccel.config import RunConfig
from nbaccel.deepspeed.auto_values import AUTO_KEYS, TrainingFacts, resolve_auto
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig, auto_keys
from nbaccel.errors import ConfigError
from nbaccel.plan import Inventory
from nbaccel.utils import DummyOptim, DummyScheduler

CPU = Inventory(cpu_cores=2, host_total_bytes=8 << 30, host_available_bytes=8 << 30)


@pytest.fixture(scope="module", autouse=True)
def peers():
    """Imported before any test: they take seconds, and warn of the age of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("deepspeed")
        yield import_module("transformers.integrations.deepspeed")


FACTS = TrainingFacts(
    world_size=1,
    micro_batch_size=4,
    accumulation_steps=2,
    max_grad_norm=0.7,
    mixed_precision="bf16",
    learning_rate=3e-4,
    weight_decay=0.05,
    betas=(0.8, 0.95),
    eps=1e-7,
    warmup_steps=10,
    total_steps=100,
)
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BUCKETS = (
    *("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
)
OPTIMIZER = ("lr", "betas", "eps", "weight_decay")
SCHEDULE = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
EVERYTHING = {
    **dict.fromkeys((*SIZES, "gradient_clipping"), AUTO),
    "fp16": {"enabled": AUTO, "initial_scale_power": 12},
    "bf16": {"enabled": AUTO},
    ZERO: {"stage": 3, **dict.fromkeys(BUCKETS, AUTO)},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(OPTIMIZER, AUTO)},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(SCHEDULE, AUTO)},
}


def model(**config):
    return SimpleNamespace(config=SimpleNamespace(**config))


def by_transformers(peers, settings, facts: TrainingFacts, its_model):
    """What the Trainer's own class makes of a configuration."""
    theirs = peers.HfTrainerDeepSpeedConfig(copy.deepcopy(settings))
    args = SimpleNamespace(
        world_size=facts.world_size,
        per_device_train_batch_size=facts.micro_batch_size,
        gradient_accumulation_steps=facts.accumulation_steps,
        max_grad_norm=facts.max_grad_norm,
        learning_rate=facts.learning_rate,
        adam_beta1=facts.betas[0],
        adam_beta2=facts.betas[1],
        adam_epsilon=facts.eps,
        weight_decay=facts.weight_decay,
        save_on_each_node=False,
        fp16=facts.mixed_precision == "fp16",
        bf16=facts.mixed_precision == "bf16",
        fp16_full_eval=False,
        bf16_full_eval=False,
        warmup_steps=facts.warmup_steps,
    )
    training_arguments = import_module("transformers").TrainingArguments
    args.get_warmup_steps = lambda steps: training_arguments.get_warmup_steps(args, steps)
    try:
        theirs.trainer_config_process(args)
        theirs.trainer_config_finalize(args, its_model, facts.total_steps)
    finally:
        peers.unset_hf_deepspeed_config()
    return theirs.config


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"world_size": 3, "accumulation_steps": 5},
        {"mixed_precision": "fp16", "max_grad_norm": 0.0},
        {"mixed_precision": "no"},
        {"warmup_steps": 0},
        {"warmup_steps": 0.125, "total_steps": 99},
        {"warmup_steps": 0.0001, "betas": (0.9, 0.999)},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "its_model",
    [
        None,
        model(hidden_size=64),
        model(hidden_sizes=[32, 96, 48]),
        model(text_config=SimpleNamespace(hidden_size=40)),
        model(text_config=SimpleNamespace(hidden_sizes=[8, 24])),
    ],
    ids=["GPT-2", "hidden_size", "hidden_sizes", "text", "texts"],
)
def test_every_value_is_what_transformers_makes_of_it(peers, change, its_model):
    said = {name: getattr(FACTS, name) for name in FACTS.__slots__}
    facts = TrainingFacts(**{**said, **change})
    if its_model is None:
        its_config = import_module("transformers").GPT2Config(n_embd=32)  # its name for a width
        its_model = SimpleNamespace(config=its_config)
    mine = resolve_auto(EVERYTHING, facts=facts, model=its_model).config.to_dict()
    assert mine == by_transformers(peers, EVERYTHING, facts, its_model)


def test_a_file_with_auto_is_checked_and_each_decision_has_a_row_with_its_reason():
    assert check_config(EVERYTHING, inventory=CPU, allow_auto=True).config.gradient_clipping == AUTO
    with pytest.raises(ConfigError) as caught:
        check_config(EVERYTHING, inventory=CPU)
    stuck = [text.partition(" is still")[0] for text in caught.value.mistakes]
    assert set(auto_keys(EVERYTHING)) <= set(stuck)
    resolved = resolve_auto(EVERYTHING, facts=FACTS, model=model(hidden_size=8))
    assert sorted(choice.name for choice in resolved.choices) == sorted(auto_keys(EVERYTHING))
    assert all(choice.reason for choice in resolved.choices)
    text = " ".join(resolved.explain().split())
    assert "4 per process * 2 accumulated * 1 processes" in text
    assert "hidden * hidden, hidden size 8 from config.hidden_size" in text


def test_what_only_accelerate_takes_is_filled_in_too():
    settings = {
        ZERO: {
            "stage": AUTO,
            "offload_optimizer": {"device": AUTO},
            "offload_param": {"device": AUTO, "nvme_path": AUTO},
            "stage3_gather_16bit_weights_on_model_save": AUTO,
        },
        "train_micro_batch_size_per_gpu": 1,
    }
    facts = TrainingFacts(offload_param="nvme", nvme_path="/fast")
    filled = resolve_auto(settings, facts=facts, run=RunConfig(zero_stage=3)).config
    assert filled.stage == 3
    assert filled.offload_optimizer.device == "none"
    assert (filled.offload_param.device, filled.offload_param.nvme_path) == ("nvme", "/fast")
    assert filled.stage3_gather_16bit_weights_on_model_save is False
    assert resolve_auto({ZERO: {"stage": AUTO}}).config.stage == 2


def test_an_optimizer_and_a_schedule_say_what_the_run_does_not():
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, betas=(0.5, 0.6), weight_decay=0.3)
    scheduler = SimpleNamespace(warmup_num_steps=0, total_num_steps=50)
    settings = {key: EVERYTHING[key] for key in ("optimizer", "scheduler")}
    filled = resolve_auto(settings, optimizer=optimizer, scheduler=scheduler).config.to_dict()
    assert filled["optimizer"]["params"] == {
        "lr": 0.02, "betas": [0.5, 0.6], "eps": 1e-8, "weight_decay": 0.3,
    }  # fmt: skip
    assert filled["scheduler"]["params"] == {
        "warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 1, "total_num_steps": 50,
    }  # fmt: skip
    dummy = import_module("accelerate.utils").DummyOptim([], lr=0.5, weight_decay=0.25, eps=1e-3)
    filled = resolve_auto({"optimizer": EVERYTHING["optimizer"]}, optimizer=dummy).config
    assert filled.optimizer.params == {
        "lr": 0.5, "betas": [0.9, 0.999], "eps": 1e-3, "weight_decay": 0.25,
    }  # fmt: skip


def test_defaults_of_a_stand_in_fill_in_and_contradict_nobody():
    optimizer, said = DummyOptim([]), DummyOptim([], lr=0.001, weight_decay=0.1)
    file = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.1}}}
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    filled = resolve_auto({**file, **warm}, optimizer=optimizer, scheduler=DummyScheduler(None))
    assert filled.config.to_dict() == {**file, **warm}

    with pytest.raises(ConfigError, match=r"optimizer.params.lr is 3e-05 in the file and 0.001"):
        resolve_auto(file, optimizer=said)
    with pytest.raises(ConfigError, match="warmup_num_steps is 100 in the file and 5"):
        resolve_auto(warm, scheduler=DummyScheduler(None, warmup_num_steps=5))

    open_file = {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay"), AUTO)}
    }
    params = resolve_auto(open_file, optimizer=optimizer).config.optimizer.params
    # Plain numbers: checks know no others, and a checkpoint that holds them is refused on loading.
    seen = {name: (type(value), value) for name, value in params.items()}
    assert seen == {"lr": (float, 0.001), "weight_decay": (float, 0)}
    assert type(DummyScheduler(None).warmup_num_steps) is int
    warm["scheduler"]["params"]["warmup_max_lr"] = AUTO
    both = resolve_auto({**file, **warm}, optimizer=optimizer).config
    assert both.scheduler.params["warmup_max_lr"] == 3e-5, "the file's, before a default"


def test_sizes_follow_from_the_model_and_from_the_whole_batch():
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 5000))
    settings = {ZERO: {"stage": 2, "reduce_bucket_size": AUTO}}
    resolved = resolve_auto(settings, model=net)
    assert resolved.config.reduce_bucket_size == 24 * 24, "a vocabulary is no width"
    assert "widest linear layer" in " ".join(resolved.explain().split())
    settings = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": AUTO}
    facts = TrainingFacts(world_size=4, accumulation_steps=3)
    filled = resolve_auto({**settings, "gradient_accumulation_steps": AUTO}, facts=facts).config
    assert filled.train_micro_batch_size_per_gpu == 4


@pytest.mark.parametrize("asked", ["fp16", "bf16", "fp8"])
def test_a_precision_that_the_file_leaves_out_is_added(asked):
    filled = resolve_auto({}, run=RunConfig(mixed_precision=asked)).config.to_dict()
    wanted = {"enabled": True, "auto_cast": True} if asked == "fp16" else {"enabled": True}
    assert filled == {"fp16" if asked == "fp16" else "bf16": wanted}


def test_what_nothing_decides_is_told_together():
    with pytest.raises(ConfigError) as caught:
        resolve_auto({**EVERYTHING, "aio": {"block_size": AUTO}})
    told = {text.partition('="auto"')[0] for text in caught.value.mistakes}
    assert told == {
        *("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
        *("scheduler.params.total_num_steps", "aio.block_size", *SIZES[:2]),
        *(f"{ZERO}.{name}" for name in BUCKETS),
    }
    assert "give the model" in str(caught.value)


def test_contradictions_are_told_together_each_with_both_values():
    rates = {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    warmup = {"warmup_max_lr": 1e-5, "warmup_num_steps": 3, "total_num_steps": 7}
    settings = {
        **dict(zip(SIZES, (9, 3, 3), strict=True)),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        ZERO: {"stage": 3},
        "optimizer": {"type": "AdamW", "params": rates},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }
    with pytest.raises(ConfigError) as caught:
        resolve_auto(settings, facts=FACTS, run=RunConfig(zero_stage=2))
    pairs = {
        tuple(text.partition(" by the run")[0].split(" is ", 1)) for text in caught.value.mistakes
    }
    assert pairs == {
        (f"{ZERO}.stage", "3 in the file and 2"),
        ("gradient_accumulation_steps", "3 in the file and 2"),
        ("train_micro_batch_size_per_gpu", "3 in the file and 4"),
        ("train_batch_size", "9 in the file and 8"),
        ("gradient_clipping", "1.0 in the file and 0.7"),
        ("optimizer.params.lr", "1e-05 in the file and 0.0003"),
        ("optimizer.params.betas", "[0.9, 0.999] in the file and [0.8, 0.95]"),
        ("optimizer.params.eps", "1e-08 in the file and 1e-07"),
        ("optimizer.params.weight_decay", "0.0 in the file and 0.05"),
        ("scheduler.params.warmup_max_lr", "1e-05 in the file and 0.0003"),
        ("scheduler.params.total_num_steps", "7 in the file and 100"),
        ("scheduler.params.warmup_num_steps", "3 in the file and 10"),
        ("fp16.enabled", "True in the file and False"),
        ("bf16.enabled", "False in the file and True"),
    }


def test_what_agrees_is_no_contradiction_and_nothing_is_changed():
    settings = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.95]}},
    }
    before = copy.deepcopy(settings)
    resolved = resolve_auto({**settings, "bf16": {"enabled": True}}, facts=FACTS)
    assert resolved.choices == ()
    assert resolved.config == ZeroConfig.from_dict({**settings, "bf16": {"enabled": True}})
    resolve_auto(EVERYTHING, facts=FACTS, model=model(hidden_size=8))
    assert settings == before
    assert EVERYTHING["train_batch_size"] == AUTO


def test_the_list_holds_every_key_that_the_peers_fill_in():
    import inspect
    import re

    transformers_code = inspect.getsource(import_module("transformers.integrations.deepspeed"))
    filled = set(re.findall(r'fill_(?:match|only)\(\s*"([a-z0-9_.]+)"', transformers_code))
    plugin = import_module("accelerate.utils").DeepSpeedPlugin
    code = inspect.getsource(plugin.__post_init__)
    filled |= set(re.findall(r': "((?:zero_optimization|gradient)[a-z0-9_.]+)",', code))
    assert len(filled) > 20
    assert filled == set(AUTO_KEYS)
