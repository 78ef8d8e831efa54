"""What works with what, as data: a row for every device, precision, strategy and engine.

Rows are here, or from other packages by entry points. Plans, pickers and tables are made from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from nbaccel.base.errors import InternalError
from nbaccel.base.optional_packages import is_installed
from nbaccel.config.capability_rows import (
    DeviceRow,
    DeviceSigns,
    EngineRow,
    Fp8Choice,
    Fp8Row,
    PrecisionRow,
    Row,
    StartMethodRow,
    StrategyRow,
)

_AnyRow = TypeVar("_AnyRow", bound=Row)

_ALL_START_METHODS = ("template", "fork", "inline")
_NATIVE_PRECISIONS = ("no", "fp16", "bf16")

TPU_SIGNS = DeviceSigns(
    packages=("torch_tpu", "torch_xla"),
    variables=(
        *("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_NAME", "TPU_WORKER_HOSTNAMES"),
        *("COLAB_TPU_ADDR", "PJRT_DEVICE"),
    ),
    files=("dev/accel*", "dev/vfio/[0-9]*"),
    pci_vendor="0x1ae0",
    facts=("tpu", "tpu_chips"),
)

_DEVICES: tuple[DeviceRow, ...] = (
    DeviceRow(
        name="cpu",
        meaning="the processor's cores",
        needs="nothing",
        path="nbaccel.devices.cpu_xpu_mps:CpuDevice",
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
        signs=DeviceSigns(
            # Nodes of NVIDIA's driver, of that of Jetson, of WSL and of AMD; in Windows a library.
            files=(
                *("dev/nvidia*", "dev/nvhost-gpu", "dev/nvmap", "dev/dxg", "dev/kfd"),
                "Windows/System32/nvml.dll",
            ),
            pci_vendor="0x10de",
            facts=("gpus",),
        ),
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
        path="nbaccel.devices.cpu_xpu_mps:XpuDevice",
        signs=DeviceSigns(files=("sys/class/drm/render*",), facts=("accelerators",)),
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
        path="nbaccel.devices.cpu_xpu_mps:MpsDevice",
        signs=DeviceSigns(files=("System/Library/CoreServices",), facts=("accelerators",)),
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
        signs=TPU_SIGNS,
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
        meaning="8-bit matrix products; the rest in bfloat16",
        needs="a GPU of compute capability 8.9 (Ada, Hopper) to be worth it; emulated elsewhere",
        words=("float8",),
        has_backends=True,
    ),
)

_LAYER_SETTINGS = (
    *("recipe", "fp8_format", "margin", "interval", "amax_history_len", "amax_compute_algo"),
    *("override_linear_precision", "use_autocast_during_eval", "skip_first_and_last"),
)
"""What libraries read that put layers of their own in a model."""
_FP8_STRATEGIES = ("single", "ddp", "fsdp", "deepspeed")
_FIRST_WITH_FP8 = (8, 9)

# In the order in which `auto` looks for them: that of Accelerate's guide, then what is installed.
_FP8_BACKENDS: tuple[Fp8Row, ...] = (
    Fp8Row(
        name="msamp",
        meaning="MS-AMP's levels: weights, gradients and optimizer states in 8 and 16 bits, too",
        needs="nothing",
        package="",
        path="nbaccel.precision.native_fp8:MsAmpFp8",
        devices=("cpu", "cuda"),
        strategies=("single", "ddp"),
        settings=("opt_level", *(name for name in _LAYER_SETTINGS if name != "fp8_format")),
        recipes=("current", "delayed"),
        auto_with="msamp",
        emulated_below=_FIRST_WITH_FP8,
        restore="nbaccel.precision.fp8_layers:restore_layers",
        library="nbaccel.precision.fp8.linear",
    ),
    Fp8Row(
        name="te",
        meaning="TransformerEngine: its layers, in the place of linear layers and LayerNorm",
        needs="the package transformer-engine, and a GPU of compute capability 8.9 or newer",
        package="transformer_engine",
        path="nbaccel.precision.transformer_engine:TransformerEngineFp8",
        words=("transformerengine", "transformer_engine"),
        devices=("cuda",),
        strategies=("single", "ddp", "fsdp"),
        settings=_LAYER_SETTINGS,
        recipes=("delayed", "current", "block", "mxfp8", "nvfp4"),
        refused_below=_FIRST_WITH_FP8,
        restore="nbaccel.precision.transformer_engine:restore_layers",
        library="transformer_engine.pytorch",
    ),
    Fp8Row(
        name="ao",
        meaning="torchao: scales found anew in each step",
        needs="the package torchao",
        package="torchao",
        path="nbaccel.precision.torchao:TorchaoFp8",
        words=("torchao",),
        devices=("cpu", "cuda"),
        strategies=_FP8_STRATEGIES,
        settings=(
            *("recipe", "skip_first_and_last", "pad_inner_dim", "enable_fsdp_float8_all_gather"),
        ),
        recipes=("current", "rowwise"),
        emulated_below=_FIRST_WITH_FP8,
        restore="nbaccel.precision.torchao:restore_layers",
        library="torchao.float8",
    ),
    Fp8Row(
        name="native",
        meaning="nbaccel's own linear layers, with current or delayed scaling",
        needs="nothing",
        package="",
        path="nbaccel.precision.native_fp8:NativeFp8",
        devices=("cpu", "cuda", "xpu"),
        strategies=_FP8_STRATEGIES,
        settings=_LAYER_SETTINGS,
        recipes=("current", "delayed"),
        emulated_below=_FIRST_WITH_FP8,
        restore="nbaccel.precision.fp8_layers:restore_layers",
        library="nbaccel.precision.fp8.linear",
    ),
)

FP8_RECIPE_CAPABILITIES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "rowwise": ((9, 0), (99, 0)),
    "block": ((9, 0), (99, 0)),
    "mxfp8": ((10, 0), (12, 0)),
    "nvfp4": ((10, 0), (99, 0)),
}
"""Recipes that not all GPUs with FP8 have: the first compute capability, and the first without."""

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
        name="fsdp",
        meaning="every process holds a shard of weights, gradients and optimizer (`fully_shard`)",
        needs="a FullyShardedDataParallelPlugin",
        path="nbaccel.strategies.fsdp:FsdpStrategy",
        headline="fully sharded",
        needs_group=True,
        settings="nbaccel.config.handlers:FullyShardedDataParallelPlugin",
        arguments=("fsdp_plugin",),
        variables=(("ACCELERATE_USE_FSDP", "true"),),
        devices=("cpu", "cuda", "tpu"),
        precisions=_NATIVE_PRECISIONS,
        distributed_type="FSDP",
    ),
    StrategyRow(
        name="deepspeed",
        meaning="ZeRO: optimizer, gradients and weights in shards, stage by stage",
        needs="DeepSpeed, ninja and a C++ compiler; a DeepSpeedPlugin or `zero_stage`",
        path="nbaccel.deepspeed.deepspeed_strategy:DeepSpeedStrategy",
        headline="DeepSpeed",
        devices=("cpu", "cuda"),
        precisions=_NATIVE_PRECISIONS,
        distributed_type="DEEPSPEED",
        settings="nbaccel.deepspeed.plugin:DeepSpeedPlugin",
        arguments=("deepspeed_plugin", "deepspeed_plugins"),
        make_settings="nbaccel.deepspeed.plugin:make_plugins",
        run_flag="uses_deepspeed",
        variables=(("ACCELERATE_USE_DEEPSPEED", "true"),),
        check="nbaccel.deepspeed.library:check_tools",
        judge="nbaccel.deepspeed.checking:check_run",
        library="deepspeed",
        shards="nbaccel.deepspeed.local_shards",
        enter="nbaccel.deepspeed.library:enter_worker",
        explain_signal="nbaccel.deepspeed.library:explain_signal",
        observe="nbaccel.deepspeed.environment:observe",
        form="nbaccel.deepspeed.form:DeepSpeedForm",
        advisor="nbaccel.deepspeed.advise:advise",
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

_ENGINES: tuple[EngineRow, ...] = (
    EngineRow(
        name="local",
        meaning="this machine; or a fixed set of machines, each with a notebook of its own",
        needs="nothing",
    ),
    EngineRow(
        name="elastic",
        meaning="machines with a command each, which agree on who takes part by torchrun's agent",
        needs="a script, started by nbaccel launch, and an rdzv_endpoint that all of them reach",
        words=("torchelastic", "torchrun"),
        starts_scripts_only=True,
    ),
    EngineRow(
        name="slurm",
        meaning="the nodes of the SLURM allocation that the notebook runs in",
        needs="an allocation (salloc, sbatch), srun and scontrol on the PATH, and Ray",
        path="nbaccel.hosts.hostfile_slurm:SlurmEngine",
    ),
    EngineRow(
        name="deepspeed",
        meaning="the hosts of a DeepSpeed hostfile, by ssh",
        needs="a hostfile, ssh without a password to each of its hosts, and Ray on all of them",
        path="nbaccel.hosts.hostfile_slurm:HostfileEngine",
        words=("hostfile", "ssh"),
        setting="hostfile",
    ),
    EngineRow(
        name="ray",
        meaning="the nodes of the Ray cluster that the notebook is connected to",
        needs="Ray, and ray.init(address=...) in the notebook",
        path="nbaccel.hosts.ray_engine:RayEngine",
    ),
)


def rows_from_outside(
    group: str, row_class: type[_AnyRow], built_in: tuple[_AnyRow, ...], problems: list[str]
) -> tuple[_AnyRow, ...]:
    """The built-in rows and those of entry points of packages; why others cannot be used."""
    rows_by_name = {row.name: row for row in built_in}
    points: Iterable[EntryPoint] = _ENTRY_POINTS.select(group=group)
    # Sorted: of two rows with one name the first is used, which must not depend on the machine.
    for entry_point in sorted(points, key=lambda point: (point.name, point.value)):
        try:
            row = entry_point.load()
        except Exception as error:  # a package's module may raise anything
            text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
            problem = f"cannot be loaded: {text}."
        else:
            if not isinstance(row, row_class):
                problem = f"must be a {row_class.__name__}: got {row!r}."
            elif rows_by_name.setdefault(row.name, row) == row:
                continue
            else:
                problem = (
                    f"has a row named {row.name!r}, and there is one of that name already. The "
                    "other one is used."
                )
        point = f"{entry_point.name} = {entry_point.value} ({entry_point.group})"
        package = f" of the package {entry_point.dist.name}" if entry_point.dist is not None else ""
        problems.append(f"Entry point {point}{package} {problem} {_ROW_REMEDY}")
    return tuple(rows_by_name.values())


_ROW_REMEDY = "What it adds is missing. Repair or uninstall the package."
_ENTRY_POINTS: Any = entry_points()  # of all installed packages: read once, as that takes long
_problems: list[str] = []
DEVICES = rows_from_outside("nbaccel.devices", DeviceRow, _DEVICES, _problems)  # CPU first
PRECISIONS = rows_from_outside("nbaccel.precisions", PrecisionRow, _PRECISIONS, _problems)
FP8_BACKENDS = rows_from_outside("nbaccel.fp8_backends", Fp8Row, _FP8_BACKENDS, _problems)
STRATEGIES = rows_from_outside("nbaccel.strategies", StrategyRow, _STRATEGIES, _problems)
ENGINES = rows_from_outside("nbaccel.engines", EngineRow, _ENGINES, _problems)  # local first
ENTRY_POINT_PROBLEMS: tuple[str, ...] = tuple(_problems)
"""Entry points of other packages that cannot be used, and why. Plans report them."""


def _row_named(rows: tuple[_AnyRow, ...], name: str) -> _AnyRow:
    for row in rows:
        if row.name == name:
            return row
    raise InternalError(
        f"nbaccel has no capability row named {name!r}. "
        "Nothing can be decided about it. Please report this as a bug."
    )


device_row = partial(_row_named, DEVICES)
"""The row of a device; this and the following raise InternalError where none has that name."""
precision_row = partial(_row_named, PRECISIONS)
strategy_row = partial(_row_named, STRATEGIES)
start_method_row = partial(_row_named, START_METHODS)
engine_row = partial(_row_named, ENGINES)


def words_of_rows(rows: tuple[Row, ...]) -> dict[str, str]:
    """Other words that people write for the names of rows."""
    return {word: row.name for row in rows for word in row.words}


def computes_in(device: DeviceRow, precision: PrecisionRow | Fp8Row) -> bool:
    """Whether a device trains in a precision, or a backend of FP8 on a device."""
    # Either row may name the other: one of them may come from another package.
    return precision.name in device.precisions or device.name in precision.devices


def strategy_fits(strategy: StrategyRow, other_row: DeviceRow | PrecisionRow | Fp8Row) -> bool:
    """Whether a strategy trains on a device, or in a precision."""
    names = strategy.devices if isinstance(other_row, DeviceRow) else strategy.precisions
    return other_row.name in names or strategy.name in other_row.strategies


def fp8_backend(
    backend_name: str,
    device: DeviceRow | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> Fp8Choice:
    """Which library computes in 8 bits."""
    for row in FP8_BACKENDS:
        if row.name == backend_name:
            is_missing = bool(row.package) and not is_installed(row.package)
            needs = f"the FP8 backend {row.name!r} needs {row.package}, which is not installed"
            return Fp8Choice(row=row, problem=needs if is_missing else "", reason="asked for")
    passed_over: list[str] = []
    # Those that need no package come last: they are always there.
    for row in sorted(FP8_BACKENDS, key=lambda row: not (row.auto_with or row.package)):
        package = row.auto_with or row.package
        if package and not is_installed(package):
            obstacle = f"{package} is not installed"
        elif device is not None and not computes_in(device, row):
            obstacle = f"it does not compute on {device.name}"
        elif compute_capability is not None and compute_capability < row.refused_below:
            obstacle = f"it needs {row.needs}"
        else:
            text = f"{package} is installed" if package else "it needs no package"
            return Fp8Choice(row=row, reason="; ".join((text, *passed_over)))
        passed_over.append(f"not {row.name}: {obstacle}")
    return Fp8Choice(row=FP8_BACKENDS[0], problem="; ".join(passed_over))


def group_backend(row: DeviceRow, *, num_local: int, num_devices: int) -> str:
    """The process group backend for the workers of one node."""
    # NCCL refuses two ranks on one GPU ("Duplicate GPU detected").
    return row.group_backend if num_local <= num_devices else row.shared_group_backend
