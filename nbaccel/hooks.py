"""Hooks of models over several devices: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import BIG_MODELS, later

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

AlignDevicesHook = later("AlignDevicesHook", BIG_MODELS, __name__)
CpuOffload = later("CpuOffload", BIG_MODELS, __name__)
LayerwiseCastingHook = later("LayerwiseCastingHook", BIG_MODELS, __name__)
ModelHook = later("ModelHook", BIG_MODELS, __name__)
SequentialHook = later("SequentialHook", BIG_MODELS, __name__)
UserCpuOffloadHook = later("UserCpuOffloadHook", BIG_MODELS, __name__)
add_hook_to_module = later("add_hook_to_module", BIG_MODELS, __name__)
attach_align_device_hook = later("attach_align_device_hook", BIG_MODELS, __name__)
attach_align_device_hook_on_blocks = later(
    "attach_align_device_hook_on_blocks", BIG_MODELS, __name__
)
attach_execution_device_hook = later("attach_execution_device_hook", BIG_MODELS, __name__)
remove_hook_from_module = later("remove_hook_from_module", BIG_MODELS, __name__)
remove_hook_from_submodules = later("remove_hook_from_submodules", BIG_MODELS, __name__)
