"""DeepSpeed's published memory formulas, and the table that its documentation shows for them.

They are rough on purpose (all Adam, all 16 bit, a factor for safety), and they are what people
compare with. Our own, by the real configuration, are in `estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel.deepspeed.shape import Shape, shape_of
from nbaccel.errors import ConfigError

__all__ = ["DeepSpeedTable", "Row", "deepspeed_table", "zero2_needs", "zero3_needs"]

_GIB = 2**30


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
        host, device = self.host_bytes / _GIB, self.device_bytes / _GIB
        return f"{host:8.2f} | {device:8.2f} | {options}".rstrip()


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
    """The table of DeepSpeed's own estimator, right for models on ``meta``, too.

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
    """
    if stage not in (2, 3):
        raise ConfigError(
            f"stage={stage} has no table of DeepSpeed's: it publishes formulas for ZeRO-2 and "
            "ZeRO-3. Use estimate_memory for the others."
        )
    shape = shape_of(model_or_shape)
    rows = (_zero2_rows if stage == 2 else _zero3_rows)(
        shape, devices_per_node, num_nodes, buffer_factor
    )
    return DeepSpeedTable(
        shape=shape,
        stage=stage,
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        rows=tuple(rows),
    )


def zero3_needs(
    shape: Shape,
    *,
    devices_per_node: int = 1,
    num_nodes: int = 1,
    offload_optimizer: bool = True,
    offload_param: bool = True,
    zero_init: bool = True,
    buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """What DeepSpeed says that ZeRO-3 needs.

    Args:
        shape: The model.
        devices_per_node: Devices on each machine.
        num_nodes: Machines.
        offload_optimizer: Whether the optimizer's states are in host memory.
        offload_param: Whether the parameters are, too; counts only together with the former.
        zero_init: Whether the model is made in pieces, or whole by each process at first.
        buffer_factor: A factor on host memory, for safety.

    Returns:
        Bytes per host and per device.
    """
    devices = num_nodes * devices_per_node
    layer = 4 * shape.largest_layer
    if not offload_optimizer:
        made = shape.largest_layer if zero_init else shape.total
        host = made * 4 * devices_per_node * buffer_factor
        return int(host), layer + int(18 * shape.total / devices)
    per_parameter, of_a_node = 18 if offload_param else 16, 1 / num_nodes
    if zero_init:  # multiplied in DeepSpeed's order: another one rounds differently
        host = shape.total * per_parameter * of_a_node * buffer_factor
    else:  # at first each process makes all of it in fp32
        most = max(4 * devices_per_node, per_parameter * of_a_node)
        host = shape.total * most * buffer_factor
    return int(host), layer + (0 if offload_param else int(2 * shape.total / devices))


def zero2_needs(
    shape: Shape,
    *,
    devices_per_node: int = 1,
    num_nodes: int = 1,
    offload_optimizer: bool = True,
    buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """What DeepSpeed says that ZeRO-2 needs.

    Args:
        shape: The model.
        devices_per_node: Devices on each machine.
        num_nodes: Machines.
        offload_optimizer: Whether the optimizer's states are in host memory.
        buffer_factor: A factor on host memory, for safety.

    Returns:
        Bytes per host and per device.
    """
    devices = num_nodes * devices_per_node
    if offload_optimizer:
        return int(shape.total * max(4 * devices, 16) * buffer_factor), 2 * shape.total
    host = shape.total * 4 * devices_per_node * buffer_factor
    return int(host), 2 * shape.total + int(18 * shape.total / devices)


def _zero3_rows(shape: Shape, devices: int, nodes: int, factor: float) -> Iterator[Row]:
    for optimizer, param in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device = zero3_needs(
                shape,
                devices_per_node=devices,
                num_nodes=nodes,
                offload_optimizer=optimizer,
                offload_param=param,
                zero_init=zero_init,
                buffer_factor=factor,
            )
            options = (
                ("offload_param", _place(param)),
                ("offload_optimizer", _place(optimizer)),
                ("zero_init", str(int(zero_init))),
            )
            yield Row(host_bytes=host, device_bytes=device, options=options)


def _zero2_rows(shape: Shape, devices: int, nodes: int, factor: float) -> Iterator[Row]:
    for optimizer in (True, False):
        host, device = zero2_needs(
            shape,
            devices_per_node=devices,
            num_nodes=nodes,
            offload_optimizer=optimizer,
            buffer_factor=factor,
        )
        options = (("offload_optimizer", _place(optimizer)),)
        yield Row(host_bytes=host, device_bytes=device, options=options)


def _place(offloaded: bool) -> str:
    return "cpu" if offloaded else "none"
