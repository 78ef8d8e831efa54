from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbaccel.devices.tpu.chips import (
    count_chips,
    generation_of_type,
    holders_of,
    hosts_of,
    inspect_host,
)
from tests.devices.tpu.hosts import (
    HOSTS,
    PCI_ID,
    XLA_DRIVERS,
    RecordedHost,
    add_pci_device,
    build_host,
    install_package,
)
from tests.programs import run_program

CHIP = ("0x0063", "")
NETWORK = ("0x0042", "")
DISK = ("0x001f", "")
HINT = {"TPU_WORKER_ID": "0"}


def inspect(host, root):
    return inspect_host(host.environ, build_host(host, root), search_path=[str(root / "packages")])


@pytest.mark.parametrize("host", HOSTS.values(), ids=list(HOSTS))
def test_a_host_is_read_from_its_files(host, tmp_path):
    found = inspect(host, tmp_path)

    assert dataclasses.replace(found, notes=()) == host.expected
    assert len(found.notes) == len(host.notes), found.notes
    for note, beginning in zip(found.notes, host.notes, strict=True):
        assert note.startswith(beginning)
    assert count_chips(host.environ, tmp_path) == found.chips


@pytest.mark.parametrize(
    ("nodes", "bus", "environ", "chips"),
    [
        ((), (), {}, 0),
        ((), (), HINT, 0),
        (("accel0", "accel1", "accel2", "accel3"), (), {}, 4),
        (("accel/accel0",), (), {}, 0),  # Linux's own folder for accelerators of other makers
        (("vfio/0", "vfio/1", "vfio/vfio"), (CHIP, CHIP), {}, 2),
        (("vfio/0",), (CHIP, CHIP, CHIP, CHIP), {}, 1),
        ((), (CHIP, CHIP), {}, 0),  # on the bus, not handed to this container
        (("vfio/0", "vfio/1"), (NETWORK, DISK), {}, 0),
        (("vfio/0", "vfio/1"), (), HINT, 2),
        (("vfio/0", "vfio/1"), (), {"PJRT_DEVICE": "tpu"}, 2),
        (("vfio/0",), (), {"PJRT_DEVICE": "CPU"}, 0),
        (("vfio/0",), (), {"TPU_NAME": ""}, 0),
        # Other devices handed out by vfio are not chips, where the bus tells the groups.
        (("vfio/7", "vfio/3"), (("0x0063", "3"), ("0x0063", "4")), {}, 1),
        (("vfio/7",), (("0x0063", "3"),), {}, 0),
        (("vfio/3",), (("0x0063", "3"), ("0x0063", "3")), {}, 2),  # two chips in a group
    ],
)
def test_chips(tmp_path, nodes, bus, environ, chips):
    build_host(RecordedHost(nodes=nodes, bus=bus), tmp_path)
    assert count_chips(environ, tmp_path) == chips


@pytest.mark.parametrize(
    ("environ", "is_host"),
    [
        ({}, False),
        ({"TPU_NAME": ""}, False),
        ({"COLAB_RELEASE_TAG": "release-colab"}, False),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, False),
        ({"JOB_COMPLETION_INDEX": "0"}, False),
        ({"TPU_NAME": "mine"}, True),
        ({"PJRT_DEVICE": "CPU"}, True),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, True),
    ],
)
def test_a_variable_alone_is_a_host_without_chips(tmp_path, environ, is_host):
    # Another maker, with a number of Google's.
    add_pci_device(tmp_path, 0, "0x0063", "0", vendor="0x10de")
    found = inspect_host(environ, tmp_path, search_path=[])
    assert (found is not None) is is_host
    if found is not None:
        assert (found.chips, found.process_counts, found.device_files) == (0, (), ())
        assert found.notes == ()


@pytest.mark.parametrize(("accelerator_type", "generation"), [("v3-8", "v3"), ("", "v2")])
def test_v2_and_v3_are_told_apart_by_their_name_alone(tmp_path, accelerator_type, generation):
    host = RecordedHost(
        nodes=("accel0",),
        bus=((PCI_ID["v3"], ""),),
        environ={"TPU_ACCELERATOR_TYPE": accelerator_type},
        packages=(("torch", "2.9.0"), ("torch_xla", "2.9.0"), ("libtpu", "0.0.21")),
    )
    found = inspect(host, tmp_path)
    assert (found.generation, found.threads_per_process) == (generation, 2)


def test_the_bus_knows_better_than_the_name_and_files_are_in_the_order_of_their_numbers(tmp_path):
    groups = ("10", "9", "11")
    host = RecordedHost(
        nodes=tuple(f"vfio/{group}" for group in groups),
        bus=tuple((PCI_ID["v6e"], group) for group in groups),
        environ={"TPU_ACCELERATOR_TYPE": "v4-8"},
    )
    found = inspect(host, tmp_path)
    assert found.generation == "v6e"
    assert found.device_files == ("/dev/vfio/9", "/dev/vfio/10", "/dev/vfio/11")


@pytest.mark.parametrize(
    ("environ", "installed", "libtpu"),
    [
        ({}, (), ""),
        ({}, ("libtpu",), "1.0"),
        ({}, ("libtpu-nightly",), "1.0"),
        ({"TPU_LIBRARY_PATH": "/lib/libtpu.so"}, ("libtpu",), "/lib/libtpu.so"),
        ({"PTXLA_TPU_LIBRARY_PATH": "/lib/libtpu.so"}, (), "/lib/libtpu.so"),
        # As the drivers leave it behind when they are imported.
        ({"TPU_LIBRARY_PATH": "{packages}/libtpu/libtpu.so"}, ("libtpu",), "1.0"),
        ({}, ("torch_xla",), ""),
        ({}, ("torch_xla", "torch_xla/lib/libtpu.so"), "{packages}/torch_xla/lib/libtpu.so"),
    ],
)
def test_libtpu(tmp_path, environ, installed, libtpu):
    packages = tmp_path / "packages"
    for name in installed:
        if name.endswith(".so"):
            (packages / name).parent.mkdir(parents=True)
            (packages / name).touch()
        else:
            install_package(packages, name, "1.0")
    filled = {name: value.format(packages=packages) for name, value in environ.items()}
    found = inspect_host(filled | HINT, tmp_path, search_path=[str(packages)])
    assert found.libtpu == libtpu.format(packages=packages)


HOLD = "import sys; held = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


def test_processes_that_hold_a_chip_are_found_and_this_one_counts_too(tmp_path):
    build_host(HOSTS["tpu vm v6e-4"], tmp_path)
    files = [str(tmp_path / f"dev/vfio/{group}") for group in range(4)]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, files[2]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "open\n"
        assert holders_of(files) == (process.pid,)
        with Path(files[3]).open():
            assert holders_of(files) == tuple(sorted((os.getpid(), process.pid)))
    finally:
        process.communicate(timeout=60)
    assert holders_of(files) == ()


LOOK = """
import sys
from pathlib import Path
from nbaccel.devices.tpu.chips import inspect_host
listed = []
LISTINGS = ("os.listdir", "os.scandir")
sys.addaudithook(lambda event, args: event in LISTINGS and listed.append(str(args[0])))
found = inspect_host({}, Path(sys.argv[1]))
heavy = {"torch", "torch_tpu", "torch_xla", "libtpu", "requests"} & sys.modules.keys()
print(found is not None, any(folder.startswith("/proc") for folder in listed), sorted(heavy))
"""


@pytest.mark.parametrize("has_chips", [False, True])
def test_looking_imports_nothing_and_searches_no_processes(tmp_path, has_chips):
    if has_chips:
        build_host(HOSTS["tpu vm v4-8"], tmp_path)
    done = run_program([sys.executable, "-c", LOOK, str(tmp_path)])
    assert done.stdout == f"{has_chips} False []\n"


EIGHT = dataclasses.replace(HOSTS["kaggle v5e-8"], environ={})
SOPHGO = "[console_scripts]\ntorch_tpu_info = torch_tpu.tools:main"


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({}, (1, 0)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, (1, 0)),
        ({"TPU_WORKER_HOSTNAMES": ""}, (1, 0)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, (2, 1)),
        ({"TPU_WORKER_HOSTNAMES": "a,b,", "JOB_COMPLETION_INDEX": "1"}, (2, 1)),
        ({"TPU_WORKER_ID": "one"}, (1, 0)),
    ],
)
def test_hosts(environ, hosts):
    assert hosts_of(environ) == hosts


@pytest.mark.parametrize(
    ("accelerator_type", "generation"),
    [
        ("v2-8", "v2"),
        ("v3-32", "v3"),
        ("v4-8", "v4"),
        ("v5litepod-16", "v5e"),
        ("v5e-8", "v5e"),
        ("v5p-8", "v5p"),
        ("v6e-4", "v6e"),
        ("tpu7x-8", "7x"),
        ("v5-8", ""),
        ("v9e-8", ""),
        ("TPU", ""),
        ("", ""),
    ],
)
def test_names_of_accelerators(accelerator_type, generation):
    assert generation_of_type(accelerator_type) == generation


def test_a_package_of_the_same_name_is_not_googles(tmp_path):
    host = dataclasses.replace(EIGHT, packages=XLA_DRIVERS)
    build_host(host, tmp_path)
    install_package(tmp_path / "packages", "torch_tpu", "2.1.0", entry_point=SOPHGO)
    found = inspect_host({}, tmp_path, search_path=[str(tmp_path / "packages")])
    assert found.torch_tpu == ""
    (note,) = found.notes
    assert note.startswith("The installed torch_tpu 2.1.0 is not Google's")
    assert "Uninstall it" in note


OF_TPU, OF_XLA = ("torch_tpu", "0.2.0"), ("torch_xla", "2.9.0")
LIBTPU = ("libtpu", "0.0.52")


@pytest.mark.parametrize(
    ("torch", "others", "said"),
    [
        ("2.10.1", (OF_TPU, LIBTPU), "torch_tpu 0.2.0 takes torch 2.11 to 2.15, got 2.10.1"),
        ("2.16.0", (OF_TPU, LIBTPU), "torch_tpu 0.2.0 takes torch 2.11 to 2.15, got 2.16.0"),
        ("2.11.0", (OF_TPU, LIBTPU), ""),
        ("2.15.1+cpu", (OF_TPU, LIBTPU), ""),
        ("2.13.0", (OF_XLA, LIBTPU), "torch_xla 2.9.0 takes torch 2.9, got 2.13.0"),
        ("2.9.1", (OF_XLA, LIBTPU), ""),
        ("2.13.0", (OF_TPU,), "No libtpu is installed"),
    ],
)
def test_a_torch_that_a_driver_does_not_take_and_a_driver_without_libtpu(
    tmp_path, torch, others, said
):
    host = dataclasses.replace(EIGHT, packages=(("torch", torch), *others))
    notes = inspect(host, tmp_path).notes
    assert len(notes) == bool(said)
    assert all(note.startswith(said) for note in notes)
