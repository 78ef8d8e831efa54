"""The command that starts a script on several machines: that of the engine that is there for it.

    settings ─► torchrun, deepspeed, srun torchrun or ray job submit, in the place of this process

nbaccel starts the workers of a script itself on one machine alone. Settings travel as options of
the command, and as the variables from which training code reads them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import is_installed
from nbaccel.cli.job_files import COMMANDS, for_ray, settings_variables
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import ENGINES, engine_row
from nbaccel.config.run_config import chosen_engine
from nbaccel.hosts.slurm import job_number, own_step_variables, srun_words
from nbaccel.plan import registry

if TYPE_CHECKING:
    from nbaccel.cli.launch_request import LaunchRequest
    from nbaccel.config.call_arguments import Script
    from nbaccel.plan.contracts.host_engine import Host

_IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of a job
# Without it nodes never meet again after one was lost: the first keeps the address of its first
# round and publishes it in no later one (torch 2.13).
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# What no option and no variable of these commands says.
_NOT_TORCHRUN = ("timeout", "shown_output", "start_method", "share_back", "on_stop", "resume")
_NOT_DEEPSPEED = (*_NOT_TORCHRUN, "monitor_interval", "max_restarts", "log_line_prefix_template")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCommand:
    """A command that starts a script on several machines."""

    words: Sequence[str]  # the program and its arguments
    # What it gets beside this process's environment.
    variables: Mapping[str, str] = field(default_factory=dict)
    dropped: Sequence[str] = ()  # variables of this process that it must not get
    notes: Sequence[str] = ()  # settings that it has no way to follow

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        # As it would be written: the path of this Python says nothing to a reader.
        words = ["python" if word == sys.executable else word for word in self.words]
        return " ".join([*variables, shlex.join(words)])

    def take_over(self) -> NoReturn:
        """Run it in the place of this process, which thus has its output, signals and status."""
        environment = {**env.snapshot(), **self.variables}
        for name in self.dropped:
            environment.pop(name, None)
        # Commands of this Python's environment, which need not be on the PATH.
        folders = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(folders)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(self.words[0], list(self.words), environment)  # noqa: S606  # as it is meant


def command_of_engine(request: LaunchRequest, script: Script) -> EngineCommand | None:
    """The command that starts a script on several machines."""
    config = request.config
    name, _ = chosen_engine(config)
    if config.num_nodes > 1 or engine_row(name).starts_scripts_only:
        return _torchrun(request, script)
    maker = _MAKERS.get(name)
    return None if maker is None else maker(request, script)


def _variables(request: LaunchRequest) -> dict[str, str]:
    config = request.config
    variables = settings_variables(config)
    if config.threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(config.threads_per_process)
    return variables | dict(request.variables)


def _script_words(script: Script) -> list[str]:
    """The script as torchrun, deepspeed and nbaccel launch take it."""
    words = {"file": [], "module": ["-m"], "program": ["--no-python"]}
    return [*words[script.kind], script.target, *script.arguments]


def _notes(config: RunConfig, setting_names: Sequence[str], program: str) -> tuple[str, ...]:
    return tuple(
        f"{name}={getattr(config, name)!r} has no effect: {program} has no option for it."
        for name in setting_names
        if getattr(config, name) != RunConfig.model_fields[name].default
    )


# ------------------------------------------------------------------ torchrun, also by srun


def _torchrun(request: LaunchRequest, script: Script) -> EngineCommand:
    config = request.config
    [_, *options] = shlex.split(" ".join(COMMANDS["torchrun"](config, None)))
    return EngineCommand(
        words=["torchrun", *options, *_log_options(config), *_script_words(script)],
        variables=_torchrun_variables(request),
        notes=_notes(config, _NOT_TORCHRUN, "torchrun"),
    )


def _log_options(config: RunConfig) -> list[str]:
    words = [] if config.log_dir is None else ["--log-dir", config.log_dir, "--tee", "3"]
    if config.monitor_interval != RunConfig.model_fields["monitor_interval"].default:
        words += ["--monitor-interval", str(config.monitor_interval)]
    return words


def _torchrun_variables(request: LaunchRequest) -> dict[str, str]:
    variables = _variables(request)
    if request.config.log_line_prefix_template is not None:
        variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = request.config.log_line_prefix_template
    if chosen_engine(request.config)[0] != ENGINES[0].name and not env.read(_OWN_STORE):
        variables[_OWN_STORE] = "1"
    return variables


def _srun(request: LaunchRequest, script: Script) -> EngineCommand:
    """One torchrun on each node of the allocation, which meet at the first."""
    config = request.config
    hosts = _hosts(config)
    # As exported jobs do: jobs that share a node must not share a port.
    port = config.use_port or 20000 + job_number() % 20000
    return EngineCommand(
        words=[
            *srun_words([host.name for host in hosts]),
            "torchrun",
            *("--nproc-per-node", _even_count(config, hosts), "--nnodes", str(len(hosts))),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{port}"),
            *("--rdzv-id", str(job_number()), "--max-restarts", str(config.max_restarts)),
            *_log_options(config),
            *_script_words(script),
        ],
        variables=_torchrun_variables(request),
        dropped=own_step_variables(),
        notes=_notes(config, _NOT_TORCHRUN, "torchrun"),
    )


def _even_count(config: RunConfig, hosts: Sequence[Host]) -> str:
    """How many workers torchrun starts on each host."""
    if config.num_processes is None and all(host.slots is None for host in hosts):
        return "gpu"
    num_workers = config.num_processes or sum(host.slots or 1 for host in hosts)
    if num_workers % len(hosts):
        raise ConfigError(
            f"num_processes={num_workers} cannot be shared out over the {len(hosts)} nodes of the "
            "allocation: torchrun starts as many on each. Give a multiple of the number of nodes."
        )
    return str(num_workers // len(hosts))


def _hosts(config: RunConfig) -> Sequence[Host]:
    engine = registry.engine(chosen_engine(config)[0])
    if reason := engine.unavailable_reason(config):
        raise ConfigError(reason)
    return engine.hosts(config)


# ------------------------------------------------------------------ deepspeed


def _deepspeed(request: LaunchRequest, script: Script) -> EngineCommand:
    config = request.config
    if not is_installed("deepspeed"):
        raise ConfigError(
            f"hostfile={config.hostfile!r} needs DeepSpeed's launcher, and DeepSpeed is not "
            "installed: nothing would start the script there. Install it with pip install "
            '"nbaccel[deepspeed]", or use another engine.'
        )
    options = ["--hostfile", str(config.hostfile)]
    hosts = _hosts(config)
    if config.num_processes is not None or config.include or config.exclude:
        slots = {host.address: host.devices or range(host.slots or 1) for host in hosts}
        included = [f"{name}:{','.join(map(str, numbers))}" for name, numbers in slots.items()]
        options += ["--include", "@".join(included)]
    if config.use_port is not None:
        options += ["--master_port", str(config.use_port)]
    if config.master_addr != RunConfig.model_fields["master_addr"].default:
        options += ["--master_addr", config.master_addr]
    if config.log_dir is not None:
        options += ["--enable_each_rank_log", config.log_dir]
    # It takes no variables of ours to the other hosts, so that a program there sets them.
    assignments = [f"{name}={value}" for name, value in _variables(request).items()]
    python = [sys.executable, "-u"]
    words = {"file": python, "module": [*python, "-m"], "program": []}
    program = ["env", *assignments, *words[script.kind], script.target, *script.arguments]
    return EngineCommand(
        words=["deepspeed", *options, "--no_local_rank", "--no_python", *program],
        notes=_notes(config, _NOT_DEEPSPEED, "deepspeed"),
    )


# ------------------------------------------------------------------ ray


def _ray_job(request: LaunchRequest, script: Script) -> EngineCommand | None:
    """The same command as a job of the cluster, where it starts workers on the nodes."""
    if env.read(_IN_RAY_JOB):
        return None
    config = request.config
    if not is_installed("ray"):
        raise ConfigError(registry.engine("ray").unavailable_reason(config))
    assignments = [f"{name}={value}" for name, value in request.variables.items()]
    command = " ".join(
        [
            *(["env", *map(shlex.quote, assignments)] if assignments else []),
            *COMMANDS["nbaccel"](config, None),
            shlex.join(_script_words(script)),
        ]
    )
    submit_words = ["ray", "job", "submit", "--working-dir", ".", "--"]
    return EngineCommand(words=[*submit_words, *shlex.split(for_ray(command), comments=True)])


_MAKERS: dict[str, Callable[[LaunchRequest, Script], EngineCommand | None]] = {
    "slurm": _srun,
    "deepspeed": _deepspeed,
    "ray": _ray_job,
}
"""Engine → what makes its command."""
