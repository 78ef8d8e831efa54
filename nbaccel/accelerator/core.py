"""``Accelerator``: prepares what a training loop uses, and runs its steps on every process.

It decides nothing by itself: arguments become a request, the request and this process become a
plan, and the plan names the strategy and the precision that do the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel import _catalog
from nbaccel.abc.place import Place
from nbaccel.abc.precision import Precision
from nbaccel.abc.strategy import Strategy
from nbaccel.accelerator.arguments import Request, dynamo_of, refuse_unserved
from nbaccel.accelerator.comforts import Comforts
from nbaccel.accelerator.keeping import Keeping
from nbaccel.accelerator.peer_names import PeerNames
from nbaccel.accelerator.preparing import Preparing
from nbaccel.config import Configured, RunConfig
from nbaccel.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Handler,
    ProjectConfiguration,
)
from nbaccel.errors import ConfigError
from nbaccel.plan.training import Found, plan_training
from nbaccel.state import remember
from nbaccel.train import arrival
from nbaccel.train.collectives import Collectives
from nbaccel.train.optimizer import PreparedOptimizer
from nbaccel.train.trackers import find_trackers
from nbaccel.train.trees import leaves, slice_rows

__all__ = ["Accelerator"]

_NOTHING = contextlib.nullcontext()


class Accelerator(Preparing, Keeping, Comforts, PeerNames):
    """The training loop, on whatever there is.

    Without a launcher it trains on one device; inside `notebook_launcher`, `torchrun` or a SLURM
    job on as many as there are processes. The loop is the same::

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(batch[0]), batch[1])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    Args:
        device_placement: Whether models and batches are moved to the device.
        split_batches: Whether each batch of a loader is cut into a slice per process.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``; None takes what the launcher asked.
        gradient_accumulation_steps: Batches for one optimizer step; None takes what the launcher
            asked (``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``), else 1.
        cpu: Compute on the CPU even if there is a GPU.
        dataloader_config: How loaders are shared out.
        deepspeed_plugin: Shard models by DeepSpeed's ZeRO; in a notebook that nobody launched, in
            an environment of one process that is made for it.
        fsdp_plugin: Shard models by torch's ``fully_shard``.
        rng_types: Which random generators to synchronise when an epoch starts; None for the
            samplers' own.
        log_with: Trackers: ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow`` ..., ``all``, objects,
            or a list of these; one whose package is not installed is left out, with a warning.
        project_dir: Folder for checkpoints and logs.
        project_config: More about that folder.
        gradient_accumulation_plugin: More about accumulation.
        step_scheduler_with_optimizer: Whether schedulers step only when optimizers do.
        kwargs_handlers: Further settings, one object per class.
        deepspeed_plugins: Several by name; `prepare` goes by the first, until
            ``accelerator.state.select_deepspeed_plugin(name)`` says another.
        dynamo_backend: Backend of ``torch.compile`` for prepared models, ``no`` for none; None
            takes what the launcher asked (``ACCELERATE_DYNAMO_BACKEND``).
        dynamo_plugin: More about it.
        config: A `RunConfig`, or a picker; arguments win over it.

    Raises:
        ConfigError: Arguments are wrong or contradict each other.
        PlatformUnsupported: An argument asks for what this version does not serve.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Handler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        config: RunConfig | Configured | None = None,
    ) -> None:
        refuse_unserved(
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        dynamo = dynamo_of(dynamo_backend, dynamo_plugin)
        request = Request.of(
            mixed_precision=mixed_precision,
            cpu=cpu,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            split_batches=split_batches,
            dataloader_config=dataloader_config,
            project_dir=project_dir,
            project_config=project_config,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            kwargs_handlers=kwargs_handlers,
            config=config,
        )
        trackers = find_trackers(log_with, request.project.logging_dir)
        super().__init__(request, trackers=trackers, dynamo=dynamo, **_arrive(request))
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        remember(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # a copy would prepare for the same processes, and count for itself

    # --------------------------------------------------------------------- the step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, scaled for accumulation and fp16.

        Args:
            loss: A 0-d tensor, mean over the batch.
            **kwargs: Arguments of ``Tensor.backward``.
        """
        state = self.gradient_state
        steps = state.num_steps
        if self._progress is not None:
            self._progress.note(loss)
        if steps != 1:
            loss = loss / steps
        scaler = self._precision.scaler
        if scaler is not None:
            loss = scaler.scale(loss)
        self._strategy.backward(loss, sync=state.sync_gradients, **kwargs)

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Count one batch; gradients stay on their process until a group of batches is complete.

        Args:
            *models: The models that are trained in the block.

        Returns:
            A context for one batch.
        """
        state = self.gradient_state
        self._count_batch()
        if state.sync_gradients or state.sync_each_batch or self._place.is_alone:
            return _NOTHING
        if len(models) == 1:
            return self._strategy.no_sync(models[0])
        return self._no_sync(models)

    @contextlib.contextmanager
    def _no_sync(self, models: Iterable[nn.Module]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(self._strategy.no_sync(model))
            yield

    def _count_batch(self) -> None:
        state = self.gradient_state
        state.batches_in_group = 1 if state.sync_gradients else state.batches_in_group + 1
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients of backward passes in the block on their process."""
        with self._strategy.no_sync(model):
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce gradients in the block's backward, though the forwards ran under `no_sync`."""
        with self._strategy.sync_in_backward(model):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16's factor out of the gradients; what was done already is not done again.

        Args:
            optimizer: One prepared optimizer, or several; None for all.

        Raises:
            ConfigError: The group of batches is not complete yet.
        """
        scaler = self._precision.scaler
        if scaler is None or not scaler.is_enabled():
            return
        if not self.sync_gradients:
            raise ConfigError(
                f"Gradients were to be unscaled or clipped after batch {self.step} of a group of "
                f"{self.gradient_accumulation_steps}: those of later batches would be added in "
                f"another scale (fp16 multiplies the loss by {scaler.get_scale():.0f}). Clip "
                "under `if accelerator.sync_gradients:`."
            )
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            original = one.optimizer if isinstance(one, PreparedOptimizer) else one
            # torch knows, and raises at the second time; it has no public name for the question.
            stage = scaler._per_optimizer_states[id(original)]["stage"]
            if stage.name == "READY":
                scaler.unscale_(original)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a norm over the whole model.

        Args:
            parameters: Of a prepared model.
            max_norm: Largest norm to leave.
            norm_type: Which norm.

        Returns:
            The norm before, a 0-d tensor.
        """
        self.unscale_gradients()
        return self._strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut every element of the gradients to ``[-clip_value, clip_value]``.

        Raises:
            ConfigError: The strategy's engine holds the gradients.
        """
        if self._strategy.owns_precision:
            raise ConfigError(
                f"clip_grad_value_({clip_value}) cannot be had with strategy "
                f"{self.plan.strategy!r}: its engine holds the gradients, and clips by norm alone. "
                "Use clip_grad_norm_."
            )
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in the accelerator's precision inside the block (a loss, for example)."""
        with self._precision.autocast(autocast_handler):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let processes run out of batches at different times.

        Args:
            joinables: The prepared models that are trained in the block.
            even_batches: What the loaders do meanwhile; None leaves them as they are.

        Raises:
            ConfigError: The strategy cannot do it.
        """
        context = self._strategy.join(joinables)
        if context is None:
            raise ConfigError(
                f"join_uneven_inputs cannot be had with strategy {self.plan.strategy!r}: its "
                "forward passes need every process, so the longest would wait for ever. Keep "
                "even_batches=True."
            )
        before = [(loader, loader.even_batches) for loader in self._dataloaders]
        try:
            if even_batches is not None:
                for loader, _ in before:
                    loader.even_batches = even_batches
            with context:
                yield
        finally:
            for loader, value in before:
                loader.even_batches = value

    # --------------------------------------------------------------------- together

    def gather(self, tensor: Any) -> Any:
        """Join every process's tensors along their first dimension.

        Args:
            tensor: Tensors of shape ``[n, ...]``, equal on all processes, in containers.

        Returns:
            The same with tensors of shape ``[num_processes * n, ...]``.

        Raises:
            CollectiveMismatch: Shapes or dtypes differ; it lists them by process.
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the samples that fill up the last batch.

        Args:
            input_data: Tensors in containers, or a list of picklable objects.
            use_gather_object: Send tensors as objects, whatever their shapes.

        Returns:
            What the processes computed for each sample of the dataset, once.
        """
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves(input_data))
        keep = self._rows_to_keep()
        if use_gather_object or not has_tensors:
            objects: Any = self._collectives.gather_object(input_data)
            # Alone it is what was given, which need not be a list.
            return objects[:keep] if isinstance(objects, Sequence) else objects
        gathered = self._collectives.gather(input_data)
        return gathered if keep is None else slice_rows(gathered, slice(keep))

    def _rows_to_keep(self) -> int | None:
        state = self.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine every process's tensors element by element: ``sum``, ``mean`` or ``max``."""
        return self._collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Make every process's tensors equally long in one dimension, so they can be gathered."""
        return self._collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` shows to all processes."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last look, which takes it down."""
        mine, self._trigger = self._trigger, False
        return any(self._collectives.answers("check_trigger", mine))


def _arrive(request: Request) -> dict[str, Any]:
    """Join the others; everything that can be refused is refused before that.

    Returns:
        Arguments of `Facts`.
    """
    device = arrival.find_device(arrival.local_rank(), cpu=request.asked.cpu)
    plan_training(request.asked, _found(Place(device=device)))
    _catalog.precision(request.asked.mixed_precision)
    place = arrival.arrive(cpu=request.asked.cpu, settings=request.handlers.process_group)
    plan = plan_training(request.asked, _found(place))
    owned = _catalog.strategy(plan.strategy).owns_precision
    precision = _precision(request, place, "no" if owned else request.asked.mixed_precision)
    return {
        "place": place,
        "plan": plan,
        "precision": precision,
        "strategy": _strategy(request, place, plan.strategy, precision),
        "collectives": Collectives(place, arrival.timeout_s(request.handlers.process_group)),
    }


def _found(place: Place) -> Found:
    device = place.device
    gpu = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Found(
        device=device.type,
        device_name=str(device),
        world_size=place.world_size,
        rank=place.rank,
        backend=place.backend,
        can_meet=arrival.can_meet(),
        compute_capability=gpu,
    )


def _precision(request: Request, place: Place, name: str) -> Precision:
    make: Callable[..., Precision] = _catalog.precision(name)
    return make(place.device, request.handlers.autocast, request.handlers.scaler)


def _strategy(request: Request, place: Place, name: str, precision: Precision) -> Strategy:
    settings = {
        "ddp": (request.handlers.ddp,),
        "fsdp": (request.fsdp, precision),
        "deepspeed": (request.deepspeed, request.asked),
    }
    return _catalog.strategy(name)(place, *settings.get(name, ()))
