"""How workers are laid out over the chips of one host: tables, and functions of numbers.

A driver's workers are one process per chip. Each of them must be told the shape of all chips
together and where the others listen, before it first uses its chip. torch_tpu and torch_xla can
work that out themselves, but keep what a variable already says, so one that an image or an earlier
launch left behind decides instead of the host. nbaccel therefore gives its workers every value, and
takes `STALE_VARIABLES` away from them.

Nothing here has run on a chip: the values are those of torch_tpu 0.2.0 and torch_xla 2.9.0, with
which the tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbaccel.base.errors import ConfigError

_GIB = 2**30

BYTES_PER_CHIP: Mapping[str, int] = {
    "v2": 16 * _GIB,
    "v3": 32 * _GIB,
    "v4": 32 * _GIB,
    "v5e": 16 * _GIB,
    "v5p": 95 * _GIB,
    "v6e": 32 * _GIB,
    "7x": 192 * _GIB,
}
"""Memory of a chip. v4 and later as in torch_tpu 0.2.0 (``_internal/utils/hardware.py``), v2 and v3
as in Google's documentation of Cloud TPU. Of v2, v3 and 7x each of two devices has one half."""

_V2_BOUNDS = {1: "1,1,1", 4: "2,2,1"}
_V4_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
_V5E_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_BOUNDS: Mapping[str, Mapping[int, str]] = {
    "v2": _V2_BOUNDS,
    "v3": _V2_BOUNDS,
    "v4": _V4_BOUNDS,
    "v5p": _V4_BOUNDS,
    "v5e": _V5E_BOUNDS,
    "v6e": _V5E_BOUNDS,
    # torch_tpu counts the two cores of a 7x chip as two devices; the fourth number is cores.
    "7x": {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
    # An unknown generation: the shapes that most of them share.
    "": _V5E_BOUNDS,
}
# torch_xla starts one process per PCI device and appends the cores to the shape of the chips. That
# such a process then has two devices is believed and has not been seen.
_XLA_BOUNDS_OF_7X = {1: "1,1,1", 4: "2,2,1,2"}

_TWO_CORES = frozenset({"v2", "v3"})

STALE_VARIABLES: frozenset[str] = frozenset(
    {
        "TORCH_TPU_TOPOLOGY",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES",
        "TORCH_TPU_XPROF_SESSION_ID",
        "TORCH_TPU_BASE_PORT",
        "TORCH_TPU_DEVICES_PER_HOST",
        "PJRT_DEVICE",
        "CLOUD_TPU_TASK_ID",
        # Other names of the bounds: torch_xla reads them, torch_tpu's runtime sets them.
        "TPU_HOST_BOUNDS",
        # Prefixes end with a star.
        "PJRT_LOCAL_PROCESS_*",
        "TPU_CHIPS_PER_*",
        "TPU_MESH_CONTROLLER_*",
        "TPU_PROCESS_*",
        "TPU_VISIBLE_*",
    }
)
"""Variables that a worker must not inherit from the notebook: each describes one launch, and the
drivers keep what they find. A name that ends with ``*`` stands for all that begin so. Settings of
the user, such as caches and ``LIBTPU_INIT_ARGS``, are not among them, and neither are facts about
the host (``TPU_WORKER_ID``, ``TPU_ACCELERATOR_TYPE``)."""


def without_stale(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker may inherit of an environment."""
    prefixes = tuple(name.rstrip("*") for name in STALE_VARIABLES if name.endswith("*"))
    return {
        variable_name: value
        for variable_name, value in environ.items()
        if variable_name not in STALE_VARIABLES and not variable_name.startswith(prefixes)
    }


def threads_per_process(generation: str) -> int:
    """Replicas, a thread each, of a worker that has one chip."""
    return 2 if generation in _TWO_CORES else 1


def legal_counts(generation: str, chips: int) -> tuple[int, ...]:
    """How many workers a host can have: libtpu knows no other shapes."""
    if chips < 1:
        return ()
    # One worker needs no shape: it has the driver's default.
    return tuple(sorted({1, *(count for count in _bounds_of(generation) if count <= chips)}))


def torch_tpu_variables(generation: str, num_workers: int, ports: Sequence[int]) -> dict[str, str]:
    """What torch_tpu's workers must agree on, as its ``set_tpu_launch_env`` would set it."""
    if num_workers == 1:
        return {}
    # torch_tpu 0.2.0 has no table for v2 and v3.
    bounds = {} if generation in _TWO_CORES else _bounds_of(generation)
    return {
        "TORCH_TPU_TOPOLOGY": _chosen_bounds("torch_tpu", generation, num_workers, bounds),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": _local_addresses(ports),
    }


def torch_xla_variables(
    generation: str, num_workers: int, local_rank: int, ports: Sequence[int]
) -> dict[str, str]:
    """What a worker of torch_xla needs, as its ``tpu.configure_topology`` would set it."""
    known_bounds = _XLA_BOUNDS_OF_7X if generation == "7x" else _bounds_of(generation)
    variables = {
        "PJRT_DEVICE": "TPU",
        "PJRT_LOCAL_PROCESS_RANK": str(local_rank),
        "PJRT_LOCAL_PROCESS_COUNT": str(num_workers),
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": _chosen_bounds("torch_xla", generation, num_workers, known_bounds),
        # The workers of this host are all there are, so ranks count from 0 whatever the host's
        # own number is.
        "CLOUD_TPU_TASK_ID": str(local_rank),
    }
    if num_workers == 1:
        return variables
    return variables | {
        "TPU_PROCESS_ADDRESSES": _local_addresses(ports),
        "TPU_PROCESS_PORT": str(ports[local_rank]),
    }


def _bounds_of(generation: str) -> Mapping[int, str]:
    return _BOUNDS.get(generation, _BOUNDS[""])


def _chosen_bounds(
    name: str, generation: str, num_workers: int, known_bounds: Mapping[int, str]
) -> str:
    if num_workers in known_bounds:
        return known_bounds[num_workers]
    counts = [str(count) for count in sorted({1, *known_bounds})]
    text = " or ".join(filter(None, (", ".join(counts[:-1]), counts[-1])))
    raise ConfigError(
        f"num_processes={num_workers} is not supported on TPU {generation or 'chips'} by "
        f"{name}, which knows no layout of so many chips of one host. The workers could not "
        f"find each other. Give num_processes={text}."
    )


def _local_addresses(ports: Sequence[int]) -> str:
    return ",".join(f"localhost:{port}" for port in ports)
