"""The records of which the tables in ``capabilities`` are made.

They stand apart from the tables because a package that adds a backend imports them while the
tables are being put together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "DeviceRow",
    "DeviceSigns",
    "EngineRow",
    "Fp8Choice",
    "Fp8Row",
    "PrecisionRow",
    "StartMethodRow",
    "StrategyRow",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSigns:
    """What a machine has at least, if it has a device: one of these.

    Attributes:
        packages: Modules that can be imported.
        variables: Environment variables.
        files: Patterns of files, below the root.
        pci_vendor: Vendor of a device on the PCI bus, as ``/sys`` writes it.
        facts: Fields of an `Inventory` that the device fills.
    """

    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    pci_vendor: str = ""
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """What workers can compute on.

    Two rows fit each other if either of them names the other, so that a package which adds a
    device can name the strategies that are there, and one which adds a strategy the devices.

    Attributes:
        name: As in ``RunConfig.device``.
        meaning: What it is, for people.
        needs: What must be there.
        path: ``module:Class`` of its :class:`~nbaccel.abc.Device`. The module is imported
            in notebooks: it imports torch inside of methods only.
        label: What one is called in sentences: ``GPU``; the name where it is empty.
        words: Other words that people write for the name.
        precisions: The precisions it can train in.
        strategies: Strategies that train on it, beside those whose rows name it.
        slow: Those of its precisions that it only imitates, and why that matters.
        refused: Precisions of others that it cannot train in, and why.
        start_methods: How its workers can be started.
        group_backend: Process group backend where each worker has a device of its own.
        shared_group_backend: The one where workers share a device.
        in_host_memory: Whether its tensors lie in the host's memory.
        stages_copies: Whether each copy to it takes as much host memory again until it is through.
        distributed_type: What Accelerate calls training on it, whatever the number of processes.
        variables: Environment variables from which other libraries in a worker learn of it.
        never_run: Whether it has never been run. ``auto`` passes over it then.
        signs: Without one of them its module is not even imported for a launch; None looks always.
    """

    name: str
    meaning: str
    needs: str
    path: str
    label: str = ""
    words: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    slow: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    start_methods: tuple[str, ...] = ()
    group_backend: str = "gloo"
    shared_group_backend: str = "gloo"
    in_host_memory: bool = False
    stages_copies: bool = False
    distributed_type: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    never_run: bool = False
    signs: DeviceSigns | None = None

    @property
    def noun(self) -> str:
        """What one is called in sentences."""
        return self.label or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRow:
    """A number format of the forward and backward pass.

    Attributes:
        name: As in ``RunConfig.mixed_precision``.
        meaning: What it is, for people.
        needs: What must be there.
        words: Other words that people write for the name.
        refused_below: Compute capability under which a GPU cannot do it.
        imitated_below: Compute capability under which a GPU does it slowly.
        path: ``module:Class`` of its :class:`~nbaccel.abc.Precision`; empty where it has backends.
        has_backends: Whether libraries compute it: then class, devices and strategies are those of
            a row in ``FP8_BACKENDS``.
        dtype: Name of the torch dtype that layers compute in under it, for the check that training
            does what was asked; empty where dtypes do not show it.
        devices: Devices that train in it, beside those whose rows name it.
        strategies: Strategies that train in it, beside those whose rows name it.
    """

    name: str
    meaning: str
    needs: str
    words: tuple[str, ...] = ()
    path: str = ""
    has_backends: bool = False
    dtype: str = ""
    refused_below: tuple[int, int] = (0, 0)
    imitated_below: tuple[int, int] = (0, 0)
    devices: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Row:
    """A library that computes in 8 bits.

    Attributes:
        name: As in ``Fp8Config.backend``.
        meaning: What it does, for people.
        needs: What must be there.
        package: The module that must be installed for it; empty where torch is enough.
        path: ``module:Class`` of its :class:`~nbaccel.abc.Precision`.
        words: Other words that people write for the name.
        devices: What it can compute on.
        strategies: Strategies that train with it.
        settings: Those of ``Fp8Config`` that it reads.
        recipes: Ways to find scales, as in ``Fp8Config.recipe``; the first is its default.
        auto_with: The module with which ``auto`` takes it, where that is not `package`.
        refused_below: Compute capability under which a GPU cannot do it.
        emulated_below: Compute capability under which products are computed in another format.
        restore: ``module:function`` that gives a module its own layers back, and returns the
            parameters that it replaced, each with the one in its place.
        library: What must be imported for its layers to exist.
        shards: ``module:object`` that reads weights of which each process has a part, a
            :class:`~nbaccel.abc.ShardReader`.
    """

    name: str
    meaning: str
    needs: str
    package: str
    path: str = ""
    words: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    auto_with: str = ""
    refused_below: tuple[int, int] = (0, 0)
    emulated_below: tuple[int, int] = (0, 0)
    restore: str = ""
    library: str = ""
    shards: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Choice:
    """The library that computes in 8 bits, on one device.

    Attributes:
        row: Its row; None where the precision needs no library.
        problem: Why it cannot be used; empty where it can.
        reason: Why it was chosen.
    """

    row: Fp8Row | None = None
    problem: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRow:
    """How the processes of a run train one model together.

    Attributes:
        name: As in ``RunConfig.strategy`` and ``Strategy.name``.
        meaning: What each process holds, for people.
        needs: What must be there.
        path: ``module:Class`` of its :class:`~nbaccel.abc.Strategy`.
        headline: How the training plan's first line calls it; the name where it is empty.
        words: Other words that people write for the name.
        devices: What it can compute on.
        precisions: The precisions it can train in.
        processes: ``one`` where it trains one process alone, ``several`` where it needs others;
            empty where it does both.
        drives_all: Whether its one process drives all devices of the machine.
        is_default: Whether it is taken for so many processes where none was asked for.
        default_reason: Why it is taken then; ``{world_size}`` stands for the number of processes.
        needs_group: Whether it does nothing where no process group can be made.
        distributed_type: What Accelerate calls it; empty where that depends on the device.
        settings: ``module:Class`` of its settings; an object of it among ``kwargs_handlers`` asks
            for the strategy, unless it is a default one. The module is light.
        arguments: Arguments of `Accelerator` that take them, and so ask for it.
        make_settings: ``module:function`` that makes them of what such an argument was given, or of
            a run's configuration, one of which is None; empty where they are what was given.
        run_flag: Attribute of a `RunConfig` that says whether that asks for it beside its name.
        variables: Environment variables from which other libraries in a worker learn of it, where
            it was requested by its name. The first of them asks for it, where a user sets it.
        check: ``module:function`` that refuses what its library lacks on a machine.
        judge: ``module:function`` that refuses mistakes in a run's configuration of it.
        library: What must be imported for its shards to exist.
        shards: Module that reads them, a :class:`~nbaccel.abc.ShardReader`.
        enter: ``module:function`` that prepares a worker for it, given the type of its device.
        explain_signal: ``module:function`` that knows why a signal has ended a worker in its
            library, given the signal's name and the functions on the worker's stack; it is light.
        observe: ``module:function`` that looks at a process before the library is in it, for the
            reader's ``tear_down``. This one and ``enter`` are loaded even where the
            library is never used, so they are light.
        form: ``module:Class`` of what a picker offers of it, a
            :class:`~nbaccel.memory.settings_form.SettingsForm`; empty where it has none.
        advisor: ``module:function`` that finds its fastest configuration that fits.
        command: ``module:function`` that adds its subcommand to the command line.
    """

    name: str
    meaning: str
    needs: str
    path: str
    headline: str = ""
    words: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    processes: str = ""
    drives_all: bool = False
    is_default: bool = False
    default_reason: str = ""
    needs_group: bool = False
    distributed_type: str = ""
    settings: str = ""
    arguments: tuple[str, ...] = ()
    make_settings: str = ""
    run_flag: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    check: str = ""
    judge: str = ""
    library: str = ""
    shards: str = ""
    enter: str = ""
    explain_signal: str = ""
    observe: str = ""
    form: str = ""
    advisor: str = ""
    command: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMethodRow:
    """How workers come to be.

    Attributes:
        name: As in ``Plan.start_method``.
        meaning: What happens, for people.
        needs: What must be there.
        headline: How :meth:`Plan.headline` says it.
        separate_processes: Whether workers are processes of their own.
    """

    name: str
    meaning: str
    needs: str
    headline: str
    separate_processes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRow:
    """What brings the workers of a run together on several machines.

    Attributes:
        name: As in ``RunConfig.engine``.
        meaning: What it does, for people.
        needs: What must be there.
        path: ``module:Class`` of its :class:`~nbaccel.abc.Engine`, with which this notebook's
            workers run on other hosts; empty where every machine has a notebook or command of its
            own. The module is light.
        words: Other words that people write for the name.
        setting: The setting of ``RunConfig`` that names its hosts, which asks for it; empty where
            it finds them itself.
        starts_scripts_only: Whether it is for scripts, which `nbaccel launch` hands to it, and not
            for notebooks.
        extra: The extra of nbaccel that installs what it needs; empty where nothing is needed.
        runs_on_hosts: Whether this notebook's workers run on other hosts.
    """

    name: str
    meaning: str
    needs: str
    path: str = ""
    words: tuple[str, ...] = ()
    setting: str = ""
    starts_scripts_only: bool = False
    extra: str = ""
    runs_on_hosts: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs_on_hosts", bool(self.path))
