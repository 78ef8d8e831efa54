"""``ZeroConfig``: a DeepSpeed configuration as an object, and as the JSON that DeepSpeed reads.

What ``zero_optimization`` holds in JSON are settings like any other here. A key that nbaccel does
not name is kept in ``extra``, so a round trip loses nothing; whether DeepSpeed knows it is the
business of `checking`, which asks DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from nbaccel.config.json_text import plain_object, read_file
from nbaccel.config.mistakes import shown
from nbaccel.config.plain import whole
from nbaccel.deepspeed.kinds import (
    FloatFormat,
    Kind,
    Number,
    Steps,
    Table,
    Text,
    Truth,
    Whole,
    WholeFromOne,
)
from nbaccel.deepspeed.section import Holds, Section, merged
from nbaccel.deepspeed.sections import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    Comet,
    CommsLogger,
    CsvMonitor,
    DataTypes,
    FlopsProfiler,
    Fp16,
    LeafModules,
    OffloadOptimizer,
    OffloadParam,
    OptimizerSection,
    SchedulerSection,
    TensorBoard,
    Timers,
    TorchAutocast,
    Wandb,
)
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ZERO", "ZERO_KEYS", "ZeroConfig", "old_forms"]

ZERO = "zero_optimization"

_offload_optimizer = Holds(OffloadOptimizer, "device")
_offload_param = Holds(OffloadParam, "device")
_leaf = Holds(LeafModules)
_optimizer = Holds(OptimizerSection, "type")
_scheduler = Holds(SchedulerSection, "type")
_fp16 = Holds(Fp16)
_bf16 = Holds(Bf16)
_autocast = Holds(TorchAutocast)
_types = Holds(DataTypes)
_aio = Holds(Aio)
_activations = Holds(ActivationCheckpointing)
_checkpoint = Holds(Checkpoint)
_flops = Holds(FlopsProfiler)
_comms = Holds(CommsLogger)
_tensorboard = Holds(TensorBoard)
_wandb = Holds(Wandb)
_csv = Holds(CsvMonitor)
_comet = Holds(Comet)
_timers = Holds(Timers)

Stage = Annotated[
    Literal[0, 1, 2, 3, "auto"] | None,
    BeforeValidator(whole),
    Kind(
        must="one of 0, 1, 2, 3",
        do="Give 0 to shard nothing",
    ),
]


class _Zero(Section):
    """What JSON holds under ``zero_optimization``."""

    stage: Stage = Field(
        None, description="ZeRO stage; 1 shards the optimizer, 2 also gradients, 3 also weights."
    )
    offload_optimizer: Annotated[
        OffloadOptimizer | None, _offload_optimizer, BeforeValidator(_offload_optimizer.read)
    ] = Field(None, description="Where optimizer state lives (stages 1 to 3).")
    offload_param: Annotated[
        OffloadParam | None, _offload_param, BeforeValidator(_offload_param.read)
    ] = Field(None, description="Where parameters live (stage 3).")
    overlap_comm: Truth = Field(None, description="Reduce gradients while others are computed.")
    contiguous_gradients: Truth = Field(None, description="Gradients in one buffer.")
    reduce_scatter: Truth = Field(None, description="Reduce-scatter in place of all-reduce.")
    reduce_bucket_size: WholeFromOne = Field(
        None, description="Elements of gradients reduced at a time; memory against calls."
    )
    use_multi_rank_bucket_allreduce: Truth = Field(
        None, description="One all-reduce for the buckets of several ranks."
    )
    allgather_partitions: Truth = Field(None, description="All-gather in place of broadcasts.")
    allgather_bucket_size: Whole = Field(None, description="Elements gathered at a time.")
    round_robin_gradients: Truth = Field(
        None, description="Ranks take turns in copying gradients to the host (offload)."
    )
    sub_group_size: Whole = Field(None, description="Elements the optimizer steps at a time.")
    stage3_max_live_parameters: Whole = Field(
        None, description="Elements a device holds gathered before it releases some."
    )
    stage3_max_reuse_distance: Whole = Field(
        None, description="Elements within which a parameter used again is not released."
    )
    stage3_prefetch_bucket_size: Whole = Field(None, description="Elements fetched ahead of use.")
    stage3_param_persistence_threshold: Whole = Field(
        None, description="Parameters below so many elements are not sharded."
    )
    stage3_model_persistence_threshold: Whole = Field(
        None, description="Elements that may stay unsharded in all."
    )
    stage3_gather_16bit_weights_on_model_save: Truth = Field(
        None, description="Gather the weights for save_16bit_model; without, it writes nothing."
    )
    stage3_module_granularity_threshold: Whole = Field(
        None, description="Modules finer than so many elements are fetched as one."
    )
    stage3_use_all_reduce_for_fetch_params: Truth = Field(
        None, description="Fetch parameters by all-reduce: less work on the host."
    )
    stage3_allgather_sequential: Truth = Field(
        None, description="Gather parameters one by one: less memory."
    )
    ignore_unused_parameters: Truth = Field(None, description="Go on where some get no gradient.")
    compute_grad_norm: Truth = Field(None, description="Compute the global norm (stages 1, 2).")
    load_from_fp32_weights: Truth = Field(None, description="Master weights from the checkpoint.")
    elastic_checkpoint: Truth = Field(None, description="Checkpoints of the old elastic form.")
    parameter_alignment: Truth = Field(None, description="Align parameters to 16 bytes.")
    legacy_stage1: Truth = Field(None, description="The old stage 1.")
    zero_hpz_partition_size: Whole = Field(
        None, description="Ranks that hold a second copy of the shards (ZeRO++)."
    )
    zero_quantized_weights: Truth = Field(None, description="Gather weights in 8 bits (ZeRO++).")
    zero_quantized_nontrainable_weights: Truth = Field(
        None, description="Keep frozen weights quantized (ZeRO++)."
    )
    zero_quantized_gradients: Truth = Field(
        None, description="Reduce gradients in 4 bits (ZeRO++)."
    )
    memory_efficient_linear: Truth = Field(None, description="Linear layers that keep less.")
    pipeline_loading_checkpoint: Truth = Field(None, description="Load in a pipeline (stage 3).")
    override_module_apply: Truth = Field(None, description="Gather weights in Module.apply.")
    log_trace_cache_warnings: Truth = Field(None, description="Warn where the order changes.")
    enable_sanity_checks: Truth = Field(None, description="DeepSpeed's checks of itself.")
    save_muon_momentum_buffer_in_memory: Truth = Field(
        None, description="Muon's momentum in memory though the rest is on nvme."
    )
    zenflow: Table = Field(None, description="ZenFlow: the important gradients first.")
    leaf_module: Annotated[LeafModules | None, _leaf, BeforeValidator(_leaf.read)] = Field(
        None, description="Modules gathered as one (stage 3)."
    )


ZERO_KEYS = tuple(name for name in _Zero.model_fields if name != "extra")


class ZeroConfig(_Zero):
    """A DeepSpeed configuration.

    Example:
        >>> ZeroConfig(stage=2, offload_optimizer="cpu", train_batch_size=8).to_json()
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 8}'
    """  # noqa: E501 - one line of output

    train_batch_size: WholeFromOne = Field(
        None, description="Samples per optimizer step, over all processes."
    )
    train_micro_batch_size_per_gpu: WholeFromOne = Field(
        None, description="Samples per process and forward pass."
    )
    gradient_accumulation_steps: WholeFromOne = Field(
        None, description="Forward passes per optimizer step."
    )
    gradient_clipping: Number = Field(
        None, description="Largest norm of the gradients; 0 does not clip. DeepSpeed's own is 1."
    )
    optimizer: Annotated[OptimizerSection | None, _optimizer, BeforeValidator(_optimizer.read)] = (
        Field(None, description="The optimizer that DeepSpeed makes.")
    )
    scheduler: Annotated[SchedulerSection | None, _scheduler, BeforeValidator(_scheduler.read)] = (
        Field(None, description="The learning rate schedule that DeepSpeed makes.")
    )
    fp16: Annotated[Fp16 | None, _fp16, BeforeValidator(_fp16.read)] = Field(
        None, description="Training in float16."
    )
    bf16: Annotated[Bf16 | None, _bf16, BeforeValidator(_bf16.read)] = Field(
        None, description="Training in bfloat16."
    )
    torch_autocast: Annotated[TorchAutocast | None, _autocast, BeforeValidator(_autocast.read)] = (
        Field(None, description="Mixed precision by torch.autocast.")
    )
    data_types: Annotated[DataTypes | None, _types, BeforeValidator(_types.read)] = Field(
        None, description="Number formats of single things."
    )
    communication_data_type: FloatFormat = Field(None, description="Format gradients travel in.")
    seq_parallel_communication_data_type: FloatFormat = Field(
        None, description="The same, among ranks that share a sequence."
    )
    prescale_gradients: Truth = Field(None, description="Divide gradients before the reduction.")
    gradient_predivide_factor: Number = Field(None, description="By what they are divided then.")
    gradient_allreduce_op: Text = Field(None, description="mean, or sum (below stage 3).")
    disable_allgather: Truth = Field(None, description="Broadcast in place of all-gather.")
    managed_gradient_accumulation: Truth = Field(None, description="DeepSpeed counts the passes.")
    sequence_parallel_size: WholeFromOne = Field(None, description="Ranks that share a sequence.")
    zero_allow_untested_optimizer: Truth = Field(None, description="ZeRO with any optimizer.")
    zero_force_ds_cpu_optimizer: Truth = Field(
        None, description="Refuse an offloaded optimizer that is not DeepSpeed's."
    )
    aio: Annotated[Aio | None, _aio, BeforeValidator(_aio.read)] = Field(
        None, description="How the disk is read and written (nvme)."
    )
    activation_checkpointing: Annotated[
        ActivationCheckpointing | None, _activations, BeforeValidator(_activations.read)
    ] = Field(None, description="How activations are kept for the backward pass.")
    checkpoint: Annotated[Checkpoint | None, _checkpoint, BeforeValidator(_checkpoint.read)] = (
        Field(None, description="How checkpoints are written and read.")
    )
    steps_per_print: Steps = Field(None, description="Steps between two lines of progress.")
    wall_clock_breakdown: Truth = Field(
        None, description="Log the time of forward, backward, step."
    )
    memory_breakdown: Truth = Field(None, description="Log the memory in use.")
    dump_state: Truth = Field(None, description="Print the engine's state at the start.")
    log_level: Text = Field(None, description="DeepSpeed's log level: debug, info, warning, ...")
    flops_profiler: Annotated[FlopsProfiler | None, _flops, BeforeValidator(_flops.read)] = Field(
        None, description="Counting what the model computes."
    )
    comms_logger: Annotated[CommsLogger | None, _comms, BeforeValidator(_comms.read)] = Field(
        None, description="Logging of communication."
    )
    tensorboard: Annotated[TensorBoard | None, _tensorboard, BeforeValidator(_tensorboard.read)] = (
        Field(None, description="Logging to TensorBoard.")
    )
    wandb: Annotated[Wandb | None, _wandb, BeforeValidator(_wandb.read)] = Field(
        None, description="Logging to Weights & Biases."
    )
    csv_monitor: Annotated[CsvMonitor | None, _csv, BeforeValidator(_csv.read)] = Field(
        None, description="Logging to CSV files."
    )
    comet: Annotated[Comet | None, _comet, BeforeValidator(_comet.read)] = Field(
        None, description="Logging to Comet."
    )
    timers: Annotated[Timers | None, _timers, BeforeValidator(_timers.read)] = Field(
        None, description="Timers."
    )
    dataloader_drop_last: Truth = Field(None, description="Drop the last incomplete batch.")
    disable_python_gc: Truth = Field(None, description="Collect no garbage while training.")

    @property
    def zero_stage(self) -> int:
        """The stage as DeepSpeed takes it: 0 where none is given."""
        return self.stage if isinstance(self.stage, int) else 0

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read a DeepSpeed configuration; keys without a field are kept in ``extra``.

        Old forms that DeepSpeed still reads (``bfloat16``, ``cpu_offload``, ...) become today's.

        Args:
            settings: Keys and values, as in DeepSpeed's JSON.

        Returns:
            The configuration.

        Raises:
            ConfigError: Values are wrong, all of them listed.
        """
        settings, _ = old_forms(plain_object(settings, "A ZeroConfig"))
        flat = {key: value for key, value in settings.items() if key != ZERO}
        # A setting of `zero_optimization` at the top level is not one: DeepSpeed ignores it there.
        extra = {key: flat.pop(key) for key in tuple(flat) if key in ZERO_KEYS}
        zero = settings.get(ZERO)
        if isinstance(zero, dict):
            flat |= {key: zero[key] for key in ZERO_KEYS if key in zero}
            rest = {key: value for key, value in zero.items() if key not in ZERO_KEYS}
            if rest or not zero:
                extra[ZERO] = rest
        elif zero is not None:
            raise ConfigError(
                f"{ZERO} must be a section: got {shown(zero)}. It holds the stage and what goes "
                'with it. Write for example {"stage": 2}.'
            )
        try:
            return super().from_dict(
                {**flat, "extra": merged(dict(flat.get("extra") or {}), extra)}
            )
        except ConfigError as error:
            raise ConfigError(*map(_placed, error.mistakes)) from error

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a file with a DeepSpeed configuration.

        Args:
            path: A JSON file.

        Returns:
            The configuration.

        Raises:
            ConfigError: There is no such file, or what it holds is wrong.
        """
        return cls.from_dict(read_file(path))

    def to_dict(self) -> dict[str, Any]:
        """The configuration as DeepSpeed reads it, without what is left to DeepSpeed.

        Returns:
            What ``deepspeed.initialize(config=...)`` takes; changing it changes nothing here.
        """
        given = dict(self._given())
        zero = {key: given.pop(key) for key in ZERO_KEYS if key in given}
        return merged({**({ZERO: zero} if zero else {}), **given}, self.extra)

    def to_file(self, path: str | Path) -> None:
        """Write the configuration as a JSON file.

        Args:
            path: Where; a file there is replaced.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def old_forms(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Today's form of what DeepSpeed still reads in an older one.

    Args:
        settings: A DeepSpeed configuration.

    Returns:
        The same configuration in today's form, and a sentence for each change.
    """
    new = dict(settings)
    said: list[str] = []

    def moved(holder: dict[str, Any], old: str, key: str, value: Any) -> None:
        del holder[old]
        holder.setdefault(key, value)
        said.append(f"{old} is an old form: write {key}={holder[key]!r}.")

    if "bfloat16" in new:
        moved(new, "bfloat16", "bf16", new["bfloat16"])
    if isinstance(new.get(ZERO), bool):
        new[ZERO] = {"stage": int(new[ZERO])}
        said.append(f"{ZERO} was true or false in an old form: write {new[ZERO]!r}.")
    if isinstance(new.get(ZERO), dict):
        zero = new[ZERO] = dict(new[ZERO])
        for old, key in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            if isinstance(zero.get(old), bool):
                moved(zero, old, key, {"device": "cpu"} if zero[old] else {"device": "none"})
        old = "stage3_gather_fp16_weights_on_model_save"
        if old in zero:
            moved(zero, old, "stage3_gather_16bit_weights_on_model_save", zero[old])
        for key in [name for name in ZERO_KEYS if name.startswith("stage3_")]:
            if key.removeprefix("stage3_") in zero:
                moved(zero, key.removeprefix("stage3_"), key, zero[key.removeprefix("stage3_")])
    if isinstance(new.get("aio"), dict) and "thread_count" in new["aio"]:
        # DeepSpeed's documentation has the old name still, and DeepSpeed ignores it.
        aio = new["aio"] = dict(new["aio"])
        moved(aio, "thread_count", "intra_op_parallelism", aio["thread_count"])
    return new, tuple(said)


def _placed(mistake: str) -> str:
    """A mistake that begins with its key, with the section in front that JSON has it in."""
    key = mistake.partition(" ")[0].partition(".")[0]
    return f"{ZERO}.{mistake}" if key in ZERO_KEYS else mistake
