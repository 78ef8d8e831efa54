"""torch_xla: the device ``xla``, whose operations are recorded and run as one program.

``PJRT_DEVICE=CPU`` makes it compute on the processor, for trying a program without a TPU: then each
worker has a runtime of its own that knows of no other, and collectives go by way of gloo.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.devices.tpu.chips import torch_xla_variables
from nbaccel.devices.tpu.drivers import TpuDriver
from nbaccel.plan.contracts.device import CompileCounts

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import TpuHost


RUNTIME_VARIABLE = "PJRT_DEVICE"
_CACHE_FOLDER = Path("~/.cache/nbaccel/xla_programs")
# What the import of torch_xla set in this process's environment, which a worker's replaces.
_IMPORT_VARIABLES: dict[str, str] = {}
_NANOSECONDS = 1e-9
_TRIAL_S = 10.0  # measured: 0.1 s; a loaded machine takes longer


class TorchXlaDriver(TpuDriver):
    """Tensors of type ``xla``; operations run when a step is marked, or a value is read."""

    name: ClassVar[str] = "torch_xla"
    kind: ClassVar[str] = "xla"

    def is_loaded(self) -> bool:
        return hasattr(sys.modules.get("torch_xla"), "_XLAC")

    def load(self) -> None:
        before = env.snapshot()
        importlib.import_module("torch_xla")
        after = env.snapshot()
        _IMPORT_VARIABLES.update(
            {name: value for name, value in after.items() if before.get(name) != value}
        )

    def is_awake(self) -> bool:
        is_initialized = _runtime_question()
        return is_initialized is not None and bool(is_initialized())

    def holds_chips(self) -> bool:
        return self.is_awake() and self._computes_on_chips()

    def fork_problem(self) -> str:
        # torch makes its queues for devices in the first backward pass of a process, and torch_xla
        # counts none before its runtime runs: later ones on its device fail an assertion, in forks
        # of the process, too (https://github.com/pytorch/xla/issues/4174). Only a trial shows it.
        # An entry of None makes Python refuse the import.
        if sys.modules.get("torch_xla") is not None and _runtime_question() is None:
            return "torch_xla is imported, and this version cannot tell whether its runtime runs"
        if not self.is_loaded() or self.is_awake():
            return super().fork_problem()
        return "" if _trial_backward() else "a backward pass has run in the notebook, on the CPU"

    def bind(self, local_rank: int) -> None:
        if not self.is_loaded():
            self.load()
        env.update(
            {name: value for name, value in _IMPORT_VARIABLES.items() if env.read(name) is None}
        )
        refuse_collectives()
        if self._computes_on_chips():
            # Before the first computation. On the processor nothing can be read again (2.9).
            folder = str(_CACHE_FOLDER.expanduser())
            importlib.import_module("torch_xla.runtime").initialize_cache(folder)
        importlib.import_module("torch_xla").device()

    def launch_variables(
        self, host: TpuHost, num_workers: int, ports: Sequence[int]
    ) -> tuple[Mapping[str, str], ...]:
        if not self._computes_on_chips():
            return ({RUNTIME_VARIABLE: "CPU", "CPU_NUM_DEVICES": "1"},) * num_workers
        return tuple(
            torch_xla_variables(host.generation, num_workers, local_rank, ports)
            for local_rank in range(num_workers)
        )

    def average_gradients(self, gradients: Sequence[torch.Tensor], world_size: int) -> bool:
        if not self._computes_on_chips():
            return False
        model = importlib.import_module("torch_xla.core.xla_model")
        model.all_reduce(model.REDUCE_SUM, list(gradients), scale=1.0 / world_size)
        return True

    def downcast_floats(self) -> str:
        import torch

        env.update({"XLA_DOWNCAST_BF16": "1", "XLA_USE_BF16": None})
        with warnings.catch_warnings():
            # It says that the variable is to go after torch_xla 2.6, and honours it in 2.9.
            warnings.simplefilter("ignore")
            # bfloat16 has 8 bits of precision: this number becomes 1.
            is_short = float(torch.tensor(1 + 2**-10).to(self.kind).cpu()) == 1.0
        if is_short:
            return ""
        raise ConfigError(
            f"downcast_bf16=True comes too late: a tensor was made on {self.kind!r} before, "
            "and torch_xla decides then how floats are kept. Training would go on in float32. Make "
            "the Accelerator first, or set XLA_DOWNCAST_BF16=1 before the launch."
        )

    def mark_step(self) -> None:
        if self.is_awake():
            importlib.import_module("torch_xla").sync()

    def synchronize(self) -> None:
        if self.is_awake():
            importlib.import_module("torch_xla").sync(wait=True)

    def compile_counts(self) -> CompileCounts:
        metrics = importlib.import_module("torch_xla.debug.metrics")
        said = metrics.metric_data("CompileTime")
        if said is None:  # nothing has been compiled
            return CompileCounts(programs=0, seconds=0.0)
        return CompileCounts(programs=int(said[0]), seconds=said[1] * _NANOSECONDS)

    def random_state(self, index: int | None = None) -> torch.Tensor:
        import torch

        seed = importlib.import_module("torch_xla.core.xla_model").get_rng_state()
        return torch.frombuffer(bytearray(struct.pack("<Q", seed)), dtype=torch.uint8)

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        (seed,) = struct.unpack("<Q", state.cpu().numpy().tobytes())
        importlib.import_module("torch_xla.core.xla_model").set_rng_state(seed)

    def reserved_bytes(self, device: torch.device) -> int | None:
        # The runtime of the processor has no figures, and raises.
        if not (self.is_awake() and self._computes_on_chips()):
            return None
        model = importlib.import_module("torch_xla.core.xla_model")
        here = importlib.import_module("torch_xla").device()
        return int(model.get_memory_info(here)["bytes_used"])

    @staticmethod
    def _computes_on_chips() -> bool:
        return (env.read(RUNTIME_VARIABLE, "") or "").strip().upper() != "CPU"


def _runtime_question() -> Callable[[], bool] | None:
    """What tells whether the runtime is initialised; None where torch_xla is absent or has none."""
    # There is no public way to ask without initialising it.
    core = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    return getattr(core, "_xla_runtime_is_initialized", None)


def _trial_backward() -> bool:
    """Whether a backward pass works in a fork, which takes no chip and is killed if it hangs."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of all forks
        process_id = os.fork()
    if process_id == 0:
        with contextlib.suppress(BaseException):
            import torch

            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed assertion writes its stack
            env.update({RUNTIME_VARIABLE: "CPU"})
            leaf = torch.ones(1, requires_grad=True)
            untyped: Any = (leaf.to("xla") * 2).sum()
            untyped.backward()
            if leaf.grad is not None and float(leaf.grad) == 2.0:
                os.write(write_end, b"1")
        os._exit(0)
    os.close(write_end)
    try:
        readable, _, _ = select.select([read_end], [], [], _TRIAL_S)
        return bool(readable) and os.read(read_end, 1) == b"1"
    finally:
        os.close(read_end)
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)


# ------------------------------------------------------------------------- collectives
# Those of torch that refuse tensors of torch_xla, which gloo would leave as they are:
#
#     dist.all_reduce ─────────────┐
#     from … import all_reduce ────┼──► torch's operation c10d::allreduce_ ──► refused for ``xla``
#     DistributedDataParallel, … ──┘
#
# For this device nobody has written these operations, so torch_xla copies their tensors to the
# host, runs them there and copies nothing back: they return at once, and every rank goes on with
# its own values (torch_xla 2.9). Neither a process group of torch_xla's own comes by here, nor
# functional collectives: torch_xla has written those, and they go from chip to chip.

_REDUCED = "accelerator.reduce(tensor)"
_GATHERED = "accelerator.gather(tensor)"
_BROADCAST = "nbaccel.utils.broadcast(tensor)"
# torch's operation → the function that users call, and what does the same on any device.
_COLLECTIVES: dict[str, tuple[str, str]] = {
    "allreduce_": ("all_reduce", _REDUCED),
    "allreduce_coalesced_": ("all_reduce_coalesced", _REDUCED),
    "reduce_": ("reduce", _REDUCED),
    "broadcast_": ("broadcast", _BROADCAST),
    "allgather_": ("all_gather", _GATHERED),
    "_allgather_base_": ("all_gather_into_tensor", _GATHERED),
    "allgather_coalesced_": ("all_gather_coalesced", _GATHERED),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor", _GATHERED),
    "gather_": ("gather", _GATHERED),
    "reduce_scatter_": ("reduce_scatter", _REDUCED),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", _REDUCED),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", _REDUCED),
    "scatter_": ("scatter", _BROADCAST),
    "alltoall_": ("all_to_all", ""),
    "alltoall_base_": ("all_to_all_single", ""),
    "send": ("send", ""),
    "recv_": ("recv", ""),
    "recv_any_source_": ("recv", ""),
}
# What is registered goes with the object that has registered it.
_REGISTERED: list[Any] = []


def refuse_collectives() -> None:
    """Let this process's collectives of tensors on ``xla`` fail instead of changing nothing."""
    if _REGISTERED:
        return
    import torch
    import torch.distributed  # defines the operations

    untyped: Any = torch.library.Library
    library = untyped("c10d", "IMPL", "XLA")
    _REGISTERED.append(library)
    for operation, (name, remedy) in _COLLECTIVES.items():
        if hasattr(torch.ops.c10d, operation):
            library.impl(operation, _refusal_of(name, remedy))


def _refusal_of(name: str, remedy: str) -> Callable[..., NoReturn]:
    text = f"Use {remedy}, or move it" if remedy else "Move it"

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"torch.distributed.{name} got a tensor on xla, and this process group is gloo's: it "
            f"would return at once, and change nothing. {text} to the host: tensor.cpu()."
        )

    return refuse
