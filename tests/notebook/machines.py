"""Machines that are not here, for pickers to choose for."""

from __future__ import annotations

from nbaccel.plan import Gpu, Inventory

GIB = 2**30


def with_gpus(count: int, *, total: int = 80, free: int = 78, capability=(9, 0)) -> Inventory:
    """A server with so many GPUs, sizes in GiB."""
    return Inventory(
        cpu_cores=32,
        host_total_bytes=256 * GIB,
        host_available_bytes=200 * GIB,
        gpus=tuple(
            Gpu(
                index=number,
                name="NVIDIA H100",
                total_bytes=total * GIB,
                free_bytes=free * GIB,
                compute_capability=capability,
                uuid=f"GPU-{number}",
            )
            for number in range(count)
        ),
        torch_version="2.13.0+cu130",
    )


WITHOUT_GPU = Inventory(
    cpu_cores=4,
    host_total_bytes=16 * GIB,
    host_available_bytes=12 * GIB,
    torch_version="2.13.0+cpu",
)
