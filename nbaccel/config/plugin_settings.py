"""Settings of a training loop's plugins in a ``RunConfig``, and the variables that carry them.

Training code reads them from Accelerate's variables (``FSDP_*``, ``ACCELERATE_DYNAMO_*``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.field_rules import FieldMistake
from nbaccel.config.given_values import closest, shown
from nbaccel.config.handlers import (
    DYNAMO_VARIABLES,
    FSDP_VARIABLES,
    TRUTH_SETTINGS,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    split_names,
)
from nbaccel.config.text_forms import json_like

_PLACE_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
    | {"MASTER_ADDR", "MASTER_PORT"}
)


def read_fsdp_settings(value: Any) -> Any:
    """Settings of `FullyShardedDataParallelPlugin`, as JSON holds them."""
    if not isinstance(value, Mapping):
        return value
    settings = _checked_names(value, FSDP_VARIABLES)
    if isinstance(class_names := settings.get("transformer_cls_names_to_wrap"), str):
        settings["transformer_cls_names_to_wrap"] = split_names(class_names)
    with warnings.catch_warnings():
        # The plugin is built for its checks alone; the worker's says what it does otherwise.
        warnings.simplefilter("ignore")
        plugin = _built_from(FullyShardedDataParallelPlugin, settings)
    if "min_num_params" in settings:
        # It may have been text; others are kept as given, since the plugin translates FSDP1's.
        settings["min_num_params"] = plugin.min_num_params
    return settings


def read_dynamo_settings(value: Any) -> Any:
    """Settings of `TorchDynamoPlugin`, also from a backend's name alone."""
    if isinstance(value, str):
        value = {"backend": value}
    if not isinstance(value, Mapping):
        return value
    settings = _checked_names(value, DYNAMO_VARIABLES)
    _built_from(TorchDynamoPlugin, settings)
    return settings


def _checked_names(settings: Mapping[str, Any], known_names: Mapping[str, str]) -> dict[str, Any]:
    """The settings as JSON holds them, without those that are None."""
    plain_settings: dict[str, Any] = json_like(settings)
    known = ", ".join(known_names)
    mistakes = [
        FieldMistake(
            f"{name} is no setting of it."
            f"{closest(name, known_names) or f' The settings are: {known}.'}",
            name,
        )
        for name in plain_settings
        if name not in known_names
    ]
    mistakes += [
        FieldMistake(f"{name}={shown(plain_settings[name])} must be true or false.", name)
        for name in TRUTH_SETTINGS
        if not isinstance(plain_settings.get(name), (bool, type(None)))
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return {name: value for name, value in plain_settings.items() if value is not None}


def _built_from(plugin_class: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    try:
        return plugin_class(**settings)
    except ConfigError as error:
        # Without their paths, since the messages name the class that was called.
        raise ConfigError(*map(FieldMistake, error.mistakes)) from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def read_worker_variables(given_value: Any) -> Any:
    """Environment variables as text."""
    if not isinstance(given_value, Mapping):
        return given_value
    placed_names = sorted(_PLACE_VARIABLES & {str(name) for name in given_value})
    if placed_names:
        raise ConfigError(
            FieldMistake(
                f"{', '.join(placed_names)} cannot be given: the launcher tells each worker its "
                "place by it. Give num_processes, num_nodes, node_rank, master_addr or use_port."
            )
        )
    return {
        str(name): str(value) if isinstance(value, (bool, int, float)) else value
        for name, value in given_value.items()
    }


def setting_variables(
    settings: Mapping[str, Any] | None, variable_names: Mapping[str, str]
) -> dict[str, str]:
    """The variables that carry settings of a plugin to workers."""
    variables = {}
    for name, value in (settings or {}).items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if value is not None:
            variables[variable_names[name]] = text.lower() if isinstance(value, bool) else text
    return variables
