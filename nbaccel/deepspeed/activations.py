"""Activations: what a forward pass keeps for the backward pass, measured on the model itself.

The pass is run on a copy whose tensors are fake: they have shapes and no memory, so a model of any
size is measured in seconds, also one on ``meta``. The user's model is not touched.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from nbaccel.deepspeed.batches import call, loss_of, mapped
from nbaccel.deepspeed.live import LiveBytes, storage_key
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import inspect_machine
from nbaccel.strategies.gradient_checkpointing import enable_gradient_checkpointing
from nbaccel.units import format_bytes

__all__ = ["Activations", "measure_activations"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What one forward and backward pass takes beside parameters, in bytes.

    Attributes:
        saved: What is kept at the end of the forward pass, each storage once.
        peak: The most that lives at once in both passes: also what is computed again under
            gradient checkpointing, and gradients until a parameter has them.
    """

    saved: int
    peak: int


def measure_activations(
    model: nn.Module,
    sample_batch: Any,
    *,
    precision: str = "fp32",
    gradient_checkpointing: bool = False,
) -> Activations:
    """Measure what a model keeps for its backward pass.

    Args:
        model: The model, on any device or on ``meta``; it stays as it is.
        sample_batch: What it is called with: a dict, a tuple or a tensor.
        precision: ``fp32``, ``bf16`` or ``fp16``, as DeepSpeed converts the model; floating-point
            tensors of the batch are converted, too. With ``fp32`` all stays as it is.
        gradient_checkpointing: Whether to turn it on first, in the copy.

    Returns:
        The bytes.

    Raises:
        ConfigError: The model cannot be run without values, and is too large for a real copy.
    """
    dtype = _DTYPES.get(precision)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _undisturbed():
        try:
            with fake:
                twin = _fake_copy(model, dtype)
                batch = mapped(sample_batch, lambda t: torch.empty(t.shape, dtype=_as(t, dtype)))
                return _run(twin, batch, gradient_checkpointing)
        except Exception as error:  # the model's own code may need values in any way it likes
            _check_small(model, error)
        real = copy.deepcopy(model).to(dtype=dtype)
        batch = mapped(sample_batch, lambda t: t.detach().to(dtype=_as(t, dtype), copy=True))
        return _run(real, batch, gradient_checkpointing)


def _run(twin: nn.Module, batch: Any, gradient_checkpointing: bool) -> Activations:
    twin.train()
    if gradient_checkpointing:
        enable_gradient_checkpointing(twin)
    own = [*twin.parameters(), *twin.buffers()]
    keys = {storage_key(tensor) for tensor in own}
    for parameter in twin.parameters():
        if parameter.requires_grad:  # gradients are counted with the model states
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(_drop_gradient)
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in keys:
            saved[storage_key(tensor)] = tensor.untyped_storage()
        return tensor

    with LiveBytes(own) as live:
        mapped(batch, lambda tensor: live.adopt([tensor]))  # it is on the device, too
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(call(twin, batch))
        num_saved = sum(storage.nbytes() for storage in saved.values())
        saved.clear()  # or the backward pass would free nothing
        loss.backward()  # type: ignore[no-untyped-call]
    return Activations(saved=num_saved, peak=max(num_saved, live.peak))


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with tensors that have no memory; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = getattr(tensor, "ds_shape", tensor.shape)  # what a placeholder of ZeRO-3 stands for
        made = torch.empty(shape, dtype=_as(tensor, dtype))
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    return copy.deepcopy(model, memo)


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _check_small(model: nn.Module, error: Exception) -> None:
    """Whether a real copy can be run beside the model without anybody noticing."""
    tensors = [*model.parameters(), *model.buffers()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    free = inspect_machine().host_available_bytes
    if any(tensor.is_meta for tensor in tensors) or num_bytes > free // 16:
        raise ConfigError(
            f"The activations of {type(model).__name__} cannot be measured without running it: "
            f"with tensors that have no values it raised {type(error).__name__}: {error}. A real "
            f"run would need a copy of {format_bytes(num_bytes)} with values. Measure them where "
            "the model fits and give activation_bytes."
        ) from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers are drawn as if nothing had been; warnings of a rehearsal are nobody's."""
    before = logging.root.manager.disable
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # transformers warns in a way of its own
        try:
            yield
        finally:
            logging.disable(before)
