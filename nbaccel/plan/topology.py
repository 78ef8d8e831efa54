"""Who a worker is: rank, node, meeting place; in variables of torch.distributed and Accelerate."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbaccel.base import env
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row, precision_row, strategy_row
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.handlers import DYNAMO_VARIABLES, FSDP_VARIABLES, setting_variables

ACTIVATION_CHECKPOINTING = "NBACCEL_ACTIVATION_CHECKPOINTING"  # Accelerate's is of FSDP only
FOLDER_VARIABLE = "NBACCEL_RESUME"  # the folder of what a stopped launch goes on with
MOST_STEPS_VARIABLE = "NBACCEL_MOST_STEPS"  # of a launch that only measures its speed
STRATEGY_VARIABLE = "NBACCEL_STRATEGY"  # ``RunConfig.strategy``, unless that is ``auto``
DEVICE_VARIABLE = "NBACCEL_DEVICE"  # the row of a worker's device

_LOOPBACK_INTERFACE = "lo"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which torch's process groups are told over which network to meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The place of one worker in a launch."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int

    @classmethod
    def of_hosts(
        cls, workers_per_host: Sequence[int], *, master_addr: str, master_port: int
    ) -> tuple[Topology, ...]:
        """The workers of several hosts, each with so many of them: one per worker, by rank."""
        ranks = itertools.count()
        return tuple(
            cls(
                rank=next(ranks),
                local_rank=local_rank,
                world_size=sum(workers_per_host),
                local_world_size=num_workers,
                node_rank=node_rank,
                num_nodes=len(workers_per_host),
                master_addr=master_addr,
                master_port=master_port,
            )
            for node_rank, num_workers in enumerate(workers_per_host)
            for local_rank in range(num_workers)
        )

    def variables(
        self,
        *,
        mixed_precision: str = "no",
        device: str = "cpu",
        environ: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """The environment variables by which training code finds its place."""
        variables_by_name = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            # The node's number has one name in torchrun and another one in Lightning.
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            # The name that Accelerate reads; its own launcher exports MIXED_PRECISION.
            "ACCELERATE_MIXED_PRECISION": mixed_precision,
            "FORK_LAUNCHED": "1",
            # The launcher serves the store itself, so rank 0 must not try to bind the port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        variables_by_name |= {DEVICE_VARIABLE: device, **dict(device_row(device).variables)}
        told = env.snapshot() if environ is None else environ
        # On one machine the host name may resolve to an address without a way: gloo would hang.
        unset = [name for name in INTERFACE_VARIABLES if self.num_nodes == 1 and not told.get(name)]
        return variables_by_name | dict.fromkeys(unset, _LOOPBACK_INTERFACE)


def run_variables(run_config: RunConfig) -> dict[str, str]:
    """The variables of a run's settings for training, without the precision."""
    launch_variables: dict[str, str] = {}
    if run_config.gradient_accumulation_steps is not None:
        steps = str(run_config.gradient_accumulation_steps)
        launch_variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = steps
    if run_config.activation_checkpointing:
        launch_variables[ACTIVATION_CHECKPOINTING] = "1"
    if run_config.strategy != "auto":
        launch_variables |= {
            STRATEGY_VARIABLE: run_config.strategy,
            **dict(strategy_row(run_config.strategy).variables),
        }
    if run_config.fp8 is not None and precision_row(run_config.mixed_precision).has_backends:
        launch_variables |= run_config.fp8.variables()
    if run_config.uses_deepspeed:
        launch_variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        launch_variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(run_config.zero_stage or 0)
    if run_config.deepspeed is not None:
        # As text: a file might be removed, and all nodes would have to read it.
        config_json = json.dumps(engine_config(run_config))
        encoded_config = base64.urlsafe_b64encode(config_json.encode()).decode()
        launch_variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = encoded_config
    if run_config.fsdp is not None:
        launch_variables |= setting_variables(run_config.fsdp, FSDP_VARIABLES)
    if run_config.dynamo is not None:
        launch_variables |= setting_variables(run_config.dynamo, DYNAMO_VARIABLES)
    # Last: who names a variable means that one.
    return launch_variables | (run_config.variables or {})


# It is called deepspeed_allreduce_buffer_<user>_<MASTER_ADDR>_<MASTER_PORT>_<rank>, of 66 MiB for
# each rank, made where LOCAL_SIZE says that all are here. Without it `inference_all_reduce` crashes
# on CPUs; with it files stay. So workers get it where there is room, and we remove them.

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - DeepSpeed chooses the name
FILE_BYTES = (66 << 20) + 4096
_SEGMENT_PREFIX = "deepspeed_allreduce_buffer_"
_MIN_AGE_S = 60.0  # a younger file may be one that workers in another container just open


def shared_memory_variables(place: Topology, device: str) -> dict[str, str]:
    """The variable that tells DeepSpeed that its ranks share a machine."""
    process_count = place.local_world_size
    if process_count == 1:
        return {}
    # Only ranks on CPUs of one machine make the files. "0" hides a variable of the notebook's own.
    is_enough = (
        not device_row(device).in_host_memory
        or place.num_nodes > 1
        or shared_memory_bytes()[1] >= process_count * FILE_BYTES
    )
    return {"LOCAL_SIZE": str(process_count) if is_enough else "0"}


def shared_memory_bytes() -> tuple[int, int]:
    """Bytes of the file system that shared memory is in, and those free; 0 where there is none."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def remove_shared_memory(worker_places: Iterable[Topology]) -> None:
    """Remove the files of workers that have ended, or that are about to be started."""
    for worker_place in worker_places:
        words = (worker_place.master_addr, worker_place.master_port, worker_place.rank)
        name = "_".join(map(str, (f"{_SEGMENT_PREFIX}{os.getuid()}", *words)))
        # Most often there is none.
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()


def remove_orphans() -> None:
    """Remove the user's files of this kind that no process has open."""
    try:
        paths = [*SHARED_MEMORY.glob(f"{_SEGMENT_PREFIX}{os.getuid()}_*")]
    except OSError:
        return
    old_files = [path for path in paths if time.time() - path.stat().st_mtime > _MIN_AGE_S]
    mapped_lines: list[str] = []
    # Once for all files: it reads the memory maps of every process.
    for maps_path in Path("/proc").glob("[0-9]*/maps") if old_files else ():
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            lines = maps_path.read_text().splitlines()
            mapped_lines += [line for line in lines if _SEGMENT_PREFIX in line]
    # The sixth field is the path, which may have blanks.
    mapped_paths = {line.split(maxsplit=5)[5] for line in mapped_lines}
    for path in old_files:
        if str(path) not in mapped_paths:
            with contextlib.suppress(OSError):
                path.unlink()
