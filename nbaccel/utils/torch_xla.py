"""TPUs: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import TPU, later

__all__ = [
    "install_xla",
]

install_xla = later("install_xla", TPU, __name__)
