"""TPUs: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import TPU_TRAINING, missing_name_of

__all__ = [
    "install_xla",
]

install_xla = missing_name_of("install_xla", TPU_TRAINING, __name__)
