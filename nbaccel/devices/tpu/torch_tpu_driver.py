"""torch_tpu (TorchTPU): the device ``tpu`` of torch itself.

Its runtime takes the chips of a process at the first tensor on one, and also at
``torch.manual_seed`` and at the first backward pass on the CPU (torch_tpu 0.2). No process gives a
chip back before it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.base import env
from nbaccel.base.errors import PlatformUnsupported
from nbaccel.devices.tpu.chips import torch_tpu_variables
from nbaccel.devices.tpu.drivers import TpuDriver
from nbaccel.plan.contracts.device import CompileCounts

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import TpuHost

COLLECTIVES_VARIABLE = "NBACCEL_TPU_COLLECTIVES"
"""``host``: collectives of device tensors go by way of host memory and gloo."""

# Of XLA's C++ log: 1 leaves out what is said when all is well, a dozen lines per worker (torch_xla
# sets the same when it is imported). It is read when the library is loaded.
_LOG_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_LOG_LEVEL = "1"
# Said of what torch_tpu itself does (0.2), once per line of the user's code.
_HARMLESS_WARNINGS = (
    r"<TorchTpu/ApiStage/ExperimentalApi/>",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
# Names of torch.tpu that this process has used.
_USED_NAMES: set[str] = set()


class _Figures:
    """What this process's runtime has said of itself."""

    counts = CompileCounts(programs=0, seconds=0.0)
    empty_answers = 0


# A runtime without figures of its memory gives 0, and writes two lines to stderr each time.
_MOST_EMPTY_ANSWERS = 3


class TorchTpuDriver(TpuDriver):
    """Tensors of type ``tpu``; operations run at once."""

    name: ClassVar[str] = "torch_tpu"
    kind: ClassVar[str] = "tpu"

    def is_loaded(self) -> bool:
        # `torch.tpu` is there without a device, too; only the renamed backend shows one.
        torch_core: Any = getattr(sys.modules.get("torch"), "_C", None)
        if torch_core is None or "torch_tpu" not in sys.modules:
            return False
        name = getattr(torch_core, "_get_privateuse1_backend_name", None)
        if name is None:
            raise PlatformUnsupported(
                f"torch {sys.modules['torch'].__version__} has no torch._C."
                "_get_privateuse1_backend_name, which was seen in 2.11 to 2.15 and tells whether "
                "torch_tpu has made its device. Install one of these, or uninstall torch_tpu."
            )
        return bool(name() == self.kind)

    def load(self) -> None:
        if env.read(_LOG_VARIABLE) is None:
            env.update({_LOG_VARIABLE: _LOG_LEVEL})
        with warnings.catch_warnings():
            # It warns of a missing tcmalloc, which no notebook user can preload.
            warnings.simplefilter("ignore")
            # With autoload off, importing the package does not make the device.
            importlib.import_module("torch_tpu._loader").load()

    def is_awake(self) -> bool:
        if not self.is_loaded():
            return False
        with _without_notice("is_initialized"):
            return bool(_tpu_module().is_initialized())

    def bind(self, local_rank: int) -> None:
        import torch

        if not self.is_loaded():
            self.load()
        for message in _HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        torch.ones(1).to(self.kind)

    def launch_variables(
        self, host: TpuHost, num_workers: int, ports: Sequence[int]
    ) -> tuple[Mapping[str, str], ...]:
        # TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT, a cache of programs on disk, is left to the user:
        # with it comes one in shared memory, which stays when all processes have ended; and
        # programs that an XLA plugin for processors had written could not be read again (0.2).
        return (torch_tpu_variables(host.generation, num_workers, ports),) * num_workers

    def process_group_backend(self) -> str:
        return "gloo" if _goes_by_host() else "cpu:gloo,tpu:tpu_dist"

    def average_gradients(self, gradients: Sequence[torch.Tensor], world_size: int) -> bool:
        if _goes_by_host():
            return False
        from nbaccel.base.trees import average  # it imports torch

        average(gradients, world_size)
        return True

    def synchronize(self) -> None:
        # Without a runtime it aborts the process instead of raising.
        if self.is_awake():
            import torch

            torch.accelerator.synchronize()

    def compile_counts(self) -> CompileCounts:
        # There is no public name for it.
        read_stats = getattr(_tpu_module(), "_get_cache_stats", None)
        if read_stats is None:
            warnings.warn(
                "torch_tpu has no torch.tpu._get_cache_stats, which was seen in 0.2: steps that "
                "compile again are not reported. Install torch_tpu 0.2, or a newer nbaccel.",
                RuntimeWarning,
                stacklevel=2,
            )
            return _Figures.counts
        stats = read_stats()
        programs = int(stats.num_compilations)
        # Asked in every step: the list of all programs is gone through only when it has grown.
        if programs != _Figures.counts.programs:
            durations = (entry.compilation_duration for entry in stats.per_entry_stats)
            seconds = sum(duration.total_seconds() for duration in durations)
            _Figures.counts = CompileCounts(programs=programs, seconds=seconds)
        return _Figures.counts

    def random_state(self, index: int | None = None) -> torch.Tensor:
        return self._generator().get_state()

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        self._generator().set_state(state.cpu())

    def _generator(self) -> torch.Generator:
        with _without_notice("default_generators"):
            generator: torch.Generator = _tpu_module().default_generators[0]
        return generator

    def reserved_bytes(self, device: torch.device) -> int | None:
        if not self.is_awake() or _Figures.empty_answers >= _MOST_EMPTY_ANSWERS:
            return None
        import torch

        used = torch.accelerator.memory_reserved() or torch.accelerator.memory_allocated()
        _Figures.empty_answers = 0 if used else _Figures.empty_answers + 1
        return used or None


@contextlib.contextmanager
def _without_notice(name: str) -> Iterator[None]:
    """Use a name of torch.tpu that says, once per process, that it is experimental.

    Later uses are plain: after `catch_warnings` each step would show all other warnings again.
    """
    if name in _USED_NAMES:
        yield
        return
    _USED_NAMES.add(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _tpu_module() -> Any:
    import torch

    return torch.tpu  # type: ignore[attr-defined]


def _goes_by_host() -> bool:
    return (env.read(COLLECTIVES_VARIABLE, "") or "").strip().lower() == "host"
