# ruff: noqa: E501 - tables of cases read best with one case a line
"""What the real DeepSpeed ignores or refuses is told before, and what it accepts is accepted."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from nbaccel.base.optional_packages import install_line
from nbaccel.config import RunConfig
from nbaccel.deepspeed.auto_values import resolve_auto
from nbaccel.deepspeed.checking import check_config, device_mistakes, doubts, value_mistakes
from nbaccel.deepspeed.library import missing_tools, needed_ops, quiet_logger
from nbaccel.deepspeed.schema import deepspeed_schema, misspelt_keys
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig, config_fields, old_forms
from nbaccel.errors import ConfigError
from nbaccel.plan import Inventory
from tests.deepspeed import needs
from tests.deepspeed.advisor.models import machine
from tests.house.source import ROOT
from tests.programs import run_program

pytestmark = needs.DEEPSPEED

CPU = Inventory(cpu_cores=2, host_total_bytes=8 << 30, host_available_bytes=8 << 30)
BATCH = {"train_micro_batch_size_per_gpu": 4}


def checked(**settings):
    return check_config({**BATCH, **settings}, check_tools=False)


def refused(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config({**BATCH, **settings}, check_tools=False)
    return str(caught.value)


@pytest.mark.parametrize("key", ["_comment", "//", "// why", "#", "$schema", "comment"])
def test_a_comment_is_left_alone(key):
    assert checked(**{key: "for the small model"}).warnings == ()
    assert checked(optimizer={"type": "AdamW", key: "as in the paper"}).warnings == ()


def test_a_comment_where_deepspeed_refuses_it_is_told_with_a_place_for_it():
    told = refused(**{ZERO: {"stage": 2, "_comment": "fast"}})
    assert "zero_optimization._comment is a comment, and DeepSpeed " in told
    assert "Move it to the top level." in told


@pytest.mark.parametrize("key", ["comms_config", "monitor_config", "cuda_visible_devices"])
def test_what_resembles_no_key_is_ignored_with_a_warning(key):
    (warning,) = checked(**{key: {"enabled": True}}).warnings
    assert warning.startswith(f"{key} is no key of DeepSpeed ")
    assert "which ignores it" in warning


RESEMBLING = {
    "batch_size": "train_batch_size", "micro_batch_size": "train_batch_size", "accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping", "clip_grad_norm": "gradient_clipping", "mixed_precision": "bf16", "BF16": "bf16",
    "lr_scheduler": "scheduler", "optim": "optimizer", "zero_opt": ZERO, "zero_stage": ZERO, "offload_optimizer_device": ZERO,
    "learning_rate": "optimizer.params", "monitor_csv": "csv_monitor",
}  # fmt: skip


@pytest.mark.parametrize(("key", "meant"), RESEMBLING.items())
def test_what_resembles_a_key_is_refused(key, meant):
    told = refused(**{key: 1})
    assert f"{key} is no key of DeepSpeed" in told
    assert meant in told.partition("silently ignore it.")[2]


def test_keys_without_a_field_and_old_names_are_read_as_deepspeed_does():
    made = checked(aio={"thread_count": 3, "block_size": 1 << 20})
    assert made.config.to_dict()["aio"] == {"intra_op_parallelism": 3, "block_size": 1 << 20}
    assert made.warnings == ("thread_count is an old form: write intra_op_parallelism=3.",)
    settings = {"stage": 1, "legacy_stage1": True, "elastic_checkpoint": "auto"}
    (warning,) = checked(**{ZERO: settings}).warnings
    key = "zero_optimization.elastic_checkpoint"
    assert warning == f'{key}="auto" leaves it to DeepSpeed, whose default is False.'
    told = refused(**{ZERO: {"stage": 1, "legacy_stage1": "old"}})
    assert "zero_optimization.legacy_stage1 is refused by DeepSpeed: got 'old'. It says: " in told
    assert "'legacy_stage1'" in refused(**{ZERO: {"stage": 1, "legacy_stage": True}})


def test_auto_where_deepspeed_takes_its_default():
    zero = {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_max_live_parameters": "auto",
        "offload_param": {"device": "cpu", "buffer_size": "auto"},
    }
    assert sorted(checked(**{ZERO: zero}).warnings) == [
        'zero_optimization.offload_param.buffer_size="auto" leaves it to DeepSpeed, whose default '
        "is 100000000.",
        'zero_optimization.stage3_max_live_parameters="auto" leaves it to DeepSpeed, whose default '
        "is 1000000000.",
    ]
    resolved = resolve_auto({**BATCH, ZERO: zero})
    made = resolved.config.to_dict()[ZERO]
    assert "stage3_max_live_parameters" not in made
    assert made["offload_param"] == {"device": "cpu"}
    assert {choice.name: choice.value for choice in resolved.choices} == {
        "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
        "zero_optimization.offload_param.buffer_size": 100_000_000,
    }


def test_a_removed_section_is_told_at_once_and_second_shards_must_come_out_even():
    settings = {**BATCH, "amp": {"enabled": "auto", "opt_level": "auto"}}
    with pytest.raises(ConfigError) as caught:
        resolve_auto(settings)
    assert len(set(caught.value.mistakes)) == 1
    assert "is of the past." in caught.value.mistakes[0]
    with pytest.raises(ConfigError) as caught:
        check_config(settings, check_tools=False, allow_auto=True)
    assert len(caught.value.mistakes) == 1
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    settings = {**BATCH, ZERO: zero}
    with pytest.raises(ConfigError, match=r"=4 does not divide 6 processes.*Give 2 or 3 or 6"):
        check_config(settings, world_size=6, check_tools=False)
    check_config(settings, world_size=8, check_tools=False)
    check_config(settings, check_tools=False)
    with pytest.raises(ConfigError, match="does not divide 6"):
        check_config(settings, run=RunConfig(num_processes=6), check_tools=False, allow_auto=True)


def test_no_key_of_deepspeed_is_taken_for_a_misspelt_one_where_it_is_not_installed():
    for section_path, known_keys in deepspeed_schema().sections.items():
        for key in known_keys:
            nested = {key: True}
            for step in reversed(section_path.split(".") if section_path else []):
                nested = {step: nested}
            assert list(misspelt_keys(old_forms(nested)[0])) == []


@pytest.fixture(scope="module", autouse=True)
def real_deepspeed():
    """Imported before any test: it takes seconds, and warns of the age of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield import_module("deepspeed")


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch):
    """A kernel started without its environment's folder on PATH finds no ninja; that is a test."""
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([folder, os.environ["PATH"]]))


def accepted_by_deepspeed(settings) -> None:
    with quiet_logger():
        import_module("deepspeed.runtime.config").DeepSpeedConfig(settings)


def mistakes_of(settings, **how) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_config({**BATCH, **settings}, **{"inventory": CPU, **how})
    return list(caught.value.mistakes)


# ------------------------------------------------------------------------------- keys
TYPOS = [
    ({"gradient_cliping": 0.5}, "gradient_cliping", "'gradient_clipping'"),
    ({"gradient_accumulation_step": 2}, "gradient_accumulation_step", "'gradient_accumulation_steps'"),
    ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "'zero_optimization'"),
    ({"fp_16": {"enabled": True}}, "fp_16", "'fp16'"),
    ({"optimizer": {"typ": "Adam"}}, "optimizer.typ", "'type'"),
    ({"scheduler": {"Type": "WarmupLR"}}, "scheduler.Type", "'type'"),
    ({"optimizer": {"type": "Adam", "param": {}}}, "optimizer.param", "'params'"),
    ({"aio": {"block_sise": 1}}, "aio.block_sise", "'block_size'"),
    ({"activation_checkpointing": {"partition_activation": True}}, "activation_checkpointing.partition_activation", "'partition_activations'"),
    ({"checkpoint": {"load_universl": True}}, "checkpoint.load_universl", "'load_universal'"),
    ({"data_types": {"grad_accum_type": "fp32"}}, "data_types.grad_accum_type", "'grad_accum_dtype'"),
    ({"overlap_comm": True}, "overlap_comm", "It belongs in zero_optimization."),
    ({"offload_param": {"device": "cpu"}}, "offload_param", "It belongs in zero_optimization."),
    ({ZERO: {"gradient_clipping": 1}}, "zero_optimization.gradient_clipping", "the top level"),
    ({"lr": 0.1}, "lr", "It belongs in optimizer.params."),
    ({"warmup_num_steps": 9}, "warmup_num_steps", "It belongs in scheduler.params."),
    # What DeepSpeed refuses too, in its own words.
    ({ZERO: {"stge": 2}}, "zero_optimization.stge", "'stage'"),
    ({ZERO: {"offload_optimiser": {}}}, "zero_optimization.offload_optimiser", "'offload_optimizer'"),
    ({ZERO: {"stage": 3, "offload_param": {"devise": "cpu"}}}, "zero_optimization.offload_param.devise", "'device'"),
    ({"timers": {"throughput": {"enable": True}}}, "timers.throughput.enable", "'enabled'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "remedy"), TYPOS, ids=[key for _, key, _ in TYPOS])
def test_a_typo_is_told_with_the_key_that_was_meant(settings, key, remedy):
    (told,) = mistakes_of(settings)
    assert told.startswith(f"{key} is no key of DeepSpeed ")
    assert remedy in told.partition("It would ")[2]


def test_everything_is_told_at_once_also_inside_a_misspelt_section():
    told = mistakes_of({"zero_optimisation": {"stge": 2}})
    starts = [text.partition(" is no key")[0] for text in told]
    assert starts == ["zero_optimisation", "zero_optimization.stge"]
    told = mistakes_of(
        {
            "gradient_cliping": 1,
            "amp": {"enabled": True},
            ZERO: {"stage": 2, "offload_param": {"device": "cpu"}, "overlap_comm": "maybe"},
            "optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}},
            "compile": {"debug_log": [3]},
            "train_batch_size": 7,
        },
        world_size=2,
    )
    told_of = "\n".join(told)
    for part in (
        "gradient_cliping is no key",
        "amp={'enabled': True}",
        "zero_optimization.overlap_comm must be true or false",
        'offload_param.device="cpu" needs stage 3: got stage 2',
        "optimizer.params.learning_rate is no argument of FusedAdam",
        "Did you mean 'lr'",
        "compile.debug_log is refused by DeepSpeed",
        "train_batch_size=7 is no multiple of train_micro_batch_size_per_gpu=4 * 2 processes = 8",
    ):
        assert part in told_of
    assert len(told) == 7


def test_keys_are_those_that_deepspeed_knows_or_has_removed():
    schema = deepspeed_schema()
    assert {"amp", "elasticity", "nebula"} <= set(schema.removed)
    for key, sentence in schema.removed.items():
        section, _, name = key.rpartition(".")
        settings = {section: {name: 1}} if section else {name: 1}
        assert mistakes_of(settings) == [f"{key}=1 is of the past. {sentence}".rstrip()]
    schema = deepspeed_schema()
    for place, name, _ in config_fields():
        assert name in schema.sections[place], f"{place}.{name}"


# -------------------------------------------------------------------- what trains on a CPU
def trains():
    for stage in (0, 1, 2, 3):
        for half in ({}, {"bf16": {"enabled": True}}):
            yield f"{stage}{'b' if half else ''}", {ZERO: {"stage": stage}, **half}
            if stage:
                zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
                yield f"{stage}{'b' if half else ''}-cpu", {ZERO: zero, **half}
    disk = {"device": "nvme", "nvme_path": "/fast"}
    host = {"device": "cpu"}
    for opt, par in ((host, host), (None, host), (disk, None), (disk, disk), (host, disk)):
        places = {"offload_optimizer": opt, "offload_param": par}
        name = "-".join(str(place and place["device"]) for place in (opt, par))
        yield name, {ZERO: {"stage": 3, **{key: value for key, value in places.items() if value}}}


@pytest.mark.parametrize("settings", [pytest.param(s, id=name) for name, s in trains()])
def test_what_trains_is_accepted_and_reads_the_same(settings):
    settings = {**BATCH, **settings, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    missing = list(missing_tools(ZeroConfig.from_dict(settings), device="cpu"))
    if missing:  # without libaio a disk cannot be used, and that alone is told
        assert mistakes_of(settings) == missing
        return
    checked = check_config(settings, world_size=1, inventory=CPU)
    assert checked.config.to_dict() == settings
    accepted_by_deepspeed(checked.config.to_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {ZERO: {"stage": "2"}},
        {"fp16": {"enabled": "false"}},
        {ZERO: {"reduce_bucket_size": 5e8}},
        {"bfloat16": {"enabled": True}},
        {ZERO: {"stage": 2, "cpu_offload": True}},
        {ZERO: {"stage": 1}, "optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True},
        {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
        {ZERO: {"stage": 1}, "optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}},
        {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "foreach": False}}},
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "Lion"}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 2}}},
        {"tensorboard": {"enabled": False}, "data_efficiency": {"data_sampling": {"mine": 1}}},
        {"data_types": {"keep_in_fp32_modules": "auto"}, "steps_per_print": float("inf")},
        {"pipeline": {"stages": "auto", "own": 1}, "compile": {"deepcompile": False}},
    ],
    ids=str,
)
def test_what_deepspeed_accepts_is_accepted(settings):
    checked = check_config({**BATCH, **settings}, world_size=2, inventory=CPU)
    accepted_by_deepspeed(checked.config.to_dict())


# ------------------------------------------------------------------------- combinations
IMPOSSIBLE = {
    "fp16 and bf16": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "refuses this configuration: .*simultaneously", {"device": "cuda"}),
    "stage 2 parameters": ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3: got stage 2", {}),
    "stage 2 nvme": (
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        "write nothing to disk", {},
    ),
    "stage 0 offload": ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, "needs stage 1, 2 or 3: got stage 0", {}),
    "no nvme_path": ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}, "needs zero_optimization.offload_param.nvme_path", {}),
    "Lion": ({"optimizer": {"type": "Lion"}}, "'Lion' cannot be made on the CPU", {}),
    "Lamb": ({"optimizer": {"type": "Lamb"}}, "'Lamb' cannot be made on the CPU", {}),
    "1-bit": ({"optimizer": {"type": "OneBitAdam"}}, "is no optimizer of DeepSpeed [0-9.]+ or torch.*Adam", {}),
    "unknown optimizer": ({"optimizer": {"type": "AdmW"}}, "Did you mean 'adamw'|Did you mean 'AdamW'", {}),
    "untested": ({ZERO: {"stage": 2}, "optimizer": {"type": "SGD"}}, '"zero_allow_untested_optimizer": true', {}),
    "max_grad_norm": ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "Set gradient_clipping", {}),
    "typeless": ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing", {}),
    "unknown schedule": ({"scheduler": {"type": "WarmpLR"}}, "Did you mean 'WarmupLR'", {}),
    "no total": ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing", {}),
    "warmup_steps": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "Did you mean 'warmup_num_steps'", {}),
    "no warm-up": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "above 0: got 0", {}),
    "torch's schedule": ({ZERO: {"stage": 1}, "scheduler": {"type": "StepLR", "params": {"step_size": 2}}}, "no Optimizer", {}),
    "sum at 3": ({ZERO: {"stage": 3}, "gradient_allreduce_op": "sum"}, "refuses this configuration: ", {}),
    "ratio": ({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "Partial offloading", {}),
    "grad norm": ({ZERO: {"stage": 3, "compute_grad_norm": False}}, "compute_grad_norm=false is supported only", {}),
    "bf16 masters": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "only supported with ZeRO", {}),
    "auto left": ({"gradient_clipping": AUTO}, 'gradient_clipping is still "auto"', {}),
    "auto nowhere": ({"aio": {"block_size": AUTO}}, 'aio.block_size cannot be "auto"', {}),
    "a bad tag mode": ({"checkpoint": {"tag_validation": "Often"}}, "DeepSpeed refuses this configuration: .*OFTEN", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_combination_is_told_once(case):
    settings, says, run = IMPOSSIBLE[case]
    run = RunConfig(**run)
    with pytest.raises(ConfigError, match=says) as caught:
        check_config({**BATCH, **settings}, inventory=CPU, run=run)
    told = [text for text in caught.value.mistakes if "libaio" not in text and "nvcc" not in text]
    assert len(told) == 1, told


@pytest.mark.parametrize(
    ("sizes", "world_size", "says"),
    [
        ((64, 4, 2), 1, "is not train_micro_batch_size_per_gpu=4 .* = 8"),
        ((64, 4, 2), 4, "= 32"),
        ((10, None, None), 4, "is no multiple of 4 processes = 4"),
        ((10, None, 4), None, "is no multiple of gradient_accumulation_steps=4 = 4"),
        ((None, None, 4), 2, "train_batch_size and train_micro_batch_size_per_gpu are both missing"),
        ((64, 4, 4), 4, ""),
        ((64, 4, None), 4, ""),
        ((64, None, 4), 4, ""),
        ((64, None, None), 4, ""),
        ((None, 4, None), 4, ""),
    ],
)  # fmt: skip
def test_batch_sizes_multiply_out(sizes, world_size, says):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    settings = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    if not says:
        assert check_config(settings, world_size=world_size, inventory=CPU).warnings == ()
        return
    with pytest.raises(ConfigError, match=says):
        check_config(settings, world_size=world_size, inventory=CPU)


def test_the_number_of_processes_and_an_open_stage_come_from_the_run():
    run = RunConfig(num_processes=3)
    with pytest.raises(ConfigError, match="no multiple of 3 processes"):
        check_config({"train_batch_size": 4}, run=run, inventory=CPU)
    half = {"device": "cpu", "ratio": 0.5}
    zero = {"stage": AUTO, "offload_param": {"device": "cpu"}, "offload_optimizer": half}
    settings = {**BATCH, ZERO: zero}
    assert check_config(settings, inventory=CPU, allow_auto=True).config.stage == AUTO
    assert len(mistakes_of({ZERO: {**zero, "stage": 2}}, allow_auto=True)) == 2


def test_what_may_disappoint_is_a_warning():
    zero = {"stage": 3}
    (said,) = check_config({**BATCH, ZERO: zero}, inventory=CPU).warnings
    assert "save_16bit_model() returns False" in said
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    assert check_config({**BATCH, ZERO: zero}, inventory=CPU).warnings == ()
    (said,) = check_config({**BATCH, "bfloat16": {}}, inventory=CPU).warnings
    assert "bfloat16 is an old form: write bf16={}" in said


def fp16_on_the_cpu():
    """What is said of fp16, and of float32 on disk, which DeepSpeed makes depend on the same."""
    half = ZeroConfig(fp16={"enabled": True})
    disk = ZeroConfig(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"})
    said = [*device_mistakes(half, device="cpu"), *doubts(disk, device="cpu")]
    return [text for text in said if "float16" in text]


def test_fp16_on_a_cpu_is_refused_where_deepspeed_refuses_it():
    cpu = import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator()
    assert len(fp16_on_the_cpu()) == (0 if cpu.is_fp16_supported() else 2)


@pytest.mark.slow
def test_fp16_on_an_older_cpu_is_refused():
    code = "from tests.deepspeed import test_checking as t; print('\\n'.join(t.fp16_on_the_cpu()))"
    older = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "DS_ACCELERATOR": "cpu"}
    done = run_program([sys.executable, "-W", "ignore", "-c", code], env=older, cwd=ROOT)
    refused, doubted = done.stdout.splitlines()[-2:]
    assert refused.startswith("fp16.enabled cannot be true on this CPU")
    assert refused.endswith("Use bf16.")
    assert "keeps the weights as bfloat16" in doubted


def test_what_would_not_work_here_is_advice_for_a_file_alone_and_refused_for_a_device():
    half = {**BATCH, "fp16": {"enabled": True}}
    assert check_config(half, inventory=machine(1)).config.fp16.enabled, "a GPU takes it"
    settings = {**BATCH, "optimizer": {"type": "Lamb"}}
    says = "'Lamb' cannot be made on the CPU"
    warned = check_config(settings).warnings
    assert [says in text for text in warned if text.startswith("On this machine: ")][-1]
    for how in ({"device": "cpu"}, {"run": RunConfig(device="cpu")}, {"inventory": CPU}):
        with pytest.raises(ConfigError, match=says):
            check_config(settings, **how)


# -------------------------------------------------------------------------------- tools
def test_a_missing_compiler_is_told_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    config = ZeroConfig(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/x"})
    (told,) = missing_tools(config, device="cpu")
    assert told.startswith("The C++ compiler 'c++' is not on PATH")
    assert "apt-get install g++" in told


def test_a_fused_part_on_a_gpu_needs_the_cuda_toolkit(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    told = list(missing_tools(ZeroConfig(optimizer="AdamW"), device="cuda"))
    home = import_module("torch.utils.cpp_extension").CUDA_HOME
    assert ["CUDA toolkit" in text for text in told] == ([True] if home is None else [])
    assert not list(missing_tools(ZeroConfig(), device="cuda"))


def test_a_library_that_does_not_link_is_told(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    config = ZeroConfig(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"})
    (told,) = missing_tools(config, device="cpu")
    assert "apt-get install libaio-dev" in told
    for name in needed_ops(config, device="cpu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    assert not list(missing_tools(config, device="cpu")), "what is built needs no tools"


@pytest.mark.parametrize(
    ("settings", "device", "ops"),
    [
        ({}, "cpu", ("deepspeed_shm_comm",)),
        ({}, "cuda", ()),
        ({"optimizer": "AdamW"}, "cpu", ("deepspeed_shm_comm", "fused_adam")),
        ({"stage": 1, "optimizer": "Adam", "offload_optimizer": "cpu"}, "cuda", ("cpu_adam",)),
        ({"stage": 1, "optimizer": "Lion", "offload_optimizer": "cpu"}, "cuda", ("cpu_lion",)),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "cuda", ()),
        ({"stage": 3, "offload_param": "nvme"}, "cuda", ("async_io",)),
    ],
)
def test_the_parts_a_run_loads(settings, device, ops):
    assert needed_ops(ZeroConfig(**settings), device=device) == ops


def test_without_deepspeed_the_remedy_is_one_line():
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from nbaccel.deepspeed.checking import check_config\n"
        "from nbaccel.errors import MissingBackend\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n    check_config({'train_batch_size': 1})\n"
        "except MissingBackend as error:\n    print(error)\n"
    )
    told = run_program([sys.executable, "-c", code], cwd=ROOT).stdout
    assert install_line("deepspeed") in told


WRONG = [
    ("optimizer", "lr", "fast", "Give for example 3e-5"),
    ("optimizer", "lr", -1, "a number of at least 0: got -1"),
    ("optimizer", "lr", True, "got True"),
    ("optimizer", "lr", float("inf"), "got inf"),
    ("optimizer", "betas", 0.9, "two numbers from 0 to below 1: got 0.9"),
    ("optimizer", "betas", [0.9, 0.99, 0.999], "two numbers"),
    ("optimizer", "betas", [0.9, 1.5], "below 1"),
    ("optimizer", "weight_decay", -0.1, "at least 0"),
    ("scheduler", "warmup_num_steps", "ten", "a whole number above 0: got 'ten'"),
    ("scheduler", "warmup_num_steps", 0.5, "above 0: got 0.5"),
    ("scheduler", "total_num_steps", 0, "above 0: got 0"),
    ("scheduler", "warmup_type", "cosine", "one of log, linear: got 'cosine'"),
]


@pytest.mark.parametrize(("section", "name", "value", "says"), WRONG)
def test_a_wrong_value_is_told_with_what_to_write(section, name, value, says):
    (told,) = value_mistakes(section, {name: value})
    assert told.startswith(f"{section}.params.{name} must be ")
    assert says in told


def test_right_values_are_left_alone_and_numbers_written_as_text_are_read():
    optimizer = {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "momentum": 0.9}
    assert not list(value_mistakes("optimizer", optimizer))
    assert not list(value_mistakes("optimizer", dict.fromkeys(optimizer, "auto")))
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": [1e-3, 1e-4], "warmup_num_steps": 1e3}
    assert not list(value_mistakes("scheduler", {**schedule, "warmup_type": "log"}))
    rates = {"lr": "3e-5", "betas": ["0.9", "0.999"], "eps": "1e-8"}
    warmup = {"warmup_max_lr": "3e-5", "warmup_num_steps": "10", "warmup_type": "linear"}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": rates},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"},
    }
    made = check_config(settings, check_tools=False).config.to_dict()
    assert made["optimizer"]["params"] == {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8}
    warmup = {"warmup_max_lr": 3e-5, "warmup_num_steps": 10, "warmup_type": "linear"}
    assert made["scheduler"]["params"] == warmup
    assert made["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    # What Accelerate and the Trainer read in workers is the run's own copy.
    kept = RunConfig(num_processes=2, deepspeed=settings).deepspeed
    assert kept is not None
    assert kept["optimizer"]["params"] == made["optimizer"]["params"]
