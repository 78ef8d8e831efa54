"""``TrainingRun``: what was decided for a run, and what does its work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nbaccel.accelerator.arguments import Request
from nbaccel.base.log import write_notice
from nbaccel.config import Fp8Config
from nbaccel.config.capabilities import device_row, precision_row
from nbaccel.config.handlers import TorchDynamoPlugin
from nbaccel.plan import registry
from nbaccel.plan.contracts.device import Device
from nbaccel.plan.contracts.training import Place, Precision, PrecisionSettings, Strategy
from nbaccel.plan.training_plan import (
    ProcessFacts,
    TrainingPlan,
    choose_fp8,
    is_emulated,
    plan_training,
    recipe_of,
)
from nbaccel.train import distributed
from nbaccel.train.collectives import Collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What all parts of one `Accelerator` are given; it does not change while training.

    Attributes:
        request: The arguments, the environment and the configuration, made one.
        place: This process among the others.
        initial_plan: The decisions that need no model, each with its reason.
        strategy: How the processes train a model together.
        precision: The number format that layers compute in.
        collectives: Collective operations over all processes.
        dynamo: How prepared models are compiled, if at all.
    """

    request: Request
    place: Place
    initial_plan: TrainingPlan
    strategy: Strategy
    precision: Precision
    collectives: Collectives
    dynamo: TorchDynamoPlugin

    @classmethod
    def begin(cls, request: Request, dynamo: TorchDynamoPlugin) -> TrainingRun:
        """Join the process group, and choose strategy and precision."""
        asked = request.asked
        handlers = request.handlers
        device_backend = registry.device(asked.device or distributed.name_device())
        expected_place = Place(
            device=device_backend.torch_device(distributed.local_rank()),
            device_row=device_backend.name,
            world_size=distributed.world_size(),
        )
        # Planned twice: a refusal after the processes have met would leave the others waiting; the
        # backend, which the second plan explains, is known only then.
        expected_facts = _observed_facts(expected_place)
        plan_training(asked, expected_facts)
        # Looked up for its refusal and dtype; the object is built for the device that was found.
        precision_class = registry.precision(
            asked.mixed_precision,
            asked.fp8,
            expected_facts.device,
            expected_facts.compute_capability,
        )
        note = _downcast(request, precision_class, device_backend)
        place = distributed.init_process(
            device=device_backend.name, settings=handlers.process_group
        )
        plan = plan_training(asked, _observed_facts(place))
        plan = replace(plan, warnings=(*plan.warnings, *note))
        strategy_class = registry.strategy(plan.strategy)
        # An engine casts models and scales losses itself: doing both would scale twice.
        is_left_to_engine = strategy_class.owns_precision and not precision_class.converts_layers
        precision_name = "no" if is_left_to_engine else asked.mixed_precision
        precision = _build_precision(request, place, precision_name, plan)
        strategy_settings = request.settings_for(plan.strategy)
        return cls(
            request=request,
            place=place,
            initial_plan=plan,
            strategy=strategy_class.build(
                place, strategy_settings, precision=precision, asked=asked
            ),
            precision=precision,
            collectives=Collectives(place, distributed.timeout_s(handlers.process_group)),
            dynamo=dynamo,
        )

    @property
    def plan(self) -> TrainingPlan:
        """The decisions so far, with those that followed from the prepared models."""
        plan = self.initial_plan
        choices = (*self.precision.choices, *self.strategy.choices)
        return replace(plan, choices=(*plan.choices, *choices))


def _downcast(request: Request, precision: type[Precision], device: Device) -> tuple[str, ...]:
    """Let floats be shorter on the device, where that was asked for; what is to be said of it."""
    if not request.downcast_bf16:
        return ()
    reason = (
        device.downcast_floats()
        if precision.dtype == torch.bfloat16
        else f"mixed_precision={precision.name!r} does not compute in bfloat16"
    )
    if not reason:
        return ()
    note = f"downcast_bf16=True has no effect: {reason}."
    if distributed.rank() == 0:
        write_notice(f"nbaccel: {note}\n")
    return (note,)


def _observed_facts(place: Place) -> ProcessFacts:
    return ProcessFacts(
        device=place.device_name,
        device_name=str(place.device),
        world_size=place.world_size,
        rank=place.rank,
        backend=place.backend,
        can_join=distributed.can_join(),
        compute_capability=registry.device(place.device_name).capability(place.device),
    )


def _build_precision(
    request: Request, place: Place, precision_name: str, plan: TrainingPlan
) -> Precision:
    facts = _observed_facts(place)
    fp8 = request.asked.fp8
    choice = choose_fp8(fp8, device_row(facts.device), facts.compute_capability)
    has_backends = precision_row(precision_name).has_backends
    if has_backends and choice.row is not None and choice.row.recipes:
        fp8 = (fp8 or Fp8Config()).changed(recipe=recipe_of(fp8 or Fp8Config(), choice.row))
    precision_settings = PrecisionSettings(
        device=place.device,
        autocast=request.handlers.autocast,
        scaler=request.handlers.scaler,
        fp8=fp8,
        emulates_fp8=choice.row is not None and is_emulated(choice.row, facts.compute_capability),
        world_size=place.world_size,
        is_main=place.is_main,
        accumulation_steps=plan.accumulation_steps,
        is_sharded=registry.strategy(plan.strategy).shards_parameters,
        handlers=request.handlers.given,
    )
    precision_class = registry.precision(
        precision_name, request.asked.fp8, facts.device, facts.compute_capability
    )
    return precision_class.build(precision_settings)
