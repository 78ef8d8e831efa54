"""Models over several devices: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import BIG_MODEL_INFERENCE, missing_name_of

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]

attach_layerwise_casting_hooks = missing_name_of(
    "attach_layerwise_casting_hooks", BIG_MODEL_INFERENCE, __name__
)
cpu_offload = missing_name_of("cpu_offload", BIG_MODEL_INFERENCE, __name__)
cpu_offload_with_hook = missing_name_of("cpu_offload_with_hook", BIG_MODEL_INFERENCE, __name__)
disk_offload = missing_name_of("disk_offload", BIG_MODEL_INFERENCE, __name__)
dispatch_model = missing_name_of("dispatch_model", BIG_MODEL_INFERENCE, __name__)
init_empty_weights = missing_name_of("init_empty_weights", BIG_MODEL_INFERENCE, __name__)
init_on_device = missing_name_of("init_on_device", BIG_MODEL_INFERENCE, __name__)
load_checkpoint_and_dispatch = missing_name_of(
    "load_checkpoint_and_dispatch", BIG_MODEL_INFERENCE, __name__
)
