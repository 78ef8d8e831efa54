"""Lets the real torch_tpu compute on the processor: two pretended v5p chips.

It is put into a lane's environment as a `.pth` file, so that it acts in every process of the tests
that has `NBACCEL_TEST_PRETENDED_TPU=1`: notebook kernels, the template, workers. There

  - torch_tpu counts two chips, and loads an XLA plugin for processors instead of libtpu;
  - nbaccel looks for chips below a folder with a recorded host's files;
  - a worker makes its client without the variables of a launch over several chips, which the
    plugin, with its single device, cannot serve.

Everything else is the real package. What it computes is proof for this code, not for a chip.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SWITCH = "NBACCEL_TEST_PRETENDED_TPU"
HOST = "NBACCEL_TEST_TPU_HOST"
CHIPS = 2
_PLUGIN = "xla_plugins.xla_cpu_pjrt"
_OF_SEVERAL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def install() -> None:
    """Act in this process, if it was asked for."""
    if os.environ.get(SWITCH) != "1":
        return
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["NBACCEL_TPU_COLLECTIVES"] = "host"
    # What the plugin lacks and libtpu has (memory figures, a client for one device, kernels of
    # vendors) is complained of in every operation, which would bury what a user of a chip sees.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    spec = importlib.util.find_spec(_PLUGIN)
    if spec is not None and spec.submodule_search_locations:
        plugin = Path(next(iter(spec.submodule_search_locations))) / "xla_cpu_pjrt.so"
        os.environ["TPU_LIBRARY_PATH"] = str(plugin)
    sys.meta_path.insert(0, _Adapter())


class _Adapter(importlib.abc.MetaPathFinder):
    """Changes three modules right after they were imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of them, with its own loader wrapped."""
        adapt = _ADAPTED.get(fullname)
        if adapt is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, adapt)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any, adapt: Callable[[Any], None]) -> None:
        self._real = real
        self._adapt = adapt

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._adapt(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _count_two(hardware: Any) -> None:
    hardware._scan_pci_tpus = lambda: (CHIPS, hardware._V5P_TOPOLOGY)
    hardware.get_tpu_device_name = lambda: "TPU v5p"


def _look_at_recorded_host(chips: Any) -> None:
    root = Path(os.environ[HOST])
    real_holders_of = chips.holders_of

    def holders_of(device_files: Sequence[str], *args: Any) -> tuple[int, ...]:
        # Files of the recorded host are named as they would be on it.
        below_root = [str(root / file.lstrip("/")) for file in device_files]
        given = [
            file if file.startswith(str(root)) else below
            for file, below in zip(device_files, below_root, strict=True)
        ]
        holders: tuple[int, ...] = real_holders_of(given, *args)
        return holders

    chips.holders_of = holders_of
    chips.inspect_host = functools.partial(chips.inspect_host, root=root)
    chips.count_chips = functools.partial(chips.count_chips, root=root)


def _bind_alone(driver_module: Any) -> None:
    driver = driver_module.TorchTpuDriver
    real_bind = driver.bind

    def bind(self: Any, local_rank: int) -> None:
        hidden = {
            name: os.environ.pop(name)
            for name in list(os.environ)
            if name in _OF_SEVERAL or name.startswith("TORCH_TPU_")
        }
        try:
            real_bind(self, local_rank)
        finally:
            os.environ.update(hidden)

    driver.bind = bind


_ADAPTED: dict[str, Callable[[Any], None]] = {
    "torch_tpu._internal.utils.hardware": _count_two,
    "nbaccel.devices.tpu.chips": _look_at_recorded_host,
    "nbaccel.devices.tpu.torch_tpu_driver": _bind_alone,
}
