"""``resolve``: a `RunConfig` and an `Inventory` become a `Plan`, or all mistakes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import Fp8Config, RunConfig, capabilities as rows
from nbaccel.config.capability_rows import DeviceRow, EngineRow, Fp8Choice
from nbaccel.config.run_config import chosen_engine, elastic_reason
from nbaccel.plan import registry, training_plan
from nbaccel.plan.contracts.training import Said, Wanted
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory
from nbaccel.plan.launch_plan import Choice, Plan

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What was said and found, and what the first rules have decided."""

    config: RunConfig
    found: Inventory
    findings: _Findings
    device: DeviceRow
    engine: EngineRow
    num_processes: int

    @property
    def world_size(self) -> int:
        return self.num_processes * self.config.num_nodes

    @property
    def units(self) -> tuple[Gpu, ...]:
        """The devices of the chosen kind."""
        return registry.device(self.device.name).units(self.found)

    @property
    def units_with_workers(self) -> tuple[Gpu, ...]:
        """The GPUs that will have a worker: an older one that stays idle does not matter."""
        # Which of them are the first is not known where CUDA may count in another order.
        units = self.units[: self.num_processes] if self.found.gpu_order_known else self.units
        # (0, 0) stands for a device whose kind has no such number.
        return tuple(unit for unit in units if unit.compute_capability > (0, 0))


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
    # Each rule decides even where another has found a mistake, so that all are reported at once.
    device = _choose_device(config, found, findings)
    engine = _choose_engine(config, findings)
    device_chosen = rows.device_row(str(device.value))
    engine_chosen = rows.engine_row(str(engine.value))
    count = _choose_num_processes(config, found, device_chosen, engine_chosen, findings)
    run = _Run(
        config=config,
        found=found,
        findings=findings,
        device=device_chosen,
        engine=engine_chosen,
        num_processes=int(count.value),
    )
    device_choices = _check_device(run)
    start_method = _choose_start_method(run)
    local_run = _local_view(run, num_local)
    threads = _choose_threads(local_run)
    group_backend_choice = _choose_backend(local_run)
    port = _choose_port(config, findings)
    fp8 = _choose_fp8(run)
    precision = _choose_precision(run, fp8)
    strategy, strategy_choices = _choose_strategy(run, fp8)
    _check_memory(local_run, start_method)
    _refuse_mistakes(findings, _platform_problem(found, start_method))
    return Plan(
        config=config,
        inventory=found,
        device=run.device.name,
        num_processes=run.num_processes,
        world_size=run.world_size,
        start_method=str(start_method.value),
        threads_per_process=int(threads.value),
        process_group_backend=str(group_backend_choice.value),
        engine=run.engine.name,
        # An IPv6 address is in brackets there.
        master_addr=config.rdzv_endpoint.rpartition(":")[0].strip("[]") or config.master_addr,
        port=port.value if isinstance(port.value, int) else None,
        strategy="" if strategy is None else strategy.strategy,
        strategy_headline="" if strategy is None else strategy.headline,
        choices=(
            device,
            *device_choices,
            count,
            engine,
            start_method,
            threads,
            precision,
            *(training_plan.fp8_choices(config.fp8 or Fp8Config(), fp8) if fp8.row else ()),
            *strategy_choices,
            group_backend_choice,
            port,
        ),
        warnings=tuple(findings.warnings),
    )


def _inspect(config: RunConfig, inventory: Inventory | None, findings: _Findings) -> Inventory:
    """The machine with the GPUs that workers will see."""
    found = inspect_machine() if inventory is None else inventory
    findings.warnings.extend(found.problems)
    if not found.gpus:
        return found
    found, mistake = with_named_gpus(found, named_setting(config))
    # GPUs of the notebook's machine do not matter where workers run on hosts.
    engine = rows.engine_row(chosen_engine(config)[0])
    is_of_workers = inventory is not None or not engine.runs_on_hosts
    if mistake and is_of_workers:
        findings.mistakes.append(mistake)
    return found


def _choose_device(config: RunConfig, found: Inventory, findings: _Findings) -> Choice:
    if config.device != "auto":
        if refusal_text := registry.device(config.device).refusal(found):
            findings.mistakes.append(refusal_text)
        if rows.device_row(config.device).never_run:
            findings.warnings.append(
                f'device="{config.device}" has never been run with nbaccel. Please report what '
                "happens."
            )
        reason = f"{_AS_REQUESTED}{_idle_devices_text(config.device, found)}"
        return Choice("device", config.device, reason)
    unused_devices = []
    for device in registry.possible_devices(found):
        if not (units := device.units(found)):
            continue
        description = _describe_units(device.row, units)
        if not (idle_reason := device.idle_reason(found)):
            return Choice("device", device.name, f"{description} found")
        unused_devices.append(description)
        findings.warnings.append(f"{description} found and not used: {idle_reason}.")
    reason = f"no GPU found ({found.gpu_note})" if found.gpu_note else "no GPU found"
    if unused_devices:
        reason = f"{', '.join(unused_devices)} found and not used"
    return Choice("device", rows.DEVICES[0].name, reason)


def _idle_devices_text(device_name: str, found: Inventory) -> str:
    if not rows.device_row(device_name).in_host_memory:
        return ""
    idle_devices = [
        _describe_units(device.row, units)
        for device in registry.possible_devices(found)
        if device.name != device_name and (units := device.units(found))
    ]
    return f"; {', '.join(idle_devices)} not used" if idle_devices else ""


def _choose_engine(config: RunConfig, findings: _Findings) -> Choice:
    name, reason = chosen_engine(config)
    if rows.engine_row(name).runs_on_hosts:
        engine = registry.engine(name)
        unavailable_reason = engine.unavailable_reason(config) or engine.unready_reason()
        if unavailable_reason:
            findings.mistakes.append(unavailable_reason)
    if config.rdzv_backend not in _RENDEZVOUS_BACKENDS:
        findings.mistakes.append(
            f"rdzv_backend={config.rdzv_backend!r} is no rendezvous of torch elastic, so the nodes "
            f"could not meet. Give one of {', '.join(_RENDEZVOUS_BACKENDS)}."
        )
    elif rows.engine_row(name).starts_scripts_only:
        text = elastic_reason(config) or f"engine={name!r}"
        findings.mistakes.append(
            f"{text} needs torchrun's agent on every machine, which starts scripts only. Run "
            "`nbaccel launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT script.py` "
            "on each (`nbaccel export` writes the script), or have this notebook start the workers "
            'of all: engine="ray", with max_restarts if a machine may be lost.'
        )
    return Choice("engine", name, reason)


def _choose_num_processes(
    config: RunConfig, found: Inventory, device: DeviceRow, engine: EngineRow, findings: _Findings
) -> Choice:
    count: int = 1
    if config.num_processes is not None:
        count, reason = config.num_processes, _AS_REQUESTED
    elif engine.runs_on_hosts:
        # With a mistake the hosts may not even be readable.
        hosts = [] if findings.mistakes else registry.engine(engine.name).hosts(config)
        count = max(1, sum(host.slots or 1 for host in hosts))
        reason = f"the slots of {count_noun(len(hosts), 'host')}"
        if any(host.slots is None for host in hosts):
            reason = f"{count_noun(len(hosts), 'host')}, whose devices are counted at the start"
    elif config.start_method == "inline" or device.start_methods == ("inline",):
        reason = 'start_method="inline" is this one process'
    elif units := registry.device(device.name).units(found):
        count, reason = len(units), f"one per {device.noun}, {len(units)} found"
    else:
        cores = count_noun(found.cpu_cores, "core")
        reason = f"one on {device.noun}; num_processes=2 or more share the {cores}"
    return Choice("num_processes", count, reason)


def _check_device(run: _Run) -> tuple[Choice, ...]:
    device = registry.device(run.device.name)
    if text := device.launch_problem(run.found, run.config, run.num_processes):
        run.findings.mistakes.append(text)
    run.findings.warnings.extend(device.plan_warnings(run.found, run.config))
    return tuple(Choice(*decision) for decision in device.plan_choices(run.found, run.config))


def _local_view(run: _Run, num_local: int | None) -> _Run:
    """The workers of the machine that was inspected, and where rules about them report."""
    if num_local is not None:
        return replace(run, num_processes=num_local)
    # Hosts that are not known yet: they are asked when they have joined.
    return replace(run, findings=_Findings()) if run.engine.runs_on_hosts else run


def _choose_start_method(run: _Run) -> Choice:
    config = run.config
    device = registry.device(run.device.name)
    method, reason = "template", "a clean process: safe whatever this notebook has run before"
    if config.start_method != "auto":
        method, reason = config.start_method, _AS_REQUESTED
    elif device.own_process:
        reason = "the notebook's own process must not hold the device: it keeps it until it ends"
    elif (
        run.num_processes == 1
        and named_setting(config)
        # A process that has begun to use GPUs cannot choose among them any more.
        and not run.device.in_host_memory
        and device.hazards()
    ):
        reason = "the notebook's CUDA has its devices for good; those named need a new process"
    # They have no effect on what this process itself prints.
    elif run.num_processes == 1 and (config.log_dir, config.shown_output) != (None, None):
        name = "shown_output" if config.log_dir is None else "log_dir"
        reason = f"{name} needs the worker's output in pipes of its own"
    elif run.engine == rows.ENGINES[0] and run.world_size == 1 and config.max_restarts == 0:
        method, reason = "inline", "one worker needs no other process; a debugger works"
    methods = run.device.start_methods
    if methods and method not in methods:
        run.findings.mistakes.append(
            f'start_method="{method}" is not supported on {run.device.name}. Give num_processes=1 '
            f'and start_method="{methods[0]}", or another device.'
        )
    return Choice("start_method", method, reason)


def _choose_threads(run: _Run) -> Choice:
    workers = count_noun(run.num_processes, "worker")
    cores = count_noun(run.found.cpu_cores, "core")
    reason = _AS_REQUESTED
    num_threads = run.config.threads_per_process
    if num_threads is None:
        num_threads = max(1, run.found.cpu_cores // run.num_processes)
        reason = f"{cores} for {workers}"
    if run.num_processes > 1 and run.num_processes * num_threads > run.found.cpu_cores:
        run.findings.warnings.append(
            f"{workers} with {count_noun(num_threads, 'thread')} each share "
            f"{cores}: they will wait for each other. Fewer workers or threads are faster."
        )
    return Choice("threads_per_process", num_threads, reason)


def _choose_backend(run: _Run) -> Choice:
    setting_name = "process_group_backend"
    row, num_workers, num_units = run.device, run.num_processes, len(run.units)
    backend_name = rows.group_backend(row, num_local=num_workers, num_devices=num_units)
    # Such a backend takes any number of ranks on one device, so there is nothing to decide.
    if row.group_backend == row.shared_group_backend:
        return Choice(setting_name, backend_name, f"for {row.name}")
    devices_text = count_noun(num_units, row.noun)
    backend_text = row.group_backend.upper()
    if num_workers > num_units > 0:
        run.findings.warnings.append(
            f"{num_workers} workers share {devices_text}, over {row.shared_group_backend}, as "
            f"{backend_text} refuses. num_processes={num_units} is faster."
        )
        reason = f"{num_workers} workers share {devices_text}, which {backend_text} refuses"
        return Choice(setting_name, backend_name, reason)
    if num_workers < num_units:
        idle_text = ", ".join(f"{unit.index} ({unit.name})" for unit in run.units[num_workers:])
        run.findings.warnings.append(
            f"{count_noun(num_workers, 'worker')} for {devices_text}: {idle_text} will be idle. "
            f"num_processes={num_units} would use them all."
        )
    return Choice(setting_name, backend_name, f"one worker per {row.name} device")


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
        reason = "nodes must agree on one; this is torch's usual"
        return Choice("use_port", _MULTI_NODE_PORT, reason)
    return Choice("use_port", "free", "the system gives one that nobody uses")


def _choose_fp8(run: _Run) -> Fp8Choice:
    """The library that computes in 8 bits; none where the precision is one of torch's own."""
    if not rows.precision_row(run.config.mixed_precision).has_backends:
        return Fp8Choice()
    # That of the oldest GPU that gets a worker; None where no GPU does.
    capability = min((gpu.compute_capability for gpu in run.units_with_workers), default=None)
    said = run.config.fp8 or Fp8Config()
    choice = rows.fp8_backend(said.backend, run.device, capability)
    if choice.row is not None and not choice.problem:
        mistakes = training_plan.fp8_mistakes(said, choice.row, capability)
        run.findings.mistakes.extend(mistakes)
        warnings = training_plan.fp8_warnings(said, choice.row, run.device, capability)
        run.findings.warnings.extend(warnings)
    return choice


def _choose_precision(run: _Run, fp8_choice: Fp8Choice) -> Choice:
    name = run.config.mixed_precision
    if name == "no":
        return Choice("mixed_precision", name, "float32, as nothing was asked")
    gpus = {
        f"GPU {gpu.index} ({gpu.name})": gpu.compute_capability for gpu in run.units_with_workers
    }
    precision = rows.precision_row(name)
    mistakes = [*training_plan.precision_mistakes(precision, fp8_choice, run.device, gpus)]
    run.findings.mistakes.extend(mistakes)
    warnings = training_plan.precision_warnings(precision, run.device, {} if mistakes else gpus)
    run.findings.warnings.extend(warnings)
    return Choice("mixed_precision", name, _AS_REQUESTED)


def _choose_strategy(run: _Run, fp8_choice: Fp8Choice) -> tuple[Wanted | None, tuple[Choice, ...]]:
    mistakes = run.findings.mistakes
    try:
        wanted = registry.wanted_strategy(Said(run=run.config))
    except ConfigError as error:
        mistakes.extend(error.mistakes)
        return None, ()
    if wanted is None:
        return None, ()
    row = rows.strategy_row(wanted.strategy)
    name = row.headline or row.name
    precision = rows.precision_row(run.config.mixed_precision)
    level = (run.config.fp8 or Fp8Config()).opt_level
    if problem := training_plan.unfit_precision(wanted.what, row, precision, fp8_choice, level):
        mistakes.append(problem)
    if not rows.strategy_fits(row, run.device):
        mistakes.append(
            f"{wanted.what} is not supported on {run.device.name}: {name} trains on "
            f"{', '.join(row.devices)} alone. Give one of these, or leave {wanted.what} out."
        )
    if problem := training_plan.unfit_count(row, wanted.what, run.world_size):
        mistakes.append(problem)
    choice = Choice("strategy", row.name, f"{_AS_REQUESTED}: {row.meaning}")
    return wanted, wanted.choices or (choice,)


def _check_memory(run: _Run, method: Choice) -> None:
    if not rows.start_method_row(str(method.value)).separate_processes:
        return
    needed_bytes = run.num_processes * _WORKER_FLOOR_BYTES
    free_bytes = run.found.host_available_bytes
    # A warning only, since the free memory changes.
    if needed_bytes > free_bytes:
        run.findings.warnings.append(
            f"{count_noun(run.num_processes, 'worker')} take about {format_bytes(needed_bytes)}, "
            f"and {format_bytes(free_bytes)} are free: the system may kill one. Use fewer workers."
        )


def _platform_problem(found: Inventory, method: Choice) -> str:
    if not rows.start_method_row(str(method.value)).separate_processes:
        return ""
    if found.fork_supported and found.memfd_supported:
        return ""
    if found.platform == "linux":
        return (
            "Separate workers cannot be started: this Python has no os.memfd_create. Give "
            "num_processes=1, or use a Python for Linux 3.17 and glibc 2.27 or later."
        )
    return (
        f"Separate workers cannot be started on {found.platform!r}, which has no memory files "
        "(os.memfd_create). Give num_processes=1, or use Linux (WSL, Docker)."
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


# Workers see fewer GPUs than this process where the configuration names some (`gpu_ids` of files).

_NONE_AT_ALL = ("", "-1", "NoDevFiles")


def named_setting(config: RunConfig, host_devices: Sequence[int] = ()) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` of the workers; None where nothing was said, or no GPU is used."""
    if config.device != "auto" and rows.device_row(config.device).in_host_memory:
        return None
    if host_devices:
        return ",".join(map(str, host_devices))
    return (config.variables or {}).get("CUDA_VISIBLE_DEVICES")


def with_named_gpus(found: Inventory, setting: str | None) -> tuple[Inventory, str]:
    """The machine as workers with that setting will see it."""
    if setting is None or setting == found.gpu_setting or not found.gpus:
        return found, ""
    names = [] if setting.strip() in _NONE_AT_ALL else [name.strip() for name in setting.split(",")]
    named_gpus = []
    for name in names:
        gpu = _gpu_of(found, name)
        if gpu is None or gpu in named_gpus:
            numbers = _numbers_of(found)[: len(found.gpus)]
            here = f"{count_noun(len(numbers), 'GPU')} ({', '.join(numbers)})"
            problem = "twice" if gpu in named_gpus else f"and here are {here}"
            return found, (
                f"CUDA_VISIBLE_DEVICES={setting!r} of the workers (gpu_ids, or a filter) names GPU "
                f"{name!r}, {problem}: CUDA would hide it. Name others, or leave it out."
            )
        named_gpus.append(gpu)
    note = found.gpu_note if names else f"CUDA_VISIBLE_DEVICES={setting!r} hides all"
    gpus = tuple(replace(gpu, index=index) for index, gpu in enumerate(named_gpus))
    return replace(found, gpus=gpus, gpu_setting=setting, gpu_note=note), ""


def _gpu_of(found: Inventory, name: str) -> Gpu | None:
    """The GPU that is called so: by number, or by the beginning of its UUID."""
    if name.startswith(("GPU-", "MIG-")):
        meant_gpus = [gpu for gpu in found.gpus if gpu.uuid.startswith(name)]
        return meant_gpus[0] if len(meant_gpus) == 1 else None
    return dict(zip(_numbers_of(found), found.gpus, strict=False)).get(name)


def _numbers_of(found: Inventory) -> list[str]:
    # Numbers are those of the machine, also for a process that sees a part of it.
    if found.gpu_setting is not None:
        return [name.strip() for name in found.gpu_setting.split(",")]
    return [str(gpu.index) for gpu in found.gpus]
