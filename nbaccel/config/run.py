"""``RunConfig``: what the user said about a run, and nothing that was found out.

It is frozen, complete and travels as JSON or YAML; ``nbaccel.plan.resolve`` turns it into what
will happen. Values that contradict themselves are refused here, values that this machine cannot
serve are refused there.
"""

from __future__ import annotations

import json
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from nbaccel._optional import require
from nbaccel.config.contradictions import contradictions
from nbaccel.config.mistakes import Hint, explain
from nbaccel.config.plain import number, plain, port, truth, whole, word
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

__all__ = ["RunConfig"]

DeviceName = Literal["auto", "cpu", "cuda", "tpu"]
PrecisionName = Literal["no", "fp16", "bf16", "fp8"]
StartMethodName = Literal["auto", "template", "fork", "inline"]
ZeroStage = Literal[0, 1, 2, 3]

_Number = BeforeValidator(number)
_Word = BeforeValidator(word)


class RunConfig(BaseModel):
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

    if not TYPE_CHECKING:  # a checker must see the keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            settings = {name: plain(value) for name, value in settings.items()}
            mistakes: tuple[str, ...] = ()
            cause: ValidationError | None = None
            bad: set[str] = set()
            try:
                super().__init__(**settings)
            except ValidationError as error:
                cause, mistakes = error, explain(type(self), error)
                bad = {str(detail["loc"][0]) for detail in error.errors()}
                # What is right alone is still compared with each other, so that the user
                # hears everything in one go. The object itself is never handed out.
                rest = {name: value for name, value in settings.items() if name not in bad}
                super().__init__(**rest)
            mistakes += contradictions(self, ignoring=bad)
            if mistakes:
                raise ConfigError(*mistakes) from cause

    def changed(self, **settings: Any) -> Self:
        """A copy with other values, validated like a new one.

        Args:
            **settings: The settings to change.

        Returns:
            The copy.

        Raises:
            ConfigError: The new settings are wrong or contradict the others.
        """
        return type(self)(**{**dict(self), **settings})

    def to_json(self) -> str:
        """All settings as one JSON object, defaults included: a worker needs no other source.

        Returns:
            Text that :meth:`from_json` reads.
        """
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote, or any JSON object of settings.

        Args:
            text: A JSON object.

        Returns:
            The configuration.

        Raises:
            ConfigError: The text is no JSON object, or its settings are wrong.
        """
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"A RunConfig cannot be read from JSON: {error}. "
                "A setting half read would train something else. Correct the text there."
            ) from error
        return cls._from_mapping(settings, "JSON")

    def to_yaml(self) -> str:
        """The settings that differ from the defaults as YAML, for a file that people read.

        Returns:
            Text that :meth:`from_yaml` reads.
        """
        yaml = require("yaml", extra="", why="Writing a configuration file")
        settings = json.loads(self.model_dump_json(exclude_defaults=True))
        return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read what :meth:`to_yaml` wrote, or any YAML mapping of settings.

        Args:
            text: A YAML mapping; an empty text gives the defaults.

        Returns:
            The configuration.

        Raises:
            ConfigError: The text is no YAML mapping, or its settings are wrong.
        """
        yaml = require("yaml", extra="", why="Reading a configuration file")
        try:
            settings = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"A RunConfig cannot be read from YAML: {error}. "
                "A setting half read would train something else. Correct the text there."
            ) from error
        return cls._from_mapping({} if settings is None else settings, "YAML")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema, for editors and forms: type, range, meaning and unit of each setting.

        Returns:
            A JSON schema as a dictionary.
        """
        return cls.model_json_schema()

    @classmethod
    def _from_mapping(cls, settings: object, language: str) -> Self:
        if not isinstance(settings, dict):
            raise ConfigError(
                f"A RunConfig cannot be read from {language} of {type(settings).__name__}: got "
                f"{str(settings)[:60]!r}. Settings need names. "
                "Write names and values: num_processes and 2, for example."
            )
        return cls(**{str(name): value for name, value in settings.items()})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def __hash__(self) -> int:
        # rdzv_conf is a dictionary, which the hash of a frozen model cannot digest.
        return hash(self.to_json())


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
