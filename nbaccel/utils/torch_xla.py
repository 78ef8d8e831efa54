"""Installing torch_xla: a name of Accelerate's that nbaccel does not have.

Training on TPUs needs none of it: see ``nbaccel.devices.tpu``.
"""

from __future__ import annotations

from nbaccel.base.unsupported_names import XLA_INSTALLATION, missing_name_of

__all__ = [
    "install_xla",
]

install_xla = missing_name_of("install_xla", XLA_INSTALLATION, __name__)
