"""``advise``: the ways to train with DeepSpeed, by estimates and, with `try_it`, by real steps."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import re
import resource
import signal
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from nbaccel.base import env
from nbaccel.base.atomic import nearest_folder
from nbaccel.base.errors import ConfigError, NbaccelError, WorkerFailed
from nbaccel.base.trees import map_tensors
from nbaccel.base.units import count_noun, format_bytes, parse_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row
from nbaccel.config.deepspeed_document import BATCH_SIZES, engine_config
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import put_at, value_at
from nbaccel.deepspeed import library
from nbaccel.deepspeed.auto_values import TrainingFacts, resolve_auto
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.engines import make_engine
from nbaccel.deepspeed.form import DeepSpeedForm
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig, load_settings
from nbaccel.deepspeed.zero_memory import BATCH_KEY, NVME_PATHS, nvme_folders
from nbaccel.memory.activations import call, loss_of, resized
from nbaccel.memory.estimate import (
    MemoryEstimate,
    paragraphs,
    refuse_unsized,
    table_html,
    table_lines,
)
from nbaccel.memory.memory_model import MemoryLimits, MemoryModel
from nbaccel.memory.settings_form import SettingsForm, TrainingWay
from nbaccel.memory.ways import FASTEST_FIRST, Candidate, CandidateFinder, best_precision, halvings
from nbaccel.plan import Plan, inspect_machine, registry, resolve
from nbaccel.strategies.model_blocks import checkpoints_gradients, enable_gradient_checkpointing

_CHECKPOINTING = "gradient checkpointing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to train with one batch of a process, and its verdict."""

    name: str  # ``ZeRO-2, optimizer on the CPU``
    batch_size: int
    accumulation_steps: int
    gradient_checkpointing: bool  # whether activations are computed again
    estimate: MemoryEstimate | None  # what it needs; None where the way is not available
    verdict: str
    """``fits``, ``does not fit``, by estimate; ``works``, ``out of memory``, by a real step; ``not
    tried``; ``not available``."""
    reason: str  # why, in one sentence
    config: dict[str, Any] | None  # DeepSpeed's; None where the way is not available

    @property
    def is_accepted(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.verdict in ("fits", "works")

    def cells(self) -> list[str]:
        """Its line of the table."""
        accumulated = f" x {self.accumulation_steps}" if self.accumulation_steps > 1 else ""
        texts = ["", "", ""]
        if (need := self.estimate) is not None:
            sizes = (need.device.peak, need.host_needed, need.nvme.total)
            texts = [format_bytes(size) if size else "-" for size in sizes]
        return [self.name, f"{self.batch_size}{accumulated}", *texts, self.verdict]


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Which DeepSpeed configuration to train with.

    Attributes:
        rungs: The ways, in order, with the batch that was chosen, or the smallest.
        chosen: The one to take; None where none fits.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        num_processes: Processes on each machine.
        warnings: What may not work as expected, and what the numbers leave out.
    """

    rungs: tuple[Rung, ...]
    chosen: Rung | None
    precision: str
    num_processes: int
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any] | None:
        """What ``deepspeed.initialize(config=...)`` takes; None where nothing fits."""
        return None if self.chosen is None else copy.deepcopy(self.chosen.config)

    @property
    def zero(self) -> ZeroConfig | None:
        """The same as a `ZeroConfig`."""
        return None if self.config is None else ZeroConfig.from_dict(self.config)

    @property
    def batch_size(self) -> int | None:
        """Samples of a process in one forward pass."""
        return None if self.chosen is None else self.chosen.batch_size

    @property
    def accumulation_steps(self) -> int | None:
        """Forward passes of one optimizer step."""
        return None if self.chosen is None else self.chosen.accumulation_steps

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether to turn gradient checkpointing on: that is the model's setting."""
        return self.chosen is not None and self.chosen.gradient_checkpointing

    @property
    def nearest(self) -> Rung | None:
        """Where nothing fits: the way that lacks least."""
        lacking = [
            (sum(rung.estimate.lacking.values()), number)
            for number, rung in enumerate(self.rungs)
            if rung.estimate is not None
        ]
        return self.rungs[min(lacking)[1]] if lacking and self.chosen is None else None

    def headline(self) -> str:
        """The advice in one line."""
        rung = self.chosen or self.nearest
        if rung is None or rung.estimate is None:
            return f"Nothing fits: none of {count_noun(len(self.rungs), 'way')} is available here"
        if self.chosen is None:
            way = f"{rung.name} with a batch of {rung.batch_size}"
            # A real step may fail although the estimate says that it fits.
            if not rung.estimate.lacking:
                return f"Nothing fits: {way} should by estimate, and did not"
            return f"Nothing fits: {way} comes nearest, and lacks {rung.estimate.lacking_text}"
        parts = [rung.name]
        if rung.gradient_checkpointing and _CHECKPOINTING not in rung.name:
            parts.append(_CHECKPOINTING)
        accumulated = f" x {rung.accumulation_steps} accumulated"
        batch = f"batch {rung.batch_size}{accumulated if rung.accumulation_steps > 1 else ''}"
        parts += [self.precision, batch, count_noun(self.num_processes, "process")]
        proof = "a real step" if rung.verdict == "works" else "estimate"
        return f"{', '.join(parts)}: fits by {proof}"

    def explain(self) -> str:
        """All ways with what they need, the verdict and the reason; remarks below the table."""
        head, *lines = table_lines(self._rows())
        text = [self.headline(), "", head]
        # A reason is a sentence, too long for a column of text of fixed width.
        wrap = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="  ")
        for line, rung in zip(lines, self.rungs, strict=True):
            text += [line, *wrap.wrap(rung.reason)]
        return "\n".join([*text, "", *self.warnings])

    def _rows(self) -> list[list[str]]:
        """The table without columns that have no value, such as that of NVMe."""
        rows = [["   way", "batch", "device", "host", "NVMe", "verdict"]]
        for rung in self.rungs:
            name, *cells = rung.cells()
            rows.append([f"{'→' if rung is self.chosen else ' '}  {name}", *cells])
        columns = [column for column in zip(*rows, strict=True) if {*column[1:]} - {"", "-"}]
        return [list(row) for row in zip(*columns, strict=True)]

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"<Advice: {self.headline()}>"

    # Without it IPython would take `__repr__`, which is one line, as the text form.
    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        head, *lines = self._rows()
        reasons = (rung.reason for rung in self.rungs)
        rows = [[one[0], why, *one[1:]] for one, why in zip(lines, reasons, strict=True)]
        table = table_html([[head[0], "why", *head[1:]], *rows], num_left=2)
        html = f"{paragraphs([self.headline()])}{table}{paragraphs(self.warnings)}"
        return {"text/plain": self.explain(), "text/html": html}


_PRECISIONS = {"fp32": "no", "float32": "no", "bfloat16": "bf16", "float16": "fp16"}
"""Other words for a precision → that of a `RunConfig`."""


def advise(asked: Any, launch: Callable[..., Any]) -> Advice:
    """Find the fastest DeepSpeed configuration that fits.

    ``asked`` has the arguments of ``nbaccel.advise``, where they and what is raised are documented;
    ``launch`` is ``notebook_launcher``, with which `try_it` proves a way.
    """
    __tracebackhide__ = True
    _check_arguments(asked)
    machine = asked.inventory or inspect_machine()
    plan = resolve(RunConfig(num_processes=asked.num_processes), machine)
    settings: dict[str, Any] = {} if asked.config is None else load_settings(asked.config)
    sizes = (asked.device_memory, asked.host_memory, asked.nvme_memory)
    memory_model = MemoryModel(
        model=asked.model,
        sample_batch=asked.sample_batch,
        inventory=machine,
        limits=MemoryLimits(*(None if size is None else parse_bytes(size) for size in sizes)),
        num_nodes=asked.num_nodes,
    )
    world_size = plan.num_processes * asked.num_nodes
    batch = _batch_of(settings, samples=memory_model.num_samples, world_size=world_size)
    # Before the ways, so that mistakes of the user's file are reported as such.
    own = {**settings, BATCH_KEY: batch[0]}
    check_config(own, world_size=world_size, inventory=machine, allow_auto=True, check_tools=False)
    run = _first_run(asked, settings, plan, memory_model)
    finder = _Finder(memory_model=memory_model, settings=settings)
    finder.completed(_with_batch(run, *batch), plan)  # raises for an "auto" that nothing decides
    trials = itertools.count(1)

    def prove(rung: Rung) -> Rung:
        if asked.try_it and next(trials) <= asked.max_trials:
            return _proven(rung, memory_model, plan, asked.timeout, launch)
        return replace(rung, verdict="not tried") if asked.try_it else rung

    rungs, chosen = _walked(finder, run, batch, prove)
    return Advice(
        rungs=rungs,
        chosen=chosen,
        precision="fp32" if run.mixed_precision == "no" else run.mixed_precision,
        num_processes=plan.num_processes,
        warnings=tuple(_warnings(finder, chosen)),
    )


@dataclass
class _Finder(CandidateFinder):
    """Finds ways with DeepSpeed, from stage 0 on, with whole configurations."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # the user's own

    def ways(self, config: RunConfig, plan: Plan) -> Iterator[TrainingWay]:
        """The fastest first; all but the first compute activations again, where that can be."""
        again = config.changed(activation_checkpointing=True) if self.can_checkpoint else config
        first, *_ = self._zero_ways(config)
        second, *others = self._zero_ways(again)
        yield first
        model = self.memory_model.model
        if not checkpoints_gradients(model):
            refusal = f"{type(model).__name__} has no gradient_checkpointing_enable()"
            refusal = second.refusal if self.can_checkpoint else refusal
            yield replace(second, name=f"{second.name}, {_CHECKPOINTING}", refusal=refusal)
        yield from others

    def _zero_ways(self, config: RunConfig) -> Iterator[TrainingWay]:
        return DeepSpeedForm().ways(
            config,
            self.memory_model.shape,
            on_host=False,
            can_checkpoint=False,
            placements=FASTEST_FIRST,
        )

    def document_of(self, form: SettingsForm, config: RunConfig, plan: Plan) -> Mapping[str, Any]:
        """DeepSpeed's configuration with nothing left to ``"auto"``, which runs here."""
        document = self.completed(config, plan)
        world_size, machine = self._world_size(plan), self.memory_model.inventory
        try:
            check_config(document, world_size=world_size, inventory=machine)
        except ConfigError:
            # Few notebooks have the compiler for DeepSpeed's own Adam on a GPU; torch's is equal.
            name = str(value_at(document, "optimizer.type")).lower()
            if name in ("adam", "adamw") and "offload_optimizer" not in document[ZERO]:
                document["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
            check_config(document, world_size=world_size, inventory=machine)
        return document

    def refusal_of(self, error: NbaccelError) -> str:
        """All that is wrong, with what to do: there is room for it below the table."""
        return " ".join(error.mistakes) if isinstance(error, ConfigError) else str(error)

    def completed(self, config: RunConfig, plan: Plan) -> dict[str, Any]:
        """The configuration of a run, by DeepSpeed's defaults where nobody decides."""
        document = engine_config(config) or {}
        for key in ("train_batch_size", "gradient_clipping"):
            if key not in self.settings and document.get(key) == "auto":
                del document[key]
        zero = document[ZERO]
        pins_memory = registry.device(plan.device).pins_host_memory
        for name in ("offload_optimizer", "offload_param"):
            if value_at(zero, f"{name}.device") not in (None, "none"):
                zero[name].setdefault("pin_memory", pins_memory)
        if zero["stage"] == 3:
            # Without it DeepSpeed's `save_16bit_model` writes nothing.
            zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
        if config.mixed_precision == "fp16":
            document["fp16"].setdefault("auto_cast", True)
        facts = TrainingFacts(
            world_size=self._world_size(plan),
            micro_batch_size=document[BATCH_KEY],
            accumulation_steps=config.gradient_accumulation_steps,
            mixed_precision=config.mixed_precision,
        )
        return resolve_auto(document, facts=facts, model=self.memory_model.model).config.to_dict()

    def _world_size(self, plan: Plan) -> int:
        return plan.num_processes * (self.memory_model.num_nodes or 1)


def _with_batch(run: RunConfig, batch_size: int, accumulation_steps: int) -> RunConfig:
    return run.changed(
        gradient_accumulation_steps=accumulation_steps,
        deepspeed={**(run.deepspeed or {}), BATCH_KEY: batch_size},
    )


def _walked(
    finder: _Finder, run: RunConfig, batch: tuple[int, int], prove: Callable[[Rung], Rung]
) -> tuple[tuple[Rung, ...], Rung | None]:
    """The rungs of the last batch, and the first that fits or works, of ever smaller batches."""
    rungs: list[Rung] = []
    chosen: Rung | None = None
    for size, steps in halvings(*batch):
        rungs.clear()
        for candidate in finder.candidates(_with_batch(run, size, steps), is_chosen=False):
            rung = _rung(candidate, size, steps)
            if chosen is not None and rung.is_accepted:
                rung = replace(rung, reason=f"{rung.reason} Usually slower than what was chosen.")
            elif rung.is_accepted:
                rung = prove(rung)
                chosen = rung if rung.is_accepted else None
            rungs.append(rung)
        # Without activations every batch needs the same.
        if chosen is not None or finder.memory_model.sample_batch is None:
            break
    return tuple(rungs), chosen


def _rung(candidate: Candidate, size: int, steps: int) -> Rung:
    verdict, reason = "not available", candidate.refusal
    if candidate.need is not None and not reason:
        verdict = "fits" if candidate.fits else "does not fit"
        reason = candidate.need.lacking_text or f"it needs {candidate.need.shares_text}"
    return Rung(
        name=candidate.name,
        batch_size=size,
        accumulation_steps=steps,
        gradient_checkpointing=candidate.config.activation_checkpointing,
        estimate=None if candidate.need is None else candidate.need.estimate,
        verdict=verdict,
        reason=f"{reason[:1].upper()}{reason[1:].rstrip('.')}.",
        config=None if verdict == "not available" else dict(candidate.document),
    )


def _warnings(finder: _Finder, chosen: Rung | None) -> Iterator[str]:
    if finder.memory_model.sample_batch is None:
        yield "Activations are not in it: they depend on the batch. Give sample_batch."
    if finder.can_checkpoint and (chosen is None or chosen.gradient_checkpointing):
        counting = "All ways but the first count" if chosen is None else f"{chosen.name} counts"
        yield (
            f"{counting} with gradient checkpointing, which no DeepSpeed configuration turns on: "
            "call model.gradient_checkpointing_enable() before training."
        )
    if chosen is not None and chosen.config is not None:
        yield from check_config(chosen.config, inventory=finder.memory_model.inventory).warnings


def _first_run(
    asked: Any, settings: Mapping[str, Any], plan: Plan, memory_model: MemoryModel
) -> RunConfig:
    """What every way begins with, but for batch sizes; in the format asked for, or the best."""
    base = {key: one for key, one in copy.deepcopy(settings).items() if key not in BATCH_SIZES}
    base.setdefault("optimizer", {"type": asked.optimizer})
    for key in NVME_PATHS if asked.nvme_path is not None else ():
        put_at(base, key, str(asked.nvme_path))
    precision = _PRECISIONS.get(asked.precision, asked.precision)
    if precision not in ("auto", "no", "bf16", "fp16"):
        raise ConfigError(
            f"precision={asked.precision!r} is no precision that DeepSpeed trains in. Give one of "
            "auto, fp32, bf16, fp16."
        )
    said: dict[str, Any] = {} if precision == "auto" else {"mixed_precision": precision}
    run = RunConfig(num_processes=plan.num_processes, deepspeed=base, **said)
    if "mixed_precision" in run.model_fields_set:
        return run
    # 16-bit weights would have to be converted for float32, and CPUs do not train in fp16.
    parameters = memory_model.model.parameters()
    in_half = any(one.is_floating_point() and one.element_size() == 2 for one in parameters)
    found, _ = best_precision(plan, memory_model.inventory)
    return run.changed(mixed_precision="bf16" if found == "no" and in_half else found)


def _batch_of(settings: Mapping[str, Any], samples: int | None, world_size: int) -> tuple[int, int]:
    """The batch of each process in one optimizer step, and how many of them are accumulated."""
    total, micro, steps = (
        value if isinstance(value := settings.get(key), int) and value > 0 else None
        for key in BATCH_SIZES
    )
    if micro is not None and samples is not None and micro != samples:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu={micro}, and sample_batch has {samples} samples: one "
            "of them would silently override the other. Leave the first out, or cut the batch."
        )
    count = micro or samples or max(1, (total or 0) // (world_size * (steps or 1)))
    return count, steps or max(1, (total or 0) // (count * world_size))


def _check_arguments(asked: Any) -> None:
    model = asked.model
    refuse_unsized(model)
    if not callable(getattr(model, "modules", None)):
        raise ConfigError(
            f"model={model!r} is no module: its parameters decide what fits. Give the model; it "
            "may be on meta."
        )
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    try_it = asked.try_it
    problems = {
        f"num_nodes={asked.num_nodes} means no machine. Use 1 or more.": asked.num_nodes < 1,
        f"try_it={try_it} needs a batch for its real step: got sample_batch=None. Give what your "
        "loader gives one process.": try_it and asked.sample_batch is None,
        f"try_it=True cannot run {type(model).__name__}, which is on meta: it has no values. Leave "
        "try_it out, or make the model with values.": try_it and is_meta,
        "try_it=True can start processes on this machine only: got "
        f"num_nodes={asked.num_nodes}. Leave one out.": try_it and asked.num_nodes > 1,
        f"max_trials={asked.max_trials} tries nothing. Use 1.": try_it and asked.max_trials < 1,
    }
    refuse_mistakes(text for text, is_there in problems.items() if is_there)


# Two real steps in workers: one may run out of memory, or be killed, and nothing else is harmed.

_PROCESS_BYTES = 192 * 2**20  # of a worker beside tensors (100 to 130 MiB were seen)
_OUT_OF_MEMORY_WORDS = re.compile(
    r"out of memory|MemoryError|(can't|cannot|unable to|could not) allocate|not enough memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|can't start new thread",
    re.IGNORECASE,
)


def is_want_of_memory(record: Any) -> bool:
    """Whether a worker failed because memory ran out: on a device, on the host, or by a kill."""
    # The system's out-of-memory killer leaves no other trace.
    was_killed = record.exit_status == -signal.SIGKILL
    said = (record.headline, record.traceback, record.evidence)
    return was_killed or any(map(_OUT_OF_MEMORY_WORDS.search, said))


def _proven(
    rung: Rung, memory: MemoryModel, plan: Plan, timeout_s: float, launch: Callable[..., Any]
) -> Rung:
    """A rung of the advice as one launch shows it."""
    run = plan.config.changed(
        num_processes=plan.num_processes,
        start_method="template",
        share_back=False,  # a trial must not change the weights of the user's model
        timeout=timeout_s,
    )
    config = copy.deepcopy(dict(rung.config or {}))
    # The second of two passes shows what accumulation keeps; further ones show nothing.
    config["gradient_accumulation_steps"] = min(rung.accumulation_steps, 2)
    swapped = [key for key in NVME_PATHS if value_at(config, key)]
    # On the user's disk, since the trial is of that disk, but not among other runs' files.
    disk = nearest_folder(next(iter(nvme_folders(config)), Path(tempfile.gettempdir())))
    device_bytes, host_bytes = memory.limits.device, memory.limits.host
    if device_row(plan.device).in_host_memory:
        host_bytes = memory.inventory.host_available_bytes if host_bytes is None else host_bytes
        host_bytes += plan.num_processes * (device_bytes or 0)
    limits = (device_bytes, host_bytes and host_bytes // plan.num_processes)
    recomputes = rung.gradient_checkpointing and not checkpoints_gradients(memory.model)
    batch = resized(memory.sample_batch, config[BATCH_KEY])
    with (
        tempfile.TemporaryDirectory(prefix="nbaccel-trial-", dir=disk) as swap_folder,
        # The advice reports how a trial ended; a dashboard of failures would look like errors.
        env.applied({"NBACCEL_DASHBOARD": "0"}),
    ):
        for key in swapped:
            put_at(config, key, swap_folder)
        arguments = (memory.model, batch, config, recomputes, plan.device, *limits)
        try:
            launch(run_trial, arguments, config=run)
        except WorkerFailed as error:
            failure: Any = next(filter(is_want_of_memory, error.failures), None)
            if failure is None:
                raise
            told = f"Memory ran out in a real step: rank {failure.rank} {failure.headline[:160]}."
            return replace(rung, verdict="out of memory", reason=f"{told} {rung.reason}")
    return replace(rung, verdict="works", reason=f"A real step worked. {rung.reason}")


def run_trial(
    model: nn.Module,
    batch: Any,
    config: dict[str, Any],
    recomputes: bool,
    device_name: str,
    device_limit: int | None,
    host_limit: int | None,
) -> None:
    """Make an engine and step. Limits are in bytes."""
    logging.disable(logging.CRITICAL)  # for good: the process ends with the trial
    device = registry.device(device_name)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        env.update({"PATH": library.ready_to_build(device_name)})
        if host_limit is not None:
            most_bytes = psutil.Process().memory_info().data + _PROCESS_BYTES + host_limit
            _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
            if hard_limit == resource.RLIM_INFINITY or most_bytes < hard_limit:
                resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard_limit))
        if device_limit is not None:
            device.limit_memory(device_limit)
        if recomputes:
            enable_gradient_checkpointing(model)
        model.train()
        zero_config = ZeroConfig.from_dict(config)
        engine = make_engine(model, None, None, zero_config, moe_layers=None, has_several=False)
        # Some optimizers make their states in the first step: the peak comes with the second.
        for _ in range(2):
            training_step(engine, batch)
        device.synchronize()  # what fails later fails here


def training_step(engine: Any, batch: Any) -> None:
    """One optimizer step: as many forward and backward passes as are accumulated."""
    batch = map_tensors(lambda tensor: tensor.detach().to(engine.device), batch)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(loss_of(call(engine, batch, module=engine.module)))
        engine.step()
