"""Hooks of models over several devices: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import BIG_MODEL_INFERENCE, missing_name_of

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

AlignDevicesHook = missing_name_of("AlignDevicesHook", BIG_MODEL_INFERENCE, __name__)
CpuOffload = missing_name_of("CpuOffload", BIG_MODEL_INFERENCE, __name__)
LayerwiseCastingHook = missing_name_of("LayerwiseCastingHook", BIG_MODEL_INFERENCE, __name__)
ModelHook = missing_name_of("ModelHook", BIG_MODEL_INFERENCE, __name__)
SequentialHook = missing_name_of("SequentialHook", BIG_MODEL_INFERENCE, __name__)
UserCpuOffloadHook = missing_name_of("UserCpuOffloadHook", BIG_MODEL_INFERENCE, __name__)
add_hook_to_module = missing_name_of("add_hook_to_module", BIG_MODEL_INFERENCE, __name__)
attach_align_device_hook = missing_name_of(
    "attach_align_device_hook", BIG_MODEL_INFERENCE, __name__
)
attach_align_device_hook_on_blocks = missing_name_of(
    "attach_align_device_hook_on_blocks", BIG_MODEL_INFERENCE, __name__
)
attach_execution_device_hook = missing_name_of(
    "attach_execution_device_hook", BIG_MODEL_INFERENCE, __name__
)
remove_hook_from_module = missing_name_of("remove_hook_from_module", BIG_MODEL_INFERENCE, __name__)
remove_hook_from_submodules = missing_name_of(
    "remove_hook_from_submodules", BIG_MODEL_INFERENCE, __name__
)
