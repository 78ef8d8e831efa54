"""Trainings on GPUs: by nbaccel's `Accelerator`, and by the library below it called by hand.

Everything here runs in workers of a launch, or is called by `benchmarks/gpu.py`; with `device`
"cpu" and a small `Size` it runs on a machine without a GPU, for the tests.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self

PRECISIONS = ("no", "bf16", "fp16")
WAYS = ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """A model of `layers` blocks of `width`, and how often it is stepped."""

    width: int = 2048
    layers: int = 16
    batch: int = 64
    steps: int = 30
    rounds: int = 3

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in self._layers()),
            nn.Linear(self.width, 10),
        )

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of shape (batch, width) and labels of shape (batch,)."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch, self.width, generator=generator)
        return inputs, torch.randint(0, 10, (self.batch,), generator=generator)

    def _layers(self) -> range:
        return range(self.layers)


@dataclass(frozen=True)
class Case:
    """A way to train, in one precision."""

    way: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.way}, {'fp32' if self.precision == 'no' else self.precision}"

    @property
    def stage(self) -> int | None:
        return int(self.way[-1]) if self.way.startswith("ZeRO") else None

    def zero_config(self, batch: int, world: int) -> dict[str, Any] | None:
        """DeepSpeed's configuration, which both sides are given; None without ZeRO."""
        if self.stage is None:
            return None
        return {
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16"},
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": 1,
            "train_batch_size": batch * world,
        }


def cases() -> list[Case]:
    """All rows."""
    return [Case(way, precision) for way in WAYS for precision in PRECISIONS]


# ------------------------------------------------------------------------- one training


def measure(model: nn.Module, case: Case, size: Size, device: str) -> dict[str, Any]:
    """Train a copy of the model by both sides in turns, in this worker.

    Returns:
        Of each side, ``nbaccel`` and ``by hand``: steps per second of each round, the last loss,
        and the most bytes that torch held on the device.
    """
    made_by = {"nbaccel": _ours, "by hand": _by_hand}
    found: dict[str, Any] = {who: {"rates": [], "peak": 0} for who in made_by}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(size.rounds):
        order = list(made_by) if number % 2 == 0 else list(made_by)[::-1]
        for who in order:
            fresh = size.model()
            fresh.load_state_dict(state)
            found[who] = _one(found[who], made_by[who], fresh, case, size, device)
    return found


def _one(
    found: dict[str, Any],
    make: Callable[..., Callable[[], torch.Tensor]],
    model: nn.Module,
    case: Case,
    size: Size,
    device: str,
) -> dict[str, Any]:
    _forget(device)
    step = make(model, case, size, device)
    for _ in range(3):  # buffers, optimizer states and the first choices of kernels
        loss = step()
    _wait(device)
    began = time.perf_counter()
    for _ in range(size.steps):
        loss = step()
    _wait(device)
    rate = size.steps / (time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    last = float(loss.detach())
    del step, loss, model
    _forget(device)
    return {"rates": [*found["rates"], rate], "peak": max(found["peak"], peak), "loss": last}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _ours(model: nn.Module, case: Case, size: Size, device: str) -> Callable[[], torch.Tensor]:
    from nbaccel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    settings: dict[str, Any] = {"mixed_precision": case.precision, "cpu": device == "cpu"}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if case.way == "FSDP2":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    elif case.stage is not None:
        settings["deepspeed_plugin"] = DeepSpeedPlugin(case.zero_config(size.batch, world))
    accelerator = Accelerator(**settings)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, labels = (tensor.to(accelerator.device) for tensor in size.data())

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _by_hand(model: nn.Module, case: Case, size: Size, device: str) -> Callable[[], torch.Tensor]:
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    inputs, labels = (tensor.to(place) for tensor in size.data())
    if case.stage is not None:
        return _engine_step(model, case, size, inputs, labels)
    context: AbstractContextManager[Any] = nullcontext()
    if case.way == "FSDP2":
        model = _sharded(model, case, device)
    else:
        model = model.to(place)
        if dist.is_initialized() and dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        if case.precision in DTYPES:
            context = torch.autocast(device, DTYPES[case.precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device, enabled=case.precision == "fp16")

    def step() -> torch.Tensor:
        with context:
            output = model(inputs)
        loss = nn.functional.cross_entropy(output.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def _sharded(model: nn.Module, case: Case, device: str) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES.get(case.precision))
    # As the plugin does without a wrap policy: the model is one unit.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _engine_step(
    model: nn.Module, case: Case, size: Size, inputs: torch.Tensor, labels: torch.Tensor
) -> Callable[[], torch.Tensor]:
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = {**(case.zero_config(size.batch, world) or {}), "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = inputs.to(DTYPES.get(case.precision, torch.float32))

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(engine(inputs).float(), labels)
        engine.backward(loss)
        engine.step()
        return loss

    return step


# ------------------------------------------------------------------------- launches


def touch(model: nn.Module) -> float:
    """What each worker does in the launches that are timed: it reads each tensor once."""
    return sum(float(p.detach().flatten()[0]) for p in model.parameters())


def touch_spawned(rank: int, model: nn.Module) -> None:
    """The same for `torch.multiprocessing.spawn`."""
    touch(model)


def hold(folder: str, device: str) -> None:
    """Take 512 MiB on the device, say so, and stay."""
    held = torch.ones(512 * MIB // 4, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    Path(folder, str(os.getpid())).touch()
    time.sleep(600 if held.numel() else 0)


class EndWhenHeld:
    """Ends a launch from a thread, once one of its workers holds memory.

    Args:
        folder: Where workers say so.
        how: ``"Stop"`` presses Stop, ``"kill"`` kills a worker.

    Attributes:
        at: When that was done (`time.monotonic`).
    """

    def __init__(self, folder: Path, how: str) -> None:
        self._folder = folder
        self._how = how
        self.at = 0.0
        self._thread = threading.Thread(target=self._act)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _act(self) -> None:
        until = time.monotonic() + 120
        while not (holders := list(self._folder.iterdir())) and time.monotonic() < until:
            time.sleep(0.02)
        self.at = time.monotonic()
        if self._how == "Stop":
            os.kill(os.getpid(), signal.SIGINT)
        elif holders:
            os.kill(int(holders[0].name), signal.SIGKILL)


def free_bytes() -> list[int]:
    """Free memory of each GPU, asked of the driver without a context; empty without a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
