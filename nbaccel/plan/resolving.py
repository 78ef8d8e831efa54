"""``resolve``: a `RunConfig` and an `Inventory` become a `Plan`.

Here, in the notebook's process and in milliseconds, everything is refused that can be refused, all
mistakes at once. It decides by the rows of ``nbaccel.config.capabilities`` and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import entry_points

from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import (
    DEVICES,
    ENGINES,
    DeviceRow,
    Fp8Choice,
    device_row,
    engine_row,
    group_backend,
    precision_row,
    start_method_row,
    strategy_fits,
    strategy_row,
)
from nbaccel.config.run_config import chosen_engine, elastic_reason
from nbaccel.plan import registry
from nbaccel.plan.contracts.asking import Said, Wanted
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory
from nbaccel.plan.launch_plan import Choice, Plan
from nbaccel.plan.named_gpus import named_setting, with_named_gpus
from nbaccel.plan.precision_choice import (
    choose_fp8,
    fp8_choices,
    fp8_mistakes,
    fp8_warnings,
    precision_mistakes,
    precision_warnings,
    refused_strategy,
)
from nbaccel.plan.training_plan import unfit_count

# Memory of a worker before its first tensor: measured 117-134 MiB, beside shared libraries.
_WORKER_FLOOR_BYTES = 150 * 2**20
# The default port of several nodes, which cannot agree on a free one.
_MULTI_NODE_PORT = 29500
_AS_REQUESTED = "asked for"
_RENDEZVOUS_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")


@dataclass(frozen=True, slots=True)
class _Findings:
    """The mistakes and warnings of the rules below, beside their decisions."""

    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def resolve(
    config: RunConfig, inventory: Inventory | None = None, *, num_local: int | None = None
) -> Plan:
    """Decide what a launch will do.

    Args:
        config: What the user said.
        inventory: What the machine has; inspected where not given.
        num_local: Workers on that machine, where others have some, too; None: all that are asked
            for. With an engine that starts workers on hosts, the notebook's machine has none.

    Returns:
        The plan, with the reason for each choice.

    Raises:
        ConfigError: This machine cannot serve the settings; every mistake is listed.
        PlatformUnsupported: This operating system cannot start separate workers.
    """
    findings = _Findings()
    found = _inspect(config, inventory, findings)
    findings.warnings.extend(found.problems)
    # Each rule decides even where another has found a mistake, so that all are reported at once.
    device = _choose_device(config, found, findings)
    engine_choice = _choose_engine(config, findings)
    process_count = _choose_num_processes(config, found, device, engine_choice, findings)
    device_choices = _check_device(config, found, device, process_count, findings)
    start_method = _choose_start_method(config, device, process_count, engine_choice, findings)
    local_count, count_findings = _local_view(num_local, process_count, engine_choice, findings)
    thread_count = _choose_threads(config, found, local_count, count_findings)
    group_backend_choice = _choose_backend(config, found, device, local_count, count_findings)
    port_choice = _choose_port(config, findings)
    fp8_choice = _choose_fp8(config, found, device, process_count, findings)
    precision_choice = _choose_precision(config, found, device, process_count, fp8_choice, findings)
    requested_strategy, strategy_choices = _choose_strategy(
        config, device, process_count, fp8_choice, findings
    )
    _check_memory(found, local_count, start_method, count_findings)
    _refuse_mistakes(findings, _platform_problem(found, start_method))
    return Plan(
        config=config,
        inventory=found,
        device=str(device.value),
        num_processes=int(process_count.value),
        world_size=int(process_count.value) * config.num_nodes,
        start_method=str(start_method.value),
        threads_per_process=int(thread_count.value),
        process_group_backend=str(group_backend_choice.value),
        engine=str(engine_choice.value),
        # An IPv6 address is in brackets there.
        master_addr=config.rdzv_endpoint.rpartition(":")[0].strip("[]") or config.master_addr,
        port=port_choice.value if isinstance(port_choice.value, int) else None,
        strategy="" if requested_strategy is None else requested_strategy.strategy,
        strategy_headline="" if requested_strategy is None else requested_strategy.headline,
        choices=(
            device,
            *device_choices,
            process_count,
            engine_choice,
            start_method,
            thread_count,
            precision_choice,
            *(fp8_choices(config.fp8, fp8_choice) if fp8_choice.row is not None else ()),
            *strategy_choices,
            group_backend_choice,
            port_choice,
        ),
        warnings=tuple(findings.warnings),
    )


def _inspect(config: RunConfig, inventory: Inventory | None, findings: _Findings) -> Inventory:
    """The machine with the GPUs that workers will see."""
    found = inspect_machine() if inventory is None else inventory
    if not found.gpus:
        return found
    found, mistake = with_named_gpus(found, named_setting(config))
    # GPUs of the notebook's machine do not matter where workers run on hosts.
    is_of_workers = inventory is not None or not engine_row(chosen_engine(config)[0]).runs_on_hosts
    if mistake and is_of_workers:
        findings.mistakes.append(mistake)
    return found


def _choose_device(config: RunConfig, found: Inventory, findings: _Findings) -> Choice:
    if config.device != "auto":
        if refusal_text := registry.known_device(config.device).refusal(found):
            findings.mistakes.append(refusal_text)
        if device_row(config.device).never_run:
            findings.warnings.append(
                f'device="{config.device}" has never been run with nbaccel: what you see may be '
                "the first fault. Please report what happens."
            )
        return Choice(
            "device", config.device, f"{_AS_REQUESTED}{_idle_devices_text(config.device, found)}"
        )
    unused_devices = []
    for device in registry.possible_devices(found):
        device_row_of = device.row
        device_units = device.units(found)
        if device_units and (idle_reason := device.idle_reason(found)):
            unused_devices.append(_describe_units(device_row_of, device_units))
            findings.warnings.append(f"{unused_devices[-1]} found and not used: {idle_reason}.")
        elif device_units:
            return Choice(
                "device",
                device_row_of.name,
                f"{_describe_units(device_row_of, device_units)} found",
            )
    note_text = f" ({found.gpu_note})" if found.gpu_note else ""
    none_text = (
        f"{', '.join(unused_devices)} found and not used"
        if unused_devices
        else f"no GPU found{note_text}"
    )
    return Choice("device", DEVICES[0].name, none_text)


def _idle_devices_text(device_name: str, found: Inventory) -> str:
    """The devices that are there beside the requested one."""
    if not device_row(device_name).in_host_memory:
        return ""
    idle_devices = [
        _describe_units(device.row, units)
        for device in registry.possible_devices(found)
        if device.name != device_name and (units := device.units(found))
    ]
    return f"; {', '.join(idle_devices)} not used" if idle_devices else ""


def _choose_num_processes(
    config: RunConfig, found: Inventory, device: Choice, engine: Choice, findings: _Findings
) -> Choice:
    setting_name = "num_processes"
    row = device_row(str(device.value))
    if config.num_processes is not None:
        return Choice(setting_name, config.num_processes, _AS_REQUESTED)
    if engine_row(str(engine.value)).runs_on_hosts:
        # With a mistake the hosts may not even be readable.
        hosts = [] if findings.mistakes else registry.engine(str(engine.value)).hosts(config)
        num_slots = sum(host.slots or 1 for host in hosts)
        reason = f"the slots of {count_noun(len(hosts), 'host')}"
        if any(host.slots is None for host in hosts):
            reason = f"{count_noun(len(hosts), 'host')}, whose devices are counted at the start"
        return Choice(setting_name, max(1, num_slots), reason)
    if config.start_method == "inline" or row.start_methods == ("inline",):
        return Choice(setting_name, 1, 'start_method="inline" is this one process')
    if config.strategy != "auto" and strategy_row(config.strategy).drives_all:
        reason = f'strategy="{config.strategy}" drives all devices from one process'
        return Choice(setting_name, 1, reason)
    if device_units := registry.known_device(row.name).units(found):
        return Choice(
            setting_name, len(device_units), f"one per {row.noun}, {len(device_units)} found"
        )
    return Choice(
        setting_name,
        1,
        f"one on {row.noun}; num_processes=2 or more share the "
        f"{count_noun(found.cpu_cores, 'core')}",
    )


def _check_device(
    config: RunConfig, found: Inventory, device: Choice, count: Choice, findings: _Findings
) -> tuple[Choice, ...]:
    """What the device itself decides, refuses and warns of."""
    chosen_device = registry.known_device(str(device.value))
    if text := chosen_device.launch_problem(found, config, int(count.value)):
        findings.mistakes.append(text)
    findings.warnings.extend(chosen_device.plan_warnings(found, config))
    return tuple(Choice(*decision) for decision in chosen_device.plan_choices(found, config))


def _choose_engine(config: RunConfig, findings: _Findings) -> Choice:
    name, reason = chosen_engine(config)
    if engine_row(name).runs_on_hosts:
        engine = registry.engine(name)
        unavailable_reason = engine.unavailable_reason(config) or engine.unready_reason()
        if unavailable_reason:
            findings.mistakes.append(unavailable_reason)
    if config.rdzv_backend not in _RENDEZVOUS_BACKENDS:
        _check_added_rendezvous(config.rdzv_backend, findings)
    elif engine_row(name).starts_scripts_only:
        text = elastic_reason(config) or f"engine={name!r}"
        findings.mistakes.append(
            f"{text} needs torchrun's agent on every machine, which starts scripts and no "
            "functions of a notebook. Run `nbaccel launch --nnodes 2 --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT script.py` on each machine (`nbaccel export` writes the "
            'script), or have this notebook start the workers of all: engine="ray", with '
            "max_restarts if a machine may be lost."
        )
    return Choice("engine", name, reason)


def _check_added_rendezvous(rdzv_backend: str, findings: _Findings) -> None:
    """Other packages may add a rendezvous; looking for them reads a file of every package."""
    backends = (*_RENDEZVOUS_BACKENDS, *entry_points(group="torchrun.handlers").names)
    if rdzv_backend not in backends:
        findings.mistakes.append(
            f"rdzv_backend={rdzv_backend!r} is no rendezvous of torch elastic, so the nodes "
            f"could not meet. Give one of {', '.join(backends)}; torchrun knows no others."
        )


def _local_view(
    num_local: int | None, count: Choice, engine: Choice, findings: _Findings
) -> tuple[Choice, _Findings]:
    """The workers of the machine that was inspected, and where rules about them report."""
    if num_local is not None:
        return Choice(count.name, num_local, count.reason), findings
    # Hosts that are not known yet: they are asked when they have joined.
    runs_on_hosts = engine_row(str(engine.value)).runs_on_hosts
    return count, _Findings() if runs_on_hosts else findings


def _choose_start_method(
    config: RunConfig, device: Choice, count: Choice, engine: Choice, findings: _Findings
) -> Choice:
    setting_name = "start_method"
    if config.start_method != "auto":
        choice = Choice(setting_name, config.start_method, _AS_REQUESTED)
    elif registry.known_device(str(device.value)).own_process:
        reason = "the notebook's own process must not hold the device: it keeps it until it ends"
        choice = Choice(setting_name, "template", reason)
    elif count.value == 1 and named_setting(config) and _cannot_choose_gpus(device):
        reason = "the notebook's CUDA has its devices for good; those named need a new process"
        choice = Choice(setting_name, "template", reason)
    elif count.value == 1 and (pipe_setting := _needs_pipes(config)):
        reason = f"{pipe_setting} needs the worker's output in pipes of its own"
        choice = Choice(setting_name, "template", reason)
    elif engine.value != ENGINES[0].name:
        reason = "a clean process: safe whatever this notebook has run before"
        choice = Choice(setting_name, "template", reason)
    elif count.value == 1 and config.num_nodes == 1 and config.max_restarts == 0:
        choice = Choice(
            setting_name, "inline", "one worker needs no other process; a debugger works"
        )
    else:
        reason = "a clean process: safe whatever this notebook has run before"
        choice = Choice(setting_name, "template", reason)
    chosen_row = device_row(str(device.value))
    if chosen_row.start_methods and choice.value not in chosen_row.start_methods:
        findings.mistakes.append(
            f'start_method="{choice.value}" is not supported on {chosen_row.name}, whose workers '
            f"start by {', '.join(chosen_row.start_methods)} alone. Give num_processes=1 and "
            f'start_method="{chosen_row.start_methods[0]}", or another device.'
        )
    return choice


def _cannot_choose_gpus(device: Choice) -> bool:
    """Whether this process has begun to use GPUs, and no variable changes which."""
    name = str(device.value)
    is_accelerator = not device_row(name).in_host_memory
    return is_accelerator and bool(registry.known_device(name).hazards())


def _needs_pipes(config: RunConfig) -> str:
    """The setting that has no effect on what this process itself prints."""
    settings = (name for name in ("log_dir", "shown_output") if getattr(config, name) is not None)
    return next(settings, "")


def _choose_threads(
    config: RunConfig, found: Inventory, count: Choice, findings: _Findings
) -> Choice:
    name = "threads_per_process"
    num_workers = int(count.value)
    num_cores = found.cpu_cores
    threads = config.threads_per_process
    num_threads = max(1, num_cores // num_workers) if threads is None else threads
    if num_workers > 1 and num_workers * num_threads > num_cores:
        findings.warnings.append(
            f"{num_workers} workers with {count_noun(num_threads, 'thread')} each share "
            f"{count_noun(num_cores, 'core')}: they will wait for each other. Fewer workers or "
            "threads are faster."
        )
    reason = (
        f"{count_noun(num_cores, 'core')} for {count_noun(num_workers, 'worker')}"
        if threads is None
        else _AS_REQUESTED
    )
    return Choice(name, num_threads, reason)


def _choose_backend(
    config: RunConfig, found: Inventory, device: Choice, count: Choice, findings: _Findings
) -> Choice:
    setting_name = "process_group_backend"
    num_workers = int(count.value)
    chosen_row = device_row(str(device.value))
    device_units = registry.known_device(chosen_row.name).units(found)
    backend_name = group_backend(chosen_row, num_local=num_workers, num_devices=len(device_units))
    # Such a backend takes any number of ranks on one device, so there is nothing to decide.
    if chosen_row.group_backend == chosen_row.shared_group_backend:
        return Choice(setting_name, backend_name, f"for {chosen_row.name}")
    devices_text = count_noun(len(device_units), chosen_row.noun)
    backend_text = chosen_row.group_backend.upper()
    if num_workers > len(device_units) > 0:
        findings.warnings.append(
            f"{num_workers} workers share {devices_text}, over {chosen_row.shared_group_backend}: "
            f"{backend_text} refuses two ranks on one {chosen_row.noun}. Each worker has a "
            f"separate {chosen_row.name.upper()} context; num_processes={len(device_units)} is "
            "faster."
        )
        return Choice(
            setting_name,
            backend_name,
            f"{num_workers} workers share {devices_text}, which {backend_text} refuses",
        )
    if num_workers < len(device_units):
        idle_text = ", ".join(f"{unit.index} ({unit.name})" for unit in device_units[num_workers:])
        findings.warnings.append(
            f"{count_noun(num_workers, 'worker')} for {devices_text}: {idle_text} will be idle. "
            f"num_processes={len(device_units)} would use them all."
        )
    return Choice(setting_name, backend_name, f"one worker per {chosen_row.name} device")


def _choose_port(config: RunConfig, findings: _Findings) -> Choice:
    # The endpoint of a rendezvous that was refused may have no port.
    if findings.mistakes:
        config = RunConfig()
    if config.use_port is not None:
        return Choice("use_port", config.use_port, _AS_REQUESTED)
    if config.rdzv_endpoint:
        port = int(config.rdzv_endpoint.rpartition(":")[2])
        return Choice("use_port", port, f"from rdzv_endpoint={config.rdzv_endpoint!r}")
    if config.num_nodes > 1:
        return Choice(
            "use_port", _MULTI_NODE_PORT, "nodes must agree on one; this is torch's usual"
        )
    return Choice("use_port", "free", "the system gives one that nobody uses")


def _choose_fp8(
    config: RunConfig, found: Inventory, device: Choice, count: Choice, findings: _Findings
) -> Fp8Choice:
    """The library that computes in 8 bits; none where the precision is one of torch's own."""
    if not precision_row(config.mixed_precision).has_backends:
        return Fp8Choice()
    row = device_row(str(device.value))
    capability = _lowest_capability(found, device, count)
    fp8_choice = choose_fp8(config.fp8, row, capability)
    if fp8_choice.row is not None and not fp8_choice.problem:
        world_size = int(count.value) * config.num_nodes
        findings.mistakes.extend(
            fp8_mistakes(config.fp8, fp8_choice.row, capability, world_size=world_size)
        )
        findings.warnings.extend(fp8_warnings(config.fp8, fp8_choice.row, row, capability))
    return fp8_choice


def _lowest_capability(found: Inventory, device: Choice, count: Choice) -> tuple[int, int] | None:
    """That of the oldest GPU that gets a worker; None where no GPU does."""
    device_units = _units_with_workers(found, device, count)
    # (0, 0) stands for a device whose kind has no such number.
    known = [unit.compute_capability for unit in device_units if unit.compute_capability > (0, 0)]
    return min(known, default=None)


def _units_with_workers(found: Inventory, device: Choice, count: Choice) -> tuple[Gpu, ...]:
    """The GPUs that will have a worker: an older one that stays idle does not matter."""
    device_units = registry.known_device(str(device.value)).units(found)
    # Which of them are the first is not known where CUDA may count in another order.
    return device_units[: int(count.value)] if found.gpu_order_known else device_units


def _choose_precision(
    config: RunConfig,
    found: Inventory,
    device: Choice,
    count: Choice,
    fp8_choice: Fp8Choice,
    findings: _Findings,
) -> Choice:
    setting_name = "mixed_precision"
    precision_name = config.mixed_precision
    if precision_name == "no":
        return Choice(setting_name, precision_name, "float32, as nothing was asked")
    row = device_row(str(device.value))
    gpus = {
        f"GPU {gpu.index} ({gpu.name})": gpu.compute_capability
        for gpu in _units_with_workers(found, device, count)
        # (0, 0) stands for a device whose kind has no such number.
        if gpu.compute_capability > (0, 0)
    }
    precision = precision_row(precision_name)
    mistakes = [*precision_mistakes(precision, fp8_choice, row, gpus)]
    findings.mistakes.extend(mistakes)
    findings.warnings.extend(precision_warnings(precision, row, {} if mistakes else gpus))
    return Choice(setting_name, precision_name, _AS_REQUESTED)


def _choose_strategy(
    config: RunConfig,
    device: Choice,
    count: Choice,
    fp8_choice: Fp8Choice,
    findings: _Findings,
) -> tuple[Wanted | None, tuple[Choice, ...]]:
    """The strategy of the training, where the configuration requests one."""
    try:
        requested_strategy = registry.wanted_strategy(Said(run=config))
    except ConfigError as error:
        findings.mistakes.extend(error.mistakes)
        return None, ()
    if requested_strategy is None:
        return None, ()
    chosen_row = strategy_row(requested_strategy.strategy)
    precision = precision_row(config.mixed_precision)
    chosen_precision = fp8_choice.row or precision
    if chosen_precision.path and not strategy_fits(chosen_row, chosen_precision):
        own_reason = fp8_choice.row and refused_strategy(config.fp8, fp8_choice.row, chosen_row)
        text = f" (backend {fp8_choice.row.name!r})" if fp8_choice.row else ""
        reason = own_reason or (
            f"{chosen_row.headline or chosen_row.name} trains in "
            f"{', '.join(chosen_row.precisions)} alone."
        )
        findings.mistakes.append(
            f"{requested_strategy.what} is not supported with mixed_precision={precision.name!r}"
            f"{text}: {reason} Use 'bf16', or leave one of them out."
        )
    chosen_device = device_row(str(device.value))
    if chosen_device.precisions and not strategy_fits(chosen_row, chosen_device):
        findings.mistakes.append(
            f"{requested_strategy.what} is not supported on {device.value}: "
            f"{chosen_row.headline or chosen_row.name} trains on {', '.join(chosen_row.devices)} "
            f"alone. Give one of these as device, or leave {requested_strategy.what} out."
        )
    if problem := unfit_count(
        chosen_row, requested_strategy.what, int(count.value) * config.num_nodes
    ):
        findings.mistakes.append(problem)
    strategy_choices = requested_strategy.choices or (
        Choice("strategy", chosen_row.name, f"{_AS_REQUESTED}: {chosen_row.meaning}"),
    )
    return requested_strategy, strategy_choices


def _check_memory(found: Inventory, count: Choice, method: Choice, findings: _Findings) -> None:
    needed_bytes = int(count.value) * _WORKER_FLOOR_BYTES
    if not start_method_row(str(method.value)).separate_processes:
        return
    # A warning only, since the free memory changes.
    if needed_bytes > found.host_available_bytes:
        findings.warnings.append(
            f"{count_noun(int(count.value), 'worker')} take about {format_bytes(needed_bytes)} "
            f"before their first tensor, and {format_bytes(found.host_available_bytes)} are free: "
            "the system may kill one. Use fewer workers."
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


def _refuse_mistakes(findings: _Findings, problem: str) -> None:
    # With other mistakes it is one among them; alone it has a type that callers can tell apart.
    if findings.mistakes:
        raise ConfigError(*findings.mistakes, *filter(None, [problem]))
    if problem:
        raise PlatformUnsupported(problem)


def _describe_units(device: DeviceRow, device_units: tuple[Gpu, ...]) -> str:
    names = sorted({unit.name for unit in device_units} - {device.noun})
    return count_noun(len(device_units), device.noun) + (f" ({', '.join(names)})" if names else "")
