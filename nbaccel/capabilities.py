"""What works with what, as data.

Every device, precision, strategy and start method has a row here. The plan judges by the rows, the
catalogue loads the implementation a row names, pickers grey out by them, and the matrix in the
README and the contract tests are made from them. To add a backend is to add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from nbaccel.errors import InternalError

__all__ = [
    "DEVICES",
    "FP8_BACKENDS",
    "PRECISIONS",
    "START_METHODS",
    "STRATEGIES",
    "DeviceRow",
    "Fp8Row",
    "PrecisionRow",
    "StartMethodRow",
    "StrategyRow",
    "device_row",
    "group_backend",
    "precision_row",
    "start_method_row",
    "strategy_row",
]

_Row = TypeVar("_Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """What workers can compute on.

    Attributes:
        name: As in ``RunConfig.device``.
        meaning: What it is, for people.
        needs: What must be there.
        path: ``module:Class`` of the implementation; empty where this version has none.
        precisions: The precisions it can train in.
        slow: Those of them that it only imitates, and why that matters.
        start_methods: How its workers can be started.
        group_backend: Process group backend where each worker has a device of its own.
        shared_group_backend: The one where workers share a device.
    """

    name: str
    meaning: str
    needs: str
    path: str = ""
    precisions: tuple[str, ...] = ()
    slow: tuple[tuple[str, str], ...] = ()
    start_methods: tuple[str, ...] = ()
    group_backend: str = "gloo"
    shared_group_backend: str = "gloo"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRow:
    """A number format of the forward and backward pass.

    Attributes:
        name: As in ``RunConfig.mixed_precision``.
        meaning: What it is, for people.
        needs: What must be there.
        refused_below: Compute capability under which a GPU cannot do it.
        imitated_below: Compute capability under which a GPU does it slowly.
        path: ``module:Class`` of the implementation; empty where this version has none.
    """

    name: str
    meaning: str
    needs: str
    path: str = ""
    refused_below: tuple[int, int] = (0, 0)
    imitated_below: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Row:
    """A library that computes in 8 bits.

    Attributes:
        name: As in ``Fp8Config.backend``.
        meaning: What it does, for people.
        needs: What must be there.
        package: The module that must be installed for it.
        devices: What it can compute on.
        settings: Those of ``Fp8Config`` that it reads.
    """

    name: str
    meaning: str
    needs: str
    package: str
    devices: tuple[str, ...]
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRow:
    """How the processes of a run train one model together.

    Attributes:
        name: As in ``Strategy.name``.
        meaning: What each process holds, for people.
        needs: What must be there.
        path: ``module:Class`` of the implementation; empty where this version has none.
        devices: What it can compute on.
        precisions: The precisions it can train in.
        distributed_type: What Accelerate calls it; empty where that depends on the device.
        settings: Module of its plugin, where the launcher's request makes one.
        check: ``module:function`` that refuses what its library lacks on a machine.
        judge: ``module:function`` that refuses mistakes in a run's configuration of it.
        library: What must be imported for its shards to exist.
        shards: Module that reads them, a :class:`~nbaccel.abc.shards.ShardReader`.
        memory: Module that knows the shared memory that the workers' library makes: the variables
            for it, and the files to remove.
        enter: ``module:function`` that prepares a worker for it, told the type of its device.
        observe: ``module:function`` that looks at a process before the library is in it, for the
            reader's ``tear_down``. This one, ``enter`` and ``memory`` are asked where nobody may
            ever use the library, so they are light.
    """

    name: str
    meaning: str
    needs: str
    path: str
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    distributed_type: str = ""
    settings: str = ""
    check: str = ""
    judge: str = ""
    library: str = ""
    shards: str = ""
    memory: str = ""
    enter: str = ""
    observe: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMethodRow:
    """How workers come to be.

    Attributes:
        name: As in ``Plan.start_method``.
        meaning: What happens, for people.
        needs: What must be there.
        path: Module of the implementation.
        headline: How :meth:`Plan.headline` says it.
        separate_processes: Whether workers are processes of their own.
    """

    name: str
    meaning: str
    needs: str
    path: str
    headline: str
    separate_processes: bool = True


_ALL_METHODS = ("template", "fork", "inline")

DEVICES: tuple[DeviceRow, ...] = (
    DeviceRow(
        name="cpu",
        meaning="the processor's cores",
        needs="nothing",
        path="nbaccel.devices.cpu:CpuDevice",
        precisions=("no", "fp16", "bf16"),
        slow=(("fp16", "CPUs compute it by way of float32 and its gradients must be scaled"),),
        start_methods=_ALL_METHODS,
    ),
    DeviceRow(
        name="cuda",
        meaning="NVIDIA GPUs",
        needs="a GPU, its driver and a CUDA build of PyTorch",
        path="nbaccel.devices.cuda:CudaDevice",
        precisions=("no", "fp16", "bf16"),
        start_methods=_ALL_METHODS,
        group_backend="nccl",
    ),
    DeviceRow(
        name="tpu",
        meaning="Google TPUs: detected, not yet driven by this version",
        needs="a later version",
    ),
)

PRECISIONS: tuple[PrecisionRow, ...] = (
    PrecisionRow(
        name="no",
        meaning="float32 throughout",
        needs="nothing",
        path="nbaccel.precision.native:Fp32",
    ),
    PrecisionRow(
        name="fp16",
        meaning="float16 with scaled gradients",
        needs="a GPU to be worth it",
        path="nbaccel.precision.native:Fp16",
    ),
    PrecisionRow(
        name="bf16",
        meaning="bfloat16, no scaling needed",
        needs="a CPU, or a GPU of compute capability 8.0 (Ampere) to be worth it",
        path="nbaccel.precision.native:Bf16",
        imitated_below=(8, 0),
    ),
    PrecisionRow(
        name="fp8",
        meaning="8-bit matrix products",
        needs="a later version: nothing computes in it yet, and it is refused",
        refused_below=(8, 9),
    ),
)

FP8_BACKENDS: tuple[Fp8Row, ...] = (
    Fp8Row(
        name="te",
        meaning="TransformerEngine: fused layers with delayed scaling",
        needs="the package transformer-engine, and a GPU of compute capability 8.9 or newer",
        package="transformer_engine",
        devices=("cuda",),
        settings=(
            "fp8_format",
            "margin",
            "interval",
            "amax_history_len",
            "amax_compute_algo",
            "override_linear_precision",
            "use_autocast_during_eval",
        ),
    ),
    Fp8Row(
        name="msamp",
        meaning="MS-AMP: weight gradients and optimizer states in 8 bits, too",
        needs="the package msamp, built from its sources, and a GPU of capability 8.9 or newer",
        package="msamp",
        devices=("cuda",),
        settings=("opt_level",),
    ),
    Fp8Row(
        name="ao",
        meaning="torchao: scales found anew in each step",
        needs="the package torchao, and a GPU of compute capability 8.9 or newer",
        package="torchao",
        devices=("cuda",),
    ),
)

_NATIVE = ("no", "fp16", "bf16")

STRATEGIES: tuple[StrategyRow, ...] = (
    StrategyRow(
        name="single",
        meaning="one process trains alone",
        needs="nothing",
        path="nbaccel.strategies.single:SingleStrategy",
        devices=("cpu", "cuda"),
        precisions=_NATIVE,
    ),
    StrategyRow(
        name="ddp",
        meaning="every process holds the whole model, gradients are averaged",
        needs="memory for the model in every process",
        path="nbaccel.strategies.ddp:DdpStrategy",
        devices=("cpu", "cuda"),
        precisions=_NATIVE,
    ),
    StrategyRow(
        name="fsdp",
        meaning="every process holds a shard of weights, gradients and optimizer (`fully_shard`)",
        needs="a FullyShardedDataParallelPlugin",
        path="nbaccel.strategies.fsdp:FsdpStrategy",
        devices=("cpu", "cuda"),
        precisions=_NATIVE,
        distributed_type="FSDP",
    ),
    StrategyRow(
        name="deepspeed",
        meaning="ZeRO: optimizer, gradients and weights in shards, stage by stage",
        needs="DeepSpeed, ninja and a C++ compiler; a DeepSpeedPlugin or `zero_stage`",
        path="nbaccel.deepspeed.strategy.strategy:DeepSpeedStrategy",
        devices=("cpu", "cuda"),
        precisions=_NATIVE,
        distributed_type="DEEPSPEED",
        settings="nbaccel.deepspeed.strategy.plugin",
        check="nbaccel.deepspeed.toolchain:check_tools",
        judge="nbaccel.deepspeed.checking:check_run",
        library="deepspeed",
        shards="nbaccel.deepspeed.strategy.reader",
        memory="nbaccel.deepspeed.shared_memory",
        enter="nbaccel.deepspeed.in_worker:enter_worker",
        observe="nbaccel.deepspeed.teardown:observe",
    ),
)

START_METHODS: tuple[StartMethodRow, ...] = (
    StartMethodRow(
        name="template",
        meaning="forked from a clean process that has torch imported",
        needs="Linux; what is sent to workers can be pickled",
        path="nbaccel.launch.template",
        headline="started from the template",
    ),
    StartMethodRow(
        name="fork",
        meaning="forked from this process: everything in it is visible, nothing is pickled",
        needs="Linux; no CUDA context, XLA runtime or process group in this process",
        path="nbaccel.launch.fork",
        headline="forked from this process",
    ),
    StartMethodRow(
        name="inline",
        meaning="the function is called in this process; a debugger works",
        needs="one worker",
        path="nbaccel.launch.inline",
        headline="in this process",
        separate_processes=False,
    ),
)


def device_row(name: str) -> DeviceRow:
    """The row of a device.

    Args:
        name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _found(name, {row.name: row for row in DEVICES}.get(name))


def precision_row(name: str) -> PrecisionRow:
    """The row of a precision.

    Args:
        name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _found(name, {row.name: row for row in PRECISIONS}.get(name))


def strategy_row(name: str) -> StrategyRow:
    """The row of a strategy.

    Args:
        name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _found(name, {row.name: row for row in STRATEGIES}.get(name))


def start_method_row(name: str) -> StartMethodRow:
    """The row of a start method.

    Args:
        name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _found(name, {row.name: row for row in START_METHODS}.get(name))


def group_backend(row: DeviceRow, *, num_local: int, num_devices: int) -> str:
    """The process group backend for the workers of one node.

    Args:
        row: The device they compute on.
        num_local: Workers on this node.
        num_devices: Devices of that kind on this node.

    Returns:
        The name that ``torch.distributed.init_process_group`` takes.
    """
    # NCCL refuses two ranks on one GPU ("Duplicate GPU detected").
    return row.group_backend if num_local <= num_devices else row.shared_group_backend


def _found(name: str, row: _Row | None) -> _Row:
    if row is None:
        raise InternalError(
            f"nbaccel has no capability row named {name!r}. "
            "Nothing can be decided about it. Please report this as a bug."
        )
    return row
