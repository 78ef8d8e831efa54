"""The ladder: ways to need less memory, the fastest first.

The order is that of the DeepSpeed guide of transformers (docs/source/en/deepspeed.md, "Select a
ZeRO stage": gradient checkpointing, ZeRO-2, ZeRO-2 with the optimizer offloaded, ZeRO-3, with
parameters offloaded, with both, then NVMe), which DeepSpeed's own documentation links to. The
batch comes last, since a smaller one computes less per step at every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Step", "halvings", "ladder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One way to train, without the batch.

    Attributes:
        name: How it is called in a table.
        stage: ZeRO stage.
        offload_optimizer: Where the optimizer is: ``none``, ``cpu``, ``nvme``.
        offload_param: Where parameters are while they are not used.
        gradient_checkpointing: Whether activations are computed again.
    """

    name: str
    stage: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    gradient_checkpointing: bool = False

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is on disk."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


# Stage, place of the optimizer, place of parameters.
_BY_SPEED = (
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "none", "cpu"),
    (3, "cpu", "cpu"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)


def ladder(*, has_switch: bool, is_on: bool) -> Iterator[Step]:
    """All ways, the fastest first.

    Args:
        has_switch: Whether the model can turn gradient checkpointing on.
        is_on: Whether it is on already.

    Yields:
        The steps. From the second on they have gradient checkpointing where the model can.
    """
    yield Step(name="as it is", gradient_checkpointing=is_on)
    if not is_on:
        yield Step(name="gradient checkpointing", gradient_checkpointing=True)
    for stage, optimizer, param in _BY_SPEED:
        yield Step(
            name=_name(stage, optimizer, param),
            stage=stage,
            offload_optimizer=optimizer,
            offload_param=param,
            gradient_checkpointing=has_switch or is_on,
        )


def halvings(batch_size: int, accumulation_steps: int) -> Iterator[tuple[int, int]]:
    """Smaller and smaller batches that make the same optimizer step.

    Args:
        batch_size: Samples of a process in one forward pass.
        accumulation_steps: Forward passes of an optimizer step.

    Yields:
        Both, whose product never changes; it ends where the next would be no whole half.
    """
    while True:
        yield batch_size, accumulation_steps
        if batch_size % 2:
            return
        batch_size, accumulation_steps = batch_size // 2, accumulation_steps * 2


def _name(stage: int, optimizer: str, param: str) -> str:
    words = {"cpu": "CPU", "nvme": "NVMe"}
    if optimizer == param != "none":
        return f"ZeRO-{stage}, optimizer and parameters on {words[param]}"
    offloaded = [
        f"{what} on {words[place]}"
        for what, place in (("optimizer", optimizer), ("parameters", param))
        if place != "none"
    ]
    return ", ".join([f"ZeRO-{stage}", *offloaded])
