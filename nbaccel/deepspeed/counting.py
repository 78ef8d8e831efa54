"""What a DeepSpeed process holds on its device, in host memory and on disk, by what it is for.

The model states are counted at the moment when there is most of them: when the optimizer steps.
All numbers follow from the configuration and from what DeepSpeed allocates for it; tests hold them
against real engines.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nbaccel.deepspeed.settings import Settings
from nbaccel.deepspeed.shape import Shape

__all__ = ["Bytes", "places"]

_FP32 = 4
_REDUCED_AT_ONCE = 5 * 10**8
"""Gradients in a bucket without ZeRO: DeepSpeed's constant, which no setting changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Memory in one place, by what it holds.

    Attributes:
        parameters: The model as it computes.
        gradients: What the backward pass leaves for the optimizer.
        optimizer: Its states and its own copy of the parameters.
        buckets: Room to communicate, to gather parameters and to read from disk.
        activations: What the forward pass keeps for the backward pass, and what that adds.
        in_backward: What lives for a moment beside the activations: gradients on their way,
            gathered parameters.
        in_step: What lives for a moment when the optimizer begins, and activations are gone:
            gradients made flat, or in fp32.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buckets: int = 0
    activations: int = 0
    in_backward: int = 0
    in_step: int = 0

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer: what ZeRO divides."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All that stays for longer than a moment."""
        return self.model_states + self.buckets + self.activations

    @property
    def peak(self) -> int:
        """The most at any moment: what must be free."""
        moments = max(self.activations + self.in_backward, self.in_step)
        return self.model_states + self.buckets + moments

    def __mul__(self, times: int) -> Bytes:
        return Bytes(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    def __add__(self, other: Bytes) -> Bytes:
        names = (f.name for f in fields(self))
        return Bytes(**{name: getattr(self, name) + getattr(other, name) for name in names})


def places(
    s: Settings, shape: Shape, world: int, *, on_cpu: bool = False
) -> tuple[Bytes, Bytes, Bytes]:
    """What one process needs on its device, in host memory and on disk.

    Args:
        s: The settings that decide about memory.
        shape: The model's sizes.
        world: Processes that divide what ZeRO divides.
        on_cpu: Whether the device is the CPU, where memory that was reserved and never written
            to is not taken, and torch's optimizers update one tensor at a time.

    Returns:
        Device, host and disk, without activations.
    """
    rule = (_stage_0, _stage_1_2, _stage_1_2, _stage_3)[s.stage]
    return rule(s, shape, world, on_cpu)


def _states(s: Settings, numel: int) -> int:
    return s.num_states * s.state_bytes * numel


def _temporaries(s: Settings, numel: int, *, on_cpu: bool) -> int:
    """What torch's own optimizers hold for a moment while they update so many numbers.

    Adam takes the root of the second moment and divides it: into a second temporary on CPUs
    (``_single_tensor_adamw``), in place on GPUs (``_multi_tensor_adamw``). DeepSpeed's optimizers
    are one kernel and hold none.
    """
    if not s.torch_optimizer:
        return 0
    return min(s.num_states, 2 if on_cpu else 1) * s.state_bytes * numel


def _stage_0(s: Settings, shape: Shape, world: int, on_cpu: bool) -> tuple[Bytes, Bytes, Bytes]:
    """Everything everywhere. In 16 bit the optimizer has fp32 parameters and gradients."""
    half = s.parameter_bytes < _FP32
    # torch's optimizers have the model's own tensors, or one copy for each of them: on CPUs they
    # update one after another.
    largest = max(shape.sizes, default=shape.largest_layer)
    update = _temporaries(s, largest if on_cpu else shape.trainable, on_cpu=on_cpu)
    # Gradients are made flat, a bucket at a time, to be reduced; in 16 bit DeepSpeed's optimizers
    # make all of them flat in their own format, beside those of the model.
    in_step = max(_FP32 * min(shape.trainable, _REDUCED_AT_ONCE), update)
    if half:
        flat = 0 if s.torch_optimizer else _FP32 * shape.trainable
        in_step = flat + s.parameter_bytes * shape.trainable + update
    device = Bytes(
        parameters=s.parameter_bytes * shape.total,
        gradients=_FP32 * shape.trainable,
        optimizer=_states(s, shape.trainable) + half * _FP32 * shape.trainable,
        in_step=in_step,
    )
    return device, Bytes(), Bytes()


def _stage_1_2(s: Settings, shape: Shape, world: int, on_cpu: bool) -> tuple[Bytes, Bytes, Bytes]:
    """The optimizer has a part of its own, also in fp32, where it is a copy of the parameters."""
    part = _part(shape.trainable, world)
    own = s.master_bytes * part  # its parameters, and once more its gradients
    buffers = _reduce_buffers(s)
    device = Bytes(parameters=s.parameter_bytes * shape.total, buckets=0 if on_cpu else buffers)
    states = Bytes(gradients=own, optimizer=own + _states(s, part))
    is_offloaded = s.optimizer_place != "none"
    update = _temporaries(s, part, on_cpu=on_cpu or is_offloaded)
    leaving = s.gradient_bytes * shape.trainable if is_offloaded else 0
    in_step = 0
    if on_cpu:
        # Of buffers that are made for each backward pass only what is written takes memory. With
        # room for all gradients they are where the gradients are, which stage 1 keeps until then
        # and stage 2 copies at the end, when activations are gone.
        has_room = s.contiguous and s.reduce_bucket >= shape.trainable
        written = min(buffers, s.parameter_bytes * shape.trainable)
        in_step = written if has_room and s.stage == 2 else 0
        device += Bytes(in_backward=max(leaving, 0 if has_room else written))
    else:
        device += Bytes(in_backward=leaving)
    if not is_offloaded:
        # Stage 1 keeps whole gradients until the optimizer has taken its part of them.
        whole = max(0, s.gradient_bytes * shape.trainable - own) if s.stage == 1 else 0
        more = Bytes(gradients=whole, in_step=max(own, in_step, update - whole))
        return device + states + more, Bytes(), Bytes()
    # On their way back to the device the new parameters are rounded into a copy of their own; a
    # gradient on its way to the host passes through a buffer on either side.
    copy = Bytes(parameters=s.parameter_bytes * part, in_step=update)
    passing = Bytes(buckets=s.parameter_bytes * max(shape.sizes, default=shape.largest_layer))
    return device + passing + Bytes(in_step=in_step), states + copy + passing, Bytes()


def _stage_3(s: Settings, shape: Shape, world: int, on_cpu: bool) -> tuple[Bytes, Bytes, Bytes]:
    """Parameters are divided, too; what is needed next is gathered."""
    everything, part = _part(shape.total, world), _part(shape.trainable, world)
    parameters = Bytes(parameters=s.parameter_bytes * everything)
    # Tensors that are too small to be worth it stay whole, beside their parts.
    reduced = s.reduce_bucket * s.contiguous if shape.trainable else 0
    if on_cpu:
        reduced = min(reduced, shape.trainable)
    whole = reduced + shape.at_most(s.persist)
    device = Bytes(buckets=s.parameter_bytes * whole)
    own = s.master_bytes * part  # in fp32, too
    kept = s.gradient_bytes * part
    group = min(s.sub_group, part)
    update = s.master_bytes * (group if s.optimizer_place != "cpu" else part)
    optimizer = Bytes(optimizer=own + _states(s, part))
    gradients = Bytes(gradients=kept + update)
    temporaries = _temporaries(s, group, on_cpu=on_cpu or s.optimizer_place != "none")
    host, nvme = Bytes(), Bytes()
    if s.parameter_place == "none":
        device += parameters
    elif s.parameter_place == "cpu":
        host += parameters
    else:
        nvme += parameters
        host += Bytes(buckets=s.parameter_bytes * s.swap_buffer * s.num_swap_buffers)
    # Parameters gathered for the forward pass stay for the backward pass, as many as may live.
    at_once = max(s.live, s.prefetch + shape.largest_layer)
    gathered = s.parameter_bytes * min(at_once, shape.total)
    # A full bucket of gradients is copied in the order in which it is divided among the processes.
    gathered += s.parameter_bytes * min(s.reduce_bucket, shape.trainable)
    if s.optimizer_place == "none":
        rounded = kept if s.gradient_bytes < s.master_bytes else 0
        in_step = max(rounded, temporaries)
        moments = Bytes(in_backward=max(0, gathered - update), in_step=in_step)
        return device + optimizer + gradients + moments, host, nvme
    device += Bytes(in_backward=gathered + 3 * s.gradient_bytes * shape.largest_layer)
    host += Bytes(in_step=temporaries)
    if s.optimizer_place == "cpu":
        return device, host + optimizer + gradients, nvme
    # On disk are gradients in the optimizer's format, too; a group of all of it is read at a time.
    swapped = Bytes(buckets=s.master_bytes * s.num_state_buffers * group)
    return device, host + Bytes(gradients=kept) + swapped, nvme + optimizer + Bytes(gradients=own)


def _reduce_buffers(s: Settings) -> int:
    if not s.contiguous:
        return 0
    return s.parameter_bytes * s.reduce_bucket * (2 if s.overlap else 1)


def _part(numel: int, world: int) -> int:
    return -(-numel // world)
