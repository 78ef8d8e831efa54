"""Models over several devices: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import BIG_MODELS, later

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

attach_layerwise_casting_hooks = later("attach_layerwise_casting_hooks", BIG_MODELS, __name__)
cpu_offload = later("cpu_offload", BIG_MODELS, __name__)
cpu_offload_with_hook = later("cpu_offload_with_hook", BIG_MODELS, __name__)
disk_offload = later("disk_offload", BIG_MODELS, __name__)
dispatch_model = later("dispatch_model", BIG_MODELS, __name__)
init_empty_weights = later("init_empty_weights", BIG_MODELS, __name__)
init_on_device = later("init_on_device", BIG_MODELS, __name__)
load_checkpoint_and_dispatch = later("load_checkpoint_and_dispatch", BIG_MODELS, __name__)
