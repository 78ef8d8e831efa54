"""What a command line and a file ask for: one `RunConfig`, and where each value is from.

defaults ◄── file (--config-file) ◄── flags, in the spelling of any of the four commands
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.cli import plain_table, terminal_console
from nbaccel.cli.launch_options import PEER_OPTIONS
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row, engine_row
from nbaccel.config.config_files import load_config_file, peek_config_file
from nbaccel.config.deepspeed_document import DEFAULT_STAGE, kept_slots, slots_by_host
from nbaccel.config.run_config import chosen_engine
from nbaccel.notebook.magic_line import json_or_text, setting_options
from nbaccel.plan import Plan, inspect_machine, registry, resolve

_DEFAULT_SOURCE = "default"
_PEERS_BY_NAME = {option.name: option for option in PEER_OPTIONS}
_SETTINGS_BY_NAME = {option.name: option for option in setting_options()}
_READ_TOGETHER = ("num_processes", "include", "exclude")  # read by `compute`
# Both mean a process that has nothing of this one, which workers of the template are.
_TORCHRUN_START_METHODS = {"spawn": "template", "forkserver": "template"}
# What torchrun counts by a word.
_COUNTED_DEVICES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}
# DeepSpeed writes ``host1:0,1@host2``; Accelerate has the same under longer names.
_FILTER_NAMES = {
    "include": ("include", "deepspeed_inclusion_filter"),
    "exclude": ("exclude", "deepspeed_exclusion_filter"),
}
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsFile:
    """The settings of ``--config-file``: nbaccel's file or Accelerate's."""

    # The file's settings; values may be anything where the file alone is wrong.
    config: RunConfig = field(default_factory=RunConfig)
    name: str = ""  # what to call their source
    path: str | None = None  # the file; None for the default one
    # Whether it is read with the settings that change it: it is wrong alone, or Accelerate's, which
    # counts the processes of all machines.
    is_read_again: bool = False

    def merge(self, changes: Mapping[str, Any]) -> RunConfig:
        """Put settings over the file's, and judge them together."""
        if self.is_read_again:
            return load_config_file(self.path, changes).config
        return self.config.changed(**changes)


def read_settings_file(file_path: str | None) -> SettingsFile:
    """Read the settings of a run."""
    try:
        file = load_config_file(file_path)
        reads_again = file.is_accelerate
    except ConfigError:
        file = peek_config_file(file_path)
        reads_again = True
    name = "" if file.path is None else file.path.name
    return SettingsFile(config=file.config, name=name, path=file_path, is_read_again=reads_again)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What was asked for."""

    config: RunConfig
    # Setting or variable → the flag or file that gives it; what is left out has its default.
    sources: Mapping[str, str]
    # Environment variables for workers, by name; their sources are among those above.
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was given and has no effect, with the reason

    def source_of(self, setting_name: str) -> str:
        """Where a setting's value is from."""
        return self.sources.get(setting_name, _DEFAULT_SOURCE)


def read_launch_request(given_options: Mapping[str, Any], file: SettingsFile) -> LaunchRequest:
    """Read the options of a command line, over those of a file."""
    reader = _OptionReader(file=file)
    for option_name, option_value in given_options.items():
        # A list option that was not given is empty with some versions of typer.
        if option_value is not None and option_value != []:
            reader.take(option_name, option_value)
    reader.compute(given_options)
    return reader.request()


def plan_of_command(config: RunConfig) -> Plan:
    """The plan of a run that a command starts, whose process nobody has prepared: connects it."""
    name, _ = chosen_engine(config)
    if engine_row(name).runs_on_hosts:
        registry.engine(name).connect()
    return resolve(config)


@dataclass(kw_only=True)
class _OptionReader:
    file: SettingsFile
    settings: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    fp8_settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def take(self, option_name: str, option_value: Any) -> None:
        """Take one option, except for those that `compute` reads together."""
        if (setting := _SETTINGS_BY_NAME.get(option_name)) is not None:
            if option_name not in _READ_TOGETHER:
                self._put(option_name, _setting_value(option_name, option_value), setting.flag)
            return
        option = _PEERS_BY_NAME.get(option_name)
        # The command's own options are not in the table.
        if option is None or not (option_value or not option.is_switch):
            return
        value = option.constant if option.is_switch else option_value
        if option.effect == "setting":
            self._put(option.target, value, option.flag)
        elif option.effect == "variable":
            self._put_variable(option.target, str(value), option.flag)
        elif option.effect == "fp8-setting":
            self.fp8_settings[option.target] = value
            self.flags.setdefault("fp8", option.flag)
        elif option.effect == "none":
            self.notes.append(f"{option.flag} has no effect: {option.reason}.")
        elif option.effect == "refused":
            self.mistakes.append(f"{option.flag} cannot be followed: {option.reason}.")

    def _put(self, setting_name: str, value: Any, flag: str) -> None:
        # DeepSpeed's own defaults, which mean "not given".
        if value == "-1" and setting_name in ("num_nodes", "node_rank", "num_processes"):
            return
        if setting_name in self.settings and str(self.settings[setting_name]) != str(value):
            self.mistakes.append(
                f"{flag} gives {setting_name}={value!r} and {self.flags[setting_name]} gives "
                f"{self.settings[setting_name]!r}: one would override the other. Leave one out."
            )
            return
        self.settings[setting_name] = value
        self.flags[setting_name] = flag

    def _put_variable(self, variable_name: str, value: str, flag: str) -> None:
        self.variables[variable_name] = value
        self.flags[variable_name] = flag

    def compute(self, given: Mapping[str, Any]) -> None:
        """Read the options whose meaning depends on others."""
        self._read_nodes(given)
        self._read_processes(given)
        self._read_hosts()
        self._read_devices(given)
        self._read_environment(given)
        self._read_strategy(given)

    def _read_nodes(self, given: Mapping[str, Any]) -> None:
        if given.get("standalone"):
            self._put("num_nodes", 1, "--standalone")
        if (text := given.get("nnodes")) is None:
            return
        least_nodes, _, most_nodes = str(text).partition(":")
        if not least_nodes.isdecimal() or (most_nodes and not most_nodes.isdecimal()):
            self.mistakes.append(
                f"--nnodes={text!r} is no number of machines: the launch waits for so many. "
                "Write 2, or 1:2 for at least one and at most two."
            )
            return
        self._put("num_nodes", most_nodes or least_nodes, "--nnodes")
        if most_nodes and least_nodes != most_nodes:
            settings = self.settings.get("rdzv_conf") or {}
            self.settings["rdzv_conf"] = {**settings, "min_nodes": int(least_nodes)}
            self.flags.setdefault("rdzv_conf", "--nnodes")

    def _read_processes(self, given: Mapping[str, Any]) -> None:
        for name in ("nproc_per_node", "num_gpus", "num_accelerators"):
            flag = f"--{name.replace('_', '-')}"
            count_text = str(given.get(name, "auto")).strip().lower()
            if (device := _COUNTED_DEVICES.get(count_text)) is not None:
                self._put("device", device, flag)
                # One worker per device, as the plan counts them; of cores as many as there are.
                if device_row(device).in_host_memory:
                    self._put("num_processes", inspect_machine().cpu_cores, flag)
            elif count_text not in ("auto", "-1", "none"):
                self._put("num_processes", count_text, flag)
        if (total := given.get("num_processes")) is None:
            return
        # Accelerate counts the processes of all machines; a `RunConfig` those of one.
        total_text, flag = str(total), "--num-processes"
        node_count = str(self.settings.get("num_nodes", self.file.config.num_nodes))
        if not (total_text.isdecimal() and node_count.isdecimal()) or int(node_count) < 2:
            is_open = total_text.strip().lower() == "none"
            self._put("num_processes", None if is_open else total_text, flag)
        elif int(total_text) % int(node_count):
            self.mistakes.append(
                f"{flag}={total_text} cannot be shared out over {node_count} machines: it counts "
                "the workers of all. Give a multiple, or --nproc-per-node for each machine."
            )
        else:
            self._put("num_processes", int(total_text) // int(node_count), flag)

    def _read_hosts(self) -> None:
        """With a hostfile one command starts the workers of all its hosts, and counts them all."""
        host_count = str(self.settings.get("num_nodes", ""))
        if "hostfile" not in self.settings or not host_count.isdecimal():
            return
        del self.settings["num_nodes"]
        text = str(self.settings.get("num_processes", ""))
        if text.isdecimal():
            self.settings["num_processes"] = int(text) * int(host_count)
        else:
            self.notes.append(
                f"{self.flags['num_nodes']} has no effect: the hosts of the hostfile are taken, in "
                "their order, until all workers have a place."
            )

    def _read_environment(self, given: Mapping[str, Any]) -> None:
        for assignment in given.get("env") or ():
            name, sign, value = assignment.partition("=")
            if not sign or not name:
                self.mistakes.append(
                    f"--env must be NAME=VALUE: got {assignment!r}. It is set in all workers. "
                    "Write for example --env NCCL_DEBUG=INFO."
                )
            else:
                self._put_variable(name, value, "--env")
        if given.get("debug"):
            self._put_variable("ACCELERATE_DEBUG_MODE", "true", "--debug")

    def _read_strategy(self, given: Mapping[str, Any]) -> None:
        asks_for_stage = bool({"zero_stage", "deepspeed"} & self.settings.keys())
        asks_for_stage = asks_for_stage or self.file.config.uses_deepspeed
        if given.get("use_deepspeed"):
            self._put("strategy", "deepspeed", "--use-deepspeed")
            if not asks_for_stage:
                self._put("zero_stage", DEFAULT_STAGE, "--use-deepspeed")
        strategies = {self.settings.get("strategy", self.file.config.strategy)}
        strategies |= {"deepspeed"} if asks_for_stage else set()
        idle_flags: dict[str, list[str]] = {}
        for name, value in given.items():
            option = _PEERS_BY_NAME.get(name)
            if option and value and option.needs and option.needs not in strategies:
                idle_flags.setdefault(option.needs, []).append(option.flag)
        self.notes += [
            f"{', '.join(flags)} has no effect without --strategy {strategy_name}."
            for strategy_name, flags in idle_flags.items()
        ]

    def _read_devices(self, given: Mapping[str, Any]) -> None:
        """Read ``--gpu-ids``, ``--include`` and ``--exclude``; they may name this machine alone."""
        filters = [
            (kind, str(given[name]), f"--{name.replace('_', '-')}")
            for kind, names in _FILTER_NAMES.items()
            for name in names
            if given.get(name)
        ]
        gpu_ids = str(given.get("gpu_ids") or "all").replace(" ", "")
        given_flags = [flag for _, _, flag in filters] + ["--gpu-ids"] * (gpu_ids != "all")
        if len(given_flags) > 1:
            self.mistakes.append(
                f"{' and '.join(given_flags)} choose devices twice: one would silently override "
                "the other. Leave one of them out."
            )
        elif gpu_ids != "all":
            self._choose_visible(gpu_ids.split(","), "--gpu-ids")
        elif filters:
            self._read_filter(*filters[0])

    def _read_filter(self, kind: str, filter_text: str, flag: str) -> None:
        has_hosts = bool(self.settings.get("hostfile") or self.file.config.hostfile)
        try:
            slots = slots_by_host(filter_text)
            if has_hosts or not slots.keys() <= _THIS_MACHINE:
                self._put(kind, filter_text, flag)
                return
            numbers = [str(number) for host_slots in slots.values() for number in host_slots]
            if kind == "exclude":
                numbers = _numbers_left(numbers)
        except ConfigError as error:
            self.mistakes += [f"{flag}: {mistake}" for mistake in error.mistakes]
            return
        if numbers:
            self._choose_visible(numbers, flag)

    def _choose_visible(self, numbers: list[str], flag: str) -> None:
        """A setting, not a variable of this command, so that the plan knows what is left out."""
        if not all(number.isdecimal() for number in numbers):
            self.mistakes.append(
                f"{flag} must name devices by number: got {','.join(numbers)!r}. Only these are "
                "used. Give for example 0,1."
            )
            return
        variables = self.settings.get("variables", self.file.config.variables) or {}
        if isinstance(variables, dict):  # the setting itself says what else is wrong
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(numbers)}
            self.settings["variables"] = {**variables, **visible}
            self.flags["variables"] = flag
        if "num_processes" not in self.settings:
            self._put("num_processes", len(numbers), flag)

    def request(self) -> LaunchRequest:
        """What was asked for, if nothing is wrong."""
        if self.fp8_settings:
            fp8_base = self.settings.get("fp8") or self.file.config.fp8
            fp8_values = dict(fp8_base) if fp8_base and not isinstance(fp8_base, str) else {}
            self.settings["fp8"] = {**fp8_values, **self.fp8_settings}
        config = self.file.config
        try:
            config = self.file.merge(self.settings)
        except ConfigError as error:
            self.mistakes += error.mistakes
        if self.mistakes:
            raise ConfigError(*dict.fromkeys(self.mistakes))
        sources = {name: self.flags[name] for name in self.variables}
        for name, model_field in RunConfig.model_fields.items():
            if name in self.flags:
                sources[name] = self.flags[name]
            elif getattr(self.file.config, name) != model_field.default:
                sources[name] = self.file.name
            elif getattr(config, name) != model_field.default:
                # A DeepSpeed configuration decides stage, precision and accumulation.
                sources[name] = self.flags.get("deepspeed", "DeepSpeed configuration")
        return LaunchRequest(
            config=config, sources=sources, variables=self.variables, notes=tuple(self.notes)
        )


def _setting_value(setting_name: str, option_value: Any) -> Any:
    option = _SETTINGS_BY_NAME[setting_name]
    if not isinstance(option_value, str):
        return option_value
    if option.none and option_value.strip().lower() == "none":
        return None
    if setting_name == "rdzv_conf" and not option_value.lstrip().startswith("{"):
        # ``timeout=60,read_timeout=5``, as torchrun takes it; other text as it is.
        pairs = [pair.partition("=") for pair in option_value.split(",") if pair.strip()]
        if not all(sign for _, sign, _ in pairs):
            return option_value
        return {name.strip(): json_or_text(value.strip()) for name, _, value in pairs}
    if setting_name == "start_method":
        return _TORCHRUN_START_METHODS.get(option_value, option_value)
    return json_or_text(option_value) if option.is_json else option_value


def _numbers_left(excluded_numbers: list[str]) -> list[str]:
    """The devices of this machine without some of them; without numbers the machine is left out."""
    num_gpus = len(inspect_machine().gpus)
    # Without GPUs there is nothing to leave out but the machine.
    if excluded_numbers and not num_gpus:
        return []
    own_filter = f"localhost:{','.join(excluded_numbers)}" if excluded_numbers else "localhost"
    [kept_numbers] = kept_slots({"localhost": max(1, num_gpus)}, exclude=own_filter).values()
    return [str(number) for number in kept_numbers]


def show_dry_run(request: LaunchRequest, engine_command: str) -> None:
    """Print every setting with its source, and the plan, or the command. Nothing is started."""
    console = terminal_console()
    table = plain_table("Settings", "setting", "value", "from")
    for name in RunConfig.model_fields:
        source = request.source_of(name)
        style = "dim" if source == _DEFAULT_SOURCE else None
        value = getattr(request.config, name)
        text = json.dumps(value) if isinstance(value, dict) else str("" if value is None else value)
        table.add_row(name, text, source, style=style)
    console.print(table)
    if request.variables:
        table = plain_table("Environment of workers", "variable", "value", "from")
        for name, value in request.variables.items():
            table.add_row(name, value, request.source_of(name))
        console.print(table)
    console.print()
    # The plan's own text is for a fixed width: rich would break its lines anew.
    if engine_command:
        sys.stdout.write(f"What would run:\n\n    {engine_command}\n")
    else:
        with env.applied(dict(request.variables)):
            sys.stdout.write(f"{plan_of_command(request.config).explain()}\n")
    sys.stdout.write("\nNothing was started: --dry-run.\n")
