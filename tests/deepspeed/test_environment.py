"""`deepspeed_environment()`: real DeepSpeed in one process, and nothing left of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nbaccel.deepspeed import environment, library
from nbaccel.deepspeed.environment import deepspeed_environment
from nbaccel.errors import ConfigError, MissingBackend, PlatformUnsupported, PortTaken, UnsafeMoment
from tests.deepspeed.advisor.models import machine
from tests.deepspeed.engines import world
from tests.deepspeed.needs import marked
from tests.deepspeed.programs import told_by
from tests.programs import run_program

pytestmark = pytest.mark.slow

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def test_what_cannot_be_asked_for_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port={port} is taken by this very process") as error:
            deepspeed_environment(port=port)
    assert error.value.port == port
    assert "Leave port out" in str(error.value)
    with pytest.raises(ConfigError, match=r"timeout_s=0 is not positive.*600"):
        deepspeed_environment(timeout_s=0)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1:2"])
def test_a_device_of_another_kind_is_refused(device):
    with pytest.raises(ConfigError, match=rf"device='{device}' is not supported.*cuda:1"):
        deepspeed_environment(device=device)


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(environment, "inspect_machine", lambda: machine(1))
    with pytest.raises(ConfigError, match=r'"cuda:1" is not there.*cuda:0 \(a GPU\).*one of these'):
        environment._check_gpu(1)
    has_none = replace(machine(0), gpu_note="no driver")
    monkeypatch.setattr(environment, "inspect_machine", lambda: has_none)
    with pytest.raises(ConfigError, match=r"no GPU \(no driver\).*device='cpu'"):
        environment._check_gpu(0)


# ---------------------------------------------------------------- what compiles
def program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_ninja_beside_python_is_found_and_goes_before_the_systems(monkeypatch, tmp_path):
    system, own = (program(tmp_path / name / "ninja").parent for name in ("system", "bin"))
    monkeypatch.setattr(library.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(system))
    assert library.path_with_ninja() == str(system)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    both = os.pathsep.join(map(str, (own, system)))
    for given in (system, both):
        monkeypatch.setenv("PATH", str(given))
        assert library.path_with_ninja() == both
    monkeypatch.setenv("PATH", "/nowhere")
    assert library.path_with_ninja() == f"{own}{os.pathsep}/nowhere"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingBackend, match=r"PATH \(/nowhere\).*pip install ninja"):
        library.path_with_ninja()


def test_a_missing_compiler_is_told_unless_the_operation_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(PlatformUnsupported, match=r"'no-such-compiler'.*apt-get install g\+\+"):
        library.ready_to_build("cpu")
    built = tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    built.parent.mkdir()
    built.touch()
    library.ready_to_build("cpu")


def test_the_lock_of_a_build_that_goes_on_stays_and_is_removed_after(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    hold = f"held = open({str(lock)!r}); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout.readline() == b"held\n"
        assert library.remove_forgotten_locks() == ()
        assert lock.exists()
        builder.communicate(b"\n")
    assert library.remove_forgotten_locks() == (lock,)
    assert not lock.exists()
    lock.touch()  # and another rank removes it after this one's last look
    pauses = iter([None, None, lock.unlink])
    monkeypatch.setattr(library.time, "sleep", lambda _: (do := next(pauses)) and do())
    assert library.remove_forgotten_locks() == (lock,)


# ---------------------------------------------------------------- in force, and over
@pytest.fixture(scope="module")
def runs():
    """What became of real engines, one after another in one process."""
    return told_by("tests.deepspeed.engines", timeout_s=800)


@pytest.fixture(scope="module")
def hf_runs():
    """The same for transformers' way to use them."""
    return told_by("tests.deepspeed.transformers_runs", timeout_s=800)


@marked
def test_it_is_in_force_at_once_and_undone_by_close():
    import deepspeed
    import torch.distributed as dist

    before = world()
    opened = deepspeed_environment()
    assert [os.environ[name] for name in NAMES] == [
        *("0", "0", "1", "1", "127.0.0.1", str(opened.port))
    ]
    assert (opened.device, opened.backend) == ("cpu", "gloo")
    assert dist.get_world_size() == 1
    addresses = set(world()["listening"])
    assert ("127.0.0.1", opened.port) in addresses, "it is served already"
    assert {address for address, _ in addresses} == {"127.0.0.1"}, "the group's own port, too"
    opened.close()
    opened.close()
    assert world() == before
    assert deepspeed.comm.comm.cdb is None
    assert opened.closed


@marked
def test_it_begins_anew_but_not_inside_a_block():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with deepspeed_environment(port=port) as opened:
        assert opened.port == port
        assert os.environ["MASTER_PORT"] == str(port)
    first = deepspeed_environment()
    with deepspeed_environment() as second:
        assert first.closed
        assert not second.closed
    assert second.closed
    with deepspeed_environment() as outer:
        with pytest.raises(UnsafeMoment, match=r"is in force, from a `with` block"):
            deepspeed_environment()
        assert not outer.closed
    with pytest.raises(UnsafeMoment, match=r"was closed.*Call deepspeed_environment\(\) again"):
        outer.__enter__()


@marked
def test_an_error_leaves_nothing_whenever_it_comes():
    before = world()
    with pytest.raises(ZeroDivisionError), deepspeed_environment():
        raise ZeroDivisionError
    assert world() == before
    with pytest.raises(ConfigError, match="not there"):
        deepspeed_environment(device="cuda:77")
    with pytest.raises(RuntimeError):
        deepspeed_environment(timeout_s=1e-9)  # torch has no time to find its own store
    assert world() == before


@marked
def test_a_device_that_deepspeed_can_no_longer_take_is_refused():
    """It chooses when it is imported, once in the life of a process."""
    import deepspeed

    with pytest.raises(UnsafeMoment, match=r"device='cuda' comes too late.*settled on cpu"):
        environment._chosen_device(deepspeed, "cuda")


@marked
def test_engines_train_one_after_another_hold_what_was_estimated_and_leave_nothing(runs):
    of_stage_0 = runs["trained"][0]["losses"]
    assert of_stage_0[-1] < of_stage_0[0]
    for run in runs["trained"]:
        assert run["losses"] == pytest.approx(of_stage_0, rel=0.02), run["settings"]
        assert run["left"] == {}, (run["settings"], "variables, process group, ports, threads")
        # All tensors alive when the optimizer steps.
        assert run["estimated"] == pytest.approx(run["measured"], rel=0.05), run["settings"]
    # The same configuration twice at the end: nothing may come with the second.
    *_, first, second = (run["live"] for run in runs["trained"])
    assert first == second


@marked
def test_zero_init_makes_placeholders_that_train_and_stage_2_refuses(runs):
    found = runs["zero_init"]
    assert found["shapes"] == [[0]]
    assert found["counted"] == found["really"]
    assert found["losses"][-1] < found["losses"][0]
    # The error is DeepSpeed's own, and documented: make the model anew for each engine.
    assert runs["zero_init"]["stage_2"] in ("KeyError", "IndexError", "RuntimeError")
    assert runs["trained"][-1]["losses"], "the runs came after it"


@marked
def test_an_environment_left_open_is_closed_at_exit():
    code = (
        "from nbaccel.deepspeed.environment import deepspeed_environment\n"
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('group at exit:', dist.is_initialized()))\n"
        "kept = deepspeed_environment()\n"
    )
    assert "group at exit: False" in run_program([sys.executable, "-c", code]).stdout


# ---------------------------------------------------------------- transformers
@marked
def test_transformers_makes_models_in_pieces_and_its_trainers_leave_the_process_as_it_was(hf_runs):
    for kind, found in hf_runs["pieces"].items():
        assert found["made"] == found["read"] == [[0]], kind
        assert found["same"], "the pieces of what was read from a folder are its weights"
        assert not found["zero_3_afterwards"], "although the configuration's object lives on"
        assert [0] not in found["afterwards"]
    for how, run in hf_runs["trained"].items():
        engine = "T5ForConditionalGeneration" if how == "none" else "DeepSpeedEngine"
        assert run["wrapped"] == engine
        assert run["losses"][-1] < run["losses"][0]
        assert not run.get("left"), how
    # Transformers leaves ACCELERATE_USE_DEEPSPEED behind, and takes it for an order.
    assert hf_runs["trained"]["path"]["trap"], "it is there while the environment is open"
    assert not hf_runs["trained"]["none"]["trap"]
