"""Models bigger than memory: Accelerate's import path of what is in `nbaccel.bigmodel`."""

from __future__ import annotations

from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from nbaccel.bigmodel.device_map import check_device_map, infer_auto_device_map
from nbaccel.bigmodel.dispatching import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from nbaccel.bigmodel.empty_init import init_empty_weights, init_on_device
from nbaccel.bigmodel.model_hooks import attach_layerwise_casting_hooks

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
