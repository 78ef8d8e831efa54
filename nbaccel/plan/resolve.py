"""``resolve``: what the user said plus what the machine has makes what will happen.

Here, in the notebook's own process and in milliseconds, everything is refused that can be
refused, all mistakes at once. It decides by the rows of ``nbaccel.capabilities`` and starts
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nbaccel.capabilities import (
    device_row,
    group_backend,
    precision_row,
    start_method_row,
    strategy_row,
)
from nbaccel.config import RunConfig
from nbaccel.config.contradictions import elastic_reason
from nbaccel.errors import ConfigError, PlatformUnsupported
from nbaccel.plan.inventory import Gpu, Inventory, inspect_machine
from nbaccel.plan.plan import Choice, Plan
from nbaccel.units import counted, format_bytes

__all__ = ["resolve"]

# What a worker takes before the first tensor: measured 117-134 MiB, beside shared libraries.
_WORKER_FLOOR_BYTES = 150 * 2**20
# Where nodes meet unless told otherwise: they cannot agree on a free one.
_NODES_PORT = 29500
_ASKED = "asked for"


@dataclass(frozen=True, slots=True)
class _Findings:
    """What the rules below have to say beside their decision."""

    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def resolve(config: RunConfig, inventory: Inventory | None = None) -> Plan:
    """Decide what a launch will do.

    Args:
        config: What the user said.
        inventory: What the machine has; looked up where not given.

    Returns:
        The plan, with the reason for each choice.

    Raises:
        ConfigError: This machine cannot serve the settings; every mistake is listed.
        PlatformUnsupported: This operating system cannot start separate workers.
    """
    found = inspect_machine() if inventory is None else inventory
    say = _Findings()
    device = _device(config, found, say)
    count = _num_processes(config, found, device)
    method = _start_method(config, count)
    threads = _threads(config, found, count, say)
    backend = _backend(config, found, device, count, say)
    _check_rendezvous(config, say)
    port = _port(config if not say.mistakes else RunConfig())
    precision = _precision(config, found, device, count, say)
    zero = _zero(config, precision, say)
    _check_memory(found, count, method, say)
    _refuse(say, _platform_problem(found, method))
    return Plan(
        config=config,
        inventory=found,
        device=str(device.value),
        num_processes=int(count.value),
        world_size=int(count.value) * config.num_nodes,
        start_method=str(method.value),
        threads_per_process=int(threads.value),
        process_group_backend=str(backend.value),
        master_addr=config.rdzv_endpoint.rpartition(":")[0].strip("[]") or config.master_addr,
        port=port.value if isinstance(port.value, int) else None,
        choices=(device, count, method, threads, precision, *zero, backend, port),
        warnings=tuple(say.warnings),
    )


def _device(config: RunConfig, found: Inventory, say: _Findings) -> Choice:
    if config.device == "tpu":
        say.mistakes.append(_no_tpu(found))
    if config.device == "cuda" and (problem := _no_cuda(found)):
        say.mistakes.append(problem)
    if config.device != "auto":
        idle = f"; {_gpus(found)} not used" if config.device == "cpu" and found.gpus else ""
        return Choice("device", config.device, f"{_ASKED}{idle}")
    if found.tpu_chips:
        say.warnings.append(
            f"{counted(found.tpu_chips, 'TPU chip')} found and not used: this version of nbaccel "
            "has no TPU backend."
        )
    if found.gpus and _is_cpu_build(found):
        say.warnings.append(f"{_gpus(found)} found and not used: {_cpu_build_remedy(found)}")
        return Choice("device", "cpu", f"torch {found.torch_version} cannot use a GPU")
    if found.gpus:
        return Choice("device", "cuda", f"{_gpus(found)} found")
    note = f" ({found.gpu_note})" if found.gpu_note else ""
    return Choice("device", "cpu", f"no GPU found{note}")


def _no_cuda(found: Inventory) -> str:
    if not found.gpus:
        return (
            f'device="cuda" needs a GPU: got a machine without one that can be used '
            f"({found.gpu_note or 'none found'}). Workers would fail in their first CUDA call. "
            'Give device="cpu", or "auto" to take what there is.'
        )
    if _is_cpu_build(found):
        return (
            f'device="cuda" needs a CUDA build of PyTorch: got torch {found.torch_version}. '
            f"Workers would fail in their first CUDA call. {_cpu_build_remedy(found)}"
        )
    return ""


def _no_tpu(found: Inventory) -> str:
    there = (
        counted(found.tpu_chips, "TPU chip") if found.tpu_chips else "a machine without TPU chips"
    )
    return (
        f'device="tpu" cannot be served: got {there}. This version of nbaccel detects TPUs and '
        'does not drive them. Give device="cpu", or "auto" to take what there is.'
    )


def _is_cpu_build(found: Inventory) -> bool:
    return found.torch_version.endswith("+cpu")


def _cpu_build_remedy(found: Inventory) -> str:
    return f"torch {found.torch_version} is built for CPUs only. Install a CUDA build of PyTorch."


def _num_processes(config: RunConfig, found: Inventory, device: Choice) -> Choice:
    name = "num_processes"
    if config.num_processes is not None:
        return Choice(name, config.num_processes, _ASKED)
    if config.start_method == "inline":
        return Choice(name, 1, 'start_method="inline" is this one process')
    if device.value == "cuda" and found.gpus:
        return Choice(name, len(found.gpus), f"one per GPU, {len(found.gpus)} found")
    return Choice(
        name, 1, f"one on CPU; num_processes=2 or more share the {counted(found.cpu_cores, 'core')}"
    )


def _start_method(config: RunConfig, count: Choice) -> Choice:
    name = "start_method"
    if config.start_method != "auto":
        return Choice(name, config.start_method, _ASKED)
    if count.value == 1 and config.num_nodes == 1 and config.max_restarts == 0:
        return Choice(name, "inline", "one worker needs no other process; a debugger works")
    return Choice(name, "template", "a clean process: safe whatever this notebook has run before")


def _threads(config: RunConfig, found: Inventory, count: Choice, say: _Findings) -> Choice:
    name, workers, cores = "threads_per_process", int(count.value), found.cpu_cores
    asked = config.threads_per_process
    threads = max(1, cores // workers) if asked is None else asked
    if workers > 1 and workers * threads > cores:
        say.warnings.append(
            f"{workers} workers with {counted(threads, 'thread')} each share "
            f"{counted(cores, 'core')}: they will "
            "wait for each other. Fewer workers or threads are faster."
        )
    reason = (
        f"{counted(cores, 'core')} for {counted(workers, 'worker')}" if asked is None else _ASKED
    )
    return Choice(name, threads, reason)


def _backend(
    config: RunConfig, found: Inventory, device: Choice, count: Choice, say: _Findings
) -> Choice:
    name, workers, gpus = "process_group_backend", int(count.value), len(found.gpus)
    row = device_row(str(device.value))
    backend = group_backend(row, num_local=workers, num_devices=gpus)
    if row.group_backend == row.shared_group_backend:
        return Choice(name, backend, f"for {row.name}")
    if workers > gpus > 0:
        say.warnings.append(
            f"{workers} workers share {counted(gpus, 'GPU')}, over gloo: NCCL refuses two ranks on "
            f"one GPU. Each worker has its own CUDA context; num_processes={gpus} is faster."
        )
        return Choice(
            name, backend, f"{workers} workers share {counted(gpus, 'GPU')}, which NCCL refuses"
        )
    if workers < gpus:
        idle = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in found.gpus[workers:])
        say.warnings.append(
            f"{counted(workers, 'worker')} for {gpus} GPUs: {idle} will be idle. "
            f"num_processes={gpus} would use them all."
        )
    return Choice(name, backend, f"one worker per {row.name} device")


def _port(config: RunConfig) -> Choice:
    if config.use_port is not None:
        return Choice("use_port", config.use_port, _ASKED)
    if config.rdzv_endpoint:
        port = int(config.rdzv_endpoint.rpartition(":")[2])
        return Choice("use_port", port, f"from rdzv_endpoint={config.rdzv_endpoint!r}")
    if config.num_nodes > 1:
        return Choice("use_port", _NODES_PORT, "nodes must agree on one; this is torch's usual")
    return Choice("use_port", "free", "the system gives one that nobody uses")


def _precision(
    config: RunConfig, found: Inventory, device: Choice, count: Choice, say: _Findings
) -> Choice:
    name, value = "mixed_precision", config.mixed_precision
    row, precision = device_row(str(device.value)), precision_row(value)
    if not precision.path:
        say.mistakes.append(_no_such_precision(value))
    elif row.path and value not in row.precisions:
        say.mistakes.append(
            f'mixed_precision="{value}" cannot be had on {row.name}: it needs {precision.needs}. '
            "Training would fail in its first step. Give "
            f'"{row.precisions[-1]}" or "no", or another device.'
        )
    if value in (slow := dict(row.slow)):
        say.warnings.append(
            f'mixed_precision="{value}" on {row.name} is slow: {slow[value]}. '
            '"bf16" is faster there, "no" is exact.'
        )
    if row.name == "cuda" and precision.path:
        _check_architecture(value, found.gpus[: int(count.value)], say)
    return Choice(name, value, "float32, as nothing was asked" if value == "no" else _ASKED)


def _no_such_precision(value: str) -> str:
    return (
        f'mixed_precision="{value}" cannot be had in this version, which computes nothing in it. '
        'Training would go on in float32 without a word. Give "bf16"; layers that your function '
        "converts itself, with TransformerEngine or torchao, compute in 8 bits under it, and "
        f'Accelerate\'s own Accelerator can be told mixed_precision="{value}" in the function.'
    )


def _check_architecture(value: str, gpus: tuple[Gpu, ...], say: _Findings) -> None:
    row = precision_row(value)
    weak = [gpu for gpu in gpus if gpu.compute_capability < row.refused_below]
    if weak:
        say.mistakes.append(
            f'mixed_precision="{value}" needs {row.needs}: got {_capabilities(weak)}. '
            'Training would fail in its first step. Give "bf16", "fp16" or "no".'
        )
    slow = [gpu for gpu in gpus if gpu.compute_capability < row.imitated_below]
    if slow:
        say.warnings.append(
            f'mixed_precision="{value}" is only imitated by {_capabilities(slow)}: it saves no '
            'time. "fp16" is fast there.'
        )


def _zero(config: RunConfig, precision: Choice, say: _Findings) -> tuple[Choice, ...]:
    """How DeepSpeed shards, where it was asked to."""
    if not config.uses_deepspeed:
        return ()
    row = strategy_row("deepspeed")
    known = bool(precision_row(str(precision.value)).path)  # else it has been refused by now
    if known and precision.value not in row.precisions:
        say.mistakes.append(
            f"zero_stage={config.zero_stage} cannot be had with "
            f"mixed_precision={precision.value!r}: DeepSpeed's engine casts models to "
            f"{', '.join(row.precisions[1:])} alone. Use 'bf16', or leave zero_stage out."
        )
    what = {0: "nothing", 1: "the optimizer", 2: "optimizer and gradients", 3: "all, weights too,"}
    stage = config.zero_stage or 0
    reason = f"asked for: {what[stage]} in shards, by DeepSpeed"
    return (Choice("zero_stage", stage, reason),)


def _check_memory(found: Inventory, count: Choice, method: Choice, say: _Findings) -> None:
    needed = int(count.value) * _WORKER_FLOOR_BYTES
    if not start_method_row(str(method.value)).separate_processes:
        return
    if needed > found.host_available_bytes:
        say.warnings.append(
            f"{counted(int(count.value), 'worker')} take about {format_bytes(needed)} before "
            f"their first tensor, and {format_bytes(found.host_available_bytes)} are free: the "
            "system may kill one. Use fewer workers."
        )


def _check_rendezvous(config: RunConfig, say: _Findings) -> None:
    if reason := elastic_reason(config):
        say.mistakes.append(
            f"{reason} needs torch elastic, by which nodes agree anew who takes part: this version "
            "of nbaccel starts a fixed set of nodes. Leave rdzv_backend at 'static' and "
            "max_restarts at 0 for several nodes, or put the function in a script for torchrun."
        )


def _platform_problem(found: Inventory, method: Choice) -> str:
    if not start_method_row(str(method.value)).separate_processes:
        return ""
    if found.fork_supported and found.memfd_supported:
        return ""
    if found.platform == "linux":
        return (
            "Separate workers cannot be started: they share the model through memory files, and "
            "this Python has no os.memfd_create. Give num_processes=1 to run in this process, or "
            "use a Python that was built for Linux 3.17 and glibc 2.27 or later."
        )
    return (
        f"Separate workers cannot be started on {found.platform!r}: they are forked and share "
        "the model through memory files (os.memfd_create), which only Linux has. "
        "Give num_processes=1 to run in this process, or use Linux (WSL, Docker)."
    )


def _refuse(say: _Findings, platform_problem: str) -> None:
    if say.mistakes:
        raise ConfigError(*say.mistakes, *filter(None, [platform_problem]))
    if platform_problem:
        raise PlatformUnsupported(platform_problem)


def _gpus(found: Inventory) -> str:
    names = sorted({gpu.name for gpu in found.gpus})
    return f"{counted(len(found.gpus), 'GPU')} ({', '.join(names)})"


def _capabilities(gpus: list[Gpu]) -> str:
    return ", ".join(
        f"GPU {gpu.index} ({gpu.name}) of {'.'.join(map(str, gpu.compute_capability))}"
        for gpu in gpus
    )
