"""The parts of torch without a public name that nbaccel uses, each in one small function.

Seen in torch 2.6 to 2.15. A torch that lacks one that every launch needs is refused on import
(`PlatformUnsupported`). No other module uses private names of torch; `tests/house` checks it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rendezvous
import torch.utils._python_dispatch
from torch import nn

from nbaccel.base.errors import PlatformUnsupported

_SEEN_IN = "2.6 to 2.15"

COMPILED_PREFIX = "_orig_mod."  # of names in the state of a module that was compiled

COPIES_TO_DEVICE = torch.ops.aten._to_copy.default  # the operation behind ``Tensor.to``

CREATES_GROUP = "_new_process_group_helper"  # what a process is in while it creates one

MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""What every module has: tensors, submodules, hooks and flags."""

_c10d = "torch.distributed.distributed_c10d"
PRIVATE_NAMES = (
    *(f"{_c10d}._pg_map", f"{_c10d}._pg_names"),
    *(f"{_c10d}._get_default_group", f"{_c10d}._get_default_store"),
    f"{_c10d}._new_process_group_helper",
    *(f"{_c10d}.ProcessGroup._get_backend", f"{_c10d}.ProcessGroup._device_types"),
    f"{_c10d}.ProcessGroup._get_sequence_number_for_group",
    "torch.distributed.rendezvous._create_c10d_store",
    *("torch.Tensor._version", "torch.Tensor._backward_hooks", "torch.UntypedStorage._cdata"),
    "torch.nn.Module._load_from_state_dict",
)
"""Dotted names that must be there."""


def _check_names() -> None:
    lacking = [name for name in PRIVATE_NAMES if not _exists(name)]
    if lacking:
        raise PlatformUnsupported(
            f"torch {torch.__version__} lacks {', '.join(lacking)}: workers could not be launched. "
            f"These names were seen in torch {_SEEN_IN}: install one of these, or a newer nbaccel."
        )


def _exists(name: str) -> bool:
    try:
        # Imported as far as it can be: torch.distributed.rendezvous, as an attribute, is a function
        # that hides its module.
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def process_groups() -> tuple[Any, ...]:
    """The process groups that this process is in."""
    return tuple(dist.distributed_c10d._pg_map)


def keep_process_groups() -> None:
    """Hold a reference to every process group that is made from now on, until the process ends."""
    kept: list[Any] = []

    class Keeping(dict[Any, Any]):
        def __setitem__(self, group: Any, value: Any) -> None:
            kept.append(group)
            super().__setitem__(group, value)

    # Torch registers every group in this table and removes it when it is destroyed.
    dist.distributed_c10d._pg_map = Keeping(dist.distributed_c10d._pg_map)


def process_group_names() -> dict[Any, str]:
    """Process groups of this process with their names, which are the same on all ranks."""
    return dict(dist.distributed_c10d._pg_names)


def collectives_begun(group: Any) -> int:
    """How many collectives a process group has begun."""
    return int(group._get_sequence_number_for_group())


def device_backends(group: Any) -> list[Any]:
    """The backends of a process group: one for each kind of device."""
    return [group._get_backend(device) for device in tuple(group._device_types)]


def default_store() -> Any:
    """The store that the default process group uses."""
    return dist.distributed_c10d._get_default_store()


def create_in_default_group(join: Callable[[], None]) -> None:
    """Let code that looks up the default process group create it where there is none."""
    c10d = dist.distributed_c10d
    get_default_group = c10d._get_default_group

    def joined_default_group() -> Any:
        if not dist.is_initialized():
            join()
        return get_default_group()

    # Functions of torch.distributed look it up by this name in their module at each call.
    c10d._get_default_group = joined_default_group


def watch_new_groups(around: contextlib.ContextDecorator) -> None:
    """Create every further process group inside a context."""
    c10d = dist.distributed_c10d
    c10d._new_process_group_helper = around(c10d._new_process_group_helper)


def replace_rendezvous_store(create_store: Callable[..., Any]) -> None:
    """Have this create the store of an `env://` or `tcp://` rendezvous, given torch's own way."""
    # Not by attribute: torch.distributed.rendezvous is a function that hides the module.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous._create_c10d_store = functools.partial(create_store, rendezvous._create_c10d_store)


def communication_hooks(model: Any) -> list[tuple[Any, Any]]:
    """The communication hooks of a DDP model, each with its state; the list that DDP appends to."""
    hooks: list[tuple[Any, Any]] = model._comm_hooks
    return hooks


def exchange_delays(model: Any) -> tuple[int, float] | None:
    """By how much the exchange of gradients has prolonged a DDP model's backward passes."""
    try:
        log: Mapping[str, Any] = model._get_ddp_logging_data()
        # Nanoseconds. What overlaps with computing delays nothing.
        delay_ns = log["avg_backward_comm_time"] - log["avg_backward_compute_comm_overlap_time"]
        return int(log["iteration"]), max(0, delay_ns) / 1e9
    except KeyError:
        return 0, 0.0
    except (AttributeError, TypeError):
        return None


def measure_each_exchange(model: Any) -> None:
    """Let torch measure every backward pass of a DDP model, not one in a hundred."""
    with contextlib.suppress(AttributeError, TypeError):
        model._set_ddp_runtime_logging_sample_rate(1)


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and where it begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(shape), tuple(offset)


def tensor_version(tensor: torch.Tensor) -> int:
    """Grows whenever a tensor is written to, by what torch counts; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks are registered on a tensor's gradient."""
    return bool(tensor._backward_hooks)


def replace_in_place(tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Let a Python object stand for another tensor; `Tensor.data` keeps the kind of device."""
    untyped: Any = tensor
    hooks = {name: getattr(untyped, name) for name in _HOOK_ATTRIBUTES}
    torch._C._swap_tensor_impl(tensor, replacement)
    for name, value in hooks.items():
        if value:
            setattr(untyped, name, value)


_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def storage_id(storage: torch.UntypedStorage) -> int:
    """Distinguishes storages, also fake ones, whose addresses are all the same."""
    return int(storage._cdata)


def shared_file(storage: torch.UntypedStorage) -> int | None:
    """The open file behind memory of `Tensor.share_memory_`; None for any other memory."""
    # What is shared by name would be copied to a file of its own.
    sharing: Any = torch.multiprocessing
    if not storage.is_shared() or sharing.get_sharing_strategy() == "file_system":
        return None
    untyped: Any = storage
    descriptor, _ = untyped._share_fd_cpu_()
    return descriptor if descriptor >= 0 else None  # a mapped file of weights is closed


def map_shared_file(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """The memory of a file that :func:`shared_file` gave in another process."""
    storage_class: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = storage_class._new_shared_fd_cpu(descriptor, nbytes)
    return storage


def untyped_storage(storage: Any) -> torch.UntypedStorage:
    """The bytes below a `TypedStorage`; its public method warns that the class is deprecated."""
    found: torch.UntypedStorage = storage._untyped_storage
    return found


def fake_tensor_mode() -> type[Any]:
    """The mode under which tensors have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports half of torch's compiler

    return FakeTensorMode


def dispatch_mode() -> type[Any]:
    """The class of modes that see every operation."""
    return torch.utils._python_dispatch.TorchDispatchMode


def make_wrapper_tensor(
    tensor_class: type[Any], like: torch.Tensor, dtype: torch.dtype, *, requires_grad: bool
) -> Any:
    """A tensor of a subclass that has shape and device of another, and no storage of its own."""
    untyped: Any = torch.Tensor
    return untyped._make_wrapper_subclass(
        tensor_class,
        like.shape,
        strides=like.stride(),
        dtype=dtype,
        device=like.device,
        requires_grad=requires_grad,
    )


def written_arguments(operation: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operation of torch writes to."""
    return [
        (position, argument.name)
        for position, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def multiply_scaled(
    left: torch.Tensor,
    right: torch.Tensor,
    left_inverse_scale: torch.Tensor,
    right_inverse_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool,
) -> torch.Tensor:
    """A matrix product of payloads of 8 bits, by the device's own kernel."""
    product: torch.Tensor = torch._scaled_mm(
        left,
        right,
        scale_a=left_inverse_scale,
        scale_b=right_inverse_scale,
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
    return product


def after_backward(callback: Callable[[], None]) -> None:
    """Let a function be called when the backward pass that is running is through."""
    untyped: Any = torch.autograd.Variable
    untyped._execution_engine.queue_callback(callback)


def exclude_from_ddp(module: nn.Module, parameter_names: list[str]) -> None:
    """Let `DistributedDataParallel` leave parameters of a module alone."""
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, parameter_names)


def module_tables(
    module: nn.Module,
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, nn.Module | None]]:
    """A module's own parameters, buffers and submodules by name, tied ones under each name."""
    return module._parameters, module._buffers, module._modules


def store_own_tensor(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a module's own parameter or buffer, past what registering a new one would do."""
    table: Any = module._parameters if name in module._parameters else module._buffers
    table[name] = tensor


def replace_parameter_table(module: nn.Module, table: dict[str, Any]) -> None:
    """Let a module look its own parameters up in another dictionary."""
    module._parameters = table


def state_readers(module: nn.Module) -> Iterator[Any]:
    """The functions and hooks that read a module's part of a state dict."""
    yield type(module).load_state_dict
    yield type(module)._load_from_state_dict
    yield type(module).set_extra_state
    for hook in module._load_state_dict_pre_hooks.values():
        # torch wraps hooks in an object that holds the function.
        yield getattr(hook, "hook", hook)


def default_device() -> torch.device | None:
    """Where the user lets torch make tensors, if that was said; asking torch itself wakes a GPU."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return getattr(context, "device", None)


def print_options() -> dict[str, Any]:
    """How torch prints tensors, as :func:`torch.set_printoptions` takes it."""
    options = getattr(torch._tensor_str, "PRINT_OPTS", None)
    return {} if options is None else dict(vars(options))


def is_compiled(module: Any) -> bool:
    """Whether `torch.compile` wrapped it."""
    # Not imported for this, which takes a second: without it nothing has been compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_exception_wrapper(value: object) -> bool:
    """Whether it carries an exception of another process or thread, as loaders' workers send it."""
    return isinstance(value, torch._utils.ExceptionWrapper)


def uncompiled(module: Any) -> Any:
    """The module inside `torch.compile`'s wrapper, or the module itself."""
    return getattr(module, "_orig_mod", module)


def replace_wrapped(compiled: Any, module: nn.Module) -> None:
    """Put another module inside of `torch.compile`'s wrapper."""
    compiled._orig_mod = module


def forget_compiled_call(module: nn.Module) -> None:
    """Undo `module.compile()`."""
    module._compiled_call_impl = None


def recompute_activations(module: nn.Module) -> None:
    """Let a module's backward compute activations again, in place, before `fully_shard`."""
    from torch.distributed._composable.checkpoint_activation import checkpoint

    checkpoint(module)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether hooks on `step` can be registered; a wrapper may not have called the constructor."""
    return getattr(optimizer, "_optimizer_step_post_hooks", None) is not None


def mark_as_stepped(optimizer: Any) -> None:
    """Let torch's schedules believe that an optimizer has stepped: else they warn."""
    optimizer._opt_called = True


def scales_gradients_itself(optimizer: Any) -> bool:
    """Whether an optimizer divides by the scaler's factor itself, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_state_loading_hooks(optimizer: Any) -> bool:
    """Whether hooks change a state before it is loaded."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def _scaling_states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    # Nowhere else are flags of infinite gradients; a precision from outside may use this class.
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return states


def gradients_are_unscaled(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Whether an optimizer's gradients were divided by the factor since the last update."""
    state = _scaling_states(scaler).get(id(optimizer))
    # By name, because the class of the stages is private, too.
    return state is not None and state["stage"].name != "READY"


def watch_steps_again(scheduler: Any) -> None:
    """Let a scheduler watch its optimizer's first step again, which pickling made it forget."""
    optimizer: Any = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer) or "step" in vars(optimizer):
        return
    step_method = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(step_method)
    def step(*args: Any, **kwargs: Any) -> Any:
        watched: Any = reference()
        watched._opt_called = True
        return step_method(watched, *args, **kwargs)

    watch: Any = step
    watch._wrapped_by_lr_sched = True
    optimizer.step = watch  # type: ignore[method-assign]


def has_stepped(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """Whether an optimizer has stepped since the last update."""
    state = _scaling_states(scaler).get(id(optimizer))
    return state is not None and state["stage"].name == "STEPPED"


def infinity_flags(scaler: torch.amp.GradScaler, optimizer: Any = None) -> list[torch.Tensor]:
    """The flags of infinite gradients, float tensors of one element: above 0 if there are any."""
    states = _scaling_states(scaler)
    chosen = states.values() if optimizer is None else [states.get(id(optimizer), {})]
    return [flag for state in chosen for flag in state.get("found_inf_per_device", {}).values()]


def scale_tensor(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The factor as a tensor; None before the first loss was multiplied with it."""
    return scaler._scale


# torchdata's `StatefulDataLoader` has a public way, but a user's plain `DataLoader` is no such.


def has_loader_iterator(loader: Any) -> bool:
    """Whether a loader with persistent workers has started them."""
    return loader._iterator is not None


def drop_loader_iterator(loader: Any) -> None:
    """Let a loader with persistent workers start new ones."""
    loader._iterator = None


def draw_order_now(batches: Any) -> None:
    """Let the sampler behind a loader's iterator draw now, not when the first batch is read."""
    indices = batches._sampler_iter
    # torchdata's samplers, which have a state, have drawn already.
    if not hasattr(indices, "state_dict"):
        # Taking the first index makes the sampler draw its order; the index is put back in front.
        batches._sampler_iter = itertools.chain(list(itertools.islice(indices, 1)), indices)


def requested_samples(sampler: Any) -> int | None:
    """The `num_samples` that a `RandomSampler` was given; the attribute fills in the length."""
    number: int | None = sampler._num_samples
    return number


_check_names()


@contextlib.contextmanager
def plain_data(allowed: Iterable[Any] = ()) -> Iterator[None]:
    """Let `torch.load` with ``weights_only=True`` read numpy's numbers and these classes, too.

    A learning rate out of ``np.logspace`` is one of numpy's, in DeepSpeed's files as in others.
    """
    import numpy as np

    reducers = {
        "_reconstruct": np.zeros(1).__reduce__()[0],
        "scalar": np.float64(0).__reduce__()[0],
    }
    # numpy 1 and 2 keep them in packages of different names, and a file has the name of its writer.
    named_reducers = [
        (reducer, f"numpy.{package_name}.multiarray.{reducer_name}")
        for reducer_name, reducer in reducers.items()
        for package_name in ("core", "_core")
    ]
    dtype_classes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    # Leaving the block takes its classes off the list, those too that the user had put there.
    user_globals = torch.serialization.get_safe_globals()
    own = {*named_reducers, np.ndarray, np.dtype, *dtype_classes, *allowed}.difference(user_globals)
    with torch.serialization.safe_globals(list(own)):
        yield
