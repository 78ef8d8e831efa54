"""Builds models on a device from the start, be it one without memory, so that none is needed twice.

It changes where tensors of new modules are made, for the thread that asks for it; modules that are
there already, and other threads, are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.torch_private import module_tables, store_own_tensor
from nbaccel.base.training_libraries import is_sharding_new_models
from nbaccel.bigmodel.tensor_placing import check_device_same, parameter_like, usable_device
from nbaccel.transfer.sharded_tensors import shard_readers

_INCLUDE_BUFFERS_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters have shapes and no memory: they are on ``meta``.

    One parameter at a time is allocated before it moves there, without being written to; with
    `include_buffers` none is.

    Args:
        include_buffers: Whether buffers, too, and everything else that the block makes with
            functions such as ``torch.zeros``. None: what the environment variable
            ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else no.

    Yields:
        Nothing. Blocks can be nested (the innermost counts), and are left as torch was found,
        also after an exception.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Linear(100_000, 100_000)
    """
    with init_on_device("meta", include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Iterator[None]:
    """Build models whose parameters are made on a device.

    Class, attributes and `requires_grad` of parameters are kept, and what is tied stays tied. A
    parameter that is on the device already stays the same object.

    Args:
        device: Where to.
        include_buffers: As in :func:`init_empty_weights`.

    Yields:
        Nothing.

    Raises:
        ConfigError: Tensors cannot be made on the device.
    """
    target = usable_device(device)
    if include_buffers is None:
        include_buffers = bool(env.flag(_INCLUDE_BUFFERS_VARIABLE))
    with contextlib.ExitStack() as stack:
        if include_buffers:
            stack.enter_context(target)
        if target.type == "meta" and is_sharding_new_models():
            # There are no values yet that could be cut into shards.
            for shard_reader in shard_readers(loaded_only=False):
                stack.enter_context(shard_reader.building_whole())
        stack.enter_context(_registration_patch)
        _open_blocks.stack.append(_Block(target, include_buffers))
        stack.callback(_open_blocks.stack.pop)
        yield


@dataclass
class _Block:
    """One ``with`` block of one thread.

    Attributes:
        device: Where tensors are made.
        include_buffers: Whether buffers, too.
        moved: What became of parameters that were made elsewhere: one that is registered twice
            must become one parameter.
    """

    device: torch.device
    include_buffers: bool
    moved: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)


class _OpenBlocks(threading.local):
    """The blocks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Block] = []


_open_blocks = _OpenBlocks()


class _RegistrationPatch:
    """Replaces how modules register tensors, while any thread is in a block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number_of_users = 0
        self._replaced: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._number_of_users += 1
            if self._number_of_users == 1:
                self._install("register_parameter", _move_parameter)
                self._install("register_buffer", _move_buffer)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._number_of_users -= 1
            if self._number_of_users == 0:
                for name, original, ours in self._replaced:
                    # Someone else's, put around it in the meantime, is theirs to take away; what
                    # is inside of it then does nothing outside of blocks.
                    if getattr(nn.Module, name) is ours:
                        setattr(nn.Module, name, original)
                self._replaced.clear()

    def _install(self, method_name: str, move: Callable[[nn.Module, str, _Block], None]) -> None:
        original = getattr(nn.Module, method_name)

        @functools.wraps(original)
        def register_and_move(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            original(module, name, *args, **kwargs)
            if _open_blocks.stack:
                move(module, name, _open_blocks.stack[-1])

        self._replaced.append((method_name, original, register_and_move))
        setattr(nn.Module, method_name, register_and_move)


_registration_patch = _RegistrationPatch()


def _move_parameter(module: nn.Module, name: str, block: _Block) -> None:
    parameter = module_tables(module)[0][name]
    if parameter is None or check_device_same(parameter.device, block.device):
        return
    if parameter not in block.moved:
        _check_values(module, name, parameter, block)
        block.moved[parameter] = parameter_like(parameter, parameter.data.to(block.device))
    store_own_tensor(module, name, block.moved[parameter])


def _move_buffer(module: nn.Module, name: str, block: _Block) -> None:
    buffer = module_tables(module)[1][name]
    if block.include_buffers and buffer is not None:
        _check_values(module, name, buffer, block)
        store_own_tensor(module, name, buffer.to(block.device))


def _check_values(module: nn.Module, name: str, tensor: torch.Tensor, block: _Block) -> None:
    if tensor.is_meta and block.device.type != "meta":
        raise ConfigError(
            f"{name!r} of {type(module).__name__} was made on meta, inside of init_on_device("
            f"{str(block.device)!r}): it has no values to move there. Give the inner block "
            "include_buffers=True, or make it outside of the outer one."
        )
