"""The tables of ``nbaccel estimate-memory``: a model loaded, and trained in several ways."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import JsonValue

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.cli.model_sizes import ModelSizes, read_model
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.mistakes import closest
from nbaccel.memory.estimate import Bytes, MemoryEstimate, replicated
from nbaccel.memory.fsdp_memory import fsdp_estimate, wrapped_sizes
from nbaccel.memory.model_states import model_states, short_formats
from nbaccel.plan import registry
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4}
_TRAINED_FORMATS = ("float32", "float16", "bfloat16")
_ADAM_COPIES = 4
"""Weights, gradients and two moments."""
_Level = Literal["O1", "O2", "O3"]
_OFFLOAD_LEVELS: tuple[_Level, ...] = ("O1", "O2", "O3")
_EVERY_PRECISION = ("no", "fp16", "bf16", "fp8")
_ZERO_PRECISIONS = _EVERY_PRECISION[:-1]
_PRECISION_LABELS = {"no": "fp32"}  # as in the form of `configure`
_ZERO = "zero_optimization"
_ON_CPU: dict[str, JsonValue] = {"device": "cpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRow:
    """A model in one format.

    Attributes:
        dtype: The format.
        largest_layer: Bytes of the largest layer.
        total: Bytes of all.
        training: Bytes of training with Adam, all in that format; None where none trains in it.
    """

    dtype: str
    largest_layer: int
    total: int
    training: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRow:
    """Training in one way.

    Attributes:
        strategy: How and in which precisions, in words.
        way: How, in words.
        precisions: Those of which this is true: ``no``, ``fp16``, ``bf16``, ``fp8``.
        per_device: Bytes that must be free on each device.
        per_host: Bytes that must be free on each host.
        fits: Whether this machine has that free; None where it has not so many devices.
    """

    strategy: str
    way: str
    precisions: tuple[str, ...]
    per_device: int
    per_host: int
    fits: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTables:
    """Both tables.

    Attributes:
        sizes: The model.
        loaded: Rows by format.
        trained: Rows by way of training.
        num_gpus: Devices of each machine.
        num_nodes: Machines.
        notes: Notes about these numbers.
    """

    sizes: ModelSizes
    loaded: tuple[LoadedRow, ...]
    trained: tuple[TrainedRow, ...]
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
    mistakes = [
        f"--dtypes: {dtype!r} is no format here.{closest(dtype, _BITS) or f' Give of: {_known()}.'}"
        for dtype in dtypes
        if dtype not in _BITS
    ]
    if mixed_precision is not None and mixed_precision not in _ZERO_PRECISIONS:
        mistakes.append(
            f"--mixed-precision={mixed_precision!r} is none of ZeRO's: it trains in no, fp16 or "
            "bf16, and FP8 has rows of its own. Give one of them."
        )
    if mistakes:
        raise ConfigError(*mistakes)
    sizes = read_model(model_path, trust_remote_code=trust_remote_code, library_name=library_name)
    machine, is_real = _machine_with(num_gpus)
    zero_precisions = _ZERO_PRECISIONS if mixed_precision is None else (mixed_precision,)
    ways = _Ways(sizes, machine, num_gpus, num_nodes, zero_precisions)
    return MemoryTables(
        sizes=sizes,
        loaded=tuple(_loaded_row(sizes, dtype) for dtype in dtypes),
        trained=tuple(_trained_row(way, need, is_real) for way, need in ways.estimates()),
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        notes=(*sizes.notes, "Activations are not in it: they depend on the batch."),
    )


def _known() -> str:
    return ", ".join(_BITS)


def _machine_with(num_gpus: int) -> tuple[Inventory, bool]:
    """This machine, with GPUs that it may not have; and whether it has them."""
    machine = inspect_machine()
    if len(machine.gpus) >= num_gpus:
        return machine, True
    return replace(
        machine, gpus=tuple(Gpu(index=index, name="") for index in range(num_gpus))
    ), False


def _loaded_row(sizes: ModelSizes, dtype: str) -> LoadedRow:
    total = sizes.shape.total * _BITS[dtype] // 8
    return LoadedRow(
        dtype=dtype,
        largest_layer=sizes.largest_layer * _BITS[dtype] // 8,
        total=total,
        training=_ADAM_COPIES * total if dtype in _TRAINED_FORMATS else None,
    )


@dataclass(frozen=True, slots=True)
class _NamedWay:
    """How a model is trained: with its precisions, without them, and these alone."""

    strategy: str
    way: str
    precisions: tuple[str, ...]


def _way_in(way: str, precisions: tuple[str, ...]) -> _NamedWay:
    return _NamedWay(f"{way} ({', '.join(precisions)})", way, precisions)


def _trained_row(named: _NamedWay, need: MemoryEstimate, is_real: bool) -> TrainedRow:
    return TrainedRow(
        strategy=named.strategy,
        way=named.way,
        precisions=named.precisions,
        per_device=need.device.peak,
        per_host=need.host.peak,
        fits=need.fits if is_real else None,
    )


class _Ways:
    """Estimates of one model in several ways of training."""

    def __init__(
        self,
        sizes: ModelSizes,
        machine: Inventory,
        num_gpus: int,
        num_nodes: int,
        zero_precisions: Sequence[str],
    ) -> None:
        self._sizes = sizes
        self._zero_precisions = zero_precisions
        self._num_devices = num_gpus * num_nodes
        self._inputs: dict[str, Any] = {
            "num_processes": num_gpus,
            "num_nodes": num_nodes,
            "activation_bytes": 0,
            "inventory": machine,
        }

    def estimates(self) -> Iterator[tuple[_NamedWay, MemoryEstimate]]:
        """The ways, each with what it needs."""
        plain = "data parallel"
        yield _way_in(plain, _EVERY_PRECISION), self._replicated(self._float32_states())
        if self._sizes.module is not None:
            for level in _OFFLOAD_LEVELS:
                yield _way_in(f"{plain}, MS-AMP {level}", ("fp8",)), self._at_level(level)
            if self._num_devices > 1:
                yield from self._sharded_by_torch(self._sizes.module)
        for form in registry.settings_forms():
            for named, run in self._zero_runs():
                document = engine_config(run) or {}
                yield named, form.estimate(self._sizes.shape, document, **self._inputs)

    def _replicated(self, states: Bytes, level: str = "") -> MemoryEstimate:
        return replicated(self._sizes.shape, states=states, level=level, **self._inputs)

    def _float32_states(self) -> Bytes:
        weight_bytes = self._sizes.shape.total * 4
        return Bytes(
            parameters=weight_bytes,
            gradients=weight_bytes,
            optimizer=2 * weight_bytes,
            # DDP's second copy of the gradients.
            buckets=weight_bytes if self._num_devices > 1 else 0,
        )

    def _at_level(self, level: _Level) -> MemoryEstimate:
        run = RunConfig(mixed_precision="fp8", fp8=Fp8Config(backend="msamp", opt_level=level))
        formats = short_formats(run)
        states = model_states(self._sizes.module, world_size=self._num_devices, formats=formats)
        return self._replicated(states, level)

    def _sharded_by_torch(self, module: Any) -> Iterator[tuple[_NamedWay, MemoryEstimate]]:
        sizes = wrapped_sizes(module)
        for way, offloads in (("FSDP", False), ("FSDP, all on the CPU", True)):
            for precisions, compute_bytes in (
                (_EVERY_PRECISION[:1], 4),
                (_EVERY_PRECISION[1:], 2),
            ):
                need = fsdp_estimate(
                    self._sizes.shape,
                    sizes,
                    compute_bytes=compute_bytes,
                    offloads=offloads,
                    **self._inputs,
                )
                yield _way_in(way, precisions), need

    def _zero_runs(self) -> Iterator[tuple[_NamedWay, RunConfig]]:
        offloaded: dict[str, JsonValue] = {
            _ZERO: {"offload_optimizer": _ON_CPU, "offload_param": _ON_CPU}
        }
        for precision in self._zero_precisions:
            for stage in (0, 1, 2, 3):
                run = RunConfig(zero_stage=stage, deepspeed={}, mixed_precision=precision)
                way = f"ZeRO-{stage}"
                strategy = f"ZeRO-{stage}, {precision}"
                yield _NamedWay(strategy, way, (precision,)), run
                if stage >= 1:
                    yield (
                        _NamedWay(
                            f"{strategy}, optimizer on cpu",
                            f"{way}, optimizer on the CPU",
                            (precision,),
                        ),
                        run.changed(deepspeed={_ZERO: {"offload_optimizer": _ON_CPU}}),
                    )
            yield (
                _NamedWay(
                    f"ZeRO-3, {precision}, optimizer and parameters on cpu",
                    "ZeRO-3, all on the CPU",
                    (precision,),
                ),
                RunConfig(zero_stage=3, deepspeed=offloaded, mixed_precision=precision),
            )


def json_text(tables: MemoryTables) -> str:
    """The tables as one JSON object; sizes are bytes."""
    return json.dumps(
        {
            "model": str(tables.sizes.source),
            "read_from": tables.sizes.origin,
            "parameters": tables.sizes.shape.total,
            "largest_layer_parameters": tables.sizes.largest_layer,
            "loaded": [_as_dict(row) for row in tables.loaded],
            "num_gpus": tables.num_gpus,
            "num_nodes": tables.num_nodes,
            "trained": [_as_dict(row) for row in tables.trained],
            "notes": list(tables.notes),
        },
        indent=2,
    )


def _as_dict(row: LoadedRow | TrainedRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__slots__}


def print_tables(tables: MemoryTables) -> None:
    """Show the tables in a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"[bold]{tables.sizes.source}[/bold]: {tables.sizes.shape.total:,} parameters "
        f"({tables.sizes.origin})",
        soft_wrap=True,
    )
    console.print(_loaded_table(tables))
    console.print(_trained_table(tables))
    for note in tables.notes:
        console.print(f"[dim]{note}[/dim]")


def _loaded_table(tables: MemoryTables) -> Any:
    from rich.table import Table

    table = Table(title="Loaded", title_justify="left")
    table.add_column("dtype")
    for heading in ("largest layer", "total size", "training with Adam"):
        table.add_column(heading, justify="right")
    for row in tables.loaded:
        training = "-" if row.training is None else format_bytes(row.training)
        table.add_row(row.dtype, format_bytes(row.largest_layer), format_bytes(row.total), training)
    return table


def _trained_table(tables: MemoryTables) -> Any:
    from rich.table import Table

    hosts = "" if tables.num_nodes == 1 else f" on each of {tables.num_nodes} machines"
    table = Table(
        title=f"Trained with Adam on {count_noun(tables.num_gpus, 'GPU')}{hosts}: memory of a GPU",
        title_justify="left",
        caption=_caption_of(tables.trained),
        caption_justify="left",
    )
    # Plain data parallelism is the same in all; a column is for what another way is told in.
    told_precisions = {one for row in tables.trained[1:] for one in row.precisions}
    precisions = [one for one in _EVERY_PRECISION if one in told_precisions] or _EVERY_PRECISION
    table.add_column("how")
    for precision in precisions:
        table.add_column(_PRECISION_LABELS.get(precision, precision), justify="right")
    for way in dict.fromkeys(row.way for row in tables.trained):
        by_precision = {
            precision: row
            for row in tables.trained
            if row.way == way
            for precision in row.precisions
        }
        of_way = [by_precision.get(precision) for precision in precisions]
        table.add_row(way, *("-" if row is None else _device_cell(row) for row in of_way))
        if any(row is not None and row.per_host for row in of_way):
            host_cells = ("-" if row is None else format_bytes(row.per_host) for row in of_way)
            table.add_row("  in host memory", *host_cells)
    return table


def _device_cell(row: TrainedRow) -> str:
    signs = {True: " [green]✓[/green]", False: " [red]✗[/red]", None: ""}
    return f"{format_bytes(row.per_device)}{signs[row.fits]}"


def _caption_of(rows: Sequence[TrainedRow]) -> str | None:
    is_known = any(row.fits is not None for row in rows)
    return "✓ fits into what is free here, ✗ does not" if is_known else None
