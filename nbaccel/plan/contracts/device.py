"""``Device``: all that is known here of one kind of hardware, without state.

A notebook that launches asks what is there: no answer may initialise it, or import torch. In a
process that trains the defaults use `torch.accelerator` and `torch.get_device_module`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbaccel.config import RunConfig
    from nbaccel.config.capability_rows import DeviceRow
    from nbaccel.plan.inventory import Gpu, Inventory
    from nbaccel.plan.launch_plan import Plan

__all__ = ["CompileCounts", "Device", "DeviceRuntime", "LaunchHooks", "StepHooks", "UnlistedDevice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCounts:
    """What a device's compiler has done in this process so far."""

    programs: int  # programs it has compiled
    seconds: float  # time that took, in seconds


class StepHooks:
    """What a training process does differently on a device; the defaults suit most of them."""

    def place_module(self, module: nn.Module, device: torch.device) -> None:
        """Move a module's tensors to such a device, in place; parameters stay the same objects."""
        module.to(device)

    def downcast_floats(self) -> str:
        """Keep floats as bfloat16, doubles as float from now on; returns why not, a clause."""
        return (
            "only torch_xla, on TPUs, keeps float tensors as bfloat16. Here autocast computes in "
            "bfloat16, and weights and doubles stay as they are"
        )

    def mark_step(self) -> None:
        """Run what was recorded for the device so far, where operations are recorded first."""

    def average_gradients(self, gradients: Sequence[torch.Tensor], world_size: int) -> bool:
        """Average tensors over processes in place by the device's own links; False: it has none."""
        return False

    def compile_counts(self) -> CompileCounts | None:
        """What its compiler has done; None for a device that runs operations without compiling."""
        return None


class LaunchHooks:
    """What a device has to say before, and for, a launch; asked in the notebook's process."""

    def launch_problem(self, inventory: Inventory, config: RunConfig, num_processes: int) -> str:
        """Why a launch could not use these devices as configured, a message; empty where it can."""
        return ""

    def plan_choices(
        self, inventory: Inventory, config: RunConfig
    ) -> Iterable[tuple[str, str, str]]:
        """What is decided for these devices beside what is decided for all: name, value, reason."""
        return ()

    def plan_warnings(self, inventory: Inventory, config: RunConfig) -> tuple[str, ...]:
        """What is odd about these devices on this machine, for a plan that uses them."""
        return ()

    def busy_reason(self, plan: Plan) -> str:
        """Why workers could not have the devices now: a message that says who has them."""
        return ""

    def launch_variables(self, plan: Plan) -> tuple[Mapping[str, str | None], ...]:
        """Variables of one launch's workers by local rank; None removes one of the notebook's."""
        return ()

    def idle_variables(self) -> Mapping[str, str]:
        """Environment variables of workers that compute on another device than this one."""
        return {}

    def explain_signal(self, signal_name: str) -> tuple[str, str] | None:
        """Why a signal has probably ended a worker, and what to do, in sentences; None: unknown."""
        return None

    def expects_launches(self) -> bool:
        """Whether launches of this notebook will probably use it; asked without an import."""
        return False

    def keep_asleep(self) -> None:
        """Keep the notebook's process from taking the device by an import, where possible."""

    def prepare_template(self) -> None:
        """Import this device's library into the process that its workers are forked from.

        Called once, after torch, where ``Device.own_template`` is set. Nothing may be left that a
        fork cannot live with: no runtime initialised, no thread started, nothing seeded.
        """


class DeviceRuntime(StepHooks, ABC):
    """What a process that computes on a device needs of it."""

    pins_host_memory: ClassVar[bool] = True  # whether page-locked memory is copied faster
    # Whether the source of a copy that does not block may be written to when the call has returned.
    copies_without_blocking: ClassVar[bool] = True
    has_random_state: ClassVar[bool] = True  # whether it has generators of its own

    @property
    @abstractmethod
    def kind(self) -> str:
        """What torch calls devices of this kind, as in ``torch.device.type``."""

    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.kind)

    def _call(self, name: str, *args: Any) -> Any:
        """What a function of torch's module gives; None where the module has no such function."""
        function = getattr(self._module(), name, None)
        return None if function is None else function(*args)

    def is_available(self) -> bool:
        """Whether this process could compute on one."""
        import torch

        try:
            current = torch.accelerator.current_accelerator()
        # torch 2.6 raises where there is no accelerator; later versions return None.
        except RuntimeError:
            return False
        is_it = current is not None and current.type == self.kind
        return is_it and bool(self._call("is_available"))

    def is_awake(self) -> bool:
        """Whether its runtime is initialised in this process; asking does not initialise it."""
        return bool(self._call("is_initialized"))

    def count(self) -> int:
        """Devices of this kind that torch shows to this process, numbered from 0."""
        return int(self._call("device_count") or 0)

    def make_current(self, device: torch.device) -> None:
        """Let what names no device go to this one, from now on in this process."""
        import torch

        torch.accelerator.set_device_index(device.index or 0)

    def random_state(self, index: int | None = None) -> torch.Tensor:
        """The generator of one device, None for the current one: a uint8 tensor in host memory."""
        where = () if index is None else (index,)
        state: torch.Tensor = self._module().get_rng_state(*where)
        return state

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        """Set the generator of one device to what :meth:`random_state` gave, on any device."""
        where = () if index is None else (index,)
        # torch takes the state in host memory only.
        self._module().set_rng_state(state.cpu(), *where)

    def reserved_bytes(self, device: torch.device) -> int | None:
        """Bytes that torch holds on a device for this process; None where that is not known."""
        said = self._call("memory_reserved", device) if self.is_awake() else None
        return None if said is None else int(said)

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the memory that this process may use on its current device."""
        import torch

        current = torch.accelerator.current_device_index()
        total = self._module().get_device_properties(current).total_memory
        # torch refuses a fraction above 1.
        self._call("set_per_process_memory_fraction", min(1.0, limit_bytes / total))

    def empty_cache(self) -> None:
        """Release memory that torch caches; does nothing where the device was never used."""
        if self.is_awake():
            self._call("empty_cache")

    def synchronize(self) -> None:
        """Wait until the current device has done what it was given."""
        self._call("synchronize")

    def profiler_activities(self) -> tuple[str, ...]:
        """What a profiler can record while this device computes, as in ``ProfileKwargs``."""
        from torch.profiler import ProfilerActivity

        has_own = hasattr(ProfilerActivity, self.kind.upper())
        # As keys, because the CPU's two names are equal.
        return tuple(dict.fromkeys(("cpu", self.kind))) if has_own else ("cpu",)

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        """Version of its architecture, where kinds of it differ in what they can compute."""
        return None


class UnlistedDevice(DeviceRuntime):
    """An accelerator of a package that extends torch, and that no row names."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @property
    def kind(self) -> str:
        """What torch calls devices of this kind."""
        return self._kind


class Device(LaunchHooks, DeviceRuntime):
    """One kind of hardware."""

    name: ClassVar[str]  # as in its capability row
    own_process: ClassVar[bool] = False  # whether a process keeps the device until it ends
    # Whether its workers need a template of their own: its library would disturb other workers.
    own_template: ClassVar[bool] = False
    # ``module:function`` of its entry point in ``torch.backends``, for :meth:`prepare_template`.
    extension: ClassVar[str] = ""
    torch_type: ClassVar[str] = ""  # what torch calls its kind; the name where it is empty
    # What any of its :meth:`hazards` would do to a forked worker: one clause.
    after_fork: ClassVar[str] = "a forked worker could not use the device at all"

    @property
    def kind(self) -> str:
        """What torch calls devices of this kind."""
        return self.torch_type or self.name

    @property
    def row(self) -> DeviceRow:
        """Its capability row."""
        # Not at the top: a package's device may be imported while the table is being made.
        from nbaccel.config.capabilities import device_row

        return device_row(self.name)

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Look for devices of this kind here, without initialising or importing anything.

        Returns fields of the :class:`~nbaccel.plan.inventory.Inventory`: ``accelerators``, a tuple
        of ``Gpu(kind=...)``, for every device but those that have fields of their own.
        """
        return {}

    def units(self, inventory: Inventory) -> tuple[Gpu, ...]:
        """The devices of this kind that a launch can use, of those in an inventory."""
        return tuple(unit for unit in inventory.accelerators if unit.kind == self.name)

    def refusal(self, inventory: Inventory) -> str:
        """Why a machine cannot serve ``device=name``, as a whole message; empty where it can."""
        if self.units(inventory):
            return ""
        return (
            f'device="{self.name}" needs {self.row.needs}: none was found on this machine. Workers '
            'would have nothing to compute on. Give device="cpu", or "auto" to take what there is.'
        )

    def idle_reason(self, inventory: Inventory) -> str:
        """Why ``device="auto"`` does not take devices that are there; empty where it does."""
        if self.row.never_run:
            return f'nbaccel has never been run on it. device="{self.name}" tries it'
        return ""

    def hazards(self) -> tuple[str, ...]:
        """Clauses: why forking a process that used this device is unsafe; initialises nothing."""
        return ()

    def driver_meter(self) -> Any:
        """Has ``read()``, of memory by process id, and ``close()``; None: nothing measures."""
        return None

    def torch_device(self, local_rank: int) -> torch.device:
        """The device of a worker; those beyond the number of devices share them in turn."""
        import torch

        return torch.device(self.kind, local_rank % max(1, self.count()))

    def enter_worker(self, local_rank: int) -> None:
        """Make a worker's device its current one; called once, in the worker, before its code."""
        self.make_current(self.torch_device(local_rank))

    def process_group_backend(self, num_local: int) -> str:
        """What ``init_process_group`` is told: beside another backend than gloo also gloo."""
        import torch.distributed as dist

        from nbaccel.config.capabilities import group_backend

        shared = self.row.shared_group_backend
        chosen = group_backend(self.row, num_local=num_local, num_devices=self.count())
        if chosen == shared or not dist.is_backend_available(chosen):
            return shared
        return f"cpu:gloo,{self.kind}:{chosen}"
