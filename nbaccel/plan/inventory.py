"""``Inventory``: what a machine has; `plan.inspecting` makes that of this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU or another accelerator, or a part of one, that a process can use."""

    index: int  # its number in this process, from 0: ``cuda:<index>``
    name: str  # the product's name
    total_bytes: int = 0  # its memory; 0 where the driver does not say
    free_bytes: int = 0  # memory that is not in use now; 0 where the driver does not say
    compute_capability: tuple[int, int] = (0, 0)  # (9, 0) for Hopper; (0, 0) where there is none
    uuid: str = ""  # its identity, which does not depend on what is visible
    kind: str = "cuda"  # the row of its kind among the devices


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuHost:
    """A machine with TPU chips, or one whose environment speaks of them."""

    generation: str = ""  # ``v2`` to ``v6e``, ``7x``; empty where it is not known
    chips: int = 0  # chips that this process could open
    chips_on_bus: int = 0  # also those that it could not open; 0 where the bus is hidden
    # Those on the bus of a generation that torch_tpu knows, with an IOMMU group below /dev/vfio.
    torch_tpu_chips: int = 0
    device_files: tuple[str, ...] = ()  # what a process opens: ``/dev/vfio/3``, ``/dev/accel0``
    bytes_per_chip: int = 0  # memory of one chip; 0 where the generation is not known
    process_counts: tuple[int, ...] = ()  # workers that can share them: 1, 4 and 8 for 8 of v5e
    threads_per_process: int = 1  # replicas of a worker, a thread each: 2 on v2 and v3, else 1
    num_hosts: int = 1  # machines of the slice that this one belongs to
    worker_id: int = 0  # this machine's number among them, from 0
    libtpu: str = ""  # its version, or the path of the one that will be loaded instead
    torch_tpu: str = ""  # version of Google's torch_tpu; empty where it is not installed
    torch_xla: str = ""  # version of torch_xla; empty where it is not installed
    pjrt_device: str = ""  # what ``PJRT_DEVICE`` says, in capital letters
    notes: tuple[str, ...] = ()  # what is odd about all this: the value, why it matters, what to do


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What a launch can count on.

    Attributes:
        cpu_cores: Cores this process may use: affinity and the container's quota respected.
        host_total_bytes: Memory this process may use in all, the container's limit respected.
        host_available_bytes: Bytes of it that are free now.
        shm_bytes: Size of /dev/shm; 0 where there is none.
        gpus: NVIDIA GPUs that CUDA shows to this process, by their CUDA number.
        gpu_note: Why there are no GPUs, where something is known.
        gpu_setting: ``CUDA_VISIBLE_DEVICES`` with which they are so numbered; None: all are shown.
        gpu_order_known: Whether CUDA is sure to number GPUs of different kinds as they are here.
        tpu_chips: TPU chips of this host.
        tpu: What else is known about its TPUs; None where nothing speaks of one.
        accelerators: What the other devices in the table found, each with its kind.
        problems: Backends of other packages that cannot be used, and why; one message each.
        platform: The operating system: ``linux``, ``darwin``, ``win32``.
        torch_version: Such as ``2.13.0+cpu``; empty where torch is not installed.
        fork_supported: Whether a process can be forked.
        memfd_supported: Whether memory can be shared without a file (Linux).
    """

    cpu_cores: int
    host_total_bytes: int
    host_available_bytes: int
    shm_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    gpu_setting: str | None = None
    gpu_order_known: bool = True
    tpu_chips: int = 0
    tpu: TpuHost | None = None
    accelerators: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()
    platform: str = "linux"
    torch_version: str = ""
    fork_supported: bool = True
    memfd_supported: bool = True
