"""The tables, by themselves and against what the drivers would set: see `drivers_own`."""

from __future__ import annotations

import json
import sys

import pytest

from nbaccel.devices.tpu.chips import (
    BYTES_PER_CHIP,
    STALE_VARIABLES,
    legal_counts,
    threads_per_process,
    torch_tpu_variables,
    torch_xla_variables,
    without_stale,
)
from nbaccel.devices.tpu.drivers import find_packages
from nbaccel.errors import ConfigError
from tests.devices.tpu.hosts import HOSTS, PCI_ID, build_host
from tests.programs import run_program

GENERATIONS = tuple(BYTES_PER_CHIP)
PORTS = tuple(range(8476, 8484))
INSTALLED = find_packages({})
NEEDS_TORCH_TPU = pytest.mark.skipif(not INSTALLED.torch_tpu, reason="torch_tpu is not installed")


@pytest.mark.parametrize(
    ("generation", "chips", "counts"),
    [
        ("v5e", 8, (1, 4, 8)),
        ("v6e", 4, (1, 4)),
        ("v6e", 1, (1,)),
        ("v5e", 3, (1,)),
        ("v4", 4, (1, 2, 4)),
        ("v5p", 8, (1, 2, 4, 8)),
        ("v3", 4, (1, 4)),
        ("v2", 3, (1,)),
        ("7x", 4, (1, 2, 4)),
        ("7x", 1, (1,)),
        ("", 8, (1, 4, 8)),
        ("v9", 8, (1, 4, 8)),
        ("v5e", 0, ()),
        ("", 0, ()),
    ],
)
def test_legal_counts(generation, chips, counts):
    assert legal_counts(generation, chips) == counts
    # Only the oldest have two threads.
    assert threads_per_process(generation) == (2 if generation in ("v2", "v3") else 1)


@pytest.mark.parametrize(
    ("generation", "num_workers", "shape"),
    [
        ("", 4, "2,2,1"),
        ("", 8, "2,4,1"),
        ("v5e", 8, "2,4,1"),
        ("v4", 8, "2,2,2"),
        ("v5p", 2, "1,2,1"),
    ],
)
def test_shapes(generation, num_workers, shape):
    ports = PORTS[:num_workers]
    addresses = ",".join(f"localhost:{port}" for port in ports)
    assert torch_tpu_variables(generation, num_workers, ports) == {
        "TORCH_TPU_TOPOLOGY": shape,
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses,
    }
    of_last = torch_xla_variables(generation, num_workers, num_workers - 1, ports)
    assert of_last == {
        "PJRT_DEVICE": "TPU",
        "PJRT_LOCAL_PROCESS_RANK": str(num_workers - 1),
        "PJRT_LOCAL_PROCESS_COUNT": str(num_workers),
        "TPU_VISIBLE_CHIPS": str(num_workers - 1),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": shape,
        "CLOUD_TPU_TASK_ID": str(num_workers - 1),
        "TPU_PROCESS_ADDRESSES": addresses,
        "TPU_PROCESS_PORT": str(ports[-1]),
    }


@pytest.mark.parametrize("generation", [*GENERATIONS, ""])
def test_what_is_legal_has_a_shape_and_nothing_else_has(generation):
    # torch_tpu has no table for v2 and v3, where one worker needs none.
    legal = (1,) if generation in ("v2", "v3") else legal_counts(generation, 8)
    for count in range(1, 9):
        if count in legal:
            assert bool(torch_tpu_variables(generation, count, PORTS[:count])) is (count > 1)
            continue
        said = rf"^num_processes={count} .*torch_tpu.* Give num_proc"
        with pytest.raises(ConfigError, match=said):
            torch_tpu_variables(generation, count, PORTS[:count])
    variables = torch_xla_variables("v5e", 1, 0, ())
    assert variables["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert not {"TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT"} & variables.keys()


@pytest.mark.parametrize(
    ("generation", "num_workers", "remedy"),
    [("v5e", 2, "1, 4 or 8"), ("v4", 3, "1, 2, 4 or 8"), ("v3", 8, "1 or 4"), ("7x", 8, "1 or 4")],
)
def test_a_wrong_count_is_refused_with_the_right_ones(generation, num_workers, remedy):
    with pytest.raises(ConfigError) as caught:
        torch_xla_variables(generation, num_workers, 0, PORTS[:num_workers])
    (message,) = caught.value.mistakes
    assert message.startswith(f"num_processes={num_workers} is not supported on TPU {generation}")
    assert message.endswith(f"Give num_processes={remedy}.")


def test_a_worker_inherits_nothing_that_a_launch_sets():
    left_behind = {
        **torch_tpu_variables("v5e", 4, PORTS[:4]),
        **torch_xla_variables("v5e", 4, 1, PORTS[:4]),
        "TORCH_TPU_XPROF_SESSION_ID": "17",
        "TPU_VISIBLE_DEVICES": "1",
        "TPU_HOST_BOUNDS": "2,2,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": "10.0.0.2:8476",
    }
    kept = {
        "HOME": "/home/me",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_ID": "0",
        "TPU_LIBRARY_PATH": "/lib/libtpu.so",
        "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": "/cache",
        "LIBTPU_INIT_ARGS": "--xla_flag",
        "PJRT_CPU_ASYNC_CLIENT": "0",
    }
    assert without_stale({**left_behind, **kept}) == kept
    assert not any("*" in name.rstrip("*") for name in STALE_VARIABLES)


def drivers_own(script, *arguments):
    """What a driver says, in a process of its own: importing one changes torch and the process."""
    variables = {"PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TPU_SKIP_MDS_QUERY": "1"}
    done = run_program([sys.executable, "-c", script, *arguments], check=False, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


TORCH_TPU_SAYS = """
import json, os, pathlib, sys, types
from torch_tpu._internal.distributed import distributed
from torch_tpu._internal.utils import hardware

NAMES = ("TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES")

def launch_env(device_id, count):
    table = hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID[device_id]
    hardware._scan_pci_tpus = lambda: (8, table)
    reader, writer = os.pipe()
    # A process each: the values are remembered in the environment and beside it.
    if os.fork() == 0:
        said = None
        try:
            distributed.set_tpu_launch_env(nproc_per_node=count)
            said = {name: os.environ[name] for name in NAMES}
        except RuntimeError as error:
            assert "No TPU topology found" in str(error), error
        finally:
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
    os.close(writer)
    said = json.loads(open(reader).read())
    os.wait()
    return said

def scanned(root):
    hardware.pathlib = types.SimpleNamespace(Path=lambda path: pathlib.Path(root + path))
    return scan()[0]

scan = hardware._scan_pci_tpus
counts = {root: scanned(root) for root in sys.argv[2:]}
hardware.pathlib = pathlib
ids = json.loads(sys.argv[1])
versions = {version.value: size for version, size in hardware._HBM_BYTES_PER_CHIP.items()}
print(json.dumps({
    "launch": {g: {n: launch_env(i, n) for n in range(1, 9)} for g, i in ids.items()},
    "bytes": {g: versions[hardware._PCI_DEVICE_ID_TO_NAME[i]] for g, i in ids.items()},
    "known": sorted(hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID),
    "counts": counts,
}))
"""
TORCH_TPU_IDS = {name: number for name, number in PCI_ID.items() if name != "v3"}


@pytest.fixture(scope="module")
def torch_tpu_says(tmp_path_factory):
    roots = {
        name: build_host(host, tmp_path_factory.mktemp("host")) for name, host in HOSTS.items()
    }
    said = drivers_own(TORCH_TPU_SAYS, json.dumps(TORCH_TPU_IDS), *map(str, roots.values()))
    counts = {name: said["counts"][str(root)] for name, root in roots.items()}
    assert counts == {name: host.expected.torch_tpu_chips for name, host in HOSTS.items()}
    assert said["known"] == sorted(TORCH_TPU_IDS.values())
    assert said["bytes"] == {name: BYTES_PER_CHIP[name] for name in TORCH_TPU_IDS}
    return said


@NEEDS_TORCH_TPU
@pytest.mark.parametrize("generation", TORCH_TPU_IDS)
def test_torch_tpu_would_set_the_same(torch_tpu_says, generation):
    of_counts = {int(count): said for count, said in torch_tpu_says["launch"][generation].items()}
    assert set(of_counts) == set(range(1, 9))
    with_shape = {count for count, said in of_counts.items() if said is not None}
    # One worker has no variables at all, so that it may be one where torch_tpu knows no shape.
    assert {*with_shape, 1} == set(legal_counts(generation, 8))
    for count in with_shape - {1}:
        addresses = of_counts[count]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        assert torch_tpu_variables(generation, count, ports) == of_counts[count]
