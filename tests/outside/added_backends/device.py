from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.abc.device import Device
from nbaccel.plan.inventory import Gpu

if TYPE_CHECKING:
    import torch

CALLS: list[str] = []
"""What this process has asked of it."""
_STATE: list[torch.Tensor] = []


class Abacus(Device):
    """Two of them are always there; torch takes them for the CPU."""

    name: ClassVar[str] = "abacus"
    torch_type: ClassVar[str] = "cpu"
    after_fork: ClassVar[str] = "beads would fall off"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        hidden = environ.get("NO_ABACUS")
        count = 0 if hidden else 2
        beads = (Gpu(index=index, name="Suanpan", kind=self.name) for index in range(count))
        return {"accelerators": tuple(beads)}

    def is_available(self) -> bool:
        return False  # never by itself: these tests run other code, too

    def count(self) -> int:
        return 2

    def torch_device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def make_current(self, device: torch.device) -> None:
        CALLS.append("make_current")

    def random_state(self, index: int | None = None) -> torch.Tensor:
        import torch

        if not _STATE:
            _STATE.append(torch.zeros(4, dtype=torch.uint8))
        return _STATE[0].clone()

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        _STATE[:] = [state.clone()]

    def reserved_bytes(self, device: torch.device) -> int:
        return 4096

    def empty_cache(self) -> None:
        CALLS.append("empty_cache")

    def capability(self, device: torch.device) -> tuple[int, int]:
        return (10, 2)
