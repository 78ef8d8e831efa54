"""The table of DeepSpeed's own memory estimator, as its documentation shows it.

Its formulas are rough on purpose (all Adam, all 16 bit, a factor for safety), and they are what
people compare with. The installed DeepSpeed computes them, whose public functions only print them.
nbaccel's estimate, by the actual configuration, is in `zero_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.deepspeed import library
from nbaccel.deepspeed.schema import quiet_logger
from nbaccel.memory.model_size import Shape, shape_of

_BYTES_PER_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        host_bytes: Per host.
        device_bytes: Per device.
        options: Settings and their values, as the table names them.
    """

    host_bytes: int
    device_bytes: int
    options: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value:<4}" for name, value in self.options)
        host_gib = self.host_bytes / _BYTES_PER_GIB
        device_gib = self.device_bytes / _BYTES_PER_GIB
        return f"{host_gib:8.2f} | {device_gib:8.2f} | {options}".rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedTable:
    """What DeepSpeed's estimator prints, as numbers and as text.

    Attributes:
        shape: The model.
        stage: The ZeRO stage, 2 or 3.
        devices_per_node: Processes on each machine.
        num_nodes: Machines.
        rows: The lines.
    """

    shape: Shape
    stage: int
    devices_per_node: int
    num_nodes: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = (
            f"ZeRO-{self.stage} by DeepSpeed's formula: {self.shape.total / 1e6:,.0f} M "
            f"parameters, largest layer {self.shape.largest_layer / 1e6:,.0f} M, "
            f"{self.num_nodes} x {self.devices_per_node} devices"
        )
        return "\n".join([head, "GiB/host | GiB/dev. | settings", *map(str, self.rows)])


def deepspeed_table(
    model_or_shape: Any,
    *,
    stage: int = 3,
    devices_per_node: int = 1,
    num_nodes: int = 1,
    buffer_factor: float = 1.5,
) -> DeepSpeedTable:
    """The table of DeepSpeed's estimator, which is also right for models on ``meta``.

    Args:
        model_or_shape: A module, or (parameters, parameters of the largest layer).
        stage: 2 or 3.
        devices_per_node: Devices on each machine.
        num_nodes: Machines.
        buffer_factor: What DeepSpeed multiplies host memory with, for safety.

    Returns:
        The table; its rows have the bytes.

    Raises:
        ConfigError: There is no such table.
        MissingBackend: DeepSpeed is not installed.
    """
    if stage not in (2, 3):
        raise ConfigError(
            f"stage={stage} has no table of DeepSpeed's: it publishes formulas for ZeRO-2 and "
            "ZeRO-3. Use estimate_memory for the others."
        )
    shape = shape_of(model_or_shape)
    make_rows = _zero2_rows if stage == 2 else _zero3_rows
    # A tuple, and inside the block, since the rows are computed only when they are read.
    with quiet_logger():
        table_rows = tuple(make_rows(shape, (devices_per_node, num_nodes), buffer_factor))
    return DeepSpeedTable(
        shape=shape,
        stage=stage,
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        rows=table_rows,
    )


def _zero3_rows(shape: Shape, device_counts: tuple[int, int], factor: float) -> Iterator[Row]:
    module = library.load_module(
        "deepspeed.runtime.zero.stage3", why="DeepSpeed's memory estimator"
    )
    estimate_bytes = module.estimate_zero3_model_states_mem_needs
    # In the order of the table in DeepSpeed's documentation.
    for with_optimizer, with_parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host_bytes, device, _ = estimate_bytes(
                shape.total,
                shape.largest_layer,
                *device_counts,
                with_optimizer,
                with_parameters,
                zero_init,
                factor,
            )
            options = (
                ("offload_param", _place_word(with_parameters)),
                ("offload_optimizer", _place_word(with_optimizer)),
                ("zero_init", str(int(zero_init))),
            )
            yield Row(host_bytes=host_bytes, device_bytes=device, options=options)


def _zero2_rows(shape: Shape, device_counts: tuple[int, int], factor: float) -> Iterator[Row]:
    module = library.load_module(
        "deepspeed.runtime.zero.stage_1_and_2", why="DeepSpeed's memory estimator"
    )
    estimate_bytes = module.estimate_zero2_model_states_mem_needs
    for optimizer in (True, False):
        host_bytes, device = estimate_bytes(shape.total, *device_counts, optimizer, factor)
        options = (("offload_optimizer", _place_word(optimizer)),)
        yield Row(host_bytes=host_bytes, device_bytes=device, options=options)


def _place_word(is_offloaded: bool) -> str:
    return "cpu" if is_offloaded else "none"
