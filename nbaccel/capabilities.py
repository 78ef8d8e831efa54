"""What works with what, as data.

Every device, precision, strategy and start method has a row here. The plan judges by the rows, the
catalogue loads the implementation a row names, `RunConfig` takes the words that they name, pickers
disable options by them, and the matrix in the documentation and the contract tests are made from
them. To add a backend is to add a row: here, or from another package by an entry point (see
`entry_points`).
"""

from __future__ import annotations

from typing import TypeVar

from nbaccel._optional import is_installed
from nbaccel.capability_rows import DeviceRow, Fp8Row, PrecisionRow, StartMethodRow, StrategyRow
from nbaccel.entry_points import NamedRow, rows_from_outside
from nbaccel.errors import InternalError

__all__ = [
    "DEVICES",
    "ENTRY_POINT_PROBLEMS",
    "FP8_BACKENDS",
    "PRECISIONS",
    "START_METHODS",
    "STRATEGIES",
    "DeviceRow",
    "Fp8Row",
    "PrecisionRow",
    "StartMethodRow",
    "StrategyRow",
    "computes_in",
    "device_row",
    "driven_devices",
    "fp8_backend",
    "group_backend",
    "precision_row",
    "start_method_row",
    "strategy_fits",
    "strategy_row",
    "words_of_rows",
]

_CapabilityRow = TypeVar("_CapabilityRow", bound=NamedRow)

_ALL_START_METHODS = ("template", "fork", "inline")
_NATIVE_PRECISIONS = ("no", "fp16", "bf16")

_DEVICES: tuple[DeviceRow, ...] = (
    DeviceRow(
        name="cpu",
        meaning="the processor's cores",
        needs="nothing",
        path="nbaccel.devices.cpu:CpuDevice",
        label="CPU",
        precisions=_NATIVE_PRECISIONS,
        slow=(("fp16", "CPUs compute it by way of float32 and its gradients must be scaled"),),
        start_methods=_ALL_START_METHODS,
        in_host_memory=True,
        variables=(("ACCELERATE_USE_CPU", "true"),),
    ),
    DeviceRow(
        name="cuda",
        meaning="NVIDIA GPUs",
        needs="a GPU, its driver and a CUDA build of PyTorch",
        path="nbaccel.devices.cuda:CudaDevice",
        label="GPU",
        words=("gpu", "nvidia"),
        precisions=_NATIVE_PRECISIONS,
        start_methods=_ALL_START_METHODS,
        group_backend="nccl",
    ),
    DeviceRow(
        name="xpu",
        meaning="Intel GPUs, never run yet",
        needs="an Intel GPU, its driver and an XPU build of PyTorch",
        path="nbaccel.devices.xpu:XpuDevice",
        label="Intel GPU",
        words=("intel",),
        precisions=_NATIVE_PRECISIONS,
        strategies=("single", "ddp", "fsdp"),
        start_methods=_ALL_START_METHODS,
        group_backend="xccl",
        never_run=True,
    ),
    DeviceRow(
        name="mps",
        meaning="the GPU of Apple silicon, one process, never run yet",
        needs="a Mac with Apple silicon",
        path="nbaccel.devices.mps:MpsDevice",
        label="Apple GPU",
        words=("apple", "metal"),
        precisions=_NATIVE_PRECISIONS,
        strategies=("single",),
        start_methods=("inline",),
        never_run=True,
    ),
    DeviceRow(
        name="tpu",
        meaning="Google TPUs, by torch_tpu or torch_xla; never run on a chip yet",
        needs="TPU chips, and torch_tpu with torch 2.11 to 2.15, or torch_xla with its torch",
        path="nbaccel.devices.tpu:TpuDevice",
        label="TPU chip",
        words=("xla",),
        precisions=("no", "bf16"),
        refused=(
            (
                "fp16",
                "TPUs compute in bfloat16, and torch_tpu lacks the operation that checks scaled "
                "gradients for infinity",
            ),
        ),
        start_methods=("template", "fork"),
        stages_copies=True,
        distributed_type="XLA",
    ),
)

_PRECISIONS: tuple[PrecisionRow, ...] = (
    PrecisionRow(
        name="no",
        meaning="float32 throughout",
        needs="nothing",
        words=("fp32", "float32", "none"),
        path="nbaccel.precision.native:Fp32",
    ),
    PrecisionRow(
        name="fp16",
        meaning="float16 with scaled gradients",
        needs="a GPU to be worth it",
        words=("half", "float16"),
        path="nbaccel.precision.native:Fp16",
        dtype="float16",
    ),
    PrecisionRow(
        name="bf16",
        meaning="bfloat16, no scaling needed",
        needs="a CPU, or a GPU of compute capability 8.0 (Ampere) to be worth it",
        words=("bfloat16",),
        path="nbaccel.precision.native:Bf16",
        dtype="bfloat16",
        imitated_below=(8, 0),
    ),
    PrecisionRow(
        name="fp8",
        meaning="8-bit matrix products",
        needs="a later version: nothing here computes in it yet, and it is refused",
        words=("float8",),
        has_backends=True,
        refused_below=(8, 9),
    ),
)

_FP8_BACKENDS: tuple[Fp8Row, ...] = (
    Fp8Row(
        name="te",
        meaning="TransformerEngine: fused layers with delayed scaling",
        needs="the package transformer-engine, and a GPU of compute capability 8.9 or newer",
        package="transformer_engine",
        words=("transformerengine", "transformer_engine"),
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
        words=("torchao",),
        devices=("cuda",),
    ),
)

_STRATEGIES: tuple[StrategyRow, ...] = (
    StrategyRow(
        name="single",
        meaning="one process trains alone",
        needs="nothing",
        path="nbaccel.strategies.single:SingleStrategy",
        headline="one process",
        processes="one",
        is_default=True,
        default_reason="there are no other processes",
        devices=("cpu", "cuda", "tpu"),
        precisions=_NATIVE_PRECISIONS,
    ),
    StrategyRow(
        name="ddp",
        meaning="every process holds the whole model, gradients are averaged",
        needs="memory for the model in every process",
        path="nbaccel.strategies.ddp:DdpStrategy",
        headline="data parallel",
        processes="several",
        is_default=True,
        default_reason="{world_size} processes, each with a whole model",
        settings="nbaccel.config.handlers:DistributedDataParallelKwargs",
        devices=("cpu", "cuda"),
        precisions=_NATIVE_PRECISIONS,
    ),
    StrategyRow(
        name="replicas",
        meaning="every process holds the whole model; gradients are averaged before each step",
        needs="memory for the model on every chip",
        path="nbaccel.strategies.replicas:ReplicasStrategy",
        headline="data parallel",
        processes="several",
        is_default=True,
        default_reason="{world_size} processes, each with a whole model",
        devices=("tpu",),
        precisions=("no", "bf16"),
        distributed_type="XLA",
    ),
    StrategyRow(
        name="spmd",
        meaning="one process drives all chips: batches and weights are cut up by XLA",
        needs="torch_xla; a single process",
        path="nbaccel.strategies.spmd:SpmdStrategy",
        headline="SPMD",
        processes="one",
        drives_all=True,
        devices=("tpu",),
        precisions=("no", "bf16"),
        distributed_type="XLA",
    ),
    StrategyRow(
        name="fsdp",
        meaning="every process holds a shard of weights, gradients and optimizer (`fully_shard`)",
        needs="a FullyShardedDataParallelPlugin",
        path="nbaccel.strategies.fsdp:FsdpStrategy",
        headline="fully sharded",
        needs_group=True,
        settings="nbaccel.config.fsdp_settings:FullyShardedDataParallelPlugin",
        argument="fsdp_plugin",
        wanted="nbaccel.strategies.fsdp_asked:fsdp_request",
        variables=(("ACCELERATE_USE_FSDP", "true"),),
        devices=("cpu", "cuda", "tpu"),
        precisions=_NATIVE_PRECISIONS,
        distributed_type="FSDP",
    ),
    StrategyRow(
        name="deepspeed",
        meaning="ZeRO: optimizer, gradients and weights in shards, stage by stage",
        needs="DeepSpeed, ninja and a C++ compiler; a DeepSpeedPlugin or `zero_stage`",
        path="nbaccel.deepspeed.strategy.deepspeed_strategy:DeepSpeedStrategy",
        headline="DeepSpeed",
        devices=("cpu", "cuda"),
        precisions=_NATIVE_PRECISIONS,
        distributed_type="DEEPSPEED",
        settings="nbaccel.deepspeed.strategy.plugin:DeepSpeedPlugin",
        argument="deepspeed_plugin",
        wanted="nbaccel.deepspeed.asked:wanted",
        variables=(("ACCELERATE_USE_DEEPSPEED", "true"),),
        check="nbaccel.deepspeed.cpp_operations:check_tools",
        judge="nbaccel.deepspeed.checking:check_run",
        library="deepspeed",
        shards="nbaccel.deepspeed.strategy.reader",
        memory="nbaccel.deepspeed.leftover_files",
        enter="nbaccel.deepspeed.in_worker:enter_worker",
        observe="nbaccel.deepspeed.teardown:observe",
        form="nbaccel.deepspeed.form.zero_form:DeepSpeedForm",
        advisor="nbaccel.deepspeed.advisor.advise:advise",
        command="nbaccel.deepspeed.to_fp32_command:add_to",
    ),
)

START_METHODS: tuple[StartMethodRow, ...] = (
    StartMethodRow(
        name="template",
        meaning="forked from a clean process that has torch imported",
        needs="Linux; what is sent to workers can be pickled",
        headline="started from the template",
    ),
    StartMethodRow(
        name="fork",
        meaning="forked from this process: everything in it is visible, nothing is pickled",
        needs="Linux; no CUDA context, XLA runtime or process group in this process",
        headline="forked from this process",
    ),
    StartMethodRow(
        name="inline",
        meaning="the function is called in this process; a debugger works",
        needs="one worker",
        headline="in this process",
        separate_processes=False,
    ),
)

DEVICES, _device_problems = rows_from_outside("nbaccel.devices", DeviceRow, _DEVICES)
"""The first is always there."""
PRECISIONS, _precision_problems = rows_from_outside("nbaccel.precisions", PrecisionRow, _PRECISIONS)
FP8_BACKENDS, _fp8_problems = rows_from_outside("nbaccel.fp8_backends", Fp8Row, _FP8_BACKENDS)
STRATEGIES, _strategy_problems = rows_from_outside("nbaccel.strategies", StrategyRow, _STRATEGIES)

ENTRY_POINT_PROBLEMS: tuple[str, ...] = (
    *_device_problems,
    *_precision_problems,
    *_fp8_problems,
    *_strategy_problems,
)
"""Entry points of other packages that cannot be used, and why. Plans report them."""


def device_row(row_name: str) -> DeviceRow:
    """The row of a device.

    Args:
        row_name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _check_row_exists(row_name, {row.name: row for row in DEVICES}.get(row_name))


def precision_row(row_name: str) -> PrecisionRow:
    """The row of a precision.

    Args:
        row_name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _check_row_exists(row_name, {row.name: row for row in PRECISIONS}.get(row_name))


def strategy_row(row_name: str) -> StrategyRow:
    """The row of a strategy.

    Args:
        row_name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _check_row_exists(row_name, {row.name: row for row in STRATEGIES}.get(row_name))


def start_method_row(row_name: str) -> StartMethodRow:
    """The row of a start method.

    Args:
        row_name: As in the table.

    Returns:
        The row.

    Raises:
        InternalError: No row has that name.
    """
    return _check_row_exists(row_name, {row.name: row for row in START_METHODS}.get(row_name))


def words_of_rows(
    rows: tuple[DeviceRow | PrecisionRow | Fp8Row | StrategyRow, ...],
) -> dict[str, str]:
    """Other words that people write for the names of rows.

    Args:
        rows: A table.

    Returns:
        Word → name.
    """
    return {
        other_word: capability_row.name
        for capability_row in rows
        for other_word in capability_row.words
    }


def driven_devices() -> tuple[DeviceRow, ...]:
    """The devices that workers can compute on in this version; others are only detected."""
    return tuple(row for row in DEVICES if row.precisions)


def computes_in(device: DeviceRow, precision: PrecisionRow | Fp8Row) -> bool:
    """Whether a device trains in a precision, or a backend of FP8 on a device."""
    # Either row may name the other: one of them may come from another package.
    return precision.name in device.precisions or device.name in precision.devices


def strategy_fits(strategy: StrategyRow, other_row: DeviceRow | PrecisionRow | Fp8Row) -> bool:
    """Whether a strategy trains on a device, or in a precision."""
    fitting_names = strategy.devices if isinstance(other_row, DeviceRow) else strategy.precisions
    return other_row.name in fitting_names or strategy.name in other_row.strategies


def fp8_backend(backend_name: str) -> tuple[Fp8Row | None, str]:
    """Which library computes in 8 bits.

    Args:
        backend_name: Its name; any other word takes the first that is installed.

    Returns:
        The row, and why it cannot be used: empty where it can. None where this version trains with
        no such library.
    """
    fitting_rows = [backend_row for backend_row in FP8_BACKENDS if backend_row.path]
    if backend_name in {backend_row.name for backend_row in FP8_BACKENDS}:
        fitting_rows = [
            backend_row for backend_row in fitting_rows if backend_row.name == backend_name
        ]
    if not fitting_rows:
        return None, ""
    for backend_row in fitting_rows:
        if is_installed(backend_row.package):
            return backend_row, ""
    first_row = fitting_rows[0]
    return (
        first_row,
        f"the FP8 backend {first_row.name!r} needs {first_row.package}, which is not installed",
    )


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


def _check_row_exists(row_name: str, named_row: _CapabilityRow | None) -> _CapabilityRow:
    if named_row is None:
        raise InternalError(
            f"nbaccel has no capability row named {row_name!r}. "
            "Nothing can be decided about it. Please report this as a bug."
        )
    return named_row
