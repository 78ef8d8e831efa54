"""Layouts of TPU hosts, as the drivers' sources and users describe them.

No live image has been recorded: there was none to record. What each host is expected to be is in
the record itself, so that a layout and its meaning are read together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel.devices.tpu.chips import BYTES_PER_CHIP
from nbaccel.plan.inventory import TpuHost

# Google's own network card and disk: the same vendor, and no chips.
OTHER_GOOGLE_DEVICES = ("0x0042", "0x001f")
PCI_ID = {
    "v3": "0x0027",
    "v4": "0x005e",
    "v5p": "0x0062",
    "v5e": "0x0063",
    "v6e": "0x006f",
    "7x": "0x0076",
}


@dataclass(frozen=True)
class RecordedHost:
    """A host."""

    nodes: tuple[str, ...] = ()  # files below /dev
    # Device numbers of Google's devices on the PCI bus, each with its IOMMU group or "".
    bus: tuple[tuple[str, str], ...] = ()
    environ: dict[str, str] = field(default_factory=dict)  # the variables that matter
    packages: tuple[tuple[str, str], ...] = (("torch", "2.13.0+cpu"), ("torch_tpu", "0.2.0"))
    expected: TpuHost | None = None  # without notes
    notes: tuple[str, ...] = ()  # the beginning of each


def build_host(host: RecordedHost, root: Path) -> Path:
    """Write a host's files below a folder; returns the folder."""
    for name in host.nodes:
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for slot, (device_id, group) in enumerate(host.bus):
        add_pci_device(root, slot, device_id, group)
    for name, version in host.packages:
        install_package(root / "packages", name, version)
    return root


def add_pci_device(
    root: Path, slot: int, device_id: str, group: str = "", vendor: str = "0x1ae0"
) -> None:
    """Put a device on the bus, as sysfs shows it."""
    folder = root / f"sys/bus/pci/devices/0000:00:{slot:02x}.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device_id}\n")
    if group:
        (folder / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")


def install_package(folder: Path, name: str, version: str, entry_point: str | None = None) -> None:
    """Leave the metadata of a distribution in a folder, as an installation does."""
    if entry_point is None and name == "torch_tpu":
        entry_point = "[torch.backends]\ntorch_tpu = torch_tpu._loader:load"
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_point or "")


def vfio(first: int, count: int) -> tuple[str, ...]:
    """Device files of newer hosts."""
    return (*(f"vfio/{first + index}" for index in range(count)), "vfio/vfio")


def chips_on_bus(generation: str, first: int, count: int) -> tuple[tuple[str, str], ...]:
    """A bus with so many chips, each in a group of its own, between other devices of Google's."""
    chips = ((PCI_ID[generation], str(first + index)) for index in range(count))
    others = ((device_id, str(first + count + 20)) for device_id in OTHER_GOOGLE_DEVICES)
    return (*others, *chips)


def expect(
    generation: str, chips: int, counts: tuple[int, ...], first: int = 0, **facts: Any
) -> TpuHost:
    """A host with torch_tpu and libtpu, whose chips all count, where nothing else is said."""
    usual = {
        "chips_on_bus": chips,
        "torch_tpu_chips": chips,
        "device_files": tuple(f"/dev/vfio/{group}" for group in range(first, first + chips)),
        "bytes_per_chip": BYTES_PER_CHIP[generation],
        "torch_tpu": "0.2.0",
        "libtpu": "0.0.52",
    }
    return TpuHost(generation=generation, chips=chips, process_counts=counts, **{**usual, **facts})


DRIVERS = (("torch", "2.13.0+cpu"), ("torch_tpu", "0.2.0"), ("libtpu", "0.0.52"))
XLA_DRIVERS = (("torch", "2.9.0"), ("torch_xla", "2.9.0"), ("libtpu", "0.0.21"))

XLA_FACTS = {"torch_tpu": "", "torch_xla": "2.9.0", "libtpu": "0.0.21"}

HOSTS: dict[str, RecordedHost] = {
    "colab v5e-1": RecordedHost(
        nodes=vfio(0, 1),
        bus=chips_on_bus("v5e", 0, 1),
        environ={"COLAB_RELEASE_TAG": "release-colab", "TPU_ACCELERATOR_TYPE": "v5litepod-1"},
        packages=DRIVERS,
        expected=expect("v5e", 1, (1,)),
    ),
    "colab v6e-1": RecordedHost(
        nodes=vfio(0, 1),
        bus=chips_on_bus("v6e", 0, 1),
        environ={"COLAB_GPU": "", "PJRT_DEVICE": "TPU"},
        packages=XLA_DRIVERS,
        expected=expect("v6e", 1, (1,), **XLA_FACTS, pjrt_device="TPU"),
    ),
    "kaggle v5e-8": RecordedHost(
        nodes=vfio(4, 8),
        bus=chips_on_bus("v5e", 4, 8),
        environ={
            "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
            "COLAB_RELEASE_TAG": "release-colab",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
            "TPU_WORKER_HOSTNAMES": "localhost",
        },
        packages=DRIVERS,
        expected=expect("v5e", 8, (1, 4, 8), first=4),
    ),
    "tpu vm v4-8": RecordedHost(
        nodes=vfio(0, 4),
        bus=chips_on_bus("v4", 0, 4),
        packages=DRIVERS,
        expected=expect("v4", 4, (1, 2, 4)),
    ),
    "tpu vm v5p-8": RecordedHost(
        nodes=vfio(0, 4),
        bus=chips_on_bus("v5p", 0, 4),
        environ={"TPU_NAME": "mine", "TPU_WORKER_ID": "0"},
        packages=DRIVERS,
        expected=expect("v5p", 4, (1, 2, 4)),
    ),
    "tpu vm v6e-4": RecordedHost(
        nodes=vfio(0, 4),
        bus=chips_on_bus("v6e", 0, 4),
        packages=DRIVERS,
        expected=expect("v6e", 4, (1, 4)),
    ),
    "tpu vm v3-8, /dev/accel": RecordedHost(
        nodes=tuple(f"accel{number}" for number in range(4)),
        bus=chips_on_bus("v3", 0, 4),
        environ={"TPU_ACCELERATOR_TYPE": "v3-8"},
        packages=XLA_DRIVERS,
        expected=expect(
            "v3",
            4,
            (1, 4),
            torch_tpu_chips=0,
            device_files=tuple(f"/dev/accel{number}" for number in range(4)),
            threads_per_process=2,
            **XLA_FACTS,
        ),
    ),
    "v3-8 behind vfio": RecordedHost(
        nodes=vfio(0, 4),
        bus=chips_on_bus("v3", 0, 4),
        environ={"TPU_ACCELERATOR_TYPE": "v3-8"},
        packages=DRIVERS,
        expected=expect("v3", 4, (1, 4), torch_tpu_chips=0, threads_per_process=2),
    ),
    "one host of a v5e-16 slice": RecordedHost(
        nodes=vfio(0, 4),
        bus=chips_on_bus("v5e", 0, 4),
        environ={
            "TPU_ACCELERATOR_TYPE": "v5litepod-16",
            "TPU_WORKER_HOSTNAMES": "t1k-0,t1k-1,t1k-2,t1k-3",
            "TPU_WORKER_ID": "2",
            "JOB_COMPLETION_INDEX": "2",
        },
        packages=DRIVERS,
        expected=expect("v5e", 4, (1, 4), num_hosts=4, worker_id=2),
        notes=("This host is number 2 of 4 of a TPU slice",),
    ),
    "container that hides /sys": RecordedHost(
        nodes=vfio(0, 4),
        environ={"TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v6e-4"},
        packages=DRIVERS,
        expected=expect("v6e", 4, (1, 4), chips_on_bus=0, torch_tpu_chips=0),
    ),
    "container with one chip of eight": RecordedHost(
        nodes=vfio(3, 1),
        bus=chips_on_bus("v5e", 0, 8),
        packages=DRIVERS,
        expected=expect("v5e", 1, (1,), first=3, chips_on_bus=8),
        notes=("8 TPU chips on the PCI bus, and this process could open 1",),
    ),
}
