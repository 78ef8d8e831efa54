"""What a machine has of TPUs, what is odd about it, and how workers are laid out over the chips.

It is read from device files, the PCI bus, ``/proc`` and the environment: no driver is imported, no
runtime is touched and nothing is asked over the network (off Google's cloud a question to the
metadata server takes half a minute).

A driver's workers are one process per chip, which must be told the shape of all chips and where the
others listen. The drivers keep what an earlier launch has left in a variable: so workers get every
value, and `STALE_VARIABLES` are taken away from them. Nothing here has run on a chip: the values
are those of torch_tpu 0.2.0 and torch_xla 2.9.0, with which the tests compare them.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun
from nbaccel.config.capabilities import TPU_SIGNS
from nbaccel.devices.tpu import drivers
from nbaccel.plan.inventory import TpuHost

_GIB = 2**30

BYTES_PER_CHIP: Mapping[str, int] = {
    "v2": 16 * _GIB,
    "v3": 32 * _GIB,
    "v4": 32 * _GIB,
    "v5e": 16 * _GIB,
    "v5p": 95 * _GIB,
    "v6e": 32 * _GIB,
    "7x": 192 * _GIB,
}
"""Memory of a chip. v4 and later as in torch_tpu 0.2.0 (``_internal/utils/hardware.py``), v2 and v3
as in Google's documentation of Cloud TPU. Of v2, v3 and 7x each of two devices has one half."""

_V2_BOUNDS = {1: "1,1,1", 4: "2,2,1"}
_V4_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
_V5E_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_BOUNDS: Mapping[str, Mapping[int, str]] = {
    "v2": _V2_BOUNDS,
    "v3": _V2_BOUNDS,
    "v4": _V4_BOUNDS,
    "v5p": _V4_BOUNDS,
    "v5e": _V5E_BOUNDS,
    "v6e": _V5E_BOUNDS,
    # torch_tpu counts the two cores of a 7x chip as two devices; the fourth number is cores.
    "7x": {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
    # An unknown generation: the shapes that most of them share.
    "": _V5E_BOUNDS,
}
# torch_xla starts one process per PCI device and appends the cores to the shape of the chips. That
# such a process then has two devices is believed and has not been seen.
_XLA_BOUNDS_OF_7X = {1: "1,1,1", 4: "2,2,1,2"}

STALE_VARIABLES: frozenset[str] = frozenset(
    {
        "TORCH_TPU_TOPOLOGY",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES",
        "TORCH_TPU_XPROF_SESSION_ID",
        "TORCH_TPU_BASE_PORT",
        "TORCH_TPU_DEVICES_PER_HOST",
        "PJRT_DEVICE",
        "CLOUD_TPU_TASK_ID",
        # Other names of the bounds: torch_xla reads them, torch_tpu's runtime sets them.
        "TPU_HOST_BOUNDS",
        # Prefixes end with a star.
        "PJRT_LOCAL_PROCESS_*",
        "TPU_CHIPS_PER_*",
        "TPU_MESH_CONTROLLER_*",
        "TPU_PROCESS_*",
        "TPU_VISIBLE_*",
    }
)
"""Variables that a worker must not inherit: each describes one launch, and drivers keep what they
find. A name that ends with ``*`` stands for all that begin so. Settings of the user and facts about
the host (``LIBTPU_INIT_ARGS``, ``TPU_WORKER_ID``) are not among them."""


def without_stale(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker may inherit of an environment."""
    return {
        name: value
        for name, value in environ.items()
        if not any(fnmatch.fnmatchcase(name, stale) for stale in STALE_VARIABLES)
    }


def threads_per_process(generation: str) -> int:
    """Replicas, a thread each, of a worker that has one chip."""
    return 2 if generation in ("v2", "v3") else 1


def legal_counts(generation: str, chips: int) -> tuple[int, ...]:
    """How many workers a host can have: libtpu knows no other shapes."""
    if chips < 1:
        return ()
    # One worker needs no shape: it has the driver's default.
    return tuple(sorted({1, *(count for count in _bounds_of(generation) if count <= chips)}))


def torch_tpu_variables(generation: str, num_workers: int, ports: Sequence[int]) -> dict[str, str]:
    """What torch_tpu's workers must agree on, as its ``set_tpu_launch_env`` would set it."""
    if num_workers == 1:
        return {}
    # torch_tpu 0.2.0 has no table for v2 and v3.
    bounds = {} if generation in ("v2", "v3") else _bounds_of(generation)
    return {
        "TORCH_TPU_TOPOLOGY": _chosen_bounds("torch_tpu", generation, num_workers, bounds),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": _local_addresses(ports),
    }


def torch_xla_variables(
    generation: str, num_workers: int, local_rank: int, ports: Sequence[int]
) -> dict[str, str]:
    """What a worker of torch_xla needs, as its ``tpu.configure_topology`` would set it."""
    known_bounds = _XLA_BOUNDS_OF_7X if generation == "7x" else _bounds_of(generation)
    variables = {
        "PJRT_DEVICE": "TPU",
        "PJRT_LOCAL_PROCESS_RANK": str(local_rank),
        "PJRT_LOCAL_PROCESS_COUNT": str(num_workers),
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": _chosen_bounds("torch_xla", generation, num_workers, known_bounds),
        # The workers of this host are all there are: ranks count from 0, whatever its own number.
        "CLOUD_TPU_TASK_ID": str(local_rank),
    }
    if num_workers == 1:
        return variables
    return variables | {
        "TPU_PROCESS_ADDRESSES": _local_addresses(ports),
        "TPU_PROCESS_PORT": str(ports[local_rank]),
    }


def _bounds_of(generation: str) -> Mapping[int, str]:
    return _BOUNDS.get(generation, _BOUNDS[""])


def _chosen_bounds(name: str, generation: str, num_workers: int, bounds: Mapping[int, str]) -> str:
    if num_workers in bounds:
        return bounds[num_workers]
    text = alternatives(sorted({1, *bounds}))
    raise ConfigError(
        f"num_processes={num_workers} is not supported on TPU {generation or 'chips'} by "
        f"{name}, which knows no layout of so many chips of one host. The workers could not "
        f"find each other. Give num_processes={text}."
    )


def alternatives(counts: Sequence[int]) -> str:
    """Numbers to choose from: ``1, 4 or 8``."""
    *others, last_count = map(str, counts)
    return " or ".join(filter(None, (", ".join(others), last_count)))


def _local_addresses(ports: Sequence[int]) -> str:
    return ",".join(f"localhost:{port}" for port in ports)


# Google's other devices have the same vendor. 0x0027 is v2 or v3; 0x0056 has no public name.
_GENERATIONS = {
    "0x0027": "v2",
    "0x0056": "",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}
_COUNTED_BY_TORCH_TPU = frozenset({"0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_ACCEL_FILE = re.compile(r"accel\d+")
_VFIO_GROUP = re.compile(r"\d+")


_BusChip = tuple[str, str]
"""Device id and IOMMU group of a chip on the PCI bus; no group where the bus does not tell it."""


def inspect_host(
    environ: Mapping[str, str], root: Path = Path("/"), *, search_path: Sequence[str] | None = None
) -> TpuHost | None:
    """Look for TPUs on this machine."""
    chips = _read_bus(root)
    num_chips, paths = _find_files(environ, root, chips)
    speaks_of_tpus = any(environ.get(name) for name in TPU_SIGNS.variables)
    if not num_chips and not chips and not speaks_of_tpus:
        return None
    counted_chips = [
        device_id
        for device_id, group in chips
        if device_id in _COUNTED_BY_TORCH_TPU and group and (root / "dev/vfio" / group).exists()
    ]
    packages = drivers.find_packages(environ, search_path)
    generation = next((found for chip, _ in chips if (found := _GENERATIONS[chip])), "")
    # On the bus v2 and v3 are the same device.
    if generation in ("", "v2"):
        generation = generation_of_type(environ.get("TPU_ACCELERATOR_TYPE", "")) or generation
    num_hosts, worker_id = hosts_of(environ)
    host = TpuHost(
        generation=generation,
        chips=num_chips,
        chips_on_bus=len(chips),
        torch_tpu_chips=len(counted_chips),
        device_files=tuple(f"/{path.relative_to(root)}" for path in paths),
        bytes_per_chip=BYTES_PER_CHIP.get(generation, 0),
        process_counts=legal_counts(generation, num_chips),
        threads_per_process=threads_per_process(generation),
        num_hosts=num_hosts,
        worker_id=worker_id,
        libtpu=packages.libtpu,
        torch_tpu=packages.torch_tpu,
        torch_xla=packages.torch_xla,
        pjrt_device=environ.get("PJRT_DEVICE", "").upper(),
    )
    return replace(host, notes=tuple(_notes_on(host, packages)))


def count_chips(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """How many TPU chips this process could open."""
    return _find_files(environ, root, _read_bus(root))[0]


def holders_of(device_files: Collection[str], proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Which processes have a device file open."""
    paths = {os.path.realpath(device_file) for device_file in device_files}
    if not paths:
        return ()
    return tuple(
        sorted(
            int(folder.name)
            for folder in _list_folder(proc)
            if folder.name.isdecimal()
            and any(_link_target(opened) in paths for opened in _list_folder(folder / "fd"))
        )
    )


def _find_files(
    environ: Mapping[str, str], root: Path, bus_chips: Sequence[_BusChip]
) -> tuple[int, tuple[Path, ...]]:
    """How many chips this process could open, and their device files below the root."""
    accel_files = _matching_files(root / "dev", _ACCEL_FILE)
    if accel_files:
        return len(accel_files), accel_files
    # Newer hosts hand chips out by vfio, which other devices use too: count only what the PCI
    # bus confirms, or what the environment of a TPU host (a container may hide the bus) does.
    vfio_files = _matching_files(root / "dev/vfio", _VFIO_GROUP)
    if not bus_chips:
        is_tpu_host = environ.get("PJRT_DEVICE", "").upper() == "TPU" or any(
            environ.get(name) for name in _HOST_VARIABLES
        )
        taken_files = vfio_files if is_tpu_host else ()
        return len(taken_files), taken_files
    if not all(group for _, group in bus_chips):
        return min(len(vfio_files), len(bus_chips)), vfio_files
    groups_here = {path.name for path in vfio_files}
    # A group can hold several chips, so chips are counted and not files.
    groups = [group for _, group in bus_chips if group in groups_here]
    return len(groups), tuple(path for path in vfio_files if path.name in groups)


def _read_bus(root: Path) -> tuple[_BusChip, ...]:
    return tuple(
        (device_id, Path(_link_target(device / "iommu_group")).name)
        for device in _list_folder(root / "sys/bus/pci/devices")
        if env.read_file(device / "vendor").lower() == TPU_SIGNS.pci_vendor
        and (device_id := env.read_file(device / "device").lower()) in _GENERATIONS
    )


def _matching_files(folder: Path, pattern: re.Pattern[str]) -> tuple[Path, ...]:
    found = [path for path in _list_folder(folder) if pattern.fullmatch(path.name)]
    # By number: "10" is behind "9".
    return tuple(sorted(found, key=lambda path: (len(path.name), path.name)))


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # not there, hidden, or a process that has ended
        return []


def _link_target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # not there, or a descriptor that was closed meanwhile
        return ""


# What confirms an ambiguous device file.
_HOST_VARIABLES = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_NAME")

_ACCELERATOR_TYPE = re.compile(r"(?:v(\d)(litepod|e|p)?|tpu(7x))(?:-\d+)?")


def hosts_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """How many hosts a slice has, and which of them this is."""
    host_names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    text = environ.get("TPU_WORKER_ID") or environ.get("JOB_COMPLETION_INDEX") or "0"
    return max(1, len(host_names)), int(text) if text.isdecimal() else 0


def generation_of_type(accelerator_type: str) -> str:
    """The generation that a name of Google's cloud means."""
    type_match = _ACCELERATOR_TYPE.fullmatch(accelerator_type.strip().lower())
    if type_match is None:
        return ""
    number, variant, seventh = type_match.groups()
    generation = seventh or f"v{number}{'e' if variant == 'litepod' else variant or ''}"
    return generation if generation in BYTES_PER_CHIP else ""


def _notes_on(host: TpuHost, packages: drivers.DriverPackages) -> Iterator[str]:
    """What is odd about a host."""
    if many_hosts := drivers.many_hosts_refusal(host):
        yield many_hosts
    if host.chips < host.chips_on_bus:
        yield (
            f"{count_noun(host.chips_on_bus, 'TPU chip')} on the PCI bus, and this process could "
            f"open {host.chips or 'none'}: the other device files are missing here. Workers can "
            "use no more. Give the container /dev/vfio, or /dev/accel* on older hosts."
        )
    if packages.foreign_torch_tpu:
        yield (
            f"The installed torch_tpu {packages.foreign_torch_tpu} is not Google's: it has no "
            "entry point torch_tpu._loader:load, and Sophgo's package has the same name. It drives "
            "no TPU of Google's and is not used. Uninstall it before you install Google's."
        )
    versions = {"torch_tpu": packages.torch_tpu, "torch_xla": packages.torch_xla}
    for name, installed in versions.items():
        if installed and (refusal := drivers.torch_refusal(name, installed, packages.torch)):
            yield (
                f"{refusal}. Importing it would fail, or its operations would. Install a torch "
                "that it takes, or use the other driver."
            )
    if host.chips and not packages.libtpu and any(versions.values()):
        yield (
            "No libtpu is installed, and TPU_LIBRARY_PATH names none: both drivers need it, and "
            "fail with 'libtpu not found'. Install it: pip install libtpu."
        )
