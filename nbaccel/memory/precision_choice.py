"""The fastest precision of a machine that needs no care, with the reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from nbaccel.config.capabilities import device_row, precision_row
from nbaccel.plan import Inventory, Plan, registry

_HALVES = ("bf16", "fp16")
"""Formats of 16 bits, the one that needs no scaling of gradients first."""
_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def best_precision(plan: Plan, machine: Inventory) -> tuple[str, str]:
    """The precision for the devices of a plan, and why; ``no`` needs no reason."""
    if device_row(plan.device).in_host_memory:
        if computes_in_bf16():
            return _HALVES[0], "this processor has instructions for it"
        return "no", ""
    units = registry.device(plan.device).units(machine)[: plan.num_processes]
    if not units:
        return "no", ""
    # The oldest decides, as ranks compute in one format.
    weakest = min(units, key=lambda unit: unit.compute_capability)
    # (0, 0) stands for a kind without such a number, as TPUs are.
    widest, smallest = _HALVES
    if (0, 0) < weakest.compute_capability < precision_row(widest).imitated_below:
        return smallest, f"{weakest.name} only imitates {widest}"
    return widest, f"{weakest.name} computes in it, with the range of fp32"


@cache
def computes_in_bf16() -> bool:
    """Whether this processor has instructions for bfloat16, as Linux tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system
        return False
    for line in text.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return not set(_BF16_INSTRUCTIONS).isdisjoint(words.split())
    return False
