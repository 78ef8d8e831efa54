"""`notebook_launcher` and `debug_launcher`: a function of the notebook, run by every worker.

A façade: arguments become a `RunConfig`, `resolve` makes a `Plan` of it, `launch` does the rest.
`advise` is the search of the strategy that has settings to find, given the launcher.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import write_notice
from nbaccel.config import Configured, RunConfig, run_config_of
from nbaccel.config.call_arguments import check_call, explained
from nbaccel.plan import Inventory, Plan, registry, resolve
from nbaccel.plan.topology import MOST_STEPS_VARIABLE
from nbaccel.workers import template

if TYPE_CHECKING:
    from nbaccel.calls.launch import CallOutcome
    from nbaccel.calls.pool import Pool
    from nbaccel.deepspeed.advise import Advice
    from nbaccel.output.panel.facts import RunBoard
    from nbaccel.output.report import RunReport

__all__ = ["Results", "debug_launcher", "notebook_launcher", "shutdown"]

if "ipykernel" in sys.modules:
    # Its imports take seconds.
    template.template_for(registry.prepare_notebook()).start_ahead()
    template.follow_cells()
    if "torch" in sys.modules:  # what launches need beside it: the first one would wait for that
        importlib.import_module("nbaccel.calls.launch")


class Results(list[Any]):
    """What the workers returned, by rank.

    Attributes:
        plan: What was done, and why: `print(results.plan.explain())`.
        state_dicts: Path of a module (`"args[0]"`) → its trained weights on the CPU, for modules
            whose structure changed while training, so that they could not be copied back in place.
    """

    def __init__(
        self,
        values: list[Any],
        plan: Plan,
        state_dicts: dict[str, dict[str, Any]] | None = None,
        *,
        observed: RunBoard | None = None,
    ) -> None:
        super().__init__(values)
        self.plan = plan
        self.state_dicts = state_dicts or {}
        self._observed = observed

    def report(self, path: str | os.PathLike[str] | None = None) -> RunReport:
        """What the run can tell of itself.

        Curves of what was logged, samples per second, each rank's time in computing, communicating,
        waiting for data and waiting for others, most memory, warnings in the output, the plan.

        Args:
            path: Where it is saved, too: a name that ends with .html or .json.

        Returns:
            It shows itself in a notebook; `.save("run.html")` and `.save("run.json")` write a file,
            `.to_dict()` gives its facts.

        Raises:
            ConfigError: These results are of no launch.
        """
        from nbaccel.output.report import report_of

        return report_of(self._observed, f"A list of {len(self)} results", path)


@explained
def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    config: RunConfig | Configured | None = None,
    start_method: str = "auto",
    timeout: float | None = None,
    share_back: bool = True,
    on_stop: str = "keep",
    resume: bool | str | os.PathLike[str] | None = None,
    compare: int | None = None,
    engine: str = "auto",
    hostfile: str | os.PathLike[str] | None = None,
    include: str | None = None,
    exclude: str | None = None,
    pool: Pool | None = None,
) -> Results:
    """Train on every device of this machine with a function and a model of the notebook.

    Each worker is a process of its own that calls `function(*args)` with the environment of
    `torchrun` (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …). Modules in `args` are shared, not copied,
    and have the trained weights when this returns.

    Args:
        function: What each worker calls. It may be defined in a cell, a lambda or a closure.
        args: Its arguments. Modules may also be nested in lists, dicts and dataclasses.
        num_processes: Workers on this machine; with an engine that starts them on hosts
            (`"slurm"`, `"deepspeed"`, `"ray"`), on all hosts together. None: one per GPU or TPU
            chip, or one. One worker runs right here, in the notebook's process.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`, for whatever reads it (Accelerate,
            Trainer); the first training step raises if nothing does.
        use_port: TCP port of the rendezvous store; None for a free one.
        master_addr: Address of the store; loopback unless several machines take part.
        node_rank: This machine's number among `num_nodes`.
        num_nodes: Machines that take part, each with its own notebook or script.
        rdzv_backend: `"static"`: the machines are known beforehand. Others, `"c10d"` among them,
            are for scripts on several machines, which `nbaccel launch` starts.
        rdzv_endpoint: `host:port` of the rendezvous, the same on all machines.
        rdzv_conf: Further settings of the rendezvous.
        rdzv_id: Name of the job, the same on all machines.
        max_restarts: How often failed workers are started anew, all together.
        monitor_interval: Taken for compatibility: workers are watched without polling.
        log_line_prefix_template: Prefix of output lines (`${rank}`, `${local_rank}`,
            `${role_name}`). None: `[rank]`, with lines that all ranks print shown once.
        config: All of the above as one object, a `RunConfig` or a picker; then give none of them.
        start_method: `"auto"`, `"template"`, `"fork"` or `"inline"`.
        timeout: Seconds after which the launch is ended with `LaunchTimeout`.
        share_back: Whether trained weights come back into the notebook's modules.
        on_stop: What Stop does while the function trains. `"keep"`: it ends where the step under
            way ends, on all ranks, and the weights come back; a second press discards them.
            `"discard"`: it ends at once, and the model is as it was.
        resume: Whether a launch that is stopped keeps what an `Accelerator` of the function has
            prepared (weights, optimizer, schedule, random numbers, place in the data), so that the
            next launch of the function goes on from there, to the bit. True keeps it as long as
            this process lives; a folder for longer. A launch that comes to its end forgets it.
        compare: Steps that one worker takes before the launch, so that its report can say what more
            workers are worth. Nothing of these steps is kept.
        engine: What brings workers on several machines together: `"local"`, `"elastic"`,
            `"slurm"`, `"deepspeed"`, `"ray"`; `"auto"` goes by the other settings.
        hostfile: A DeepSpeed hostfile, for `engine="deepspeed"`.
        include: Hosts and slots of it to use alone, in DeepSpeed's syntax: `worker-1:0,1@worker-2`.
        exclude: Hosts and slots of it to leave out, in the same syntax.
        pool: Live workers to call the function in instead of new ones: nothing has to be started.
            Their settings hold; those given here must not contradict them.

    Returns:
        The functions' return values, by rank.

    Raises:
        ConfigError: If the settings are wrong or do not fit this machine, all mistakes at once; or
            the call cannot work in workers.
        ModelNotShareable, NotSendable, UnsafeFork, PortTaken: Before any process is started.
        WorkerFailed: If a worker failed. It is also of the type that the worker raised, and says
            which rank failed first and where. The notebook's model is as it was.
        KeyboardInterrupt: If interrupted. All workers have ended; its message says whether the
            model has the weights of the last step (see `on_stop`) or is as it was.
    """
    # Its settings have the same names in a `RunConfig`. First, when nothing else is local.
    arguments = locals()
    asked = {name: arguments[name] for name in RunConfig.model_fields if name in arguments}
    # IPython leaves such frames out of tracebacks.
    __tracebackhide__ = True
    merged = _merge_settings(config, asked)
    if pool is not None:
        return _launch_in_pool(pool, function, args, merged)
    return launch_configured(function, args, merged)


@explained
def debug_launcher(
    function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2
) -> Results:
    """Run a function in a few CPU workers, to see whether it works before it gets a GPU.

    Args:
        function: As for `notebook_launcher`.
        args: Its arguments.
        num_processes: CPU workers.

    Returns:
        The functions' return values, by rank.
    """
    __tracebackhide__ = True
    return launch_configured(function, args, RunConfig(num_processes=num_processes, device="cpu"))


def advise(
    model: Any,
    sample_batch: Any = None,
    *,
    config: Mapping[str, Any] | str | Path | Any = None,
    num_processes: int | None = None,
    num_nodes: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    nvme_memory: int | str | None = None,
    nvme_path: str | Path | None = None,
    optimizer: str = "AdamW",
    precision: str = "auto",
    try_it: bool = False,
    max_trials: int = 20,
    timeout: float = 600.0,
    inventory: Inventory | None = None,
) -> Advice:
    """Find the fastest DeepSpeed configuration that fits.

    The ways to train are tried in a published order, the fastest first: as it is, gradient
    checkpointing, ZeRO-1, ZeRO-2, with the optimizer offloaded, ZeRO-3, with the optimizer, with
    parameters, with both offloaded, NVMe; then again with half the batch and twice the
    accumulation, so that an optimizer step sees the same samples. (Source: the DeepSpeed guide of
    transformers, "Select a ZeRO stage".)

    Args:
        model: The model; without `try_it` it may be on ``meta``. It stays as it is.
        sample_batch: What one process calls it with: a dict, a tuple or a tensor, whose first
            dimension counts samples. Without it activations are left out.
        config: A DeepSpeed configuration to begin with: what the way does not decide is kept.
        num_processes: Processes on each machine. None: one per GPU or TPU chip, or one.
        num_nodes: Machines.
        device_memory: What may be used on each device: bytes, or ``"16 GiB"``. None: what is free.
        host_memory: What may be used of each host.
        nvme_memory: What may be used of the disk.
        nvme_path: A folder on the fast disk; None leaves NVMe out, unless `config` names one.
        optimizer: DeepSpeed's optimizer, where `config` has none.
        precision: ``"auto"`` as the hardware allows, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        try_it: Whether to prove the choice: one real step in worker processes that end with it,
            way after way until one works. On a CPU a worker is held to its share of memory, so
            that nothing else is harmed.
        max_trials: How many launches that may take.
        timeout: Seconds that one launch may take.
        inventory: What the machine has; None looks at this one.

    Returns:
        The advice: `config` to train with, and a table of all ways with reasons. Where nothing
        fits, `config` is None, and the table says what is missing.

    Raises:
        ConfigError: A setting is wrong, or activations cannot be measured.
        MissingBackend: DeepSpeed, or nbaccel's backend for it, is not installed.
        WorkerFailed: (With `try_it`) a step failed for another reason than memory.
    """
    asked = SimpleNamespace(**locals())
    __tracebackhide__ = True
    advice: Advice = registry.load_advisor()(asked, notebook_launcher)
    return advice


def shutdown() -> None:
    """End the template process that waits to start workers. The next launch starts a new one."""
    template.stop()


def _merge_settings(config: RunConfig | Configured | None, settings: dict[str, Any]) -> RunConfig:
    # A value equal to the default cannot be told from one that was not given. By type first: True
    # is no number of processes, and an array is equal to nothing.
    defaults = {name: field.default for name, field in RunConfig.model_fields.items()}
    given = {
        name: value
        for name, value in settings.items()
        if type(value) is not type(defaults[name]) or value != defaults[name]
    }
    if config is None:
        return RunConfig(**given)
    if given:
        raise ConfigError(
            f"config and {', '.join(given)} were both given, and one would silently override the "
            f"other. Use config.changed({', '.join(f'{name}=…' for name in given)}) or no config."
        )
    return run_config_of(config)


def launch_configured(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    config: RunConfig,
    *,
    tells_warnings: bool = True,
) -> Results:
    """What both launchers and the command `nbaccel launch` do with their settings."""
    __tracebackhide__ = True
    check_call(function, args)
    # Again, because a hiding file may have been imported after nbaccel.
    plan = resolve(config)
    registry.check_strategy(plan.strategy, plan.device, config)
    for text in plan.warnings if tells_warnings else ():
        write_notice(f"nbaccel: {text}\n")
    if plan.start_method == "inline":
        # Imported late, because a launch in this process needs none of the machinery of workers.
        from nbaccel.calls import inline

        values, observed = inline.run_observed(plan, function, args)
        return Results(values, plan, observed=observed)
    from nbaccel.calls import launch

    if config.compare is not None:
        # The report compares with the steps of one worker, whose weights are dropped.
        write_notice(f"nbaccel: {config.compare} steps in one worker first, to compare.\n")
        alone = config.changed(
            num_processes=1,
            compare=None,
            resume=None,
            share_back=False,
            start_method="template",
            variables={**(config.variables or {}), MOST_STEPS_VARIABLE: str(config.compare)},
        )
        launch.launch_plan(resolve(alone), function, args)
    return _results_of(launch.launch_plan(plan, function, args))


def _launch_in_pool(
    pool: Pool, function: Callable[..., Any], args: tuple[Any, ...], config: RunConfig
) -> Results:
    """Call the function in live workers, whose settings must be those that were asked for."""
    __tracebackhide__ = True
    check_call(function, args)
    defaults = RunConfig().model_dump()
    # The plan's number: the configuration may leave it open.
    pool_settings = pool.config.model_dump() | {"num_processes": pool.num_processes}
    mistakes = [
        f"{name}={value!r} was asked for, but the pool's workers run with "
        f"{name}={pool_settings[name]!r}, which cannot change while they live. Leave it out, or "
        f"use pool.restart(pool.config.changed({name}={value!r}))."
        for name, value in config.model_dump().items()
        if value not in (defaults[name], pool_settings[name])
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return _results_of(pool.launch(function, args))


def _results_of(outcome: CallOutcome) -> Results:
    __tracebackhide__ = True
    results = Results(outcome.values, outcome.plan, outcome.state_dicts, observed=outcome.observed)
    if outcome.stopped is not None:
        outcome.stopped.results = results
        raise outcome.stopped
    return results
