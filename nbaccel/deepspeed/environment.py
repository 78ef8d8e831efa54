"""A distributed environment of one process, in the notebook itself, which DeepSpeed needs.

    variables   RANK, LOCAL_RANK, WORLD_SIZE, ... : those that a launcher would set
    socket      bound and listening from the first moment, then handed to torch's store
    group       made here, on that store: DeepSpeed finds it and makes none itself, so no port is
                ever chosen first and bound later

All of it, and what DeepSpeed, Accelerate and transformers add, is undone in the opposite order:
else engines and modules stay alive, DeepSpeed's wrapper outlives torch's process group, and
transformers goes on training with DeepSpeed because a variable says so.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from nbaccel.base import env, processes, training_libraries
from nbaccel.base.errors import ConfigError, UnsafeMoment
from nbaccel.base.log import get_logger
from nbaccel.deepspeed import library
from nbaccel.plan.inspecting import inspect_machine

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


def _read_device(device: object) -> tuple[str | None, int]:
    """``cpu`` or ``cuda``, as DeepSpeed calls its accelerators, and a GPU's number."""
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(device))
    if match is None and device is not None:
        raise ConfigError(
            f"device={device!r} is not supported by deepspeed_environment: it would be used under "
            'a wrong name. Use "cpu", "cuda" or "cuda:1", or None for what DeepSpeed chooses.'
        )
    return (match[1], int(match[2] or 0) * (match[1] == "cuda")) if match else (None, 0)


def _check_gpu(index: int) -> None:
    """Refuse a GPU that is not there, with which DeepSpeed would fail at its first tensor."""
    machine = inspect_machine()
    if index >= len(machine.gpus):
        listed = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in machine.gpus)
        no_gpu = f"no GPU ({machine.gpu_note})" if machine.gpu_note else "no GPU"
        raise ConfigError(
            f'device="cuda:{index}" is not there: CUDA shows this process {listed or no_gpu}. '
            f"Use {'one of these' if listed else 'device=' + repr('cpu')}."
        )


_LOOPBACK_ADDRESS = "127.0.0.1"
_OLD_NAMES = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
_ALONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"), "1"),
}
"""What these variables hold in a process that is alone."""
# By the first three torch or Accelerate would look for a launcher; by the last DeepSpeed would make
# 66 MiB of shared memory, and leave it: see `plan.topology`.
_UNSET_VARIABLES = (
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "FORK_LAUNCHED"),
    "LOCAL_SIZE",
)


class DeepSpeedEnvironment:
    """What :func:`deepspeed_environment` gives: in force from its creation until :meth:`close`.

    Attributes:
        device: What DeepSpeed computes on, as torch calls it: ``cpu``, ``cuda:0``.
        backend: The process group's backend: ``gloo``, ``nccl``.
        port: TCP port of the rendezvous store, on loopback.
        closed: Whether it has been closed.
        is_block: Whether a ``with`` statement closes it.
    """

    def __init__(self, *, device: str, backend: str, port: int, undo: contextlib.ExitStack) -> None:
        self.device = device
        self.backend = backend
        self.port = port
        self._undo = undo
        self._pid = os.getpid()
        self.is_block = False
        self.closed = False
        self.users = 0  # strategies and builders for which it was made, see `Lease`
        # At exit, too: engines must be destroyed before `local_shards` removes their files.
        atexit.register(self.close)

    def close(self) -> None:
        """Destroy engines, end the process group, restore variables; again it does nothing."""
        # A forked child has a copy; group, store and variables are its parent's to end.
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        atexit.unregister(self.close)
        # Before the undoing, so that one that fails half-way does not block the next environment.
        _OPEN_ENVIRONMENTS.discard(self)
        self._undo.close()

    def __enter__(self) -> Self:
        if self.closed:
            raise UnsafeMoment(f"{self!r} was closed. Call deepspeed_environment() again.")
        self.is_block = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        text = "closed" if self.closed else f"{_LOOPBACK_ADDRESS}:{self.port}"
        return f"<DeepSpeedEnvironment {self.device}, {self.backend}, {text}>"


_OPEN_ENVIRONMENTS: set[DeepSpeedEnvironment] = set()  # the one in force, if any


def deepspeed_environment(
    *, device: str | torch.device | None = None, port: int | None = None, timeout_s: float = 600.0
) -> DeepSpeedEnvironment:
    """Let DeepSpeed run in this very process, without a launcher.

    ``deepspeed.initialize``, ``deepspeed.zero.Init``, ``HfDeepSpeedConfig`` and
    ``Trainer(args=TrainingArguments(deepspeed=...))`` work in it, again and again, with whatever
    ZeRO stage. For several processes use `notebook_launcher`, whose workers need none of this.

    As a block it ends with the block; as a plain call it stays until it is closed, called again,
    or Python exits::

        with deepspeed_environment():
            engine, *_ = deepspeed.initialize(model=model, config=config)

    Build a new model for each engine: one that ZeRO-3 has taken apart cannot go into ZeRO-2.
    Take out what you need from a ZeRO-3 engine before the end.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None for what DeepSpeed chooses. DeepSpeed
            chooses once in the life of a process.
        port: TCP port of the rendezvous store; None for a free one.
        timeout_s: How long a collective may take.

    Returns:
        The environment, in force already.

    Raises:
        ConfigError: The device is not there, or a setting is wrong.
        UnsafeMoment: A launcher started this process, it has a process group already, or a block of
            this kind is open.
        PortTaken: Another process listens on the port.
        MissingBackend: DeepSpeed or ninja is not installed.
        PlatformUnsupported: There is no compiler, and one is needed.
    """
    __tracebackhide__ = True
    wanted_kind, gpu_index = _read_device(device)
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s={timeout_s} is not positive: all would fail. Use 600.")
    _close_current()
    _check_launcher(env.snapshot())
    _check_group()
    # The stack undoes every step if one fails; in the end it hands them to the environment.
    with contextlib.ExitStack() as stack:
        if wanted_kind == "cuda":
            _check_gpu(gpu_index)
        ignore_old_names()
        socket = stack.enter_context(
            processes.listen(_LOOPBACK_ADDRESS, port, setting="port", waiters="DeepSpeed")
        )
        port_number = int(socket.getsockname()[1])
        variables = _environment_variables(wanted_kind, gpu_index, port_number)
        stack.enter_context(env.applied(variables))
        # Before DeepSpeed is loaded, whose changes `observe` must not take for what was there.
        stack.callback(tear_down, observe())
        deepspeed = library.load_module("deepspeed", why="deepspeed_environment()")
        kind = _chosen_device(deepspeed, wanted_kind)
        library.ready_to_build(kind)
        backend_name = str(deepspeed.accelerator.get_accelerator().communication_backend_name())
        # The store owns the descriptor from here on, so the socket must not close it.
        _begin_group(backend_name, socket.detach(), port_number, timeout_s)
        device = kind if kind == "cpu" else f"{kind}:{gpu_index}"
        opened_environment = DeepSpeedEnvironment(
            device=device, backend=backend_name, port=port_number, undo=stack.pop_all()
        )
    _OPEN_ENVIRONMENTS.add(opened_environment)
    return opened_environment


def ignore_old_names() -> None:
    """Suppress torch's warnings in each step: DeepSpeed 0.19 calls what torch 2.13 has renamed."""
    warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning, r"torch\.distributed")


def _environment_variables(kind: str | None, gpu_index: int, port: int) -> dict[str, str | None]:
    variables: dict[str, str | None] = {
        "RANK": "0",
        # DeepSpeed and transformers take the device's number from here.
        "LOCAL_RANK": str(gpu_index),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": _LOOPBACK_ADDRESS,
        "MASTER_PORT": str(port),
        # Groups open ports on the interface of the machine's name unless these name another.
        "GLOO_SOCKET_IFNAME": env.read("GLOO_SOCKET_IFNAME") or "lo",
        "NCCL_SOCKET_IFNAME": env.read("NCCL_SOCKET_IFNAME") or "lo",
        "PATH": library.path_with_ninja(),
        **dict.fromkeys(_UNSET_VARIABLES),
    }
    # DeepSpeed reads it once, when it is imported.
    return variables if kind is None else {**variables, "DS_ACCELERATOR": kind}


def _close_current() -> None:
    for environment in tuple(_OPEN_ENVIRONMENTS):
        # A block's owner still works in it; a plain call belongs to an earlier run of a cell.
        if environment.is_block:
            raise UnsafeMoment(
                f"{environment!r} is in force, from a `with` block that has not ended, and a "
                "process has one at a time. Use that one, or leave the block first."
            )
        environment.close()


def _check_launcher(environ: Mapping[str, str]) -> None:
    """A process that is one of several must not be cut off from the others."""
    given = {name: environ.get(name, "").strip() for name in _ALONE}
    found = [name for name, value in given.items() if value not in ("", "-1", _ALONE[name])]
    if found:
        raise UnsafeMoment(
            "A launcher's environment is here already: "
            f"{', '.join(f'{name}={environ[name]}' for name in found)}. In a launched process "
            f"leave deepspeed_environment() out; in a notebook unset {', '.join(found)} first."
        )


def _check_group() -> None:
    """DeepSpeed would silently join a group that was made elsewhere."""
    if (owner := library.group_owner()) is not None:
        module = sys.modules["torch.distributed"]
        name = "torch.distributed" if owner is module else "deepspeed.comm"
        raise UnsafeMoment(
            f"This process has a process group already ({module.get_backend()}, rank "
            f"{module.get_rank()} of {module.get_world_size()}). Use DeepSpeed without "
            f"deepspeed_environment(), or end it first: {name}.destroy_process_group()"
        )


def _chosen_device(deepspeed: ModuleType, wanted_kind: str | None) -> str:
    """The kind of device that DeepSpeed has chosen for the life of this process."""
    device_kind = str(deepspeed.accelerator.get_accelerator().device_name())
    if wanted_kind not in (None, device_kind):
        raise UnsafeMoment(
            f"device={wanted_kind!r} comes too late: DeepSpeed has settled on {device_kind}. "
            "Restart the kernel, and call this before DeepSpeed is imported."
        )
    return device_kind


def _begin_group(name: str, fd: int, port: int, timeout_s: float) -> None:
    import torch.distributed as dist

    # Its functions keep the default group of the moment of this import, with port and threads, for
    # ever (torch 2.13). Here there is none yet.
    import_module("torch.distributed.nn.functional")
    timeout = timedelta(seconds=timeout_s)
    # One process: waiting for other workers would wait for ever.
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK_ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        **processes.store_options(fd),
    )
    dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=timeout)


class Lease:
    """One user's claim that engines can be made: in an environment that ends with the last claim.

    In a launched process, which has a group, the variables that DeepSpeed needs are set.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._environment: DeepSpeedEnvironment | None = None

    def take(self) -> None:
        """Claim it; a second time does nothing."""
        if self._environment is not None:
            return
        import torch.distributed as dist

        ignore_old_names()
        gc.collect()  # strategies of an earlier run of the cell, in cycles, still hold their lease
        shared = next((known for known in _OPEN_ENVIRONMENTS if known.users), None)
        if shared is None and dist.is_initialized():
            variables = {"PATH": library.ready_to_build(self._device.type)}
            if self._device.type == "cpu":
                # DeepSpeed reads it once, when it is imported; else it would take a GPU.
                variables["DS_ACCELERATOR"] = env.read("DS_ACCELERATOR") or "cpu"
            env.update(variables)
            return
        self._environment = shared or deepspeed_environment(device=self._device)
        self._environment.users += 1

    def give_up(self) -> None:
        """End the claim; without one this does nothing."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.users -= 1
            if not environment.users:
                environment.close()


_log = get_logger(__name__)
# `TrainingArguments(deepspeed=...)` sets ACCELERATE_USE_DEEPSPEED and leaves it there: the next
# Trainer would use DeepSpeed unasked.
_VARIABLE_PREFIXES = ("ACCELERATE_", "DEEPSPEED_")


_Before: TypeAlias = tuple[dict[str, str], bool, Any]
"""Variables, whether Accelerate is set up, and transformers' DeepSpeed configuration."""


def observe() -> _Before:
    """Look at what DeepSpeed and those who use it will change."""
    is_set_up = training_libraries.accelerate_is_set_up()
    return _library_variables(), is_set_up, library.hf_config_reference()


def tear_down(state_before: _Before) -> None:
    """End DeepSpeed's part of this process; the next use starts from nothing."""
    variables, was_set_up, hf_config = state_before
    with contextlib.ExitStack() as steps:  # run from the last to the first, each in any case
        # Last of all: only then do no hooks, lists and groups hold engines and modules any more.
        steps.callback(gc.collect)
        # None unsets a variable that was not there before.
        steps.callback(lambda: env.update(dict.fromkeys(_library_variables()) | variables))
        # While it holds a ZeRO-3 configuration, every model is made of placeholders.
        steps.callback(library.keep_hf_config_reference, hf_config)
        if not was_set_up:
            steps.callback(training_libraries.forget_accelerate)
        # After the engines, some of which ask their group for a rank when they are destroyed.
        steps.callback(_end_groups)
        steps.callback(forget_modules)
        steps.callback(_destroy_engines)


def _destroy_engines() -> None:
    """Also those that a variable still names: without their process group they cannot train."""
    for engine in live_engines():
        try:
            destroy(engine)
        except Exception as error:  # a half-made engine must not keep the rest alive
            _log.warning("an engine could not be destroyed: %r", error)


def destroy(engine: Any) -> None:
    """Destroy an engine for good."""
    engine.destroy()
    # Before 0.19 it is called again on collection, maybe when the group it asks is gone.
    engine.destroy = lambda: None


def live_engines() -> list[Any]:
    """All engines of this process, also those that no Accelerator made."""
    if (module := sys.modules.get("deepspeed.runtime.engine")) is None:
        return []
    # DeepSpeed has no list of its engines. By type: objects of torch warn when `__class__` is read.
    return [one for one in gc.get_objects() if issubclass(type(one), module.DeepSpeedEngine)]


def forget_modules() -> None:
    """Empty what keeps the modules of a ZeRO-3 run alive after its engine is gone."""
    if offload := sys.modules.get("deepspeed.runtime.zero.parameter_offload"):
        # The start of each forward pass appends to it; only the end of a whole one takes away.
        offload.FWD_MODULE_STACK.clear()
    if coordinator := sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator"):
        # A cache on a method, in a decorator without `__wrapped__`, has submodules as its keys.
        for attribute in vars(coordinator.PartitionedParameterCoordinator).values():
            for cell in getattr(attribute, "__closure__", None) or ():
                getattr(cell.cell_contents, "cache_clear", bool)()


def _end_groups() -> None:
    """Destroy all process groups, through DeepSpeed where it has taken them up."""
    if (owner := library.group_owner()) is not None:
        # Held until last: their threads are joined without the GIL, see `_group_backends`.
        group_backends = _group_backends()
        owner.destroy_process_group()
        del group_backends
    forget_groups()


def forget_groups() -> None:
    """Make DeepSpeed forget the groups that it made from those of torch, which are gone."""
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        # It wraps the group that is gone, and `init_distributed` would take it for the next one.
        comm.cdb = None
    if groups := sys.modules.get("deepspeed.utils.groups"):
        library.forget_group_references(groups)


def _group_backends() -> list[Any]:
    """The C++ side of all groups, as Python holds it."""
    # ~ProcessGroupGloo joins a thread that may wait for the GIL, which a ProcessGroup's destructor
    # holds: a deadlock. The handles given here release the GIL first, so they must go last.
    # Where there is a group, torch is loaded; everywhere else this module does without it.
    from nbaccel.base import torch_private

    groups = torch_private.process_groups()
    return [backend for group in groups for backend in torch_private.device_backends(group)]


def _library_variables() -> dict[str, str]:
    variables = env.snapshot().items()
    return {name: value for name, value in variables if name.startswith(_VARIABLE_PREFIXES)}
