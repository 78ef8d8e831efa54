"""Where a TPU host runs, by its environment, and what is odd about it, in whole sentences.

Nothing asks the metadata server: off Google's cloud such a question takes half a minute. So a host
is what its variables say, and the values that Colab's and Kaggle's images set are not verified.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping

from nbaccel.base.processes import describe_process
from nbaccel.base.units import count_noun, first_few, shorten_text
from nbaccel.config.capabilities import TPU_SIGNS
from nbaccel.devices.tpu.chip_topology import BYTES_PER_CHIP
from nbaccel.devices.tpu.drivers import many_hosts_refusal, torch_refusal
from nbaccel.devices.tpu.packages import DriverPackages
from nbaccel.plan.inventory import TpuHost

_KAGGLE_VARIABLES = ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE")
_COLAB_VARIABLES = ("COLAB_RELEASE_TAG", "COLAB_GPU", "COLAB_TPU_ADDR")
_COLAB_MODULE = "google.colab"
# What confirms an ambiguous device file.
_HOST_VARIABLES = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_NAME")

_ACCELERATOR_TYPE = re.compile(r"(?:v(\d)(litepod|e|p)?|tpu(7x))(?:-\d+)?")
_LITE_NAMES = {"litepod": "e"}

# Each belongs to the launch that set it.
_LAUNCH_VARIABLES = (
    "TORCH_TPU_TOPOLOGY",
    "TORCH_TPU_SLICEBUILDER_ADDRESSES",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "CLOUD_TPU_TASK_ID",
)
_VISIBLE_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
_VALUE_CHARS = 40
_MOST_NAMED = 4
_WITHOUT_TORCH_TPU = frozenset({"v2", "v3"})


def mentions_tpu(environ: Mapping[str, str]) -> bool:
    """Whether an environment speaks of a TPU, or of a driver of one."""
    return any(environ.get(name) for name in TPU_SIGNS.variables)


def is_tpu_host(environ: Mapping[str, str]) -> bool:
    """Whether an environment is that of a host with TPU chips."""
    return environ.get("PJRT_DEVICE", "").upper() == "TPU" or any(
        environ.get(name) for name in _HOST_VARIABLES
    )


def environment_of(environ: Mapping[str, str], modules: Collection[str], *, has_chips: bool) -> str:
    """Where a notebook with a TPU runs."""
    if any(environ.get(variable_name) for variable_name in _KAGGLE_VARIABLES):
        return "kaggle"
    # Empty ones count, too: what COLAB_GPU says beside a TPU has not been seen.
    if _COLAB_MODULE in modules or any(name in environ for name in _COLAB_VARIABLES):
        return "colab"
    # Kubernetes numbers the pods of an indexed job by it.
    if environ.get("JOB_COMPLETION_INDEX"):
        return "gke"
    return "tpu_vm" if has_chips or is_tpu_host(environ) else ""


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


def notes_on(
    host: TpuHost, environ: Mapping[str, str], packages: DriverPackages
) -> tuple[str, ...]:
    """What is odd about a host."""
    notes = [*_hardware_notes(host, environ), *_package_notes(host, packages)]
    if host.chips:
        notes += [*_preset_notes(host, environ), *_holder_notes(host)]
    return tuple(notes)


def _hardware_notes(host: TpuHost, environ: Mapping[str, str]) -> Iterator[str]:
    if many_hosts := many_hosts_refusal(host):
        yield many_hosts
    if host.chips < host.chips_on_bus:
        yield (
            f"{count_noun(host.chips_on_bus, 'TPU chip')} on the PCI bus, and this process could "
            f"open {host.chips or 'none'}: the other device files are missing here. Workers can "
            "use no more. Give the container /dev/vfio, or /dev/accel* on older hosts."
        )
    if host.generation in _WITHOUT_TORCH_TPU and not generation_of_type(
        environ.get("TPU_ACCELERATOR_TYPE", "")
    ):
        yield (
            f"TPU {host.generation} is a guess: chips of v2 and v3 look alike on the PCI bus, and "
            "TPU_ACCELERATOR_TYPE is not set. The smaller memory of the two is counted with. Set "
            'TPU_ACCELERATOR_TYPE="v3-8" if these are v3.'
        )


def _preset_notes(host: TpuHost, environ: Mapping[str, str]) -> Iterator[str]:
    """What variables would do to a program that keeps them, as torch_xla and torch_tpu do."""
    bounds_text = environ.get("TPU_PROCESS_BOUNDS", "")
    if 0 < _num_processes(bounds_text) < host.chips:
        yield (
            f"TPU_PROCESS_BOUNDS={bounds_text} is set beside {host.chips} TPU chips: torch_xla "
            f"starts no more workers than {_num_processes(bounds_text)} then. nbaccel sets bounds "
            "of its own for its workers; for other launchers "
            'remove it: os.environ.pop("TPU_PROCESS_BOUNDS").'
        )
    left_over = [
        f"{variable_name}={shorten_text(environ[variable_name], _VALUE_CHARS)}"
        for variable_name in _LAUNCH_VARIABLES
        if environ.get(variable_name)
    ]
    if left_over:
        yield (
            f"{', '.join(left_over)}: set by another launch, or by the image. Drivers keep what "
            "is set, so that workers would wait for processes that are not there. nbaccel gives "
            "its workers values of their own; for other launchers remove them from os.environ."
        )
    for variable_name in _VISIBLE_VARIABLES:
        visible_text = environ.get(variable_name, "")
        num_visible = len([part for part in visible_text.split(",") if part.strip()])
        if 0 < num_visible < host.chips:
            yield (
                f"{variable_name}={visible_text} hides {host.chips - num_visible} of "
                f"{host.chips} TPU chips from programs that keep it. torch_tpu overwrites it in "
                "a launch, and nbaccel gives worker 0 chip 0 and so on. Give num_processes to use "
                "fewer chips."
            )
    if host.pjrt_device not in ("", "TPU"):
        yield (
            f"PJRT_DEVICE={environ.get('PJRT_DEVICE')} is set beside "
            f"{count_noun(host.chips, 'TPU chip')}: torch_xla would leave the TPU alone. nbaccel's "
            'workers on device="tpu" use the chips all the same; for torch_xla in this notebook '
            "set PJRT_DEVICE=TPU before it is imported."
        )


def _package_notes(host: TpuHost, packages: DriverPackages) -> Iterator[str]:
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
    if not host.chips:
        return
    if host.chips != host.torch_tpu_chips and (packages.torch_tpu or not packages.torch_xla):
        yield (
            f"nbaccel counts {count_noun(host.chips, 'TPU chip')} here and torch_tpu "
            f"{host.torch_tpu_chips}: {_why_uncounted(host)}. torch_tpu makes no device for a chip "
            'that it does not count. Use torch_xla: RunConfig(tpu_driver="torch_xla").'
        )
    if not packages.libtpu and any(versions.values()):
        yield (
            "No libtpu is installed, and TPU_LIBRARY_PATH names none: both drivers need it, and "
            "fail with 'libtpu not found'. Install it: pip install libtpu."
        )


def _why_uncounted(host: TpuHost) -> str:
    if host.generation in _WITHOUT_TORCH_TPU:
        return f"it knows no chips of {host.generation}"
    if not host.chips_on_bus:
        return "it goes by the PCI bus, which /sys does not show here"
    files = first_few(host.device_files, _MOST_NAMED)
    return f"it takes chips by their group below /dev/vfio, and this host has {files}"


def _holder_notes(host: TpuHost) -> Iterator[str]:
    others = [process_id for process_id in host.holders if process_id != os.getpid()]
    if os.getpid() in host.holders:
        yield (
            f"This process holds TPU chips ({first_few(host.device_files, _MOST_NAMED)}), and "
            "keeps them until it ends: workers could not open them. Restart the kernel, and "
            "launch before anything computes on them here."
        )
    if others:
        text = first_few([describe_process(process_id) for process_id in others], _MOST_NAMED)
        yield (
            f"TPU chips are held by {text}: a chip serves one process, so that workers could "
            "not open it. End what holds it, for example by shutting down the other notebook."
        )


def _num_processes(text: str) -> int:
    """Product of numbers such as "2,2,1"; 0 where they are none."""
    parts = text.split(",")
    return math.prod(map(int, parts)) if all(part.strip().isdecimal() for part in parts) else 0
