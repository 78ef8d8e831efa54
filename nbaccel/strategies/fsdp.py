"""``FsdpStrategy``: every process holds a shard of weights, gradients and optimizer state.

[Note: the same start] torch's `fully_shard` lets every process cut its shard out of its own copy of
the model. Processes that built it from different seeds would train a mixture of models, so process
0 then sends every process its shard. (Broadcasting the whole model, as DDP does, would have every
process write all of it, whose pages it shares with the others until then.) Where all processes see
the same bytes of the same files, such as weights that were loaded from a checkpoint and not changed
since, nothing is sent: each has read its own shard, and gives back the pages of the rest.

[Note: who is whose] `fully_shard` puts new parameters into the model, while optimizers hold the old
ones and would train tensors that the model does not use. A table from old to new, keyed weakly by
the old, corrects them, whether they are prepared with their model or later.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.weak import WeakTensorKeyDictionary

from nbaccel.base import mapped_files, torch_private
from nbaccel.base.errors import ConfigError, PlatformUnsupported
from nbaccel.base.trees import names_by_tensor
from nbaccel.config.handlers import FullyShardedDataParallelPlugin
from nbaccel.plan.contracts.training import (
    Bundle,
    Place,
    Precision,
    SaidBySettings,
    Strategy,
    TrainingRequest,
)
from nbaccel.strategies import optimizer_shards
from nbaccel.strategies.model_blocks import choose_modules, ignored_parameters
from nbaccel.strategies.sharded_checkpoints import OwnPartCheckpoints

# By exact type: a subclass such as a DTensor may have no memory of its own.
_WITH_ADDRESS = (torch.Tensor, nn.Parameter)

# Both spellings, because Accelerate accepts its own short names and torch's.
_DTYPES_BY_NAME = {
    "no": None,
    "fp32": None,
    "float32": None,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


class FsdpStrategy(OwnPartCheckpoints, Strategy):
    """Torch's ``fully_shard`` over all processes of the run; buffers stay whole in each."""

    name: ClassVar[str] = "fsdp"
    shards_parameters: ClassVar[bool] = True

    def __init__(
        self, place: Place, settings: FullyShardedDataParallelPlugin, precision: Precision
    ) -> None:
        super().__init__(place)
        # It needs events of CPU streams: https://github.com/pytorch/pytorch/pull/145935
        if place.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise PlatformUnsupported(
                f"fsdp_plugin needs torch 2.7 or newer on a CPU: this is {torch.__version__}, "
                "whose fully_shard trains on GPUs only. Update torch, or leave fsdp_plugin out."
            )
        # Functional collectives over gloo read a GPU's memory as the host's: SIGSEGV in torch 2.11.
        if place.device.type == "cuda" and place.backend == "gloo" and not place.is_alone:
            raise PlatformUnsupported(
                f"fsdp_plugin was given where {place.world_size} processes talk by gloo about "
                f"tensors on {place.device} (workers that share a GPU do): torch would kill the "
                "process. Launch at most one process per GPU, with NCCL, or leave fsdp_plugin out: "
                "a GPU that is shared has no more memory by sharding."
            )
        self._settings = settings
        self._inner, self._root = _mixed_policies(settings.mixed_precision_policy, precision.dtype)
        # Not a WeakKeyDictionary: it compares keys with ==, for tensors element by element.
        self._became = WeakTensorKeyDictionary()
        self._syncs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    @classmethod
    def build(
        cls, place: Place, settings: Any, *, precision: Precision, asked: TrainingRequest
    ) -> FsdpStrategy:
        if place.device.type == "xla":
            raise ConfigError(
                f"{settings!r} was given on {place.device}: torch_xla has no process group that "
                "shards tensors, and training would fail in its first step. Use torch_tpu."
            )
        return cls(place, settings, precision)

    @classmethod
    def said_by(cls, settings: FullyShardedDataParallelPlugin) -> SaidBySettings:
        return SaidBySettings(writes_shards=settings.writes_shards)

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; a collective."""
        for model in bundle.models:
            if not isinstance(model, FSDPModule) and any(True for _ in model.parameters()):
                self._shard(model)
        for optimizer in bundle.optimizers:
            optimizer_shards.follow_parameters(optimizer, self._became)
        return bundle

    @cached_property
    def _mesh(self) -> DeviceMesh:
        shape = (self.place.world_size,)
        return init_device_mesh(self.place.device.type, shape, mesh_dim_names=("shard",))

    def _shard(self, model: nn.Module) -> None:
        _refuse_meta_tensors(model)
        ignored_set = ignored_parameters(model, self._settings)
        chosen_modules = choose_modules(model, self._settings, ignored_set)
        old_parameters = dict(model.named_parameters(remove_duplicate=False))
        # Before `fully_shard`, after which the old parameters have no memory.
        old_spans = {id(parameter): _span_of(parameter) for parameter in model.parameters()}
        equal = self._starts_equal(old_spans.values())
        # Innermost first: an outer `fully_shard` takes only the parameters that no inner one holds.
        for module in chosen_modules:
            if self._settings.activation_checkpointing:
                torch_private.recompute_activations(module)
            own_spans = [old_spans.get(id(parameter)) for parameter in module.parameters()]
            fully_shard(module, mp_policy=self._inner, **self._arguments(ignored_set))
            if equal:
                _give_back(own_spans)
        fully_shard(model, mp_policy=self._root, **self._arguments(ignored_set))
        new_parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, old_parameter in old_parameters.items():
            # A tied parameter has several names, but the collective below must run once for it.
            if new_parameters[name] is not old_parameter and old_parameter not in self._became:
                self._became[old_parameter] = new_parameters[name]
                if not equal:
                    optimizer_shards.refill_parameter(new_parameters[name], old_parameter)
                _give_back([old_spans[id(old_parameter)]])
        # In the model's order: a set has another one in every process.
        unsharded = [parameter for parameter in model.parameters() if parameter in ignored_set]
        for tensor in (*unsharded, *model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def _starts_equal(self, old_spans: Iterable[tuple[int, int] | None]) -> bool:
        own_places = mapped_files.same_bytes(span for span in old_spans if span != (0, 0))
        all_places: list[Any] = [None] * self.place.world_size
        # Never equal on two nodes, whose files may differ: then process 0 sends.
        # The mesh's group: in one process without a launcher it is the mesh that creates one.
        dist.all_gather_object(all_places, own_places, group=self._mesh.get_group())
        return own_places is not None and all(places == own_places for places in all_places)

    def _arguments(self, ignored_set: frozenset[nn.Parameter]) -> dict[str, Any]:
        offloads_to_host = self._settings.cpu_offload and self.place.device.type != "cpu"
        arguments: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": self._settings.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if offloads_to_host else OffloadPolicy(),
        }
        if ignored_set:
            # Passed only where it is needed, because torch 2.6 does not have the argument.
            if "ignored_params" not in inspect.signature(fully_shard).parameters:
                raise PlatformUnsupported(
                    f"ignored_modules={self._settings.ignored_modules!r} needs torch 2.7 or "
                    f"newer; this is {torch.__version__}, which would shard them. Update torch."
                )
            arguments["ignored_params"] = set(ignored_set)
        return arguments

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`Strategy.no_sync`; whole gradients are kept meanwhile, which takes memory."""
        return self._syncing(model, False)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._syncing(model, True)

    def join(self, models: Iterable[nn.Module], **options: Any) -> None:
        """See :meth:`Strategy.join`; always None: each process needs the others' shards."""

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """See :meth:`Strategy.clip_grad_norm`; a collective."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with_gradients = [parameter for parameter in given if parameter.grad is not None]
        # torch's kernels for many tensors take sharded ones or plain ones, never both in one list.
        groups = [
            [one for one in with_gradients if isinstance(one, DTensor) == is_sharded]
            for is_sharded in (True, False)
        ]
        norms = [_norm_of_gradients(group, norm_type) for group in groups if group]
        if not norms:
            # As torch's `clip_grad_norm_` for parameters without gradients.
            return torch.tensor(0.0)
        # Offloaded gradients are in host memory, others on the device.
        stacked_norms = torch.stack([norm.to(norms[0].device) for norm in norms])
        total_norm: torch.Tensor = torch.linalg.vector_norm(stacked_norms, norm_type)
        for group in filter(None, groups):
            clip_grads_with_norm_(group, max_norm, total_norm)
        return total_norm

    @contextmanager
    def _syncing(self, model: nn.Module, syncs_gradients: bool) -> Iterator[None]:
        if not isinstance(model, FSDPModule):
            yield
            return
        # Kept here, because torch has a method that sets it and none that returns it.
        synced_before = self._syncs.get(model, True)
        self._syncs[model] = syncs_gradients
        model.set_requires_gradient_sync(syncs_gradients)
        try:
            yield
        finally:
            self._syncs[model] = synced_before
            model.set_requires_gradient_sync(synced_before)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """See :meth:`Strategy.model_state`; in host memory, empty but on process 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        # Gathering is a collective, so all have called it; process 0 alone keeps the result.
        if not self.place.is_main:
            return {}
        # Tied tensors were gathered once per name; files keep them once if they are one object.
        for names in names_by_tensor(model.named_parameters(remove_duplicate=False)).values():
            state |= {name: state[names[0]] for name in names if {name, names[0]} <= state.keys()}
        whole_by_id = {id(value): _whole(value) for value in state.values()}
        return {tensor_name: whole_by_id[id(value)] for tensor_name, value in state.items()}

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> None:
        settings = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **options)
        set_model_state_dict(model, dict(state) if self.place.is_main else {}, options=settings)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See :meth:`Strategy.optimizer_state`; in host memory, empty but on process 0."""
        return optimizer_shards.gather_optimizer_state(optimizer, keep=self.place.is_main)

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """See :meth:`Strategy.load_optimizer_state`; only process 0 must pass one."""
        optimizer_shards.scatter_optimizer_state(optimizer, state, source=self.place.is_main)


def _span_of(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Address and number of bytes of a tensor in host memory, zeros for an empty one; else None."""
    if not parameter.numel():
        return 0, 0
    if parameter.device.type != "cpu" or type(parameter) not in _WITH_ADDRESS:
        return None
    return (parameter.data_ptr(), parameter.nbytes) if parameter.is_contiguous() else None


def _give_back(spans: Iterable[tuple[int, int] | None]) -> None:
    for span in spans:
        if span is not None and span[1]:
            # A parameter may share its memory with another that is not sharded.
            mapped_files.drop_pages(*span, keep_written=True)


def _mixed_policies(
    policy: Any, dtype: torch.dtype | None
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """For submodules and for the model itself, which returns float32 unless the user says more."""
    if isinstance(policy, Mapping):
        dtypes = {name: _policy_dtype(value) for name, value in policy.items()}
        policy = MixedPrecisionPolicy(**dtypes)
    if isinstance(policy, MixedPrecisionPolicy):
        return policy, policy
    compute_dtype = dtype if policy is None else _policy_dtype(policy)
    if compute_dtype is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    # Sums over many processes lose digits in a short format, so gradients are reduced in float32.
    inner_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    return inner_policy, dataclasses.replace(inner_policy, output_dtype=torch.float32)


def _policy_dtype(dtype: Any) -> Any:
    if not isinstance(dtype, str):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in _DTYPES_BY_NAME:
        raise ConfigError(
            f"mixed_precision_policy names {dtype!r}, which is no format that layers "
            f"compute in. Give one of {', '.join(_DTYPES_BY_NAME)}, or a MixedPrecisionPolicy."
        )
    return _DTYPES_BY_NAME[name]


def _refuse_meta_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{type(model).__name__}.{name} is on the meta device: it has no values to shard. "
                "Load the weights first: load_checkpoint_in_model(model, path) maps them, and each "
                "process reads its shard. (Workers share one copy of a model that a launch gets.)"
            )


def _whole(value: Any) -> Any:
    """A gathered tensor without the padding of uneven shards, which would be written to files."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def _norm_of_gradients(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total_norm: torch.Tensor = get_total_norm(gradients, norm_type)
    # Each process has the norm of its own shards; `full_tensor` combines them, in a collective.
    return total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
