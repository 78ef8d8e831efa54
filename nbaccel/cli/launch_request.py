"""What a command line and a file ask for: one `RunConfig`, and where each value is from.

Every mistake is found before anything is started.

    defaults ◄── file (--config-file) ◄── flags, in the spelling of any of the four commands
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.cli.host_options import choose_devices
from nbaccel.cli.output_flags import shown_output_of
from nbaccel.cli.peer_options import PEER_OPTIONS, PeerOption
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.notebook.options import setting_options
from nbaccel.plan import inspect_machine

_DEFAULT_SOURCE = "default"
_PEERS_BY_NAME = MappingProxyType({option.name: option for option in PEER_OPTIONS})
_SETTINGS_BY_NAME = MappingProxyType({option.name: option for option in setting_options()})
# Settings whose options `compute` reads with others.
_READ_TOGETHER = ("num_processes", "include", "exclude")
# Both mean a process that has nothing of this one, which workers of the template are.
_TORCHRUN_START_METHODS = MappingProxyType({"spawn": "template", "forkserver": "template"})
# What torchrun counts by a word.
_COUNTED_DEVICES = MappingProxyType({"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"})
# Accelerate's own default, where --use_deepspeed says no stage.
_DEFAULT_ZERO_STAGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What was asked for.

    Attributes:
        config: The settings.
        sources: Setting → the flag or file that gives it; settings left out have their defaults.
        variables: Environment variables for workers, by name.
        variable_sources: Variable → the flag that gives it.
        notes: What was given and has no effect, with the reason.
    """

    config: RunConfig
    sources: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    variable_sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def source_of(self, setting_name: str) -> str:
        """Where a setting's value is from."""
        return self.sources.get(setting_name, _DEFAULT_SOURCE)


def read_launch_request(
    given_options: Mapping[str, Any],
    file_config: RunConfig | None = None,
    file_name: str = "",
    merge: Callable[[Mapping[str, Any]], RunConfig] | None = None,
) -> LaunchRequest:
    """Read the options of a command line, over those of a file."""
    reader = _OptionReader(file_config=file_config or RunConfig(), file_name=file_name, merge=merge)
    for option_name, option_value in given_options.items():
        # A list option that was not given is empty with some versions of typer.
        if option_value is not None and option_value != []:
            reader.take(option_name, option_value)
    reader.compute(given_options)
    return reader.request()


@dataclass(kw_only=True)
class _OptionReader:
    """Takes options one by one, and collects the mistakes in them."""

    file_config: RunConfig
    file_name: str
    merge: Callable[[Mapping[str, Any]], RunConfig] | None
    settings: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    variable_flags: dict[str, str] = field(default_factory=dict)
    fp8_settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def take(self, option_name: str, option_value: Any) -> None:
        """Take one option, except for those that `compute` reads together."""
        if option_name in _SETTINGS_BY_NAME:
            if option_name not in _READ_TOGETHER:
                self._put(
                    option_name,
                    self._setting_value(option_name, option_value),
                    _SETTINGS_BY_NAME[option_name].flag,
                )
            return
        option = _PEERS_BY_NAME.get(option_name)
        # The command's own options are not in the table.
        if option is None or (option.is_switch and not option_value):
            return
        value = option.constant if option.is_switch else option_value
        actions: dict[str, Callable[[PeerOption, Any], None]] = {
            "setting": self._take_setting,
            "variable": self._take_variable,
            "fp8-setting": self._take_fp8,
            "none": self._take_none,
            "refused": self._refuse,
        }
        if action := actions.get(option.effect):
            action(option, value)

    def _setting_value(self, setting_name: str, option_value: Any) -> Any:
        option = _SETTINGS_BY_NAME[setting_name]
        if not isinstance(option_value, str):
            return option_value
        if option.none and option_value.strip().lower() == "none":
            return None
        if setting_name == "rdzv_conf" and not option_value.lstrip().startswith("{"):
            return _read_pairs(option_value)
        if setting_name == "start_method":
            return _TORCHRUN_START_METHODS.get(option_value, option_value)
        return _json_or_text(option_value) if option.is_json else option_value

    def _take_setting(self, option: PeerOption, value: Any) -> None:
        self._put(option.target, value, option.flag)

    def _take_variable(self, option: PeerOption, value: Any) -> None:
        self._put_variable(option.target, str(value), option.flag)

    def _take_fp8(self, option: PeerOption, value: Any) -> None:
        self.fp8_settings[option.target] = value
        self.flags.setdefault("fp8", option.flag)

    def _take_none(self, option: PeerOption, value: Any) -> None:
        self.notes.append(f"{option.flag} has no effect: {option.reason}.")

    def _refuse(self, option: PeerOption, value: Any) -> None:
        self.mistakes.append(f"{option.flag} cannot be followed: {option.reason}.")

    def _put(self, setting_name: str, value: Any, flag: str) -> None:
        if setting_name not in RunConfig.model_fields:
            self.mistakes.append(
                f"{flag} cannot be followed: this version has no setting {setting_name}. It would "
                "silently have no effect. Start one nbaccel launch on each host instead, with "
                "--num-nodes, --node-rank and --master-addr."
            )
            return
        # DeepSpeed's own defaults, which mean "not given".
        if value == "-1" and setting_name in ("num_nodes", "node_rank", "num_processes"):
            return
        if setting_name in self.settings and str(self.settings[setting_name]) != str(value):
            self.mistakes.append(
                f"{flag} gives {setting_name}={value!r} and {self.flags[setting_name]} gives "
                f"{self.settings[setting_name]!r}: one would silently override the other. Leave "
                "one of them out."
            )
            return
        self.settings[setting_name] = value
        self.flags[setting_name] = flag

    def _put_variable(self, variable_name: str, value: str, flag: str) -> None:
        self.variables[variable_name] = value
        self.variable_flags[variable_name] = flag

    # ---- options that are read together

    def compute(self, given: Mapping[str, Any]) -> None:
        """Read the options whose meaning depends on others."""
        self._read_nodes(given)
        self._read_processes(given)
        self._read_hosts()
        self._read_devices(given)
        self._read_environment(given)
        self._read_strategy(given)
        self._read_output(given)

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
            if (value := given.get(name)) is not None:
                self._put_local_count(str(value).strip().lower(), flag)
        if (total := given.get("num_processes")) is not None:
            self._put_total(str(total))

    def _put_local_count(self, count_text: str, flag: str) -> None:
        name = _COUNTED_DEVICES.get(count_text)
        if name is not None:
            self._put("device", name, flag)
            # One worker per device, as the plan counts them; of cores as many as there are.
            if device_row(name).in_host_memory:
                self._put("num_processes", inspect_machine().cpu_cores, flag)
        elif count_text not in ("auto", "-1"):
            self._put("num_processes", count_text, flag)

    def _put_total(self, total_text: str) -> None:
        """Accelerate counts the processes of all machines; a `RunConfig` those of one."""
        node_count = str(self.settings.get("num_nodes", self.file_config.num_nodes))
        if not (total_text.isdecimal() and node_count.isdecimal()) or int(node_count) < 2:
            self._put(
                "num_processes",
                None if total_text.strip().lower() == "none" else total_text,
                "--num-processes",
            )
        elif int(total_text) % int(node_count):
            self.mistakes.append(
                f"--num-processes={total_text} cannot be shared out over {node_count} machines: it "
                "counts the workers of all of them, as after accelerate launch. Give a multiple, "
                "or --nproc-per-node for each machine."
            )
        else:
            self._put("num_processes", int(total_text) // int(node_count), "--num-processes")

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

    def _read_devices(self, given: Mapping[str, Any]) -> None:
        has_hosts = bool(self.settings.get("hostfile") or self.file_config.hostfile)
        choice = choose_devices(given, has_hosts=has_hosts)
        self.mistakes += choice.mistakes
        if choice.visible is not None:
            self._choose_visible(choice.visible, choice.flag)
        if choice.count and "num_processes" not in self.settings:
            self._put("num_processes", choice.count, choice.flag)
        for name, text in choice.host_filters.items():
            self._put(name, text, choice.flag)

    def _choose_visible(self, visible_devices: str, flag: str) -> None:
        """A setting, not a variable of this command, so that the plan knows what is left out."""
        variables = self.settings.get("variables", self.file_config.variables) or {}
        if isinstance(variables, dict):  # the setting itself says what else is wrong
            self.settings["variables"] = {
                **variables,
                "CUDA_VISIBLE_DEVICES": visible_devices,
            }
            self.flags["variables"] = flag

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
        if given.get("use_deepspeed"):
            self._put("strategy", "deepspeed", "--use-deepspeed")
            asks_for_stage = {"zero_stage", "deepspeed"} & self.settings.keys()
            if not asks_for_stage and not self.file_config.uses_deepspeed:
                self._put("zero_stage", _DEFAULT_ZERO_STAGE, "--use-deepspeed")
        strategies = {self.settings.get("strategy", self.file_config.strategy)}
        if {"zero_stage", "deepspeed"} & self.settings.keys() or self.file_config.uses_deepspeed:
            strategies.add("deepspeed")
        idle_flags: dict[str, list[str]] = {}
        for name, value in given.items():
            option = _PEERS_BY_NAME.get(name)
            if option and value and option.needs and option.needs not in strategies:
                idle_flags.setdefault(option.needs, []).append(option.flag)
        self.notes += [
            f"{', '.join(flags)} has no effect without --strategy {strategy_name}."
            for strategy_name, flags in idle_flags.items()
        ]

    def _read_output(self, given: Mapping[str, Any]) -> None:
        output = shown_output_of(
            given, has_log_dir=bool({"log_dir"} & self.settings.keys() or self.file_config.log_dir)
        )
        self.mistakes += output.mistakes
        self.notes += output.notes
        if output.text is not None:
            self._put("shown_output", output.text, output.flag)

    # ---- the result

    def request(self) -> LaunchRequest:
        """What was asked for, if nothing is wrong."""
        if self.fp8_settings:
            fp8_base = self.settings.get("fp8") or self.file_config.fp8
            fp8_values = dict(fp8_base) if fp8_base and not isinstance(fp8_base, str) else {}
            self.settings["fp8"] = {**fp8_values, **self.fp8_settings}
        config = self.file_config
        try:
            config = (
                self.file_config.changed(**self.settings)
                if self.merge is None
                else self.merge(self.settings)
            )
        except ConfigError as error:
            self.mistakes += error.mistakes
        if self.mistakes:
            raise ConfigError(*dict.fromkeys(self.mistakes))
        return LaunchRequest(
            config=config,
            sources=self._sources(config),
            variables=self.variables,
            variable_sources=self.variable_flags,
            notes=tuple(self.notes),
        )

    def _sources(self, launch_config: RunConfig) -> dict[str, str]:
        sources = {}
        for name, model_field in RunConfig.model_fields.items():
            if name in self.flags:
                sources[name] = self.flags[name]
            elif getattr(self.file_config, name) != model_field.default:
                sources[name] = self.file_name
            elif getattr(launch_config, name) != model_field.default:
                # A DeepSpeed configuration decides stage, precision and accumulation.
                sources[name] = self.flags.get("deepspeed", "DeepSpeed configuration")
        return sources


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text  # the setting itself says what it must be


def _read_pairs(text: str) -> Any:
    """``timeout=60,read_timeout=5``, as torchrun takes it; other text as it is."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(sign for _, sign, _ in pairs):
        return text
    return {name.strip(): _json_or_text(value.strip()) for name, _, value in pairs}
