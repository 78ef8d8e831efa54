"""What a machine has of TPUs, where it runs, and what is odd about it.

It is read from device files, the PCI bus, ``/proc`` and the environment: no driver is imported, no
runtime is touched and nothing is asked over the network (off Google's cloud a question to the
metadata server takes half a minute). The values that Colab's and Kaggle's images set are not
verified. On a machine without a sign of a TPU it costs two or three listings of folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbaccel.base import env
from nbaccel.base.units import count_noun
from nbaccel.config.capabilities import TPU_SIGNS
from nbaccel.devices.tpu.chip_topology import BYTES_PER_CHIP, legal_counts, threads_per_process
from nbaccel.devices.tpu.drivers import (
    DriverPackages,
    find_packages,
    many_hosts_refusal,
    torch_refusal,
)
from nbaccel.plan.inventory import TpuHost

# Google's network and storage devices have the same vendor, so the device decides. 0x0027 is v2 or
# v3; 0x0056 has no public name.
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


@dataclass(frozen=True, slots=True)
class _BusChip:
    """A chip on the PCI bus; the group is empty where the bus does not tell it."""

    device_id: str
    iommu_group: str


@dataclass(frozen=True, slots=True)
class _ChipFiles:
    """The chips that this process could open, and their device files below the root."""

    num_chips: int
    paths: tuple[Path, ...]


def inspect_host(
    environ: Mapping[str, str],
    root: Path = Path("/"),
    *,
    search_path: Sequence[str] | None = None,
) -> TpuHost | None:
    """Look for TPUs on this machine."""
    chips = _read_bus(root)
    files = _find_files(environ, root, chips)
    speaks_of_tpus = any(environ.get(name) for name in TPU_SIGNS.variables)
    if not files.num_chips and not chips and not speaks_of_tpus:
        return None
    packages = find_packages(environ, search_path)
    generation = _generation_of(chips, environ)
    num_hosts, worker_id = hosts_of(environ)
    host = TpuHost(
        generation=generation,
        chips=files.num_chips,
        chips_on_bus=len(chips),
        torch_tpu_chips=_count_for_torch_tpu(root, chips),
        device_files=tuple(f"/{path.relative_to(root)}" for path in files.paths),
        bytes_per_chip=BYTES_PER_CHIP.get(generation, 0),
        process_counts=legal_counts(generation, files.num_chips),
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
    return _find_files(environ, root, _read_bus(root)).num_chips


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
) -> _ChipFiles:
    accel_files = _matching_files(root / "dev", _ACCEL_FILE)
    if accel_files:
        return _ChipFiles(len(accel_files), accel_files)
    # Newer hosts hand chips out by vfio, which other devices use too: count only what the PCI
    # bus confirms, or what the environment of a TPU host (a container may hide the bus) does.
    vfio_files = _matching_files(root / "dev/vfio", _VFIO_GROUP)
    if not bus_chips:
        is_tpu_host = environ.get("PJRT_DEVICE", "").upper() == "TPU" or any(
            environ.get(name) for name in _HOST_VARIABLES
        )
        taken_files = vfio_files if is_tpu_host else ()
        return _ChipFiles(len(taken_files), taken_files)
    if not all(chip.iommu_group for chip in bus_chips):
        return _ChipFiles(min(len(vfio_files), len(bus_chips)), vfio_files)
    groups_here = {path.name for path in vfio_files}
    # A group can hold several chips, so chips are counted and not files.
    groups = [chip.iommu_group for chip in bus_chips if chip.iommu_group in groups_here]
    return _ChipFiles(len(groups), tuple(path for path in vfio_files if path.name in groups))


def _count_for_torch_tpu(root: Path, bus_chips: Sequence[_BusChip]) -> int:
    return sum(
        1
        for chip in bus_chips
        if chip.device_id in _COUNTED_BY_TORCH_TPU
        and chip.iommu_group
        and (root / "dev/vfio" / chip.iommu_group).exists()
    )


def _generation_of(bus_chips: Sequence[_BusChip], environ: Mapping[str, str]) -> str:
    generation = generation_of_type(environ.get("TPU_ACCELERATOR_TYPE", ""))
    on_bus = next((found for chip in bus_chips if (found := _GENERATIONS[chip.device_id])), "")
    # On the bus v2 and v3 are the same device.
    return generation if on_bus in ("", "v2") and generation else on_bus


def _read_bus(root: Path) -> tuple[_BusChip, ...]:
    google = TPU_SIGNS.pci_vendor
    return tuple(
        _BusChip(device_id, Path(_link_target(device / "iommu_group")).name)
        for device in _list_folder(root / "sys/bus/pci/devices")
        if env.read_file(device / "vendor").lower() == google
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
_LITE_NAMES = {"litepod": "e"}


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
    generation = seventh or f"v{number}{_LITE_NAMES.get(variant, variant or '')}"
    return generation if generation in BYTES_PER_CHIP else ""


def _notes_on(host: TpuHost, packages: DriverPackages) -> Iterator[str]:
    """What is odd about a host."""
    if many_hosts := many_hosts_refusal(host):
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
    for driver_name, driver_version in versions.items():
        if driver_version and (
            refusal := torch_refusal(driver_name, driver_version, packages.torch)
        ):
            yield (
                f"{refusal}. Importing it would fail, or its operations would. Install a torch "
                "that it takes, or use the other driver."
            )
    if host.chips and not packages.libtpu and any(versions.values()):
        yield (
            "No libtpu is installed, and TPU_LIBRARY_PATH names none: both drivers need it, and "
            "fail with 'libtpu not found'. Install it: pip install libtpu."
        )
