"""What lets torch compute on TPUs: the interface of the two drivers, and which of them is taken.

    device "tpu" ──► TorchTpuDriver   tensor.to("tpu"), computes at once     torch 2.11 to 2.15
                 └─► TorchXlaDriver   tensor.to("xla"), records, then runs   torch 2.9

Nothing outside of the two drivers calls either library. torch_tpu extends the torch that everything
else uses; torch_xla ends with torch 2.9. So the first is taken where it can be, and every refusal
says what would have to be installed. The packages are found by their metadata: none is imported.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nbaccel.base.optional_packages import metadata_version
from nbaccel.base.units import count_noun
from nbaccel.plan.contracts.device import DeviceRuntime
from nbaccel.plan.inventory import TpuHost

if TYPE_CHECKING:
    import torch
    from torch import nn


class TpuDriver(DeviceRuntime):
    """One library that drives TPUs, and what a process that computes needs of it.

    An implementation has no state beyond that of its library, and imports it inside of methods.
    """

    name: ClassVar[str]  # as in ``RunConfig.tpu_driver``

    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether this process can make tensors of this kind; nothing is imported for it."""

    @abstractmethod
    def load(self) -> None:
        """Import the library, without initialising its runtime."""

    def holds_chips(self) -> bool:
        """Whether this process has chips that no other can use before it ends."""
        return self.is_awake()

    def fork_problem(self) -> str:
        """What this process has done with the library that a fork of it could not live with."""
        return (
            f"the runtime of {self.name} is initialised in the notebook" if self.is_awake() else ""
        )

    @abstractmethod
    def bind(self, local_rank: int) -> None:
        """Take the chip of this worker, which no process gives back before it ends."""

    @abstractmethod
    def launch_variables(
        self, host: TpuHost, num_workers: int, ports: Sequence[int]
    ) -> tuple[Mapping[str, str], ...]:
        """Variables of the workers of one launch, by local rank."""

    def process_group_backend(self) -> str:
        """What ``torch.distributed.init_process_group`` is told in a worker."""
        return "gloo"


def move_parameters(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers one after another, each staying the same Python object.

    ``Module.to`` makes new parameters on TPUs: those of an optimizer would stay behind on the
    host, and weights that were tied would be two (torch_tpu 0.2, torch_xla 2.9).
    """
    import torch

    from nbaccel.base import torch_private

    moved_buffers: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in moved_buffers:
                moved_buffers[id(buffer)] = buffer.detach().to(device)
            setattr(owner, name, moved_buffers[id(buffer)])
    for parameter in module.parameters():
        if parameter.device == device:
            continue
        gradient = parameter.grad
        parameter.grad = None
        # A blocking copy: with a non-blocking one, a later write to the host tensor showed in the
        # copy (torch_tpu 0.2).
        on_device = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        torch_private.replace_in_place(parameter, on_device)
        if gradient is not None:
            parameter.grad = gradient.to(device)


# Sophgo's package has the same name and the same module; only the entry point tells them apart.
TORCH_TPU_EXTENSION = "torch_tpu._loader:load"
"""By what torch's entry point ``torch.backends`` imports torch_tpu."""

_TORCH_TPU_ENTRY_POINT = ("torch.backends", TORCH_TPU_EXTENSION)
# In this order torch_xla takes a path from the environment.
_LIBRARY_VARIABLES = ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverPackages:
    """What is installed."""

    torch: str = ""  # version of torch; this and all others are empty where it is not installed
    torch_tpu: str = ""  # version of Google's torch_tpu
    foreign_torch_tpu: str = ""  # version of another package of that name
    torch_xla: str = ""  # version of torch_xla
    libtpu: str = ""  # version of libtpu, or the path of the one that is loaded instead of it


def find_packages(
    environ: Mapping[str, str], search_path: Sequence[str] | None = None
) -> DriverPackages:
    """Look for the drivers."""
    torch_tpu, torch_xla = (_find(name, search_path) for name in ("torch_tpu", "torch_xla"))
    is_googles = torch_tpu is not None and any(
        (point.group, point.value) == _TORCH_TPU_ENTRY_POINT for point in torch_tpu.entry_points
    )
    return DriverPackages(
        torch=_installed_version(_find("torch", search_path)),
        torch_tpu=_installed_version(torch_tpu) if is_googles else "",
        foreign_torch_tpu="" if is_googles else _installed_version(torch_tpu),
        torch_xla=_installed_version(torch_xla),
        libtpu=_find_libtpu(environ, torch_xla, search_path),
    )


def _find_libtpu(
    environ: Mapping[str, str], torch_xla: Distribution | None, search_path: Sequence[str] | None
) -> str:
    distribution = _find("libtpu", search_path) or _find("libtpu-nightly", search_path)
    named_path = next((path for name in _LIBRARY_VARIABLES if (path := environ.get(name))), "")
    # Both drivers write the path of an installed libtpu into the environment when they are
    # imported: the version says more then.
    if named_path and not (
        distribution is not None
        and Path(named_path).is_relative_to(str(distribution.locate_file("libtpu")))
    ):
        return named_path
    if distribution is not None:
        return _installed_version(distribution)
    bundled = None if torch_xla is None else torch_xla.locate_file("torch_xla/lib/libtpu.so")
    return str(bundled) if bundled is not None and Path(str(bundled)).exists() else ""


def _find(name: str, search_path: Sequence[str] | None) -> Distribution | None:
    folders = list(sys.path if search_path is None else search_path)
    return next(iter(Distribution.discover(name=name, path=folders)), None)


def _installed_version(distribution: Distribution | None) -> str:
    return "" if distribution is None else metadata_version(distribution)


# torch_tpu 0.2.0 declares torch>=2.11.0,<=2.15.0.
_TORCH_OF_TORCH_TPU = ((2, 11), (2, 15))
_INSTALL_TEXTS = {
    "torch_tpu": "pip install torch_tpu, with torch 2.11 to 2.15 and Python 3.11 or later",
    "torch_xla": "pip install 'torch_xla[tpu]', with the torch of the same version",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverChoice:
    """The driver of a launch."""

    name: str = ""  # ``torch_tpu`` or ``torch_xla``; empty where there is none
    version: str = ""
    reason: str = ""  # why it is this one: a clause
    refusal: str = ""  # why there is none: a whole message; empty where there is one


def choose_driver(asked: str, host: TpuHost | None, torch_version: str) -> DriverChoice:
    """Choose what drives the chips of a host."""
    found = TpuHost() if host is None else host
    if asked == "torch_xla" and found.pjrt_device == "CPU" and not found.chips:
        return _dry_run(found, torch_version)
    if refusal := many_hosts_refusal(found) or _chips_refusal(asked, found):
        return DriverChoice(refusal=refusal)
    tried_names = ("torch_tpu", "torch_xla") if asked == "auto" else (asked,)
    problems: list[str] = []
    for driver_name in tried_names:
        problem = _driver_problem(driver_name, found, torch_version)
        if not problem:
            reason = "asked for" if asked != "auto" else f"{driver_name} is installed"
            return DriverChoice(
                name=driver_name,
                version=getattr(found, driver_name),
                reason="; ".join([reason, *problems]),
            )
        problems.append(problem)
    installations = [_INSTALL_TEXTS[name] for name in tried_names if _could_drive(name, found)]
    other_driver = 'Give tpu_driver="torch_xla"'
    remedy = f"Run {'; or '.join(installations)}" if installations else other_driver
    return DriverChoice(
        refusal=(
            f'tpu_driver="{asked}" finds nothing for {count_noun(found.chips, "TPU chip")}: '
            f"{'; '.join(problems)}. Workers could not compute on them. "
            f'{remedy}; or give device="cpu".'
        )
    )


def torch_refusal(driver_name: str, driver_version: str, torch_version: str) -> str:
    """Why a driver does not take the torch that is installed."""
    if driver_name == "torch_tpu":
        lowest, highest = _TORCH_OF_TORCH_TPU
    else:
        # Each release is built for the torch of its own number.
        lowest = highest = _release_of(driver_version)
    if lowest <= _release_of(torch_version) <= highest:
        return ""
    text = " to ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in (lowest, highest)))
    return f"{driver_name} {driver_version} takes torch {text}, got {torch_version or 'none'}"


def many_hosts_refusal(host: TpuHost) -> str:
    """Why a slice of several hosts is not driven."""
    if host.num_hosts < 2:
        return ""
    return (
        f"This host is number {host.worker_id} of {host.num_hosts} of a TPU slice "
        "(TPU_WORKER_HOSTNAMES). This version of nbaccel drives the chips of one host; more need "
        "one launch per host, all of which agree on addresses. Use a TPU of one host, or start "
        "your script with the driver's own launcher on every host."
    )


def _dry_run(host: TpuHost, torch_version: str) -> DriverChoice:
    """torch_xla on the processor, which needs no chip: what PJRT_DEVICE=CPU is for."""
    if problem := _driver_problem("torch_xla", host, torch_version):
        return DriverChoice(
            refusal=(
                f'tpu_driver="torch_xla" with PJRT_DEVICE=CPU cannot be used: {problem}. A dry '
                "run on the processor needs no chip, but the package. "
                f'Run {_INSTALL_TEXTS["torch_xla"]}; or give device="cpu".'
            )
        )
    return DriverChoice(
        name="torch_xla",
        version=host.torch_xla,
        reason="asked for; PJRT_DEVICE=CPU: a dry run on the processor, without any TPU chip",
    )


def _chips_refusal(asked: str, host: TpuHost) -> str:
    if host.chips:
        return ""
    text = ""
    if host.chips_on_bus:
        chips = count_noun(host.chips_on_bus, "chip")
        text = f" ({chips} on the PCI bus, whose device files are missing)"
    return (
        f'tpu_driver="{asked}" needs a TPU chip: got a machine where this process could open '
        f"none{text}. Workers would have nothing to compute on. Take a runtime with a TPU, "
        'give device="cpu", or set PJRT_DEVICE=CPU and tpu_driver="torch_xla" for a dry run of '
        "torch_xla on the processor."
    )


def _driver_problem(name: str, host: TpuHost, torch_version: str) -> str:
    """Why a driver cannot be used here; a clause."""
    driver_version: str = getattr(host, name)  # the fields are called as the drivers
    if not _could_drive(name, host):
        return f"torch_tpu counts none of the {count_noun(host.chips, 'chip')}"
    if not driver_version:
        text = "Google's " if name == "torch_tpu" else ""
        return f"{text}{name} is not installed"
    return torch_refusal(name, driver_version, torch_version)


def _could_drive(name: str, host: TpuHost) -> bool:
    """Whether a driver would see chips, once it is installed."""
    return name != "torch_tpu" or host.torch_tpu_chips > 0


def _release_of(version: str) -> tuple[int, int]:
    """Major and minor number; (0, 0) where there are none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
