"""The hardware that workers compute on, a module each."""

from __future__ import annotations
