"""A distributed environment of one process, in the notebook itself: what DeepSpeed insists on.

    variables   RANK, LOCAL_RANK, WORLD_SIZE, ... : those that people paste by hand
    socket      bound and listening from the first moment, then handed to torch's store
    group       begun here, on that store: DeepSpeed finds it and begins none of its own, so
                no port is ever chosen first and bound later

All of it, and what DeepSpeed adds, is undone in the opposite order.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from nbaccel import env, ports
from nbaccel.deepspeed import library, teardown, toolchain
from nbaccel.deepspeed.device import Wish, check_gpu, read_wish
from nbaccel.errors import ConfigError, UnsafeMoment
from nbaccel.plan.inventory import inspect_machine

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["DeepSpeedEnvironment", "deepspeed_environment", "ignore_old_names"]

_HOST = "127.0.0.1"
_OLD_NAMES = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
# What these variables hold in a process that is alone.
_ALONE = {
    "RANK": 0,
    "LOCAL_RANK": 0,
    "WORLD_SIZE": 1,
    "LOCAL_WORLD_SIZE": 1,
    "OMPI_COMM_WORLD_SIZE": 1,
    "PMI_SIZE": 1,
    "MV2_COMM_WORLD_SIZE": 1,
}
# They would make torch or Accelerate look for a launcher that is not there.
_UNSET: tuple[str, ...] = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "FORK_LAUNCHED",
)
# Here DeepSpeed would make shared memory of 66 MiB, and leave it there: see `shared_memory`.
_UNSET += ("LOCAL_SIZE",)


class DeepSpeedEnvironment:
    """What :func:`deepspeed_environment` gives: in force from birth until :meth:`close`.

    Attributes:
        device: What DeepSpeed computes on, as torch calls it: ``cpu``, ``cuda:0``.
        backend: The process group's backend: ``gloo``, ``nccl``.
        port: TCP port of the rendezvous store, on loopback.
    """

    def __init__(self, *, device: str, backend: str, port: int, undo: contextlib.ExitStack) -> None:
        self.device = device
        self.backend = backend
        self.port = port
        self._undo = undo
        self._pid = os.getpid()
        self._is_block = False
        self._is_open = True
        atexit.register(self.close)

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return not self._is_open

    @property
    def is_block(self) -> bool:
        """Whether a ``with`` statement closes it."""
        return self._is_block

    def close(self) -> None:
        """Undo everything. Closing again does nothing.

        Engines that are still alive are destroyed, the process group ends, variables are as before.
        """
        # A forked child has a copy; group, store and variables are its parent's to end.
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        atexit.unregister(self.close)
        _CURRENT.discard(self)
        self._undo.close()

    def __enter__(self) -> Self:
        if not self._is_open:
            raise UnsafeMoment(
                f"{self!r} was closed, and its port is gone. Call deepspeed_environment() again: "
                "each call makes a new one."
            )
        self._is_block = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{_HOST}:{self.port}" if self._is_open else "closed"
        return f"<DeepSpeedEnvironment {self.device}, {self.backend}, {state}>"


_CURRENT: set[DeepSpeedEnvironment] = set()
"""The one in force, if any: a cell that is run again must find it."""


def deepspeed_environment(
    *,
    device: str | torch.device | None = None,
    port: int | None = None,
    timeout_s: float = 600.0,
) -> DeepSpeedEnvironment:
    """Let DeepSpeed run in this very process, without a launcher.

    ``deepspeed.initialize``, ``deepspeed.zero.Init``, ``HfDeepSpeedConfig`` and
    ``Trainer(args=TrainingArguments(deepspeed=...))`` work in it, again and again, with whatever
    ZeRO stage. For several processes use `notebook_launcher`, whose workers need none of this.

    As a block it ends with the block; as a plain call it stays until it is closed, called again,
    or Python exits::

        with deepspeed_environment():
            engine, *_ = deepspeed.initialize(model=model, config=config)

    Make the model anew for each engine: one that ZeRO-3 has taken apart cannot go into ZeRO-2.
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
        UnsafeMoment: A launcher started this process, it has a process group already, its device
            is taken, or a block of this kind is open.
        PortTaken: The port is somebody else's.
        MissingBackend: DeepSpeed or ninja is not installed.
        PlatformUnsupported: There is no compiler, and one is needed.
    """
    __tracebackhide__ = True
    wish = read_wish(device)
    if timeout_s <= 0:
        raise ConfigError(
            f"timeout_s={timeout_s} is no time: every collective would fail. Use 600, for example."
        )
    _close_current()
    _check_launcher(env.snapshot())
    _check_group()
    with contextlib.ExitStack() as stack:
        opened = _open(wish, port, timeout_s, stack)
    _CURRENT.add(opened)
    return opened


def ignore_old_names() -> None:
    """Leave out what torch warns of in each step, and no user of DeepSpeed can change.

    DeepSpeed 0.19 calls collectives by names that torch 2.13 has given others.
    """
    warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning, r"torch\.distributed")


def _open(
    wish: Wish, port: int | None, timeout_s: float, stack: contextlib.ExitStack
) -> DeepSpeedEnvironment:
    """Everything in its order; what was done is undone if a step fails."""
    if wish.kind == "cuda":
        _check_gpu(wish.index)
    ignore_old_names()
    listener = stack.enter_context(ports.listen(_HOST, port, setting="port", who="DeepSpeed"))
    number = int(listener.getsockname()[1])
    stack.enter_context(env.applied(_variables(wish, number)))
    stack.callback(teardown.tear_down, teardown.observe())
    deepspeed = library.load("deepspeed", why="deepspeed_environment()")
    kind = _settled_device(deepspeed, wish)
    if kind == "cpu":
        toolchain.check_compiler()
    elif kind == "cuda" and wish.kind is None:
        _check_gpu(wish.index)
    toolchain.remove_forgotten_locks()
    backend = str(deepspeed.accelerator.get_accelerator().communication_backend_name())
    _begin_group(backend, listener.detach(), number, timeout_s)
    device = kind if kind == "cpu" else f"{kind}:{wish.index}"
    return DeepSpeedEnvironment(device=device, backend=backend, port=number, undo=stack.pop_all())


def _variables(wish: Wish, port: int) -> dict[str, str | None]:
    changes: dict[str, str | None] = {
        "RANK": "0",
        "LOCAL_RANK": str(wish.index),  # DeepSpeed and transformers take the device's number here
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "PATH": toolchain.path_with_ninja(),
    }
    # Groups open ports of their own, on the interface of the machine's name unless told which.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        changes[name] = env.read(name) or _loopback()
    if wish.kind is not None:
        changes["DS_ACCELERATOR"] = wish.kind  # read once, when DeepSpeed is imported
    return changes | dict.fromkeys(_UNSET)


def _loopback() -> str | None:
    """The interface that no other machine can reach: ``lo`` or ``lo0``."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == _HOST for address in addresses):
            return name
    return None


def _close_current() -> None:
    for opened in tuple(_CURRENT):
        if opened.is_block:
            raise UnsafeMoment(
                f"{opened!r} is in force, from a `with` block that has not ended. A process has "
                "one environment at a time. Use that one, or leave the block first."
            )
        opened.close()


def _check_launcher(environ: Mapping[str, str]) -> None:
    """A process that is one of several must not be cut off from the others."""
    found = [
        f"{name}={environ[name]}"
        for name, alone in _ALONE.items()
        if environ.get(name, "").strip() not in ("", "-1", str(alone))
    ]
    if found:
        raise UnsafeMoment(
            f"A launcher's environment is here already: {', '.join(found)}. An environment of one "
            "process would cut this one off from the others. In a launched process leave "
            "deepspeed_environment() out: DeepSpeed reads these variables itself. In a notebook "
            f"that nobody launched they are left over: unset {_names(found)} first."
        )


def _names(found: list[str]) -> str:
    return ", ".join(text.partition("=")[0] for text in found)


def _check_group() -> None:
    """DeepSpeed would silently join a group of which nothing is known here."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    size, backend = distributed.get_world_size(), distributed.get_backend()
    raise UnsafeMoment(
        f"This process has a process group already: {backend}, rank {distributed.get_rank()} of "
        f"{size}. DeepSpeed would train in it, and its end would be nobody's. "
        "Either use DeepSpeed in it without deepspeed_environment(), or end it first: "
        f"{_way_to_end_group()}()"
    )


def _way_to_end_group() -> str:
    comm = sys.modules.get("deepspeed.comm.comm")
    known = comm is not None and comm.cdb is not None
    return f"{'deepspeed.comm' if known else 'torch.distributed'}.destroy_process_group"


def _settled_device(deepspeed: ModuleType, wish: Wish) -> str:
    """The kind of device that DeepSpeed has chosen for the life of this process."""
    kind = str(deepspeed.accelerator.get_accelerator().device_name())
    if wish.kind not in (None, kind):
        raise UnsafeMoment(
            f"device={wish.kind!r} comes too late: DeepSpeed was imported before and has settled "
            f"on {kind} for the life of this process. Restart the kernel and call "
            f"deepspeed_environment(device={wish.kind!r}) before DeepSpeed is imported."
        )
    return kind


def _check_gpu(index: int) -> None:
    inventory = inspect_machine()
    check_gpu(index, inventory.gpus, inventory.gpu_note)


def _begin_group(backend: str, listener: int, port: int, timeout_s: float) -> None:
    import torch.distributed as dist

    # Its functions take the default group of the moment of this import as a default argument, and
    # would keep it, with its port and threads, for ever (torch 2.13). Now there is none to keep.
    import_module("torch.distributed.nn.functional")
    timeout = timedelta(seconds=timeout_s)
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        **ports.store_options(listener),
    )
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
