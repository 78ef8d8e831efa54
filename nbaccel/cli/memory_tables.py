"""What ``nbaccel estimate-memory`` tells: a model loaded, and trained in each of the ways.

The ways, and what each needs, are those of the form that ``configure`` shows; so is their table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.cli.model_sizes import ModelSizes, read_model
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.capabilities import PRECISIONS
from nbaccel.config.mistakes import closest
from nbaccel.memory.estimate import Bytes, MemoryEstimate, table_lines
from nbaccel.memory.memory_model import MemoryModel
from nbaccel.memory.model_size import Shape
from nbaccel.memory.model_states import ShortFormats
from nbaccel.memory.ways import Candidate, CandidateFinder
from nbaccel.notebook.picker.form_text import precision_table_lines
from nbaccel.plan import Plan
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4}
_TRAINED_FORMATS = ("float32", "float16", "bfloat16")
_ADAM_COPIES = 4
"""Weights, gradients and two moments."""
_ANY_GPU = (10, 0)
"""What computes in all formats: nothing is known of a GPU that is not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRow:
    """A model in one format, in bytes; training is with Adam, all in that format."""

    dtype: str
    largest_layer: int
    total: int
    training: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTables:
    """Both tables, of so many devices on each of so many machines."""

    sizes: ModelSizes
    loaded: tuple[LoadedRow, ...]
    trained: tuple[Candidate, ...]
    is_here: bool
    """Whether this machine has the devices, so that it is known what fits."""
    num_gpus: int
    num_nodes: int
    notes: tuple[str, ...]


def estimate_model(
    model_path: str,
    *,
    dtypes: Sequence[str],
    num_gpus: int,
    num_nodes: int,
    mixed_precision: str | None = None,
    trust_remote_code: bool = False,
    library_name: str = "transformers",
) -> MemoryTables:
    """Read a model and estimate its memory."""
    # What needs a library of its own comes last.
    precisions = [row.name for row in sorted(PRECISIONS, key=lambda row: row.has_backends)]
    wanted = [("--dtypes", one, [*_BITS]) for one in dtypes]
    wanted += [("--mixed-precision", mixed_precision, precisions)] if mixed_precision else []
    mistakes = [
        f"{option}={word!r} is no format here.{closest(word, known)} Its size is not known. Give "
        f"of: {', '.join(known)}."
        for option, word, known in wanted
        if word not in known
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    sizes = read_model(model_path, trust_remote_code=trust_remote_code, library_name=library_name)
    machine, is_here = _machine_with(num_gpus)
    in_precisions = precisions if mixed_precision is None else [mixed_precision]
    trained = _trained_ways(sizes, machine, num_gpus, num_nodes, in_precisions)
    return MemoryTables(
        sizes=sizes,
        loaded=tuple(_loaded_row(sizes, dtype) for dtype in dtypes),
        # Nothing is chosen here, and without a device there is no best.
        trained=tuple(
            replace(one, is_taken=False, is_best=one.is_best and is_here) for one in trained
        ),
        is_here=is_here,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        notes=(*sizes.notes, "Activations are not in it: they depend on the batch."),
    )


def _machine_with(num_gpus: int) -> tuple[Inventory, bool]:
    """This machine; or one with so many GPUs, of which it is not known what is free."""
    machine = inspect_machine()
    if len(machine.gpus) >= num_gpus:
        return machine, True
    gpus = (Gpu(index=index, name="", compute_capability=_ANY_GPU) for index in range(num_gpus))
    # A torch that was built for CPUs only would let them lie idle.
    version = machine.torch_version.partition("+")[0]
    return replace(machine, gpus=(*gpus,), host_total_bytes=0, torch_version=version), False


def _loaded_row(sizes: ModelSizes, dtype: str) -> LoadedRow:
    total = sizes.shape.total * _BITS[dtype] // 8
    return LoadedRow(
        dtype=dtype,
        largest_layer=sizes.largest_layer * _BITS[dtype] // 8,
        total=total,
        training=_ADAM_COPIES * total if dtype in _TRAINED_FORMATS else None,
    )


@dataclass(kw_only=True)
class _StoredModel(MemoryModel):
    """A model of which only the sizes of its tensors are known."""

    known_shape: Shape

    @cached_property
    def shape(self) -> Shape:
        return self.known_shape

    def _states_at(self, world_size: int, formats: ShortFormats | None) -> Bytes:
        weight_bytes = 4 * self.shape.total
        return Bytes(
            parameters=weight_bytes,
            gradients=weight_bytes,
            optimizer=2 * weight_bytes,
            # DDP's second copy of the gradients.
            buckets=weight_bytes if world_size > 1 else 0,
        )

    def _sharded(self, config: RunConfig, plan: Plan, inputs: Mapping[str, Any]) -> MemoryEstimate:
        raise ConfigError(
            f"headers do not tell how the layers of its {len(self.shape.sizes)} tensors are "
            "wrapped. What is gathered at once is not known. Give a folder with a config.json."
        )


def _trained_ways(
    sizes: ModelSizes, machine: Inventory, num_gpus: int, num_nodes: int, precisions: Sequence[str]
) -> Iterator[Candidate]:
    known: dict[str, Any] = {"model": sizes.module, "sample_batch": None, "inventory": machine}
    memory_model = MemoryModel(**known)
    if sizes.module is None:
        memory_model = _StoredModel(**known, known_shape=sizes.shape)
    finder = CandidateFinder(memory_model)
    config = RunConfig(
        device="cuda", num_processes=num_gpus, num_nodes=num_nodes, master_addr="another machine"
    )
    ways = finder.compare(config, precisions)
    yield from (one for one in ways if one.name == ways[0].name)
    if sizes.module is not None:
        yield from _msamp_levels(finder, config, precisions)
    yield from (one for one in ways if one.name != ways[0].name)


def _msamp_levels(
    finder: CandidateFinder, config: RunConfig, precisions: Sequence[str]
) -> Iterator[Candidate]:
    for row in PRECISIONS:
        for level in ("O1", "O2", "O3") if row.has_backends and row.name in precisions else ():
            settings = Fp8Config.model_validate({"backend": "msamp", "opt_level": level})
            with suppress(ConfigError):  # O3 divides something among several processes
                [copies, *_] = finder.find(config.changed(mixed_precision=row.name, fp8=settings))
                yield replace(copies, name=f"MS-AMP {level}", is_best=False)


def json_text(tables: MemoryTables) -> str:
    """The tables as one JSON object; sizes are bytes."""
    return json.dumps(
        {
            "model": str(tables.sizes.source),
            "read_from": tables.sizes.origin,
            "parameters": tables.sizes.shape.total,
            "largest_layer_parameters": tables.sizes.largest_layer,
            "loaded": [asdict(row) for row in tables.loaded],
            "num_gpus": tables.num_gpus,
            "num_nodes": tables.num_nodes,
            "trained": [_trained_row(one, is_here=tables.is_here) for one in tables.trained],
            "notes": list(tables.notes),
        },
        indent=2,
    )


def _trained_row(candidate: Candidate, *, is_here: bool) -> dict[str, Any]:
    estimate = None if candidate.need is None else candidate.need.estimate
    return {
        "strategy": f"{candidate.name}, {candidate.precision}",
        "way": candidate.name,
        "precisions": [candidate.precision],
        "per_device": None if estimate is None else estimate.device.peak,
        "per_host": None if estimate is None else estimate.host.peak,
        "fits": candidate.can_be_taken if is_here else None,
        "refusal": candidate.refusal,
    }


def print_tables(tables: MemoryTables) -> None:
    """Show the tables in a terminal."""
    sizes = tables.sizes
    rows: list[tuple[str, ...]] = [("dtype", "largest layer", "total size", "training with Adam")]
    for row in tables.loaded:
        bytes_of = (row.largest_layer, row.total, row.training)
        rows.append((row.dtype, *("-" if one is None else format_bytes(one) for one in bytes_of)))
    hosts = "" if tables.num_nodes == 1 else f" on each of {tables.num_nodes} machines"
    sections = {
        f"{sizes.source}: {sizes.shape.total:,} parameters ({sizes.origin})": [],
        "Loaded": table_lines(rows),
        f"Trained with Adam on {count_noun(tables.num_gpus, 'GPU')}{hosts}": (
            precision_table_lines(tables.trained, knows_free=tables.is_here)
        ),
        "Notes": tables.notes,
    }
    for title, lines in sections.items():
        print("\n".join((title, *(f"  {line}" for line in lines), "")))
