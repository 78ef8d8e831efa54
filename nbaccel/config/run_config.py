"""``RunConfig``: the user's settings; contradictions are refused here, all else by `plan`."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import require
from nbaccel.config import capabilities as rows, deepspeed_document as zero_engine
from nbaccel.config.deepspeed_document import Contradiction, filter_contradictions, read_host_filter
from nbaccel.config.field_rules import FieldMistake, explain_mistakes, setting
from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.given_values import plain_value, read_path, read_port, read_resume, shown
from nbaccel.config.handlers import read_dynamo_settings, read_fsdp_settings, read_worker_variables
from nbaccel.config.text_forms import Plain, read_yaml_settings


def contradictions(config: RunConfig, *, ignoring: Collection[str] = ()) -> tuple[str, ...]:
    """What settings say against each other, but for those that are known to be wrong."""
    found = (*_of_nodes(config), *_of_start(config), *filter_contradictions(config))
    return tuple(text for names, text in found if not set(names).intersection(ignoring))


def _of_nodes(config: RunConfig) -> Iterator[Contradiction]:
    host_name, separator, port = config.rdzv_endpoint.rpartition(":")
    address = (host_name if separator else port).strip("[]") or config.master_addr
    is_port = port.isdecimal() and 1 <= int(port) <= 65535
    if config.node_rank >= config.num_nodes:
        yield (
            ("node_rank", "num_nodes"),
            f"node_rank must be below num_nodes: got node_rank={config.node_rank} with "
            f"num_nodes={config.num_nodes}. The other nodes would wait for a node that never "
            "comes. Number the nodes from 0, or raise num_nodes.",
        )
    if config.num_nodes > 1 and config.num_processes is None:
        yield (
            ("num_processes", "num_nodes"),
            f"num_processes cannot be left out with num_nodes={config.num_nodes}: every node must "
            "know how many workers the others have. Give the same on every node.",
        )
    if config.num_nodes > 1 and _is_loopback(address):
        yield (
            ("master_addr", "rdzv_endpoint", "num_nodes"),
            f"{'rdzv_endpoint' if config.rdzv_endpoint else 'master_addr'} cannot be {address!r} "
            f"with num_nodes={config.num_nodes}. On each node that address is the node itself, so "
            "they would never meet. Give the address of the first node as the others reach it.",
        )
    # Only static rendezvous needs the port; other backends have a default port.
    if config.rdzv_endpoint and config.rdzv_backend == "static" and not is_port:
        yield (
            ("rdzv_endpoint", "rdzv_backend"),
            f'rdzv_endpoint must be "host:port": got {config.rdzv_endpoint!r}. Static rendezvous '
            "connects to exactly that port. Add one from 1 to 65535.",
        )
    if config.rdzv_backend.startswith("etcd") and not config.rdzv_endpoint:
        yield (
            ("rdzv_endpoint", "rdzv_backend"),
            f"rdzv_endpoint cannot be empty with rdzv_backend={config.rdzv_backend!r}: the etcd "
            'server must be found. Give its "host:port".',
        )


def _of_start(config: RunConfig) -> Iterator[Contradiction]:
    engine_settings = ("engine", "hostfile", "num_nodes", "start_method", "rdzv_backend")
    is_inline = config.start_method == "inline"
    engine = chosen_engine(config)[0]
    starts_all = rows.engine_row(engine).runs_on_hosts
    owner = next(row.name for row in rows.ENGINES if row.setting == "hostfile")
    sharding = [row.name for row in rows.STRATEGIES if "fsdp_plugin" in row.arguments]
    if is_inline and config.num_processes not in (None, 1):
        yield (
            ("start_method", "num_processes"),
            f'start_method="inline" cannot run num_processes={config.num_processes}: it means this '
            'very process, which is one. Give num_processes=1, or start_method="auto".',
        )
    if is_inline and (config.num_nodes > 1 or config.max_restarts > 0):
        yield (
            ("start_method", "num_nodes", "max_restarts"),
            f'start_method="inline" cannot go with num_nodes={config.num_nodes} and '
            f"max_restarts={config.max_restarts}. Inline is this very process: it meets no other "
            'node and cannot be started again. Give start_method="auto", or leave them out.',
        )
    if config.fsdp is not None and config.strategy not in sharding:
        yield (
            ("fsdp", "strategy"),
            f"fsdp cannot go with strategy={config.strategy!r}: its settings would have no effect. "
            'Give strategy="fsdp", or leave fsdp out.',
        )
    if config.num_nodes > 1 and starts_all:
        yield (
            engine_settings,
            f"num_nodes={config.num_nodes} contradicts engine={engine!r}, with which one notebook "
            "starts all workers. Leave num_nodes and node_rank out; num_processes "
            "counts the workers on all hosts.",
        )
    if config.hostfile is not None and config.engine not in ("auto", owner):
        yield (
            ("engine", "hostfile"),
            f"hostfile={config.hostfile!r} contradicts engine={config.engine!r}, which finds "
            f"its machines itself. One would be ignored. Leave one out, or give engine={owner!r}.",
        )
    if starts_all and config.start_method not in ("auto", "template"):
        yield (
            engine_settings,
            f"start_method={config.start_method!r} contradicts engine={engine!r}: workers on "
            "other machines cannot be forked from this process. Leave start_method out.",
        )


def chosen_engine(config: RunConfig) -> tuple[str, str]:
    """The engine of a run, and why."""
    if config.engine != "auto":
        return config.engine, "asked for"
    for row in rows.ENGINES:
        if row.setting and (value := getattr(config, row.setting)) is not None:
            return row.name, f"{row.setting}={value!r} names the hosts"
    if text := elastic_reason(config):
        name = next(row.name for row in rows.ENGINES if row.starts_scripts_only)
        return name, f"{text}: the nodes agree again on who takes part"
    if config.num_nodes > 1:
        return rows.ENGINES[0].name, f"a fixed set of {config.num_nodes} nodes"
    return rows.ENGINES[0].name, "this machine"


def elastic_reason(config: RunConfig) -> str:
    """The settings that need torch elastic, whose nodes agree again on who takes part."""
    if config.num_nodes == 1:
        return ""
    if config.rdzv_backend != "static":
        return f"rdzv_backend={config.rdzv_backend!r}"
    if config.max_restarts > 0:
        return f"max_restarts={config.max_restarts} with num_nodes={config.num_nodes}"
    return ""


def _is_loopback(host_name: str) -> bool:
    stripped_name = host_name.strip().strip("[]").lower()
    try:
        return ipaddress.ip_address(stripped_name).is_loopback
    except ValueError:  # a name
        return stripped_name == "localhost" or stripped_name.startswith("localhost.")


if TYPE_CHECKING:
    # A type checker cannot see the rows that other packages add.
    DeviceName = str
    PrecisionName = str
    StrategyName = str
    StartMethodName = str
    EngineName = str
else:
    DeviceName = Literal[("auto", *(row.name for row in rows.DEVICES))]
    PrecisionName = Literal[tuple(row.name for row in rows.PRECISIONS)]
    StrategyName = Literal[("auto", *(row.name for row in rows.STRATEGIES))]
    StartMethodName = Literal[("auto", *(row.name for row in rows.START_METHODS))]
    EngineName = Literal[("auto", *(row.name for row in rows.ENGINES))]
OnStop = Literal["keep", "discard"]
TpuDriverName = Literal["auto", "torch_tpu", "torch_xla"]
ZeroStage = Literal[0, 1, 2, 3]
# As torchrun writes it: a number for all ranks, pairs of local rank and number, or both.
_SHOWN_OUTPUT = r"^([0-3]|\d+:[0-3])(,\d+:[0-3])*$"


class RunConfig(Plain):
    """How a training function is to be run.

    All settings are keyword-only and have a default; wrong ones raise
    :class:`~nbaccel.base.errors.ConfigError`, which lists every mistake at once.

    Examples:
        >>> RunConfig(num_processes=2, mixed_precision="bf16")
        RunConfig(num_processes=2, mixed_precision='bf16')
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False
    )

    num_processes: int | None = setting(
        None, "Workers on this node; None lets the plan choose.", ge=1
    )
    device: DeviceName = setting(
        "auto",
        "What the workers compute on; auto takes GPUs or TPUs where there are some.",
        words=rows.words_of_rows(rows.DEVICES),
        problems=rows.ENTRY_POINT_PROBLEMS,
    )
    mixed_precision: PrecisionName = setting(
        "no",
        "Number format of the forward and backward pass; no keeps float32.",
        words=rows.words_of_rows(rows.PRECISIONS),
        problems=rows.ENTRY_POINT_PROBLEMS,
    )
    strategy: StrategyName = setting(
        "auto",
        "How workers train one model together; auto goes by the other settings, "
        "and by the plugins that training code gives.",
        words=rows.words_of_rows(rows.STRATEGIES),
        problems=rows.ENTRY_POINT_PROBLEMS,
    )
    start_method: StartMethodName = setting(
        "auto",
        "How workers come to be: forked from a clean template or this process.",
        words={"spawn": "template", "forkserver": "template", "none": "inline"},
    )
    engine: EngineName = setting(
        "auto",
        "What brings workers on several machines together; auto goes by the other settings.",
        words=rows.words_of_rows(rows.ENGINES),
        problems=rows.ENTRY_POINT_PROBLEMS,
    )
    hostfile: str | None = setting(
        None,
        "File of hosts for engine deepspeed, one `name slots=N` a line.",
        read=read_path,
        must="the path of a file with lines such as `worker-1 slots=4`, or None",
        min_length=1,
    )
    include: str | None = setting(
        None,
        "Hosts and slots of the hostfile to use alone: worker-1:0,1@worker-2.",
        read=read_host_filter,
        min_length=1,
    )
    exclude: str | None = setting(
        None,
        "Hosts and slots of the hostfile to leave out: worker-1:0,1@worker-2.",
        read=read_host_filter,
        min_length=1,
    )
    use_port: int | None = setting(
        None,
        "TCP port where workers meet; None takes a free one.",
        read=read_port,
        must="a TCP port from 1 to 65535, or None or 0",
        ge=1,
        le=65535,
    )
    master_addr: str = setting("127.0.0.1", "Host name or address of the first node.", min_length=1)
    node_rank: int = setting(0, "Number of this node among all nodes, from 0.", ge=0)
    num_nodes: int = setting(1, "Nodes (machines) that take part.", ge=1)
    rdzv_backend: str = setting(
        "static",
        "How nodes find each other: static, c10d, etcd, ...",
        do='Leave it at "static" in a notebook; "c10d" is for nbaccel launch',
        min_length=1,
    )
    rdzv_endpoint: str = setting(
        "", "host:port of the rendezvous; empty takes master_addr and use_port."
    )
    rdzv_conf: dict[str, JsonValue] | None = setting(
        None,
        "Further settings of the rendezvous backend.",
        must="a dictionary of JSON values, or None",
        do='Give for example {"timeout": 60}',
    )
    rdzv_id: str = setting("none", "Name of this job; equal on all its nodes.", min_length=1)
    max_restarts: int = setting(
        0, "How often failed workers are started again, all together.", ge=0
    )
    monitor_interval: float = setting(
        0.1, "Seconds; taken for compatibility, workers are watched without polling.", gt=0
    )
    log_line_prefix_template: str | None = setting(
        None,
        "Prefix of a worker's output lines, with ${rank} and the like.",
        do='Give for example "[${rank}] "',
    )
    log_dir: str | None = setting(
        None,
        "Folder for files with what each rank prints, complete and without "
        "prefix; None writes none.",
        must="the path of a folder, or None",
        min_length=1,
    )
    shown_output: str | None = setting(
        None,
        "What is shown of workers' output: 3 both streams, 1 stdout, 2 stderr, "
        '0 nothing, or by local rank: "0:3,1:2"; None shows all.',
        must='0, 1, 2 or 3, or pairs such as "0:3,1:2", or None',
        pattern=_SHOWN_OUTPUT,
    )
    timeout: float | None = setting(
        None, "Seconds after which a launch is ended; None never ends it.", gt=0
    )
    share_back: bool = setting(
        True, "Whether trained weights come back into the notebook's own model."
    )
    on_stop: OnStop = setting(
        "keep",
        "What Stop does to a launch that trains: keep ends it where the step under "
        "way ends, with the weights in the notebook; discard ends it at once, without them.",
    )
    resume: str | None = setting(
        None,
        "Whether a launch goes on where a Stop has ended the last one of the same "
        "function: here, for as long as this process lives, or the folder that keeps it.",
        read=read_resume,
        must="True, False, or the path of a folder",
        min_length=1,
    )
    compare: int | None = setting(
        None,
        "Steps that one worker takes first, so that it can be told what more "
        "workers are worth; None for none.",
        ge=10,
    )
    threads_per_process: int | None = setting(
        None, "CPU threads of each worker; None shares the cores out.", ge=1
    )
    tpu_driver: TpuDriverName = setting(
        "auto",
        "What drives TPU chips; auto takes torch_tpu where it can be used.",
        words={"torchtpu": "torch_tpu", "xla": "torch_xla", "torchxla": "torch_xla"},
    )
    zero_stage: ZeroStage | None = setting(
        None,
        "ZeRO stage: 1 shards the optimizer, 2 also gradients, 3 also weights; "
        "0 or None shards nothing.",
    )
    deepspeed: dict[str, JsonValue] | None = setting(
        None,
        "DeepSpeed's configuration: a mapping, JSON text or a file.",
        read=zero_engine.read_document,
        must="a DeepSpeed configuration, as a dictionary, JSON text or the path of a JSON file",
        do='Give for example {"gradient_clipping": 1.0}, or leave it out',
    )
    gradient_accumulation_steps: int | None = setting(
        None, "Batches that make one optimizer step; None leaves it open.", ge=1
    )
    activation_checkpointing: bool = setting(
        False,
        "Compute activations again in the backward pass: less memory, about a "
        "third more time. For models with gradient_checkpointing_enable().",
    )
    fp8: Fp8Config | None = setting(
        None,
        "Backend and recipe of FP8; None takes the defaults.",
        read=Fp8Config.read,
        must="an Fp8Config, a dictionary of its settings, or the name of a backend",
        do='Give for example {"backend": "te"}, or leave it out',
    )
    fsdp: dict[str, JsonValue] | None = setting(
        None,
        'Settings of FSDP, with strategy="fsdp": those of FullyShardedDataParallelPlugin that can '
        "be text.",
        read=read_fsdp_settings,
        do='Give for example {"cpu_offload": true}, or leave it out',
    )
    dynamo: dict[str, JsonValue] | None = setting(
        None,
        "Settings of torch.compile: a backend's name, or those of TorchDynamoPlugin.",
        read=read_dynamo_settings,
        must="a backend of torch.compile, a dictionary of settings, or None",
        do='Give for example {"backend": "inductor"}, or leave it out',
    )
    variables: dict[str, str] | None = setting(
        None,
        "Further environment variables of the workers.",
        read=read_worker_variables,
        must="a dictionary of names and texts, or None",
        do='Give for example {"NCCL_DEBUG": "INFO"}, or leave it out',
    )

    if not TYPE_CHECKING:  # a type checker must see the fields as keywords, not **settings

        def __init__(self, **settings: Any) -> None:
            # Before pydantic sees them: an enum's member or a scalar of torch would be refused.
            given_settings = {name: plain_value(value) for name, value in settings.items()}
            # The document decides only settings that were not given.
            config_document, file_settings = _read_document(given_settings)
            settings = {**file_settings, **given_settings}
            all_mistakes: list[str] = []
            validation_error: ValidationError | None = None
            wrong: set[str] = set()
            try:
                # Not `Plain`'s, which would raise before contradictions are found, too.
                BaseModel.__init__(self, **settings)
            except ValidationError as error:
                validation_error = error
                for one in explain_mistakes(type(self), error, settings):
                    text = f"DeepSpeed configuration: {one}" if one.path in file_settings else one
                    all_mistakes.append(FieldMistake(text, one.path))
                    wrong.add(one.path.partition(".")[0])
                # Built again, for contradictions among the valid ones; an error follows.
                super().__init__(
                    **{name: value for name, value in settings.items() if name not in wrong}
                )
            right = {name: getattr(self, name) for name in given_settings if name not in wrong}
            if config_document:
                all_mistakes += zero_engine.disagreements(config_document, right)
            all_mistakes += contradictions(self, ignoring=wrong)
            if all_mistakes:
                raise ConfigError(*all_mistakes) from validation_error

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed is to train: at a stage above 0, or with a DeepSpeed configuration."""
        return self.deepspeed is not None or bool(self.zero_stage)

    def changed(self, **settings: Any) -> RunConfig:
        """A copy with other values, validated like a new one.

        A DeepSpeed configuration among them decides stage, precision and accumulation where it
        has them, unless they are given beside it.

        Args:
            **settings: The settings to change.

        Returns:
            The copy.

        Raises:
            ConfigError: The new settings are wrong or contradict the others.
        """
        return type(self)(**merged_settings(dict(self), settings))

    def to_yaml(self) -> str:
        """The settings that differ from the defaults as YAML, for a file that people read.

        Returns:
            Text that :meth:`from_yaml` reads.
        """
        yaml = require("yaml", extra="", why="Writing a configuration file")
        settings = self.model_dump(mode="json", exclude_defaults=True)
        return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))

    @classmethod
    def from_yaml(cls, text: str) -> RunConfig:
        """Read what :meth:`to_yaml` wrote, or any YAML mapping or JSON object of settings.

        Args:
            text: The settings; an empty text gives the defaults.

        Returns:
            The configuration.

        Raises:
            ConfigError: The text is no YAML mapping, or its settings are wrong.
        """
        return cls(**read_yaml_settings(text, f"A {cls.__name__}"))


def merged_settings(kept_settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, before they are judged; see :meth:`RunConfig.changed`."""
    document = _document_of(changes.get("deepspeed"))
    if document is None:
        return {**kept_settings, **changes}
    decided = zero_engine.taken_out(document)[1]
    # Otherwise the old values would contradict the new configuration.
    kept = {name: value for name, value in kept_settings.items() if name not in decided}
    return {**kept, **changes, "deepspeed": document}


def _document_of(document: Any) -> dict[str, Any] | None:
    """A DeepSpeed configuration that can be read; None where there is none, or a wrong one."""
    if document is None:
        return None
    try:
        read = zero_engine.read_document(document)
    except ValueError:  # a `ConfigError` is one: the field's validator will report it
        return None
    return read if isinstance(read, dict) else None


def _read_document(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a DeepSpeed configuration and take out of it what is a setting of `RunConfig`."""
    document = _document_of(settings.get("deepspeed"))
    if document is None:
        return {}, {}
    settings["deepspeed"], decided_settings = zero_engine.taken_out(document)
    file_settings = {"zero_stage": zero_engine.stage_left_open(document), **decided_settings}
    # None is "not given" for settings whose default it is, such as those of a form's empty field.
    for name in file_settings:
        if settings.get(name, ...) is None and RunConfig.model_fields[name].default is None:
            del settings[name]
    return document, {name: value for name, value in file_settings.items() if name not in settings}


class Configured(Protocol):
    """An object with a configuration: a picker, for example."""

    @property
    def config(self) -> RunConfig:
        """The settings as they are now."""


def run_config_of(given_config: Any) -> RunConfig:
    """The settings that were given as ``config=``.

    Args:
        given_config: A `RunConfig`, or an object with one as its ``config``, such as a picker.

    Returns:
        The settings as they are now.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(given_config, RunConfig):
        return given_config
    # By the attribute and not by class: this package must not import the pickers.
    inner_config = getattr(given_config, "config", None)
    if isinstance(inner_config, RunConfig):
        return inner_config
    raise ConfigError(
        f"config must be a RunConfig, or a picker: got {shown(given_config)}. All settings are "
        "taken from it. Make one: RunConfig(num_processes=2), for example."
    )


# pydantic's signature shows each field's whole `Annotated` type, which fills a notebook's tooltip.
_types = get_type_hints(RunConfig)
RunConfig.__signature__ = Signature(
    [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=_types[name])
        for name, field in RunConfig.model_fields.items()
    ]
)
