"""``TpuDevice``: Google's TPUs, whichever library drives them.

A process that has used a chip keeps it until it ends, so workers are always processes of their own,
and the notebook's process must not wake the runtime: see :meth:`TpuDevice.busy_reason`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.base import env
from nbaccel.base.optional_packages import installed_version
from nbaccel.base.processes import describe_process
from nbaccel.config.capabilities import strategy_row
from nbaccel.devices.tpu import chips, drivers
from nbaccel.devices.tpu.drivers import DriverChoice, TpuDriver, move_parameters
from nbaccel.devices.tpu.torch_tpu_driver import TorchTpuDriver
from nbaccel.devices.tpu.torch_xla_driver import RUNTIME_VARIABLE, TorchXlaDriver
from nbaccel.plan.contracts.device import CompileCounts, Device
from nbaccel.plan.inspecting import free_host_bytes
from nbaccel.plan.inventory import Gpu, TpuHost
from nbaccel.plan.launch_plan import copies_in_turn

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbaccel.config import RunConfig
    from nbaccel.plan.inventory import Inventory
    from nbaccel.plan.launch_plan import Plan

DRIVER_VARIABLE = "NBACCEL_TPU_DRIVER"  # the driver of a worker, by name
_TURN_FILE = Path("~/.cache/nbaccel/tpu_placement.lock")
_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_DRIVERS: dict[str, type[TpuDriver]] = {one.name: one for one in (TorchTpuDriver, TorchXlaDriver)}


class TpuDevice(Device):
    """Workers compute on TPU chips, one for each."""

    name: ClassVar[str] = "tpu"
    own_process: ClassVar[bool] = True
    # A backward pass on the CPU would take the chips wherever torch_tpu is loaded (0.2).
    own_template: ClassVar[bool] = True
    extension: ClassVar[str] = drivers.TORCH_TPU_EXTENSION
    pins_host_memory: ClassVar[bool] = False
    # A later write to the host tensor showed on the device (torch_tpu 0.2).
    copies_without_blocking: ClassVar[bool] = False
    after_fork: ClassVar[str] = "a forked worker hangs or fails in its first operation on a chip"

    # ---------------------------------------------------------------- before a launch

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        host = chips.inspect_host(environ)
        return {"tpu_chips": 0 if host is None else host.chips, "tpu": host}

    def units(self, inventory: Inventory) -> tuple[Gpu, ...]:
        host = inventory.tpu or TpuHost(chips=inventory.tpu_chips)
        name = f"TPU {host.generation}" if host.generation else self.row.noun
        return tuple(
            Gpu(
                index=index,
                name=name,
                kind=self.name,
                total_bytes=host.bytes_per_chip,
                free_bytes=host.bytes_per_chip,  # a chip has one process, which has all of it
            )
            for index in range(inventory.tpu_chips)
        )

    def refusal(self, inventory: Inventory) -> str:
        if inventory.tpu_chips or _is_dry_run(inventory.tpu):
            return ""
        return (
            'device="tpu" needs TPU chips: none was found on this machine. Workers would have '
            'nothing to compute on. Give device="cpu", or "auto" to take what there is; or, to try '
            "a program without a chip, install torch_xla and set PJRT_DEVICE=CPU."
        )

    def idle_reason(self, inventory: Inventory) -> str:
        return _choose(inventory).refusal.removesuffix(".")

    def launch_problem(self, inventory: Inventory, config: RunConfig, num_processes: int) -> str:
        if not (inventory.tpu_chips or _is_dry_run(inventory.tpu)):
            return ""  # refused already
        choice = _choose(inventory, config)
        if choice.name and (problem := _strategy_problem(choice, config)):
            return problem
        counts = () if inventory.tpu is None else inventory.tpu.process_counts
        if choice.refusal or not counts or num_processes in counts:
            return choice.refusal
        return (
            f"num_processes={num_processes} is not supported on {inventory.tpu_chips} TPU chips: "
            "the runtime has no layout of so many, and workers could not find each other. Give "
            f"num_processes={chips.alternatives(counts)}."
        )

    def plan_warnings(self, inventory: Inventory, config: RunConfig) -> tuple[str, ...]:
        host = inventory.tpu
        if host is None:
            return ()
        if _is_dry_run(host):
            return (
                f"{RUNTIME_VARIABLE}=CPU: torch_xla computes on the processor, to try a program "
                "without a TPU. Unset it where there is one",
            )
        if host.threads_per_process == 1:
            return host.notes
        return (
            *host.notes,
            f"a {host.generation} chip has two cores, and each worker uses one of them",
        )

    def plan_choices(
        self, inventory: Inventory, config: RunConfig
    ) -> Iterator[tuple[str, str, str]]:
        choice = _choose(inventory, config)
        if choice.name:
            yield "tpu_driver", f"{choice.name} {choice.version}".rstrip(), choice.reason

    def hazards(self) -> tuple[str, ...]:
        return tuple(problem for driver in _all_drivers() if (problem := driver.fork_problem()))

    def busy_reason(self, plan: Plan) -> str:
        host = plan.inventory.tpu
        if host is None or not host.device_files:
            return ""
        # Looked up again: the plan may be from before the cell that took them.
        holders = chips.holders_of(host.device_files)
        files = ", ".join(host.device_files)
        # A runtime may have opened the chips by another path than the files that are listed.
        if any(driver.holds_chips() for driver in _all_drivers()) or os.getpid() in holders:
            return (
                f"The TPU chips ({files}) are held by this notebook's kernel, and no other process "
                "can use them before it ends. With torch_tpu, torch.manual_seed or one backward "
                "pass on the CPU takes them; with torch_xla, any tensor on the device. Restart the "
                "kernel, and run %load_ext nbaccel before torch is imported, which prevents that."
            )
        if not holders:
            return ""
        return (
            f"The TPU chips ({files}) are held by {', '.join(map(describe_process, holders))}: "
            "workers could not open them. End it; a notebook's live workers: %accelerate stop."
        )

    def launch_variables(self, plan: Plan) -> tuple[Mapping[str, str | None], ...]:
        # No trace of an earlier launch is left in them.
        host = plan.inventory.tpu or TpuHost()
        driver = _DRIVERS[_choose(plan.inventory, plan.config).name]()
        kept = chips.without_stale(env.snapshot())
        shared: dict[str, str | None] = {
            **{name: None for name in env.snapshot() if name not in kept},
            DRIVER_VARIABLE: driver.name,
            _AUTOLOAD_VARIABLE: "0",  # the template has loaded the driver; a child needs none
        }
        ports = _free_ports(plan.num_processes)
        per_worker = driver.launch_variables(host, plan.num_processes, ports)
        return tuple({**shared, **variables} for variables in per_worker)

    def idle_variables(self) -> Mapping[str, str]:
        return {_AUTOLOAD_VARIABLE: "0"} if drivers.find_packages({}).torch_tpu else {}

    def prepare_template(self) -> None:
        driver = _usable_driver(or_dry_run=True)
        if driver is not None:
            driver.load()

    def explain_signal(self, signal_name: str) -> tuple[str, str] | None:
        if signal_name != "SIGSEGV" or not chips.count_chips(env.snapshot()):
            return None
        return (
            "On a TPU host this usually means that host memory ran out.",
            "Build the model in a cell and pass it in args, so that all workers share one copy.",
        )

    def expects_launches(self) -> bool:
        return _usable_driver() is not None

    def keep_asleep(self) -> None:
        """See :meth:`Device.keep_asleep`; torch is told not to import torch_tpu.

        With torch_tpu in it, the kernel would take the chips in its first ``torch.manual_seed`` or
        backward pass (0.2), and on a host without chips wait for a network.
        """
        is_undecided = env.read(_AUTOLOAD_VARIABLE) is None and "torch" not in sys.modules
        if is_undecided and drivers.find_packages({}).torch_tpu:
            env.update({_AUTOLOAD_VARIABLE: "0"})

    # ---------------------------------------------------------------- in a process that trains

    @property
    def kind(self) -> str:
        """What torch calls devices of this kind; it depends on the driver."""
        return _current_driver().kind

    def is_available(self) -> bool:
        if env.read(DRIVER_VARIABLE):
            return True
        driver = _usable_driver()
        if driver is not None and not driver.is_loaded():
            driver.load()
        return driver is not None and driver.is_loaded()

    def is_awake(self) -> bool:
        return any(driver.is_awake() for driver in _all_drivers())

    def count(self) -> int:
        return 1  # of a process

    def make_current(self, device: torch.device) -> None:
        pass  # there is no other

    def torch_device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device(self.kind, 0)

    def enter_worker(self, local_rank: int) -> None:
        """See :meth:`Device.enter_worker`; takes the chip, before user code could do so unbound."""
        driver = _current_driver()
        if not driver.is_awake():
            driver.bind(local_rank)

    def process_group_backend(self, num_local: int) -> str:
        driver = _current_driver()
        if driver.is_loaded():
            return driver.process_group_backend()
        return self.row.shared_group_backend

    def place_module(self, module: nn.Module, device: torch.device) -> None:
        with _turn(module):
            move_parameters(module, device)
            # The last copy has left host memory before the next process begins.
            self.synchronize()

    def downcast_floats(self) -> str:
        return _current_driver().downcast_floats()

    def mark_step(self) -> None:
        _current_driver().mark_step()

    def average_gradients(self, gradients: Sequence[torch.Tensor], world_size: int) -> bool:
        return _current_driver().average_gradients(gradients, world_size)

    def compile_counts(self) -> CompileCounts | None:
        driver = _current_driver()
        return driver.compile_counts() if driver.is_awake() else None

    def random_state(self, index: int | None = None) -> torch.Tensor:
        return _current_driver().random_state()

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        _current_driver().set_random_state(state)

    def reserved_bytes(self, device: torch.device) -> int | None:
        return _current_driver().reserved_bytes(device)

    def empty_cache(self) -> None:
        pass  # the runtime frees what nobody uses by itself

    def synchronize(self) -> None:
        _current_driver().synchronize()


def _all_drivers() -> Iterator[TpuDriver]:
    return (driver() for driver in _DRIVERS.values())


def _current_driver() -> TpuDriver:
    """The driver of this process: a worker's is set, elsewhere it is the one that is loaded."""
    named = env.read(DRIVER_VARIABLE, "") or ""
    if named in _DRIVERS:
        return _DRIVERS[named]()
    loaded = (driver for driver in _all_drivers() if driver.is_loaded())
    return next(loaded, None) or TorchTpuDriver()


def _usable_driver(*, or_dry_run: bool = False) -> TpuDriver | None:
    """What drives the chips of this machine; None without chips, or without a driver for them."""
    host = chips.inspect_host(env.snapshot())
    if host is None:
        return None
    asked = TorchXlaDriver.name if or_dry_run and _is_dry_run(host) else "auto"
    name = drivers.choose_driver(asked, host, installed_version("torch")).name
    return _DRIVERS[name]() if name else None


def _choose(inventory: Inventory, config: RunConfig | None = None) -> DriverChoice:
    host = inventory.tpu or TpuHost(chips=inventory.tpu_chips)
    asked: str = "auto" if config is None else config.tpu_driver
    if _is_dry_run(host) and asked == "auto":
        asked = TorchXlaDriver.name  # the other one has none
    return drivers.choose_driver(asked, host, inventory.torch_version)


def _strategy_problem(choice: DriverChoice, config: RunConfig) -> str:
    """Why a driver cannot do what a strategy needs; empty where it can, or none was asked for."""
    is_asked = config.strategy != "auto"
    if (
        is_asked
        and strategy_row(config.strategy).needs_group
        and choice.name == TorchXlaDriver.name
    ):
        return (
            f'strategy="{config.strategy}" needs a process group whose backend shards tensors, and '
            "torch_xla has none for it: training would fail in its first step. Use torch_tpu."
        )
    return ""


def _is_dry_run(host: TpuHost | None) -> bool:
    return bool(host and not host.chips and host.pjrt_device == "CPU" and host.torch_xla)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses: the runtimes bind them, and take no bound socket."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


@contextlib.contextmanager
def _turn(module: nn.Module) -> Iterator[None]:
    """Wait for this process's turn where host memory, in which copies are staged, is short."""
    num_local = int(env.read("LOCAL_WORLD_SIZE", "1") or 1)
    module_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if not copies_in_turn(num_local, module_bytes, free_host_bytes()):
        yield
        return
    from filelock import FileLock

    file = _TURN_FILE.expanduser()
    lock = FileLock(file)
    # One file for all launches of a user, which stays: without it waiting processes and new ones
    # would hold different locks. A home that cannot be written to has none, and nobody waits.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
