from __future__ import annotations

import dataclasses

import pytest

from nbaccel.devices.tpu.chips import environment_of, generation_of_type, hosts_of, inspect_host
from tests.devices.tpu.hosts import (
    DRIVERS,
    HOSTS,
    XLA_DRIVERS,
    build_host,
    chips_on_bus,
    install_package,
)

EIGHT = dataclasses.replace(HOSTS["kaggle v5e-8"], environ={})
SOPHGO = "[console_scripts]\ntorch_tpu_info = torch_tpu.tools:main"


def notes_of(root, environ=None, host=EIGHT):
    build_host(host, root)
    found = inspect_host(
        host.environ if environ is None else environ,
        root,
        root / "no_proc",
        search_path=[str(root / "packages")],
        modules=(),
    )
    return found.notes


@pytest.mark.parametrize(
    ("environ", "modules", "has_chips", "where"),
    [
        ({}, ("google.colab",), True, "colab"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, (), True, "colab"),
        ({"COLAB_GPU": ""}, (), True, "colab"),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, (), False, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, (), True, "kaggle"),
        ({"KAGGLE_URL_BASE": "https://www.kaggle.com"}, ("google.colab",), True, "kaggle"),
        ({"KAGGLE_KERNEL_RUN_TYPE": ""}, (), True, "tpu_vm"),
        ({"JOB_COMPLETION_INDEX": "0"}, (), True, "gke"),
        ({"TPU_NAME": "mine"}, (), False, "tpu_vm"),
        ({}, (), True, "tpu_vm"),
        ({}, ("google.cloud",), False, ""),
        ({"PJRT_DEVICE": "CPU"}, (), False, ""),
    ],
)
def test_environments(environ, modules, has_chips, where):
    assert environment_of(environ, modules, has_chips=has_chips) == where


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


def test_an_ordinary_host_has_no_notes(tmp_path):
    environ = {
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_PROCESS_BOUNDS": "2,4,1",
        "TPU_VISIBLE_CHIPS": "0,1,2,3,4,5,6,7",
        "TPU_HOST_BOUNDS": "1,1,1",
        "PJRT_DEVICE": "tpu",
        "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": "/cache",
    }
    assert notes_of(tmp_path, environ) == ()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"TPU_PROCESS_BOUNDS": "1,1,1"},
            ["TPU_PROCESS_BOUNDS=1,1,1", "8 TPU chips", "no more workers than 1", "of its own"],
        ),
        ({"TPU_PROCESS_BOUNDS": "2,2,1"}, ["TPU_PROCESS_BOUNDS=2,2,1", "no more workers than 4"]),
        (
            {"TORCH_TPU_TOPOLOGY": "2,2,1", "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:1,"},
            ["TORCH_TPU_TOPOLOGY=2,2,1", "TORCH_TPU_SLICEBUILDER_ADDRESSES=", "another launch"],
        ),
        ({"PJRT_LOCAL_PROCESS_COUNT": "4"}, ["PJRT_LOCAL_PROCESS_COUNT=4", "another launch"]),
        ({"TPU_PROCESS_ADDRESSES": "local"}, ["TPU_PROCESS_ADDRESSES=local", "os.environ"]),
        ({"TPU_VISIBLE_CHIPS": "0,1"}, ["TPU_VISIBLE_CHIPS=0,1 hides 6 of 8", "num_processes"]),
        ({"TPU_VISIBLE_DEVICES": "3"}, ["TPU_VISIBLE_DEVICES=3 hides 7 of 8", "overwrites"]),
        ({"PJRT_DEVICE": "CPU"}, ["PJRT_DEVICE=CPU", "8 TPU chips", "set PJRT_DEVICE=TPU"]),
    ],
    ids=str,
)
def test_a_preset_is_told_with_what_to_do(tmp_path, environ, said):
    (note,) = notes_of(tmp_path, environ)
    assert [part for part in said if part not in note] == []
    assert note.count(". ") >= 1


def test_a_long_value_is_shortened(tmp_path):
    addresses = ",".join(f"localhost:{port}" for port in range(50000, 50008))
    (note,) = notes_of(tmp_path, {"TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses})
    assert "localhost:50000" in note
    assert "characters not shown" in note


@pytest.mark.parametrize(
    "environ", [{"TPU_PROCESS_BOUNDS": "many"}, {"TPU_PROCESS_BOUNDS": ""}, {"PJRT_DEVICE": ""}]
)
def test_what_says_nothing_is_not_told(tmp_path, environ):
    assert notes_of(tmp_path, environ) == ()


def test_presets_without_chips_are_nobodys_business(tmp_path):
    presets = {"PJRT_DEVICE": "CPU", "TPU_PROCESS_BOUNDS": "1,1,1", "TORCH_TPU_TOPOLOGY": "1,1,1"}
    assert inspect_host(presets, tmp_path, search_path=[]).notes == ()


# ------------------------------------------------------------------------ packages


def test_a_package_of_the_same_name_is_not_googles(tmp_path):
    host = dataclasses.replace(EIGHT, packages=XLA_DRIVERS)
    build_host(host, tmp_path)
    install_package(tmp_path / "packages", "torch_tpu", "2.1.0", entry_point=SOPHGO)
    found = inspect_host({}, tmp_path, tmp_path, search_path=[str(tmp_path / "packages")])
    assert found.torch_tpu == ""
    (note,) = found.notes
    assert note.startswith("The installed torch_tpu 2.1.0 is not Google's")
    assert "Uninstall it" in note


@pytest.mark.parametrize(
    ("torch", "driver", "said"),
    [
        ("2.10.1", ("torch_tpu", "0.2.0"), "torch_tpu 0.2.0 takes torch 2.11 to 2.15, got 2.10.1"),
        ("2.16.0", ("torch_tpu", "0.2.0"), "torch_tpu 0.2.0 takes torch 2.11 to 2.15, got 2.16.0"),
        ("2.11.0", ("torch_tpu", "0.2.0"), ""),
        ("2.15.1+cpu", ("torch_tpu", "0.2.0"), ""),
        ("2.13.0", ("torch_xla", "2.9.0"), "torch_xla 2.9.0 takes torch 2.9, got 2.13.0"),
        ("2.9.1", ("torch_xla", "2.9.0"), ""),
    ],
)
def test_a_torch_that_a_driver_does_not_take(tmp_path, torch, driver, said):
    packages = (("torch", torch), driver, ("libtpu", "0.0.52"))
    notes = notes_of(tmp_path, host=dataclasses.replace(EIGHT, packages=packages))
    assert len(notes) == bool(said)
    assert all(note.startswith(said) for note in notes)


@pytest.mark.parametrize(("packages", "told"), [(DRIVERS[:2], True), (DRIVERS, False), ((), False)])
def test_a_driver_without_libtpu(tmp_path, packages, told):
    notes = notes_of(tmp_path, host=dataclasses.replace(EIGHT, packages=packages))
    assert any(note.startswith("No libtpu is installed") for note in notes) is told


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("container that hides /sys", {}, "counts 4 TPU chips here and torch_tpu 0: it goes by"),
        ("tpu vm v3-8, /dev/accel", {"packages": DRIVERS}, "it knows no chips of v3"),
        ("tpu vm v3-8, /dev/accel", {"packages": ()}, "it knows no chips of v3"),
        (
            "tpu vm v3-8, /dev/accel",
            {"packages": DRIVERS, "bus": chips_on_bus("v4", 0, 4), "environ": {}},
            "below /dev/vfio, and this host has /dev/accel0, /dev/accel1",
        ),
    ],
)
def test_both_counts_are_shown_where_they_differ(tmp_path, name, changes, said):
    notes = notes_of(tmp_path, host=dataclasses.replace(HOSTS[name], **changes))
    assert len([note for note in notes if said in note and "torch_tpu 0: " in note]) == 1


def test_counts_of_a_driver_that_nobody_uses_are_not_shown(tmp_path):
    host = dataclasses.replace(HOSTS["container that hides /sys"], packages=XLA_DRIVERS)
    assert notes_of(tmp_path, host=host) == ()


def test_chips_that_were_not_handed_out(tmp_path):
    host = dataclasses.replace(EIGHT, nodes=())
    (note,) = notes_of(tmp_path, host=host)
    assert note.startswith("8 TPU chips on the PCI bus, and this process could open none")


def test_a_slice_of_several_hosts_says_what_is_driven(tmp_path):
    (note,) = notes_of(tmp_path, host=HOSTS["one host of a v5e-16 slice"])
    assert "one launch per host" in note
    assert "number 2 of 4" in note
