"""Machines that are not here, for pickers to choose for."""

from __future__ import annotations

from dataclasses import replace

from nbaccel.plan import Gpu, Inventory, TpuHost

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

V5E_8 = replace(
    WITHOUT_GPU,
    tpu_chips=8,
    tpu=TpuHost(
        generation="v5e",
        chips=8,
        chips_on_bus=8,
        torch_tpu_chips=8,
        bytes_per_chip=16 * GIB,
        process_counts=(1, 4, 8),
        torch_tpu="0.2.0",
    ),
)
"""Kaggle's TPU, with torch_tpu."""
