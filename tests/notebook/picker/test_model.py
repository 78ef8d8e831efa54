from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import nbaccel
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.errors import ConfigError
from nbaccel.notebook.magic_line import read_magic_line
from nbaccel.notebook.picker.choices import PANELS, by_name, settings
from nbaccel.notebook.picker.config_text import faces_of
from nbaccel.notebook.picker.model import PickerModel, describe_model
from nbaccel.notebook.picker.rendering import picker_text
from tests import needs
from tests.notebook.machines import GIB, V5E_8, WITHOUT_GPU, with_gpus
from tests.notebook.shown import BUCKET, OPTIMIZER_PLACE, big, net

PARAM_PLACE = "zero_optimization.offload_param.device"


def reasons(picker: PickerModel, name: str) -> dict[str, str]:
    return {option.label: reason for option, reason in picker.offers(name)}


@needs.DEEPSPEED_ROW
def test_undo_walks_back_to_the_start():
    picker = PickerModel(inventory=with_gpus(1))
    states = [picker.config]
    for name, value in [("zero_stage", 2), (BUCKET, "5e7"), ("mixed_precision", "bf16")]:
        picker.choose(name, value)
        states.append(picker.config)
    for expected in reversed(states[:-1]):
        picker.undo()
        assert picker.config == expected
    assert not picker.can_undo
    picker.undo()
    assert picker.config == states[0]
    picker.choose("mixed_precision", "no")
    assert not picker.can_undo, "what is chosen again is no change"


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_processes", 0, "num_processes must be a whole number of at least 1"),
        (BUCKET, -3, "must be a whole number of at least 1: got -3"),
        ("gradient_clipping", "much", "gradient_clipping must be a number"),
        ("mixed_precision", "int4", "mixed_precision must be one of"),
        (PARAM_PLACE, "cpu", "needs ZeRO stage 3: the stage is 2"),
        ("num_proceses", 2, "Did you mean 'num_processes'?"),
    ],
)
def test_a_refused_choice_changes_nothing_and_says_why(name, value, told):
    picker = PickerModel(RunConfig(zero_stage=2), inventory=WITHOUT_GPU)
    before = picker.config
    with pytest.raises(ConfigError) as caught:
        picker.choose(name, value)
    assert told in str(caught.value)
    assert picker.config == before
    assert not picker.can_undo


@needs.DEEPSPEED_ROW
def test_numbers_are_read_as_people_type_them_and_an_empty_field_is_the_default():
    picker = PickerModel(RunConfig(num_processes=2, zero_stage=2), inventory=WITHOUT_GPU)
    for typed, kept in (("5e7", 50_000_000), ("500_000", 500_000), ("1,000", 1000), (" 7 ", 7)):
        picker.choose(BUCKET, typed)
        assert picker.value(BUCKET) == kept
    picker.choose(BUCKET, "auto")
    assert picker.value(BUCKET) == "auto"
    picker.choose("gradient_clipping", "0.5")
    assert picker.config.deepspeed["gradient_clipping"] == 0.5
    for name in (BUCKET, "gradient_clipping"):
        picker.choose(name, None)
    picker.choose("num_processes", "")
    picker.choose("master_addr", "")
    assert picker.config == RunConfig(zero_stage=2, deepspeed={})


@needs.DEEPSPEED_ROW
def test_engine_choices_are_kept_while_it_is_off_and_needs_of_a_stage_are_not(
    tmp_path, monkeypatch
):
    picker = PickerModel(inventory=with_gpus(1))
    picker.choose("zero_stage", 3)
    picker.choose(OPTIMIZER_PLACE, "cpu")
    picker.choose("zero_stage", None)
    assert picker.config == RunConfig()
    picker.choose("zero_stage", 2)
    assert picker.value(OPTIMIZER_PLACE) == "cpu"
    picker.choose(OPTIMIZER_PLACE, None)
    picker.choose("zero_stage", None)
    picker.choose("zero_stage", 2)
    assert picker.value(OPTIMIZER_PLACE) is None

    monkeypatch.chdir(tmp_path)
    picker = PickerModel(RunConfig(zero_stage=3), inventory=with_gpus(1))
    picker.choose(PARAM_PLACE, "cpu")
    picker.choose(OPTIMIZER_PLACE, "nvme")
    folder = picker.value("zero_optimization.offload_optimizer.nvme_path")
    assert folder == str(tmp_path / "nvme_offload")
    assert folder in picker.remarks[0]

    picker.choose("zero_stage", 2)

    assert picker.value(PARAM_PLACE) is None
    assert picker.value(OPTIMIZER_PLACE) == "cpu"
    assert len(picker.remarks) == 2
    picker.choose("zero_stage", 0)
    assert picker.config == RunConfig(zero_stage=0, deepspeed={})
    assert engine_config(picker.config)["zero_optimization"] == {"stage": 0}


def test_fp8_opens_its_recipe_and_greys_what_it_does_not_have():
    picker = PickerModel(RunConfig(num_processes=1), inventory=with_gpus(1))
    assert not picker.is_shown("fp8.backend")
    picker.choose("mixed_precision", "fp8")
    assert picker.is_shown("fp8.backend")
    backends = reasons(picker, "fp8.backend")
    assert backends["te"] == "transformer_engine is not installed"
    assert backends["native"] == backends["msamp"] == ""
    # A file may hold a backend that is not installed: its recipe is shown beside the reason.
    picker.replace(picker.config.changed(fp8="te"))
    shown = {s.name for s in settings("precision") if picker.is_shown(s.name)}
    assert {"fp8.fp8_format", "fp8.margin", "fp8.override_linear_precision"} <= shown
    assert "fp8.opt_level" not in shown
    picker.choose("fp8.backend", "native")
    picker.choose("fp8.margin", 2)
    picker.choose("fp8.override_linear_precision", [False, True, False])
    assert picker.config.fp8.override_linear_precision == (False, True, False)
    assert not picker.is_shown("fp8.amax_history_len")  # its default has no history
    assert "is not one that native has" in reasons(picker, "fp8.recipe")["mxfp8"]
    picker.choose("fp8.recipe", "delayed")
    assert picker.is_shown("fp8.amax_history_len")
    picker.choose("fp8.backend", "msamp")
    assert picker.is_shown("fp8.opt_level")
    assert not picker.is_shown("fp8.fp8_format")


def test_a_tpu_is_offered_with_its_driver_its_precisions_and_its_memory():
    chosen = PickerModel(RunConfig(device="tpu"), model=net(), inventory=V5E_8)
    assert reasons(chosen, "device")["tpu"] == ""
    assert "TPUs compute in bfloat16" in reasons(chosen, "mixed_precision")["fp16"]
    assert reasons(chosen, "mixed_precision")["bf16"] == ""
    assert chosen.plan.num_processes == 8
    assert [bar.label for bar in chosen.need.bars][:2] == ["tpu:0 · TPU v5e", "tpu:1 · TPU v5e"]
    assert chosen.is_shown("tpu_driver")
    assert not PickerModel(inventory=with_gpus(1)).is_shown("tpu_driver")


@needs.DEEPSPEED_ROW
def test_options_are_greyed_by_other_choices():
    picker = PickerModel(RunConfig(num_processes=2), model=net(), inventory=with_gpus(2))
    assert "cannot run num_processes=2" in reasons(picker, "start_method")["inline"]
    assert picker.refusal(BUCKET) == "choose a ZeRO stage first"
    picker.choose("zero_stage", 2)
    assert picker.refusal(BUCKET) == ""
    places = reasons(picker, PARAM_PLACE)
    assert places == {
        "device": "",
        "CPU": "needs ZeRO stage 3: the stage is 2",
        "NVMe": "needs ZeRO stage 3: the stage is 2",
    }
    assert picker.refusal("zero_optimization.stage3_prefetch_bucket_size") == (
        "for stage 3 only: the stage is 2"
    )
    refusal = picker.refusal("activation_checkpointing")
    assert "Sequential has no gradient_checkpointing_enable()" in refusal
    picker = PickerModel(RunConfig(mixed_precision="fp8", fp8="msamp"), inventory=with_gpus(2))
    assert "does not train in fp8 by the backend msamp" in reasons(picker, "zero_stage")["3"]
    picker.choose("fp8.backend", "native")
    assert reasons(picker, "zero_stage")["3"] == ""
    assert picker.refusal("activation_checkpointing") == ""


@needs.DEEPSPEED_ROW
def test_every_option_that_is_offered_can_be_chosen_and_no_other():
    """Over all stages: what is greyed is refused, what is not is taken."""
    for stage in (None, 0, 1, 2, 3):
        start = RunConfig(num_processes=2, zero_stage=stage)
        if stage == 0:
            start = start.changed(deepspeed={})
        for panel in ("precision", "zero", "launch"):
            picker = PickerModel(start, inventory=with_gpus(2))
            for setting in settings(panel):
                if picker.refusal(setting.name) or not picker.is_shown(setting.name):
                    continue
                for option, reason in picker.offers(setting.name):
                    fresh = PickerModel(start, inventory=with_gpus(2))
                    if reason:
                        with pytest.raises(ConfigError):
                            fresh.choose(setting.name, option.value)
                    else:
                        fresh.choose(setting.name, option.value)
                        assert fresh.plan is not None, (setting.name, option, fresh.problems)


@needs.DEEPSPEED_ROW
def test_what_does_not_fit_says_how_much_and_what_would_and_bars_are_the_estimate():
    model = big()
    picker = PickerModel(RunConfig(num_processes=2), model=model, inventory=with_gpus(2))
    verdict = picker.verdict
    assert verdict.fits is False
    assert verdict.text.endswith("GiB too little on each of cuda:0 to cuda:1.")
    name, _, would = verdict.remedy.partition(" would ")
    assert would == "fit."
    picker.take(name)
    assert picker.verdict.fits is True

    picker.choose("zero_stage", 3)
    picker.choose("mixed_precision", "bf16")
    picker.choose(OPTIMIZER_PLACE, "cpu")
    estimate = nbaccel.estimate_memory(
        model, engine_config(picker.config), num_processes=2, inventory=with_gpus(2)
    )
    first, second, host = picker.bars()
    assert first.label == "cuda:0 · NVIDIA H100"
    assert second.needed == first.needed == estimate.device.peak
    assert host.needed == estimate.host.peak
    for bar in (first, second, host):
        size = sum(part.bytes for part in bar.segments)
        assert size == max(bar.capacity, bar.capacity + bar.lacking)
    sizes = {part.kind: part.bytes for part in first.segments}
    assert sizes["others"] == 2 * GIB
    assert sizes["parameters"] == estimate.device.parameters
    assert picker.verdict.fits is estimate.fits


@needs.DEEPSPEED_ROW
def test_activations_follow_batch_and_precision():
    model, batch = net(256), torch.randn(64, 256)
    picker = PickerModel(model=model, sample_batch=batch, inventory=WITHOUT_GPU)
    fp32 = picker.need.estimate.device.activations
    picker.choose("mixed_precision", "bf16")
    bf16 = picker.need.estimate.device.activations
    assert 0 < bf16 < fp32
    picker.choose("zero_stage", 1)
    picker.choose("train_micro_batch_size_per_gpu", 128)
    assert picker.need.estimate.device.activations > 1.2 * bf16


def test_no_memory_is_estimated_before_the_postponed_estimate_is_asked_for(monkeypatch):
    from nbaccel.memory import activations

    measured = []
    measure = activations.measure_activations
    monkeypatch.setattr(
        activations,
        "measure_activations",
        lambda *arguments, **options: measured.append(options) or measure(*arguments, **options),
    )
    picker = PickerModel(model=net(64), sample_batch=torch.randn(8, 64), inventory=WITHOUT_GPU)
    picker.postpone_memory()
    told = []
    picker.observe(lambda: told.append(picker.verdict.text))
    picker.choose("mixed_precision", "bf16")
    assert (picker.need, picker.bars(), measured) == (None, (), [])
    assert "Memory is being estimated …" in picker_text(picker)

    picker.estimate_memory()
    assert len(measured) == 1
    assert picker.need.estimate.device.activations > 0
    assert [text.partition(" ")[0] for text in told] == ["Memory", "Fits:"]
    picker.estimate_memory()
    assert len(told) == 2, "the second time there is nothing to tell"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("gpt2", "is no module"),
        (None, "without a model"),
        (torch.nn.Linear, r"model=Linear is a class.*Linear\(\.\.\.\)"),
        (nn.Sequential(nn.LazyLinear(3)), r"\(0\.weight, 0\.bias\).*Call it once"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_do(model, told):
    with pytest.raises(ConfigError, match=told):
        PickerModel(model=model, sample_batch=torch.ones(2, 3))


def test_what_no_machine_or_not_this_one_can_serve_is_told_and_can_be_left():
    picker = PickerModel(RunConfig(device="cuda"), model=net(), inventory=WITHOUT_GPU)
    assert picker.plan is None
    assert "needs a GPU" in picker.problems[0]
    assert picker.verdict.fits is None
    picker.choose("device", "auto")
    assert picker.verdict.fits is True
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(65536, 65536) for _ in range(40)))
    picker = PickerModel(RunConfig(num_processes=1), model=model, inventory=WITHOUT_GPU)
    before = picker.config
    with pytest.raises(ConfigError, match="Nothing fits"):
        picker.suggest()
    assert picker.config == before
    assert picker.verdict.remedy.startswith("Nothing fits")
    with pytest.raises(ConfigError, match="give the model"):
        PickerModel(inventory=WITHOUT_GPU).suggest()


@needs.DEEPSPEED_ROW
def test_what_is_not_installed_is_shown_with_what_to_install_and_not_suggested(monkeypatch):
    from nbaccel.deepspeed import form

    monkeypatch.setattr(form, "is_installed", lambda name: False)
    picker = PickerModel(RunConfig(num_processes=2), model=big(), inventory=with_gpus(2))
    zero = next(found for found in picker.candidates() if found.name == "ZeRO-3")
    assert "pip install" in zero.refusal
    assert zero.need is not None, "its memory is shown all the same"
    with pytest.raises(ConfigError, match="pip install"):
        picker.take("ZeRO-3")
    picker.suggest()
    assert not picker.config.uses_deepspeed
    assert picker.verdict.fits is True


@needs.DEEPSPEED_ROW
def test_faces_say_the_same():
    picker = PickerModel(
        RunConfig(
            num_processes=2,
            mixed_precision="bf16",
            zero_stage=3,
            deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        ),
        model=net(),
        sample_batch=torch.randn(4, 8),
        inventory=with_gpus(2),
    )
    faces = picker.faces()

    assert RunConfig.from_yaml(faces["YAML"]) == picker.config
    assert RunConfig(num_processes=2, deepspeed=faces["DeepSpeed JSON"]).zero_stage == 3
    names: dict = {}
    exec(faces["Python"].partition("notebook_launcher(train")[0], names)
    assert names["config"] == picker.config
    assert read_line(faces["Command line"]) == picker.config
    config = RunConfig(
        mixed_precision="fp8",
        fp8={"backend": "te", "override_linear_precision": [True, False, False]},
        share_back=False,
        log_line_prefix_template="[${rank}] ",
        timeout=5,
    )
    assert read_line(faces_of(config, {})["Command line"]) == config


def read_line(line: str) -> RunConfig:
    options = line.removeprefix("%%accelerate")
    return read_magic_line(options, base_config=RunConfig(), namespace={}).wanted


@needs.DEEPSPEED_ROW
def test_auto_is_shown_resolved_with_reasons():
    picker = PickerModel(
        RunConfig(num_processes=2, zero_stage=2, deepspeed={"gradient_clipping": "auto"}),
        model=net(),
        sample_batch=torch.randn(4, 8),
        inventory=with_gpus(2),
    )
    told = {choice.name: choice for choice in picker.resolved()}
    assert told["train_batch_size"].value == 8
    assert "4 per process * 1 accumulated * 2 processes" in told["train_batch_size"].reason
    assert told["gradient_clipping"].reason == "Accelerate's default"
    settings = json.loads(picker.faces()["DeepSpeed JSON"])
    assert settings["train_batch_size"] == 8

    open_ = PickerModel(RunConfig(zero_stage=2), inventory=with_gpus(1))
    told = {choice.name: choice for choice in open_.resolved()}
    assert told["train_micro_batch_size_per_gpu"].value == "auto"
    assert "data loader" in told["train_micro_batch_size_per_gpu"].reason


def test_every_setting_is_a_choice_and_common_ones_come_first():
    fields = {setting.run_field.partition(".")[0] for setting in by_name().values()}
    assert fields >= set(RunConfig.model_fields) - {"deepspeed", "zero_stage"}
    landed = {s.run_field.removeprefix("fp8.") for s in settings("precision") if "fp8." in s.name}
    assert landed == set(Fp8Config.model_fields)
    for panel in PANELS:
        sections = [setting.section for setting in settings(panel)]
        assert sections == sorted(sections, key=bool)


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def test_a_model_is_described_with_tied_weights_counted_once_and_a_batch_by_its_shapes():
    found = describe_model(Tied().to(torch.bfloat16))
    for fact in ("88 parameters in 4 tensors", "3 Linear", "bfloat16", "1 tied weight"):
        assert fact in found
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**4, 10**4), nn.Linear(2, 2).half())
    assert describe_model(model).endswith("float32, float16 · on meta: shapes only")
    nested = {"input_ids": torch.zeros(1, 5), "more": [torch.zeros(2), 7]}
    told = ((torch.zeros(8, 20), "(8, 20)"), (nested, "input_ids (1, 5), more (2,)"), (None, ""))
    for batch, shapes in told:
        assert PickerModel(model=nn.Linear(2, 2), sample_batch=batch).batch_shapes == shapes


def test_devices_that_are_used_are_marked_and_equal_ones_are_one_part():
    two = PickerModel(RunConfig(num_processes=2), inventory=with_gpus(3))
    assert [is_used for _, is_used in two.machine_parts] == [True, True, False, False, False]
    first, *_, host, cores = (text for text, _ in two.machine_parts)
    assert first == "GPU 0 · NVIDIA H100 · 80.0 GiB, 78.0 free"
    assert (host, cores) == ("host memory · 256.0 GiB, 200.0 free", "32 cores")
    for machine, label in ((with_gpus(8), "GPU 0 to 7 · "), (V5E_8, "0 to 7")):
        assert label in PickerModel(inventory=machine).machine_parts[0][0]
    alone = PickerModel(inventory=WITHOUT_GPU).machine_parts
    assert [is_used for _, is_used in alone] == [True, True]
