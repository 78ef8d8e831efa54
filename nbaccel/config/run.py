"""``RunConfig``: what the user said about a run, and nothing that was found out.

It is frozen, complete and travels as JSON or YAML; ``nbaccel.plan.resolve`` turns it into what
will happen. Values that contradict themselves are refused here, values that this machine cannot
serve are refused there.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from nbaccel.config import engine
from nbaccel.config.contradictions import contradictions
from nbaccel.config.exchange import Exchangeable
from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.mistakes import Hint, explain, shown
from nbaccel.config.plain import number, plain, port, truth, whole, word
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Configured", "RunConfig", "run_config_of"]

DeviceName = Literal["auto", "cpu", "cuda", "tpu"]
PrecisionName = Literal["no", "fp16", "bf16", "fp8"]
StartMethodName = Literal["auto", "template", "fork", "inline"]
ZeroStage = Literal[0, 1, 2, 3]

_Number = BeforeValidator(number)
_Word = BeforeValidator(word)


class RunConfig(Exchangeable):
    """How a training function is to be run.

    All settings are keyword-only and have a default; wrong ones raise
    :class:`~nbaccel.errors.ConfigError`, which lists every mistake at once.

    Example:
        >>> RunConfig(num_processes=2, mixed_precision="bf16")
        RunConfig(num_processes=2, mixed_precision='bf16')
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False
    )

    num_processes: Annotated[
        int | None,
        Field(ge=1, description="Workers on this node; None lets the plan choose."),
        _Number,
        Hint(
            must="a whole number of at least 1, or None",
            why="It counts the workers on this node",
            do="Give for example 2, or leave it out and the plan chooses",
        ),
    ] = None
    device: Annotated[
        DeviceName,
        Field(description="What the workers compute on; auto takes GPUs where there are some."),
        _Word,
        Hint(
            must="one of auto, cpu, cuda, tpu",
            why="The workers compute on it",
            do='Leave it at "auto" to take what this machine has',
            words={"gpu": "cuda", "nvidia": "cuda", "xla": "tpu"},
        ),
    ] = "auto"
    mixed_precision: Annotated[
        PrecisionName,
        Field(description="Number format of the forward and backward pass; no keeps float32."),
        _Word,
        Hint(
            must="one of no, fp16, bf16, fp8",
            why="It decides in which number format the forward and backward pass compute",
            do='"no" keeps float32',
            words={
                "fp32": "no",
                "float32": "no",
                "none": "no",
                "half": "fp16",
                "float16": "fp16",
                "bfloat16": "bf16",
                "float8": "fp8",
            },
        ),
    ] = "no"
    start_method: Annotated[
        StartMethodName,
        Field(description="How workers come to be: forked from a clean template or this process."),
        _Word,
        Hint(
            must="one of auto, template, fork, inline",
            why="It decides how workers come to be",
            do='Leave it at "auto": it takes the safest that works',
            words={"spawn": "template", "forkserver": "template", "none": "inline"},
        ),
    ] = "auto"
    use_port: Annotated[
        int | None,
        Field(ge=1, le=65535, description="TCP port where workers meet; None takes a free one."),
        BeforeValidator(port),
        Hint(
            must="a TCP port from 1 to 65535, or None or 0",
            why="Workers meet at it",
            do="Leave it out and a free port is taken",
        ),
    ] = None
    master_addr: Annotated[
        str,
        Field(min_length=1, description="Host name or address of the first node."),
        Hint(
            must="a host name or an address",
            why="Workers meet there",
            do='Leave it at "127.0.0.1" on one machine',
        ),
    ] = "127.0.0.1"
    node_rank: Annotated[
        int,
        Field(ge=0, description="Number of this node among all nodes, from 0."),
        _Number,
        Hint(
            must="a whole number of at least 0",
            why="It numbers this node among all nodes, from 0",
            do="Give 0 on the first node",
        ),
    ] = 0
    num_nodes: Annotated[
        int,
        Field(ge=1, description="Nodes (machines) that take part."),
        _Number,
        Hint(
            must="a whole number of at least 1",
            why="It counts the machines that take part",
            do="Give 1 for this machine alone",
        ),
    ] = 1
    rdzv_backend: Annotated[
        str,
        Field(min_length=1, description="How nodes find each other: static, c10d, etcd, ..."),
        Hint(
            must="the name of a rendezvous backend of torch elastic",
            why="Nodes find each other by it",
            do='Leave it at "static" unless nodes may come and go; then "c10d"',
        ),
    ] = "static"
    rdzv_endpoint: Annotated[
        str,
        Field(description="host:port of the rendezvous; empty takes master_addr and use_port."),
        Hint(
            must='text of the form "host:port", or empty',
            why="Nodes meet there",
            do="Leave it out to use master_addr and use_port",
        ),
    ] = ""
    rdzv_conf: Annotated[
        dict[str, JsonValue] | None,
        Field(description="Further settings of the rendezvous backend."),
        Hint(
            must="a dictionary of JSON values, or None",
            why="It is handed to the rendezvous backend and stored as JSON",
            do='Give for example {"timeout": 60}',
        ),
    ] = None
    rdzv_id: Annotated[
        str,
        Field(min_length=1, description="Name of this job; equal on all its nodes."),
        Hint(
            must="a name that is not empty",
            why="Nodes of one job recognise each other by it",
            do='Leave it at "none" if no other job shares the rendezvous',
        ),
    ] = "none"
    max_restarts: Annotated[
        int,
        Field(ge=0, description="How often failed workers are started again, all together."),
        _Number,
        Hint(
            must="a whole number of at least 0",
            why="It counts how often all workers are started again after a failure",
            do="Give 0 to report the first failure",
        ),
    ] = 0
    monitor_interval: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds; taken for compatibility, workers are watched without polling.",
        ),
        _Number,
        Hint(
            must="a number of seconds above 0",
            why="It is taken for compatibility alone",
            do="Leave it at 0.1",
        ),
    ] = 0.1
    log_line_prefix_template: Annotated[
        str | None,
        Field(description="Prefix of a worker's output lines, with ${rank} and the like."),
        Hint(
            must="text or None",
            why="It stands before every line that a worker prints",
            do='Give for example "[${rank}] "',
        ),
    ] = None
    timeout: Annotated[
        float | None,
        Field(gt=0, description="Seconds after which a launch is ended; None never ends it."),
        _Number,
        Hint(
            must="a number of seconds above 0, or None",
            why="A launch that takes longer is ended",
            do="Leave it out for no limit",
        ),
    ] = None
    share_back: Annotated[
        bool,
        Field(description="Whether trained weights come back into the notebook's own model."),
        BeforeValidator(truth),
        Hint(
            must="True or False",
            why="It decides whether the notebook's own model is trained afterwards",
            do="Leave it at True to find the trained weights in the notebook",
        ),
    ] = True
    threads_per_process: Annotated[
        int | None,
        Field(ge=1, description="CPU threads of each worker; None shares the cores out."),
        _Number,
        Hint(
            must="a whole number of at least 1, or None",
            why="Each worker computes on the CPU with that many threads",
            do="Leave it out to share the cores out",
        ),
    ] = None
    zero_stage: Annotated[
        ZeroStage | None,
        Field(
            description="ZeRO stage: 1 shards the optimizer, 2 also gradients, 3 also weights; "
            "0 or None shards nothing."
        ),
        BeforeValidator(whole),
        Hint(
            must="one of 0, 1, 2, 3, or None",
            why="It decides what each worker holds only a shard of",
            do="Leave it out and every worker holds the whole model",
        ),
    ] = None
    deepspeed: Annotated[
        dict[str, JsonValue] | None,
        Field(description="DeepSpeed's configuration: a mapping, JSON text or a file."),
        BeforeValidator(engine.read),
        Hint(
            must="a DeepSpeed configuration, as a dictionary, JSON text or the path of a JSON file",
            why="The engine of each worker is made by it",
            do='Give for example {"gradient_clipping": 1.0}, or leave it out',
        ),
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None,
        Field(ge=1, description="Batches that make one optimizer step; None leaves it open."),
        _Number,
        Hint(
            must="a whole number of at least 1, or None",
            why="So many batches make one optimizer step",
            do="Give 1 to step after every batch",
        ),
    ] = None
    activation_checkpointing: Annotated[
        bool,
        Field(
            description="Compute activations again in the backward pass: less memory, about a "
            "third more time. For models with gradient_checkpointing_enable()."
        ),
        BeforeValidator(truth),
        Hint(
            must="True or False",
            why="It decides whether activations are kept or computed again",
            do="Leave it at False where memory suffices",
        ),
    ] = False
    fp8: Annotated[
        Fp8Config | None,
        Field(description="Backend and recipe of FP8; None takes the defaults."),
        BeforeValidator(Fp8Config.read),
        Hint(
            must="an Fp8Config, a dictionary of its settings, or the name of a backend",
            why="It decides which library computes in 8 bits, and how it scales",
            do='Give for example {"backend": "te"}, or leave it out',
        ),
    ] = None

    if not TYPE_CHECKING:  # a checker must see the keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            settings = {name: plain(value) for name, value in settings.items()}
            mistakes: list[str] = []
            cause: ValidationError | None = None
            bad: set[str] = set()
            try:
                super().__init__(**settings)
            except ValidationError as error:
                cause, mistakes = error, [*explain(type(self), error)]
                bad = {str(detail["loc"][0]) for detail in error.errors()}
                # What is right alone is still compared with each other, so that the user
                # hears everything in one go. The object itself is never handed out.
                settings = {name: value for name, value in settings.items() if name not in bad}
                super().__init__(**settings)
            mistakes += self._settle(settings, bad)
            mistakes += contradictions(self, ignoring=bad)
            if mistakes:
                raise ConfigError(*mistakes) from cause

    def _settle(self, settings: dict[str, Any], bad: set[str]) -> list[str]:
        """Take out of a DeepSpeed configuration what has a setting of its own."""
        if self.deepspeed is None:
            return []
        changes, mistakes = engine.settled(self)
        changes = {name: value for name, value in changes.items() if name not in bad}
        try:
            super().__init__(**{**settings, **changes})
        except ValidationError as error:  # the file has what no run can
            mistakes += [f"DeepSpeed configuration: {text}" for text in explain(type(self), error)]
        return mistakes

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed is to train: at a stage above 0, or with a configuration of its own."""
        return self.deepspeed is not None or bool(self.zero_stage)

    def changed(self, **settings: Any) -> Self:
        """A copy with other values, validated like a new one.

        A DeepSpeed configuration among them decides what it speaks of (stage, precision,
        accumulation), unless that is given beside it.

        Args:
            **settings: The settings to change.

        Returns:
            The copy.

        Raises:
            ConfigError: The new settings are wrong or contradict the others.
        """
        kept = dict(self)
        if settings.get("deepspeed") is not None:
            file = engine.attempted(settings["deepspeed"])
            kept = {name: value for name, value in kept.items() if name not in file}
        return type(self)(**{**kept, **settings})

    def __hash__(self) -> int:
        # rdzv_conf is a dictionary, which the hash of a frozen model cannot digest.
        return hash(self.to_json())


class Configured(Protocol):
    """What has a configuration: a picker, for example."""

    @property
    def config(self) -> RunConfig:
        """The settings as they are now."""


def run_config_of(value: Any) -> RunConfig:
    """The settings that somebody gave as ``config=``.

    Args:
        value: A `RunConfig`, or what has one as its ``config``, as a picker does.

    Returns:
        The settings as they are now.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(value, RunConfig):
        return value
    inner = getattr(value, "config", None)
    if isinstance(inner, RunConfig):
        return inner
    raise ConfigError(
        f"config must be a RunConfig, or a picker: got {shown(value)}. All settings are taken from "
        "it. Make one: RunConfig(num_processes=2), for example."
    )


def _tidy_signature() -> Signature:
    """The signature as a notebook shows it: types without constraints and hints."""
    types = get_type_hints(RunConfig)
    return Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            for name, field in RunConfig.model_fields.items()
        ]
    )


RunConfig.__signature__ = _tidy_signature()
