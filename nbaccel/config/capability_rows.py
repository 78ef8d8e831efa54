"""The records of the tables in ``capabilities``, which packages that add a backend import."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "DeviceRow",
    "EngineRow",
    "Fp8Choice",
    "Fp8Row",
    "PrecisionRow",
    "StartMethodRow",
    "StrategyRow",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What the rows of all tables have."""

    name: str  # As in the setting that names it: ``RunConfig.device``, ``Fp8Config.backend``, ...
    meaning: str  # What it is or does, for people
    needs: str  # What must be there
    words: tuple[str, ...] = ()  # Other words that people write for the name


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSigns:
    """What a machine has at least, if it has a device: one of these."""

    packages: tuple[str, ...] = ()  # Modules that can be imported
    variables: tuple[str, ...] = ()  # Environment variables
    files: tuple[str, ...] = ()  # Patterns of files, below the root
    pci_vendor: str = ""  # Vendor of a device on the PCI bus, as ``/sys`` writes it
    facts: tuple[str, ...] = ()  # Fields of an `Inventory` that the device fills


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow(Row):
    """What workers can compute on. Two rows fit each other if either names the other."""

    path: str  # ``module:Class`` of its `nbaccel.abc.Device`; imports torch in methods only
    label: str = ""  # What one is called in sentences: ``GPU``; the name where it is empty
    precisions: tuple[str, ...] = ()  # The precisions it can train in
    strategies: tuple[str, ...] = ()  # Strategies that train on it, beside those whose rows name it
    slow: tuple[tuple[str, str], ...] = ()  # precisions that it only imitates, and why it matters
    refused: tuple[tuple[str, str], ...] = ()  # precisions that it cannot train in, and why
    start_methods: tuple[str, ...] = ()  # How its workers can be started
    group_backend: str = "gloo"  # Process group backend where each worker has a device of its own
    shared_group_backend: str = "gloo"  # The one where workers share a device
    in_host_memory: bool = False  # Whether its tensors lie in the host's memory
    stages_copies: bool = False  # Whether a copy to it takes as much host memory meanwhile
    distributed_type: str = ""  # What Accelerate calls training on it
    variables: tuple[tuple[str, str], ...] = ()  # By which a worker's libraries learn of it
    never_run: bool = False  # Whether it has never been run. ``auto`` passes over it then.
    signs: DeviceSigns | None = None  # Without one of them its module is not imported

    @property
    def noun(self) -> str:
        """What one is called in sentences."""
        return self.label or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRow(Row):
    """A number format of the forward and backward pass."""

    path: str = ""  # ``module:Class`` of its `nbaccel.abc.Precision`; empty where it has backends
    has_backends: bool = False  # Whether class, devices and strategies are those of an `Fp8Row`
    dtype: str = ""  # Torch's name of what layers compute in; empty where that shows nothing
    refused_below: tuple[int, int] = (0, 0)  # Compute capability under which a GPU cannot do it
    imitated_below: tuple[int, int] = (0, 0)  # Compute capability under which a GPU does it slowly
    devices: tuple[str, ...] = ()  # Devices that train in it, beside those whose rows name it
    strategies: tuple[str, ...] = ()  # Strategies that train in it, beside those whose rows name it


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Row(Row):
    """A library that computes in 8 bits."""

    package: str  # The module that must be installed for it; empty where torch is enough
    path: str = ""  # ``module:Class`` of its :class:`~nbaccel.abc.Precision`
    devices: tuple[str, ...] = ()  # What it can compute on
    strategies: tuple[str, ...] = ()  # Strategies that train with it
    settings: tuple[str, ...] = ()  # Those of ``Fp8Config`` that it reads
    recipes: tuple[str, ...] = ()  # As in ``Fp8Config.recipe``; the first is its default
    auto_with: str = ""  # The module with which ``auto`` takes it, where that is not `package`
    refused_below: tuple[int, int] = (0, 0)  # Compute capability under which a GPU cannot do it
    emulated_below: tuple[int, int] = (0, 0)  # Where products are computed in another format
    # ``module:function`` that restores a module's layers; returns pairs of replaced parameters
    restore: str = ""
    library: str = ""  # What must be imported for its layers to exist


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Choice:
    """The library that computes in 8 bits, on one device."""

    row: Fp8Row | None = None  # Its row; None where the precision needs no library
    problem: str = ""  # Why it cannot be used; empty where it can
    reason: str = ""  # Why it was chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRow(Row):
    """How the processes of a run train one model together."""

    path: str  # ``module:Class`` of its :class:`~nbaccel.abc.Strategy`
    headline: str = ""  # How the training plan's first line calls it; the name where it is empty
    devices: tuple[str, ...] = ()  # What it can compute on
    precisions: tuple[str, ...] = ()  # The precisions it can train in
    processes: str = ""  # ``one``, or ``several`` where it needs others; empty where it does both
    is_default: bool = False  # Whether it is taken for so many processes where none was asked for
    default_reason: str = ""  # Why it is taken then, with ``{world_size}``
    needs_group: bool = False  # Whether it does nothing where no process group can be made
    distributed_type: str = ""  # What Accelerate calls it; empty where that depends on the device
    # ``module:Class`` of its settings, which ask for it as a handler unless it is a default; light
    settings: str = ""
    arguments: tuple[str, ...] = ()  # Arguments of `Accelerator` that take them, and so ask for it
    # ``module:function`` that makes them of such an argument or of a run; empty: they are given
    make_settings: str = ""
    run_flag: str = ""  # Attribute of a `RunConfig` that asks for it beside its name
    # Variables that tell other libraries in a worker; the first asks for it, if a user sets it.
    variables: tuple[tuple[str, str], ...] = ()
    check: str = ""  # ``module:function`` that refuses what its library lacks on a machine
    judge: str = ""  # ``module:function`` that refuses mistakes in a run's configuration of it
    library: str = ""  # What must be imported for its shards to exist
    shards: str = ""  # Module that reads them, a :class:`~nbaccel.abc.ShardReader`
    enter: str = ""  # ``module:function`` that prepares a worker, given its device's type; light
    # ``module:function`` that explains a signal by its name and the functions on the stack; light
    explain_signal: str = ""
    # ``module:function`` that looks at a process beforehand, for the reader's ``tear_down``; light
    observe: str = ""
    form: str = ""  # ``module:Class`` of its form for pickers, as `deepspeed.form.DeepSpeedForm`
    advisor: str = ""  # ``module:function`` that finds its fastest configuration that fits
    command: str = ""  # ``module:function`` that adds its subcommand to the command line


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMethodRow(Row):
    """How workers come to be."""

    headline: str  # How :meth:`Plan.headline` says it
    separate_processes: bool = True  # Whether workers are processes of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRow(Row):
    """What brings the workers of a run together on several machines."""

    # ``module:Class`` of its `nbaccel.abc.Engine`, light; empty where machines have notebooks.
    path: str = ""
    setting: str = ""  # That of ``RunConfig`` that names its hosts; empty where there is none
    starts_scripts_only: bool = False  # Whether it is for `nbaccel launch`, and not for notebooks
    runs_on_hosts: bool = field(init=False)  # Whether this notebook's workers run on other hosts

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs_on_hosts", bool(self.path))
