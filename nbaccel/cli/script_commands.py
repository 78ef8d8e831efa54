"""What starts a script: a command line in two languages, jobs around it, and engines' commands.

    settings ─► torchrun, deepspeed, srun torchrun or ray job submit, in the place of this process

Settings travel as options of the command, or in variables; nothing of this machine does.
"""

from __future__ import annotations

import base64
import importlib.resources
import json
import os
import shlex
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbaccel import __version__
from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import install_line, is_installed
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import ENGINES, device_row, engine_row
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.run_config import chosen_engine
from nbaccel.config.text_forms import changed_settings
from nbaccel.hosts.hostfile_slurm import job_number, own_step_variables, srun_words
from nbaccel.notebook.magic_line import changed_flags
from nbaccel.plan import registry
from nbaccel.plan.topology import run_variables

if TYPE_CHECKING:
    from nbaccel.cli.launch_request import LaunchRequest
    from nbaccel.config.call_arguments import Script
    from nbaccel.plan.contracts.host_engine import Host


_PORT = 29500
_MEETING_PORT = 29400  # torch's own, for rendezvous
# What the cluster decides, and not the command line of a job.
_PLACE_SETTINGS = ("num_processes", "num_nodes", "node_rank", "master_addr", "use_port")
_DEEPSPEED_FILE = "ds_config.json"


def settings_variables(config: RunConfig) -> dict[str, str]:
    """What `nbaccel launch` would set, for launchers that do not know these settings."""
    variables = dict(run_variables(config))
    if config.mixed_precision != "no":
        variables["ACCELERATE_MIXED_PRECISION"] = config.mixed_precision
    if config.device != "auto":
        variables |= dict(device_row(config.device).variables)
    return variables


def _node_words(
    config: RunConfig, node_rank: str = "", master_addr: str = "", master_port: str = ""
) -> list[str]:
    """The number of nodes, this node's, and where they meet, which a job's shell may know."""
    if config.num_nodes == 1:
        return [] if config.use_port is None else [f"--master-port {config.use_port}"]
    name, _, port = config.rdzv_endpoint.rpartition(":")
    return [
        f"--nnodes {config.num_nodes}",
        f"--node-rank {node_rank or config.node_rank}",
        f"--master-addr {master_addr or name or config.master_addr}",
        f"--master-port {master_port or port or config.use_port or _PORT}",
    ]


def _nbaccel_words(config: RunConfig, *place: str) -> list[str]:
    flags = changed_flags(config, left_out=_PLACE_SETTINGS)
    # An engine that finds the machines counts the workers on all of them.
    count_flag = "--nproc-per-node" if config.engine == "auto" else "--num-processes"
    count_words = [] if config.num_processes is None else [f"{count_flag} {config.num_processes}"]
    return ["nbaccel launch", *count_words, *_node_words(config, *place), *flags]


def _torchrun_words(config: RunConfig) -> list[str]:
    restarts = [f"--max-restarts {config.max_restarts}"] if config.max_restarts else []
    count = "gpu" if config.num_processes is None else config.num_processes
    may_leave = engine_row(chosen_engine(config)[0]).starts_scripts_only
    nodes = _meeting_words(config) if may_leave else _node_words(config)
    return ["torchrun", f"--nproc-per-node {count}", *nodes, *restarts]


def _meeting_words(config: RunConfig) -> list[str]:
    """How nodes that may come and go agree on who takes part."""
    settings = dict(config.rdzv_conf or {})
    least_nodes = settings.pop("min_nodes", None)
    backend = "c10d" if config.rdzv_backend == "static" else config.rdzv_backend
    endpoint = config.rdzv_endpoint or f"{config.master_addr}:{config.use_port or _MEETING_PORT}"
    pairs = ",".join(f"{name}={value}" for name, value in settings.items())
    return [
        f"--nnodes {f'{least_nodes}:' if least_nodes else ''}{config.num_nodes}",
        f"--rdzv-backend {shlex.quote(backend)}",
        f"--rdzv-endpoint {shlex.quote(endpoint)}",
        f"--rdzv-id {shlex.quote(config.rdzv_id)}",
        *([f"--rdzv-conf {shlex.quote(pairs)}"] if pairs else []),
    ]


def _own_command(config: RunConfig, script_name: str, *place: str) -> str:
    return " ".join([*_nbaccel_words(config, *place), shlex.quote(script_name)])


def _torchrun_command(config: RunConfig, script_name: str) -> str:
    variables = settings_variables(config)
    if config.deepspeed is not None:
        # A file that can be read in the place of its text in base64.
        variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = _DEEPSPEED_FILE
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, *_torchrun_words(config), shlex.quote(script_name)])


class _Template(string.Template):
    """A text with ``@names`` in it: a dollar is the shell's."""

    delimiter = "@"


def _filled(template_name: str, **values: object) -> str:
    folder = importlib.resources.files("nbaccel.cli") / "job_templates"
    return _Template(folder.joinpath(template_name).read_text(encoding="utf-8")).substitute(values)


def _has_accelerators(config: RunConfig) -> bool:
    """Whether a job asks for devices: those that are left open are some."""
    return config.device == "auto" or not device_row(config.device).in_host_memory


def _slurm_job(config: RunConfig, stem: str) -> str:
    place = ('"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    num_workers = config.num_processes or 1
    return _filled(
        "slurm.sbatch",
        stem=stem,
        num_nodes=config.num_nodes,
        cpus=num_workers * (config.threads_per_process or 1),
        gpu_line=f"#SBATCH --gpus-per-node={num_workers}\n" if _has_accelerators(config) else "",
        command=shlex.quote(_own_command(config, f"{stem}.py", *place)),
    )


def _ray_job(config: RunConfig, stem: str) -> str:
    job_config = config.changed(num_nodes=1, node_rank=0, master_addr="127.0.0.1", use_port=None)
    if config.num_nodes > 1:
        num_processes = (config.num_processes or 1) * config.num_nodes
        job_config = job_config.changed(engine="ray", num_processes=num_processes)
        # The job's own process trains nothing: its workers have places of their own.
        resource_line = ""
    else:
        name = "gpus" if _has_accelerators(config) else "cpus"
        resource_line = f"  --entrypoint-num-{name} {config.num_processes or 1} \\\n"
    return _filled(
        "ray.sh",
        stem=stem,
        version=__version__,
        resource_line=resource_line,
        command=for_ray(_own_command(job_config, f"{stem}.py")),
    )


def for_ray(command: str) -> str:
    """A command as `ray job submit` has to be given it.

    Ray gives its words, joined with the quotes of Windows, to a shell, which runs what is in them.
    A command of plain words comes through; any other goes in letters that mean nothing to it.
    """
    if all(word == shlex.quote(word) for word in shlex.split(command)):
        return command
    letters = base64.b64encode(f"exec {command}".encode()).decode()
    return f"echo {letters} '|' base64 -d '|' bash  # {' '.join(command.split())}"


# What makes a job's file, what comes after the script's name in that of the file, and its program.
_JOBS = {"slurm": (_slurm_job, ".sbatch", "sbatch"), "ray": (_ray_job, "_ray.sh", "bash")}


def exported_files(
    target: str, config: RunConfig, script_path: Path, script_text: str
) -> tuple[dict[str, str], str]:
    """The texts of the files to write by name, the script first, and the command that starts it."""
    files = {script_path.name: script_text}
    if target in _JOBS:
        make_text, name_end, program = _JOBS[target]
        name = f"{script_path.stem}{name_end}"
        files[name] = make_text(config, script_path.stem)
        return files, f"{program} {name}"
    if target == "nbaccel":
        return files, _own_command(config, script_path.name)
    if config.deepspeed is not None:
        document = json.dumps(engine_config(config), indent=2)
        files[_DEEPSPEED_FILE] = f"{document}\n"
    return files, _torchrun_command(config, script_path.name)


_IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of a job
# Without it nodes never meet again after one was lost (torch 2.13).
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# What no option and no variable of these commands says.
_NOT_TORCHRUN = (
    *("timeout", "shown_output", "start_method", "share_back", "on_stop", "resume", "compare"),
)
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
    name, _ = chosen_engine(request.config)
    if request.config.num_nodes > 1 or engine_row(name).starts_scripts_only:
        return _torchrun(request, script)
    makers: dict[str, Callable[[LaunchRequest, Script], EngineCommand | None]] = {
        "slurm": _srun,
        "deepspeed": _deepspeed,
        "ray": _ray_submission,
    }
    return makers[name](request, script) if name in makers else None


def _variables(request: LaunchRequest) -> dict[str, str]:
    variables = settings_variables(request.config)
    if request.config.threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(request.config.threads_per_process)
    return variables | dict(request.variables)


def _script_words(script: Script) -> list[str]:
    """The script as torchrun, deepspeed and nbaccel launch take it."""
    words = {"file": [], "module": ["-m"], "program": ["--no-python"]}
    return [*words[script.kind], script.target, *script.arguments]


def _notes(config: RunConfig, setting_names: Sequence[str], program: str) -> tuple[str, ...]:
    changed = changed_settings(config)
    return tuple(
        f"{name}={changed[name]!r} has no effect: {program} has no option for it."
        for name in setting_names
        if name in changed
    )


def _torchrun(request: LaunchRequest, script: Script) -> EngineCommand:
    config = request.config
    [_, *options] = shlex.split(" ".join(_torchrun_words(config)))
    return EngineCommand(
        words=["torchrun", *options, *_log_options(config), *_script_words(script)],
        variables=_torchrun_variables(request),
        notes=_notes(config, _NOT_TORCHRUN, "torchrun"),
    )


def _log_options(config: RunConfig) -> list[str]:
    words = [] if config.log_dir is None else ["--log-dir", config.log_dir, "--tee", "3"]
    if "monitor_interval" in changed_settings(config):
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


def _deepspeed(request: LaunchRequest, script: Script) -> EngineCommand:
    config = request.config
    if not is_installed("deepspeed"):
        raise ConfigError(
            f"hostfile={config.hostfile!r} needs DeepSpeed's launcher, and DeepSpeed is not "
            "installed: nothing would start the script there. Install it: "
            f"{install_line('deepspeed')}; or use another engine."
        )
    options = ["--hostfile", str(config.hostfile)]
    hosts = _hosts(config)
    if config.num_processes is not None or config.include or config.exclude:
        slots = {host.address: host.devices or range(host.slots or 1) for host in hosts}
        included = [f"{name}:{','.join(map(str, numbers))}" for name, numbers in slots.items()]
        options += ["--include", "@".join(included)]
    if config.use_port is not None:
        options += ["--master_port", str(config.use_port)]
    if "master_addr" in changed_settings(config):
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


def _ray_submission(request: LaunchRequest, script: Script) -> EngineCommand | None:
    """The same command as a job of the cluster, where it starts workers on the nodes."""
    if env.read(_IN_RAY_JOB):
        return None
    config = request.config
    if not is_installed("ray"):
        raise ConfigError(registry.engine("ray").unavailable_reason(config))
    assignments = [f"{name}={value}" for name, value in request.variables.items()]
    environment = ["env", *map(shlex.quote, assignments)] if assignments else []
    words = [*environment, *_nbaccel_words(config), shlex.join(_script_words(script))]
    submit_words = ["ray", "job", "submit", "--working-dir", ".", "--"]
    command = shlex.split(for_ray(" ".join(words)), comments=True)
    return EngineCommand(words=[*submit_words, *command])
