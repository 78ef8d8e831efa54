"""The hardware: CPU, CUDA, TPU, XPU, MPS."""

from __future__ import annotations
