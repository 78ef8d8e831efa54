"""What users do with DeepSpeed beside plain training: one launch of two processes for all of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from safetensors.torch import load_file
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, RunConfig, notebook_launcher
from nbaccel.errors import ConfigError
from nbaccel.utils import DummyOptim, DummyScheduler
from tests.damage import damaged_copy
from tests.deepspeed import needs
from tests.deepspeed.programs import refusal
from tests.deepspeed.strategy.test_training import distance, loader, net

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]


def zero(stage: int, **more: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": section, **more}


def some_steps(accelerator: Accelerator, model: Any, optimizer: Any, count: int = 3) -> list[float]:
    losses = []
    for number, (values, labels) in enumerate(loader()):
        if number == count:
            break
        loss = F.cross_entropy(model(values), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def accelerator_for(config: dict[str, Any], precision: str = "no") -> Accelerator:
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(deepspeed_plugin=plugin, mixed_precision=precision, cpu=True)


def start(
    stage: int, seed: int = 0, precision: str = "no", kind: Any = torch.optim.AdamW, **more: Any
) -> tuple[Accelerator, Any, Any]:
    accelerator = accelerator_for(zero(stage, **more), precision)
    model = net(seed)
    # A rate out of a sweep over np.logspace, which the engine writes into its files as it is.
    rate = np.float64(1e-2 if kind is torch.optim.AdamW else 1.0)
    optimizer = kind(model.parameters(), lr=rate)
    return (accelerator, *accelerator.prepare(model, optimizer))


def checkpoints(folder: Path) -> dict[str, Any]:
    """Save, go on, load into something else, and go on from there."""
    found = {}
    for stage in (1, 2, 3):
        first, model, optimizer = start(stage, precision="bf16")
        some_steps(first, model, optimizer)
        saved = first.save_state(folder / f"stage {stage}")
        expected = some_steps(first, model, optimizer)
        second, other, stepper = start(stage, seed=1, precision="bf16")
        second.load_state(saved)
        found[stage] = (expected, some_steps(second, other, stepper), sorted_names(saved))
    return found


def sorted_names(folder: Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


DAMAGED = {  # file and damage
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": (
        *("truncated", "empty", "missing", "flipped", "evil"),
    ),
    "zero_pp_rank_1_mp_rank_00_model_states.pt": ("truncated", "flipped"),
}


def damaged(folder: Path) -> dict[str, tuple[str, bool]]:
    """Checkpoints of which a shard is damaged: what is told, and whether weights stayed."""
    first, model, optimizer = start(3, precision="bf16")
    some_steps(first, model, optimizer)
    saved = first.save_state(folder / "whole")
    second, other, stepper = start(3, seed=1, precision="bf16")
    some_steps(second, other, stepper, count=1)
    found = {}
    for name, damages in DAMAGED.items():
        for damage in damages:
            copy = folder / f"{damage} {name}"
            if first.is_main_process:
                damaged_copy(saved, copy, f"pytorch_model/{name}", damage)
                # As by an older version, or by an attacker: only DeepSpeed's files tell.
                if damage in ("missing", "evil"):
                    (copy / "nbaccel_manifest.json").unlink()
            first.wait_for_everyone()
            before = second.get_state_dict(other)
            told = refusal(second.load_state, copy)
            after = second.get_state_dict(other)
            same = all(torch.equal(before[key], after[key]) for key in before)
            found[f"{damage} {name}"] = (told, same)
    return found


def weights_alone(folder: Path) -> dict[str, Any]:
    """Whole weights out of one engine, through a file, into another; and from a run without."""
    accelerator, model, optimizer = start(3)
    some_steps(accelerator, model, optimizer)
    accelerator.save_model(model, folder / "weights")
    whole = accelerator.get_state_dict(model)
    plain = Accelerator(cpu=True)
    same = net(3)
    ready = plain.prepare(same)
    if whole:
        same.load_state_dict(whole)
    for tensor in same.state_dict().values():
        dist.broadcast(tensor, 0)
    saved = plain.save_state(folder / "of ddp")
    answers = {}
    for stage in (2, 3):
        other, its, _ = start(stage, seed=4)
        # What DDP saved has one model and no optimizer: it is loaded as a script that evaluates.
        other._optimizers.clear()
        other.load_state(saved)
        values, _labels = next(iter(loader()))
        with torch.no_grad():
            answers[stage] = float((its(values) - ready(values)).abs().max())
        wrong = {**whole, "0.bias": torch.zeros(2)} if whole else {}
        answers[f"{stage} misfit"] = refusal(other._run.strategy.load_model_state, its, wrong)
        some = {"0.bias": torch.full((33,), 7.0)} if whole else {}
        other._run.strategy.load_model_state(its, some, strict=False)
        loaded = other.get_state_dict(its)
        if whole:
            expected = {**whole, **some}
            answers[f"{stage} part"] = all(torch.equal(loaded[n], expected[n]) for n in expected)
    answers["files"] = sorted_names(folder / "weights") if accelerator.is_main_process else None
    answers["kept"] = len(whole)
    return answers


def two_models(folder: Path) -> dict[str, Any]:
    """Each with an optimizer of its own, under one Accelerator."""
    accelerator = accelerator_for(zero(2))
    first, second = net(0), net(1)
    frozen = nn.Linear(64, 10)
    one = torch.optim.AdamW(first.parameters(), lr=1e-2)
    two = torch.optim.SGD(second.parameters(), lr=1e-2)
    first, second, frozen, one, two = accelerator.prepare(first, second, frozen, one, two)
    alone, own, its = start(2)
    losses: list[tuple[float, float]] = []
    for values, labels in list(loader())[:3]:
        a = F.cross_entropy(first(values), labels)
        b = F.cross_entropy(second(values) + frozen(values).detach(), labels)
        accelerator.backward(b)
        accelerator.backward(a)
        for optimizer in (one, two):
            optimizer.step()
        losses.append((float(a.detach()), float(b.detach())))
    both = first(values).sum() + second(values).sum()
    saved = accelerator.save_state(folder / "both")
    return {
        "first": [a for a, _ in losses],
        "alone": some_steps(alone, own, its),
        "second": [b for _, b in losses],
        "both": refusal(accelerator.backward, both),
        "files": sorted_names(saved),
        "frozen": type(frozen).__name__,
    }


def two_schedules(folder: Path) -> list[list[float]]:
    """Two models, each with stand-ins of its own: the learning rates that each schedule says."""
    warmup = {**dict.fromkeys(SCHEDULE[:3], "auto"), "warmup_min_lr": 0, "warmup_type": "linear"}
    config = zero(
        2,
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        scheduler={"type": "WarmupLR", "params": warmup},
    )
    accelerator = accelerator_for(config)
    models = [net(0), net(1)]
    optimizers = [
        DummyOptim(m.parameters(), lr=lr) for m, lr in zip(models, (0.01, 0.05), strict=True)
    ]
    schedules = [DummyScheduler(optimizer, warmup_num_steps=4) for optimizer in optimizers]
    *ready, one, two = accelerator.prepare(*models, *optimizers, *schedules)
    models, optimizers = ready[:2], ready[2:]
    rates = []
    for number, (values, labels) in enumerate(list(loader())[:6]):
        for model, optimizer in zip(models[: 2 - number % 2], optimizers, strict=False):
            accelerator.backward(F.cross_entropy(model(values), labels))
            optimizer.step()
        rates.append([round(schedule.get_last_lr()[0], 6) for schedule in (one, two)])
    return rates


def teacher(folder: Path) -> dict[str, Any]:
    """A teacher sharded for inference beside a student in training, by two plugins."""
    trained = zero(2, optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=trained),
        "teacher": DeepSpeedPlugin(hf_ds_config=zero(3)),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins, cpu=True)
    model, wise = net(0), net(1).requires_grad_(False).eval()
    expected = wise(next(iter(loader()))[0])
    model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.01))
    accelerator.state.select_deepspeed_plugin("teacher")
    wise = accelerator.prepare(wise)
    losses = []
    for values, _ in list(loader())[:3]:
        with torch.no_grad():
            answers = wise(values)
        if not losses:
            error = float((answers - expected).abs().max())
        loss = F.mse_loss(model(values), answers)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    shapes = [tuple(next(m.parameters()).shape) for m in (model, wise)]
    return {"losses": losses, "error": error, "shapes": shapes}


SCHEDULE = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")


def stand_ins(folder: Path) -> dict[str, Any]:
    """A configuration full of "auto", with its optimizer and schedule."""
    config = zero(
        2,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(SCHEDULE, "auto")},
        gradient_clipping="auto",
        train_batch_size="auto",
    )
    accelerator = accelerator_for(config)
    model = net()
    optimizer = DummyOptim(model.parameters(), lr=0.02)
    schedule = DummyScheduler(
        optimizer, total_num_steps=8 * accelerator.num_processes, warmup_num_steps=2
    )
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
    rates = []
    for values, labels in batches:
        accelerator.backward(F.cross_entropy(model(values), labels))
        optimizer.step()
        schedule.step()
        rates.append(round(schedule.get_last_lr()[0], 6))
    accelerator.load_state(accelerator.save_state(folder / "stand-ins"))
    return {
        "rates": rates,
        "settled": accelerator.deepspeed_config,
        "explained": accelerator.plan.explain(),
        "group": round(optimizer.param_groups[0]["lr"], 6),
        "optimizer": repr(optimizer),
    }


def left_to_the_engine(folder: Path) -> list[list[float]]:
    """A loop that never calls the optimizer, as DeepSpeed's own do, beside one that does."""
    found = []
    for calls in (False, True):
        accelerator, model, optimizer = start(2)
        losses = []
        for values, labels in list(loader())[:4]:
            loss = F.cross_entropy(model(values), labels)
            accelerator.backward(loss)
            if calls:
                optimizer.step()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found


def by_hand(folder: Path) -> dict[str, float]:
    """`no_sync` without `accumulate`: gradients of both batches make one step."""
    found = {}
    for stage in (1, 2, 3):
        accelerator, model, optimizer = start(stage)
        (v1, l1), (v2, l2) = list(loader())[:2]
        with accelerator.no_sync(model):
            accelerator.backward(F.cross_entropy(model(v1), l1))
        accelerator.backward(F.cross_entropy(model(v2), l2))
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        found[str(stage)] = float(norm)
    ddp = Accelerator(cpu=True)
    plain = ddp.prepare(net())
    with ddp.no_sync(plain):
        ddp.backward(F.cross_entropy(plain(v1), l1))
    ddp.backward(F.cross_entropy(plain(v2), l2))
    found["ddp"] = float(ddp.clip_grad_norm_(plain.parameters(), 100.0))
    return found


def held_back(folder: Path) -> tuple[list[str], bool]:
    """`no_sync` around every batch: what is said, and whether anything was trained."""
    accelerator, model, optimizer = start(2)
    before = accelerator.get_state_dict(model)
    before = {name: tensor.clone() for name, tensor in before.items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for values, labels in list(loader())[:2]:
            with accelerator.no_sync(model):
                accelerator.backward(F.cross_entropy(model(values), labels))
            optimizer.step()
    after = accelerator.get_state_dict(model)
    said = [str(warning.message) for warning in told if "no_sync" in str(warning.message)]
    return said, all(torch.equal(before[name], after[name]) for name in before)


def two_norms(folder: Path) -> list[str]:
    """The call goes before the file, and says so once."""
    accelerator, model, optimizer = start(2, gradient_clipping=0.1)
    said = []
    for values, labels in list(loader())[:2]:
        accelerator.backward(F.cross_entropy(model(values), labels))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        said += [str(w.message) for w in caught if "clip_grad_norm_" in str(w.message)]
        optimizer.step()
    return said


def once_clipped(folder: Path) -> dict[str, list[float]]:
    """How far three steps go: by the file's norm, by the call's, by the file's."""

    def weights() -> torch.Tensor:
        state = accelerator.get_state_dict(model)  # empty but on rank 0
        tied = "3.weight"
        return torch.cat([torch.zeros(1), *(v.flatten() for k, v in state.items() if k != tied)])

    found = {}
    for stage in (0, 1, 2, 3):
        clipped = {"kind": torch.optim.SGD, "gradient_clipping": 0.125}
        accelerator, model, optimizer = start(stage, **clipped)
        went = []
        for number, (values, labels) in enumerate(list(loader())[:3]):
            before = weights()
            accelerator.backward(F.cross_entropy(model(values), labels))
            if number == 1:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    accelerator.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            went.append(float((weights() - before).norm()))
        found[str(stage)] = went
    return found


def wrong(folder: Path) -> dict[str, str]:
    """What cannot be, said before an engine is made."""
    found = {}
    accelerator = accelerator_for(zero(2, optimizer={"type": "AdamW", "params": {"lr": 0.1}}))
    model = net()
    real = torch.optim.AdamW(model.parameters())
    found["two optimizers"] = refusal(accelerator.prepare, model, real)
    plain = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), cpu=True)
    found["no optimizer"] = refusal(plain.prepare, model, DummyOptim(model.parameters()))
    found["optimizer alone"] = refusal(plain.prepare, real)
    typos = {"zero_optimization": {"stge": 3}, "gradient_cliping": 0.5}
    found["typos"] = refusal(accelerator_for(typos).prepare, model, real)
    found["schedule"] = refusal(plain.prepare, model, real, DummyScheduler(real))
    ddp = Accelerator(cpu=True)
    found["stand-in without DeepSpeed"] = refusal(ddp.prepare, DummyOptim(model.parameters()))
    prepared, stepper = plain.prepare(model, real)
    values, labels = next(iter(loader()))
    plain.backward(F.cross_entropy(prepared(values), labels))
    found["norm"] = refusal(plain.clip_grad_norm_, prepared.parameters(), 1.0, 1.0)
    found["value"] = refusal(plain.clip_grad_value_, prepared.parameters(), 1.0)
    found["closure"] = refusal(stepper.step, lambda: None)
    found["load"] = refusal(stepper.load_state_dict, {"state": {}})
    found["late group"] = refusal(stepper.add_param_group, {"params": []})
    found["backward"] = refusal(
        plain.backward, F.cross_entropy(prepared(values), labels), gradient=1
    )
    again = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), cpu=True)
    found["another's engine"] = refusal(again.prepare, prepared, stepper)
    return found


STORIES = (
    *(checkpoints, damaged, weights_alone, two_models, two_schedules, teacher, stand_ins),
    *(left_to_the_engine, by_hand, held_back, two_norms, once_clipped, wrong),
)


def tell(folder: Path) -> dict[str, Any]:
    """All of them, one after another."""
    return {story.__name__: story(folder / story.__name__) for story in STORIES}


def raw(models: dict[str, nn.Module]) -> None:
    """DeepSpeed without an Accelerator, as its own tutorials have it; engines kept and dropped."""
    import deepspeed

    kept = []
    for name, model in models.items():
        stage, fate = name.split()
        settings = {
            **zero(int(stage), bf16={"enabled": True}),
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        }
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        for values, labels in list(loader())[:2]:
            loss = F.cross_entropy(engine(values.bfloat16()).float(), labels)
            engine.backward(loss)
            engine.step()
        if fate == "destroyed":
            engine.destroy()
        elif fate == "alive":
            kept.append(engine)
    raw.kept = kept  # type: ignore[attr-defined]


def launched(model: nn.Module) -> tuple[str, int]:
    """Nothing but the launch says that DeepSpeed is to be used."""
    accelerator = Accelerator()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    some_steps(accelerator, prepared, optimizer)
    return accelerator.distributed_type.value, accelerator.deepspeed_plugin.zero_stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stories")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank has to tell."""
    return list(notebook_launcher(tell, (folder,), num_processes=2, timeout=240))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loaded_checkpoint_goes_on_where_it_was_saved(told, stage):
    expected, after, files = told[0]["checkpoints"][stage]
    assert after == expected
    assert {"pytorch_model", "latest", "random_states_0.pkl", "random_states_1.pkl"} <= {*files}
    assert "zero_to_fp32.py" in files
    assert "optimizer.bin" not in files


def test_a_checkpoint_of_two_processes_is_refused_by_one(told, folder):
    def load() -> None:
        accelerator, _model, _optimizer = start(3, precision="bf16")
        accelerator.load_state(folder / "checkpoints" / "stage 3")

    with pytest.raises(ConfigError, match=r"is of 2 processes, and this run has 1.*to-fp32"):
        notebook_launcher(load, num_processes=1, start_method="template")


def test_a_damaged_shard_is_named_to_all_before_anything_is_loaded(told, folder):
    first, second = (rank["damaged"] for rank in told)
    assert len(first) == 7
    for case, (text, is_as_before) in first.items():
        damage, _, name = case.partition(" ")
        assert (text, is_as_before) == second[case], "both are told the same"
        assert text.startswith("CheckpointDamaged: "), case
        assert is_as_before, case
        if damage == "missing":
            assert "optim_states.pt of rank 1 are missing" in text
        else:
            assert name in text
        assert ("holds a posix.mkdir. Nothing of it was run" in text) == (damage == "evil")
    assert not list(folder.rglob("*-was-here"))


def test_whole_weights_come_out_of_shards_and_go_into_them(told, folder):
    first, second = (rank["weights_alone"] for rank in told)
    assert first["files"] == ["model.safetensors"]
    assert first["kept"] > 0 == second["kept"]
    assert first[2] == first[3] == second[3] == pytest.approx(0, abs=1e-6)
    for rank in (first, second):
        for stage in (2, 3):
            assert "0.bias has shape (2,) instead of (33,)" in rank[f"{stage} misfit"]
    assert first["2 part"], "names that are not in the state keep their weights"
    assert first["3 part"]
    saved = load_file(folder / "weights_alone" / "weights" / "model.safetensors")
    assert {tuple(value.shape) for value in saved.values()} >= {(33, 64), (33, 33), (10, 33)}


def test_several_models_each_have_an_engine_and_a_schedule(told):
    found = told[0]["two_models"]
    assert found["first"] == pytest.approx(found["alone"], abs=1e-6)
    assert found["second"][0] != found["second"][-1]
    assert "comes from 2 of 2 engines (Sequential, Sequential)" in found["both"]
    assert {"pytorch_model", "pytorch_model_1", "pytorch_model_2"} <= {*found["files"]}
    assert found["frozen"] == "Linear"
    # The second is trained with every other batch; both reach their own rate after four steps.
    first, second = zip(*told[0]["two_schedules"], strict=True)
    assert max(first) == 0.01
    assert max(second) < 0.05
    assert len(set(second)) == 3
    found = told[0]["teacher"]
    assert found["shapes"] == [(33, 64), (0,)]
    assert found["error"] < 1e-6
    assert found["losses"][-1] < found["losses"][0]


def test_stand_ins_become_what_the_file_describes(told):
    found = told[0]["stand_ins"]
    settled = found["settled"]
    assert settled["optimizer"]["params"] == {"lr": 0.02, "weight_decay": 0.0}
    assert settled["scheduler"]["params"]["total_num_steps"] == 8
    assert settled["scheduler"]["params"]["warmup_max_lr"] == 0.02
    assert (settled["train_batch_size"], settled["train_micro_batch_size_per_gpu"]) == (32, 16)
    assert "optimizer.params.lr" in found["explained"]
    assert "the run's learning rate" in found["explained"]
    assert max(found["rates"]) <= 0.02
    assert found["rates"][-1] == found["group"] < max(found["rates"])
    assert "EngineOptimizer(FusedAdam)" in found["optimizer"]


def test_loops_of_every_form_train_the_same_and_what_they_overrule_is_told(told):
    left, called = told[0]["left_to_the_engine"]
    assert left == called
    found = told[0]["by_hand"]
    for stage in "123":
        assert found[stage] == pytest.approx(found["ddp"], rel=1e-5)
    (said,), is_unchanged = told[0]["held_back"]
    assert "takes no step with DeepSpeed" in said
    assert "accelerator.accumulate(model)" in said
    assert is_unchanged
    (said,) = told[0]["two_norms"]
    assert "clip_grad_norm_(max_norm=0.5) overrides gradient_clipping=0.1" in said


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_step_without_the_call_is_clipped_as_the_file_says(told, stage):
    assert told[0]["once_clipped"][stage] == pytest.approx([0.125, 0.25, 0.125], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("two optimizers", r"has an optimizer \(AdamW\), and prepare got one of torch"),
        ("no optimizer", r"no optimizer that it could stand for"),
        ("typos", r"optimization.stge .*'stage'.*gradient_cliping .*'gradient_clipping'"),
        ("optimizer alone", r"prepare got 1 optimizer\(s\) and no model"),
        ("schedule", r"no schedule that it could stand for"),
        ("stand-in without DeepSpeed", r"DummyOptim with strategy 'ddp'"),
        ("norm", r"norm_type=1\.0"),
        ("value", r"clip_grad_value_\(1\.0\).*clip_grad_norm_"),
        ("closure", r"closure="),
        ("load", r"load_state_dict got 1 entries"),
        ("late group", r"comes too late"),
        ("backward", r"backward\(gradient=1\)"),
        ("another's engine", r"engine of another Accelerator.*run their cell again"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(told, case, words):
    import re

    for rank in told:
        text = rank["wrong"][case]
        assert text.startswith("ConfigError")
        assert re.search(words, text, re.DOTALL)


# ---------------------------------------------------------------------- without an Accelerator
def test_weights_of_deepspeeds_own_engines_come_home_even_of_destroyed_ones():
    names = [f"{stage} {fate}" for stage in (1, 2, 3) for fate in ("alive", "dropped", "destroyed")]
    models = {name: net() for name in names}
    notebook_launcher(raw, (models,), num_processes=2, timeout=240)
    first = models["2 alive"].state_dict()
    assert distance(first, net().state_dict()) > 1e-3
    assert {value.dtype for value in first.values()} == {torch.float32}
    # What comes home has more digits than the bfloat16 weights that computed.
    assert distance(first, {k: v.bfloat16().float() for k, v in first.items()}) > 0
    for name in names:
        assert distance(models[name].state_dict(), first) < 1e-6, name


# ------------------------------------------------------------------------- the launch says it
def test_the_launchs_zero_stage_is_taken_up():
    model = net()
    model[4].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = RunConfig(num_processes=2, zero_stage=3, mixed_precision="bf16")
    assert notebook_launcher(launched, (model,), config=config)[0] == ("DEEPSPEED", 3)
    after = model.state_dict()
    assert not torch.equal(after["0.weight"], before["0.weight"])
    # What is frozen was cast with the rest, and has all its digits again.
    assert not torch.equal(before["4.weight"], before["4.weight"].bfloat16().float())
    for name in ("4.weight", "4.bias", "scale"):
        assert torch.equal(after[name], before[name])
