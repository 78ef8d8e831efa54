"""Activations: what a forward pass keeps for the backward pass, measured on the model itself.

Each storage counts from the operation that made it until it is freed, in a pass of a copy whose
tensors are fake: they have no memory, so any size is measured in seconds, also one on ``meta``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.trees import find_batch_size, leaves, map_tensors
from nbaccel.base.units import format_bytes
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.strategies.model_blocks import enable_gradient_checkpointing

if TYPE_CHECKING:
    _Mode = Any
else:
    _Mode = torch_private.dispatch_mode()  # torch has not typed it


_ASKS_DEVICE = torch.ops.prim.device.default


class LiveBytes(_Mode):  # type: ignore[misc]
    """Counts the bytes of storages made inside a ``with`` block: those that live, and the most."""

    def __init__(self, known: Iterable[torch.Tensor] = (), *, device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self._known: set[int] = set()
        self._living: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        for tensor in known:
            key = storage_key(tensor)
            if key not in self._known:
                self._known.add(key)
                # Another storage may get the same address once this one is freed.
                finalizer = weakref.finalize(tensor.untyped_storage(), self._known.discard, key)
                finalizer.atexit = False  # or all that live then would run it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count what it made."""
        if func is _ASKS_DEVICE:
            # Two of three calls with fake tensors, and nothing is made by them.
            return args[0].device
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            # Sparse tensors have no storage of their own to count.
            if tensor.layout is torch.strided:
                self._count(tensor)
        self.peak = max(self.peak, self.now)
        return result

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before from now on: they have become private."""
        for tensor in tensors:
            self._known.discard(storage_key(tensor))
            self._count(tensor)
        self.peak = max(self.peak, self.now)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._known or self._device not in (None, tensor.device.type):
            return
        num_bytes = storage.nbytes()
        if key not in self._living:
            weakref.finalize(storage, self._freed, key).atexit = False
        self.now += num_bytes - self._living.get(key, 0)  # a storage may have been resized
        self._living[key] = num_bytes

    def _freed(self, key: int) -> None:
        self.now -= self._living.pop(key, 0)


def storage_key(tensor: torch.Tensor) -> int:
    """A number per storage, also for fake tensors, whose addresses are all the same."""
    return torch_private.storage_id(tensor.untyped_storage())


def num_samples(batch: Any) -> int:
    """How many samples a batch has."""
    count = find_batch_size(batch)
    if count is None:
        raise ConfigError(
            f"sample_batch is a {type(batch).__name__} without tensors: nothing can be measured "
            "with it. Give what your loader gives: a tensor, or a dict or tuple of tensors whose "
            "first dimension counts samples."
        )
    return count


def resized(batch: Any, samples: int) -> Any:
    """A batch of another size: the first samples, or all of them again and again."""
    present_samples = num_samples(batch)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != present_samples or present_samples == samples:
            return tensor
        num_repeats = -(-samples // present_samples)
        return tensor.repeat(num_repeats, *[1] * (tensor.dim() - 1))[:samples].clone()

    return map_tensors(change, batch)


def call(model: Callable[..., Any], batch: Any, *, module: nn.Module | None = None) -> Any:
    """Call a model on a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(*batch[: _most_arguments(module or model)])
    return model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """Something to begin a backward pass from."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    parts = [tensor.float().sum() for tensor in _tensors(output) if tensor.requires_grad]
    if not parts:
        raise ConfigError(
            f"The model returned a {type(output).__name__} without a tensor that has gradients: "
            "there is no backward pass to measure. Give a model whose parameters are trained."
        )
    return torch.stack(parts).sum()


def _tensors(output: Any) -> list[torch.Tensor]:
    if not isinstance(output, (torch.Tensor, Mapping, list, tuple)):  # of some class
        output = getattr(output, "__dict__", {})
    return [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]


def _most_arguments(model: Any) -> int | None:
    """How many positional arguments a model takes; None where there is no limit."""
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):  # written in C, or traced
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measure_activations(
    model: nn.Module,
    sample_batch: Any,
    *,
    precision: str = "fp32",
    gradient_checkpointing: bool = False,
) -> int:
    """The most bytes at once that a forward and backward pass needs besides parameters.

    What is computed again counts, too, and gradients until a parameter has them.
    """
    dtype = _DTYPES.get(precision)
    # A model may hold real tensors besides its parameters and buffers; these are allowed.
    fake = torch_private.fake_tensor_mode()(allow_non_fake_inputs=True)
    with _undisturbed():
        try:
            with fake:
                twin = _fake_copy(model, dtype)
                batch = map_tensors(
                    lambda tensor: torch.empty(tensor.shape, dtype=_as(tensor, dtype)), sample_batch
                )
                return _run(twin, batch, gradient_checkpointing)
        except Exception as error:  # the model's own code may need values, and fail in any way
            _check_small(model, error)
        # A copy, because hooks are added and gradients computed.
        real = copy.deepcopy(model).to(dtype=dtype)
        batch = map_tensors(
            lambda tensor: tensor.detach().to(dtype=_as(tensor, dtype), copy=True), sample_batch
        )
        try:
            return _run(real, batch, gradient_checkpointing)
        except ConfigError:
            raise
        except Exception as error:  # a batch of another form makes the model fail in any way
            raise ConfigError(
                f"{type(model).__name__} does not run with this sample_batch, so its activations "
                f"cannot be measured: it raised {type(error).__name__}: {error}. Give a batch as "
                "the training loop hands it to the model: a tensor, or a dict or tuple of the "
                "model's arguments."
            ) from error


def _run(twin: nn.Module, batch: Any, gradient_checkpointing: bool) -> int:
    twin.train()
    if gradient_checkpointing:
        enable_gradient_checkpointing(twin)
    for parameter in twin.parameters():
        if parameter.requires_grad:  # dropped at once: gradients are counted with the model states
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    # Layers keep their weights, too, which are counted with the model states.
    live = LiveBytes((*twin.parameters(), *twin.buffers()))
    with live:
        live.adopt(_tensors(batch))  # it is on the device, too
        loss_of(call(twin, batch)).backward()  # type: ignore[no-untyped-call]
    return live.peak


def _fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with tensors that have no memory; tied ones stay tied."""
    # `deepcopy` takes these tensors from the memo, so it copies no values and keeps ties.
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = getattr(tensor, "ds_shape", tensor.shape)  # what a placeholder of ZeRO-3 stands for
        fake_tensor = torch.empty(shape, dtype=_as(tensor, dtype))
        if isinstance(tensor, nn.Parameter):
            fake_tensor = nn.Parameter(fake_tensor, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake_tensor
    return copy.deepcopy(model, memo)


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _check_small(model: nn.Module, error: Exception) -> None:
    """Refuse a real copy of the model that would take much of the free memory."""
    tensors = [*model.parameters(), *model.buffers()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    free_bytes = inspect_machine().host_available_bytes
    if any(tensor.is_meta for tensor in tensors) or num_bytes > free_bytes // 16:
        raise ConfigError(
            f"The activations of {type(model).__name__} cannot be measured without running it: "
            f"with tensors that have no values it raised {type(error).__name__}: {error}. A real "
            f"run would need a copy of {format_bytes(num_bytes)} with values. Measure them where "
            "the model fits and give activation_bytes."
        ) from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random numbers and logging after the block; its warnings concern no real run."""
    previous_level = logging.root.manager.disable
    was_collecting = gc.isenabled()
    # No devices: saving the state of CUDA's generators would initialise CUDA in the notebook.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # transformers warns through it; torch tells of each operation that fails without values.
        logging.disable(logging.ERROR)
        gc.disable()  # so many small objects would have all that the notebook holds searched
        try:
            yield
        finally:
            logging.disable(previous_level)
            if was_collecting:
                gc.enable()
