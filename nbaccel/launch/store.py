"""The port of the rendezvous store: bound once, never chosen and bound again."""

from __future__ import annotations

from nbaccel.ports import listen

__all__ = ["listen"]
