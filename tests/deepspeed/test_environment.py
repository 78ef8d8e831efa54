"""`deepspeed_environment()`: real DeepSpeed in one process, and nothing left of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from nbaccel.deepspeed import environment, toolchain
from nbaccel.deepspeed.device import Wish, check_gpu
from nbaccel.deepspeed.environment import deepspeed_environment
from nbaccel.errors import (
    ConfigError,
    MissingBackend,
    PlatformUnsupported,
    PortTaken,
    UnsafeMoment,
)
from nbaccel.plan.gpus import Gpu
from tests.deepspeed import needs
from tests.isolation import isolated

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def marked(test):
    """A test of the real DeepSpeed; the warnings of its imports are not ours."""
    for mark in (*needs.ENGINE, pytest.mark.filterwarnings("ignore")):
        test = mark(test)
    return test


# ---------------------------------------------------------------- refused before anything is done
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "4", "RANK": "2"}, r"here already: RANK=2, WORLD_SIZE=4.*leave "),
        ({"LOCAL_RANK": "1"}, r"LOCAL_RANK=1.*unset LOCAL_RANK first"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_SIZE=2"),
    ],
)
def test_a_launchers_environment_is_refused_by_name(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsafeMoment, match=words):
        deepspeed_environment()


def test_a_process_group_that_is_there_is_refused():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UnsafeMoment, match=r"gloo, rank 0 of 1.*destroy_process_group\(\)"):
            deepspeed_environment()
    finally:
        dist.destroy_process_group()


def test_a_port_that_is_taken_names_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port={port} is taken by this very process") as error:
            deepspeed_environment(port=port)
    assert error.value.port == port
    assert "Leave port out" in str(error.value)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1:2"])
def test_a_device_of_another_kind_is_refused(device):
    with pytest.raises(ConfigError, match=rf"device='{device}' is none.*cuda:1"):
        deepspeed_environment(device=device)


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are():
    card = Gpu(
        index=0,
        name="A100",
        total_bytes=1,
        free_bytes=1,
        compute_capability=(8, 0),
        uuid="GPU-0",
    )
    with pytest.raises(ConfigError, match=r'"cuda:1" is not there.*cuda:0 \(A100\).*one of these'):
        check_gpu(1, [card])
    with pytest.raises(ConfigError, match=r"no GPU \(no driver\).*device='cpu'"):
        check_gpu(0, [], "no driver")


def test_no_time_for_collectives_is_refused():
    with pytest.raises(ConfigError, match=r"timeout_s=0 is no time.*600"):
        deepspeed_environment(timeout_s=0)


# ---------------------------------------------------------------- what compiles
def test_ninja_beside_python_is_found_by_a_kernel_without_it_on_path(monkeypatch, tmp_path):
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ninja.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert toolchain.path_with_ninja() == f"{ninja.parent}{os.pathsep}/nowhere"


def test_a_missing_ninja_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingBackend, match=r"PATH \(/nowhere\).*pip install ninja"):
        toolchain.path_with_ninja()


def test_a_missing_compiler_is_told_unless_the_operation_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(PlatformUnsupported, match=r"'no-such-compiler'.*apt-get install g\+\+"):
        toolchain.check_compiler()
    built = tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    built.parent.mkdir()
    built.touch()
    toolchain.check_compiler()


def test_the_lock_of_a_killed_build_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = locked(tmp_path)
    assert toolchain.remove_forgotten_locks() == (lock,)
    assert not lock.exists()


def test_the_lock_of_a_build_that_goes_on_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = locked(tmp_path)
    hold = f"held = open({str(lock)!r}); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout.readline() == b"held\n"
        assert toolchain.remove_forgotten_locks() == ()
        assert lock.exists()
        builder.communicate(b"\n")


def locked(root: Path) -> Path:
    lock = root / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


# ---------------------------------------------------------------- in force, and over
def world():
    """What a run could leave behind in its process."""
    import torch.distributed as dist

    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    return {
        "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        "group": dist.is_initialized(),
        "listening": listening,
        "threads": {thread.name for thread in threading.enumerate()},
    }


@marked
@isolated(timeout_s=90)
def test_it_is_in_force_at_once_and_undone_by_close():
    import deepspeed  # so that the world before has it
    import torch.distributed as dist

    before = world()
    native = psutil.Process().num_threads()
    opened = deepspeed_environment()
    assert [os.environ[name] for name in NAMES] == [
        *("0", "0", "1", "1", "127.0.0.1", str(opened.port))
    ]
    assert (opened.device, opened.backend) == ("cpu", "gloo")
    assert dist.get_world_size() == 1
    addresses = {served.laddr for served in world()["listening"]}
    assert ("127.0.0.1", opened.port) in addresses, "it is served already"
    assert {address for address, _ in addresses} == {"127.0.0.1"}, "the group's own port, too"
    opened.close()
    opened.close()
    assert world() == before
    assert psutil.Process().num_threads() == native, "gloo's and the store's threads have ended"
    assert deepspeed.comm.comm.cdb is None
    assert opened.closed


@marked
@isolated(timeout_s=90)
def test_a_plain_call_that_is_repeated_begins_anew():
    first = deepspeed_environment()
    second = deepspeed_environment()
    assert first.closed
    assert not second.closed
    second.close()


@marked
@isolated(timeout_s=90)
def test_a_block_inside_a_block_is_refused():
    with deepspeed_environment() as outer:
        with pytest.raises(UnsafeMoment, match=r"is in force, from a `with` block"):
            deepspeed_environment()
        assert not outer.closed
    with pytest.raises(UnsafeMoment, match=r"was closed.*Call deepspeed_environment\(\) again"):
        outer.__enter__()


@marked
@isolated(timeout_s=90)
def test_what_fails_half_way_leaves_nothing():
    import deepspeed  # noqa: F401 - so that the world before has it

    before = world()
    with pytest.raises(ConfigError, match="not there"):
        deepspeed_environment(device="cuda:77")
    with pytest.raises(RuntimeError):
        deepspeed_environment(timeout_s=1e-9)  # torch has no time to find its own store
    assert world() == before


@marked
@isolated(timeout_s=90)
def test_a_device_that_deepspeed_can_no_longer_take_is_refused():
    """It chooses when it is imported, once in the life of a process."""
    import deepspeed

    with pytest.raises(UnsafeMoment, match=r"device='cuda' comes too late.*settled on cpu"):
        environment._settled_device(deepspeed, Wish(kind="cuda"))


@marked
def test_an_environment_left_open_is_closed_at_exit():
    code = (
        "from nbaccel.deepspeed.environment import deepspeed_environment\n"
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('group at exit:', dist.is_initialized()))\n"
        "kept = deepspeed_environment()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "group at exit: False" in done.stdout


@marked
@isolated(timeout_s=120)
def test_all_stages_train_one_after_another_and_leave_nothing():
    import deepspeed  # noqa: F401 - so that the world before has it

    from tests.deepspeed import engines

    before = world()
    losses = {}
    for stage in (0, 1, 2, 3, 2):
        with deepspeed_environment():
            losses[stage] = engines.train(engines.config(stage))
        assert world() == before, stage
    assert losses[0][-1] < losses[0][0]
    for stage in (1, 2, 3):
        assert losses[stage] == pytest.approx(losses[0], rel=1e-3)


@marked
@isolated(timeout_s=120)
def test_a_zero_3_model_in_a_stage_2_engine_is_deepspeeds_error_and_the_next_run_works():
    """Documented: a model that ZeRO-3 has taken apart is made anew."""
    from tests.deepspeed import engines

    model = engines.model()
    with deepspeed_environment():
        engines.train(engines.config(3), model)
    with pytest.raises((KeyError, RuntimeError)), deepspeed_environment():
        engines.train(engines.config(2), model)
    with deepspeed_environment():
        assert len(engines.train(engines.config(2))) == 4


@marked
@isolated(timeout_s=120)
def test_memory_does_not_grow_with_the_runs():
    import gc

    import torch

    from tests.deepspeed import engines

    def run():
        with deepspeed_environment():
            engines.train(engines.config(3, offload="cpu"), steps=3)
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)

    run()  # what is made once and kept
    assert run() == run()


@marked
@isolated(timeout_s=120)
def test_zero_init_makes_placeholders_that_train():
    import deepspeed

    from nbaccel.deepspeed.shape import measure
    from tests.deepspeed import engines

    settings = engines.config(3)
    with deepspeed_environment():
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = engines.model()
        assert {tuple(p.shape) for p in model.parameters()} == {(0,)}
        assert measure(model).total == measure(engines.model()).total
        losses = engines.train(settings, model)
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- transformers
def tiny_gpt2():
    from transformers import GPT2Config

    return GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)


@marked
@isolated(timeout_s=120)
def test_a_model_of_transformers_is_made_in_pieces_and_whole_again_afterwards():
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    from tests.deepspeed import engines

    with deepspeed_environment():
        kept = HfDeepSpeedConfig(engines.config(3))
        model = AutoModelForCausalLM.from_config(tiny_gpt2())
        assert {tuple(p.shape) for p in model.parameters()} == {(0,)}
    assert kept is not None
    assert not is_deepspeed_zero3_enabled(), "although the object lives on"
    model = AutoModelForCausalLM.from_config(tiny_gpt2())
    assert all(p.numel() for p in model.parameters())


@marked
@isolated(timeout_s=150)
def test_a_trainer_without_deepspeed_after_one_with_it_trains_without(tmp_path):
    """Transformers leaves ACCELERATE_USE_DEEPSPEED behind, and takes it for an order."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from tests.deepspeed import engines

    def fit(deepspeed):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            deepspeed=deepspeed,
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_config(tiny_gpt2())
        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return trainer

    settings = engines.config(2) | {"train_micro_batch_size_per_gpu": "auto"}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    before = world()
    with deepspeed_environment():
        assert fit(settings).is_deepspeed_enabled
    assert {name for name in os.environ if name.startswith("ACCELERATE")} == set()
    assert world()["environ"] == before["environ"]
    plain = fit(None)
    assert not plain.is_deepspeed_enabled
    assert type(plain.model_wrapped).__name__ == "GPT2LMHeadModel"
