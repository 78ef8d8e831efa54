"""What `bigmodel.py` measures: each task in a process of its own, by one of the two libraries."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, PEER, PLAIN = "nbaccel", "Accelerate", "a plain read"
NO_PREFETCH = "nbaccel, without fetching ahead"
OWN_OFFLOAD = "nbaccel's disk_offload"
LAYERS, WIDTH = 16, 8192
CHECKPOINT_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
PORTION = 64 << 20
WARM_PASSES = 3
ROWS_OF_INPUT = 4
TOKENS = 6
BASE_BYTES = 900 << 20  # Python, torch and transformers in a process that has no weights
TIMEOUT_S = 900.0

TASKS: dict[str, tuple[str, ...]] = {
    "read": (PLAIN,),
    "load": (PEER, OURS),
    "load_bf16": (PEER, OURS),
    "disk": (PEER, OURS, NO_PREFETCH, OWN_OFFLOAD),
    "generate": (PEER, OURS, NO_PREFETCH),
}


@dataclass(frozen=True)
class Row:
    """A line of the table: whose figures are compared, how, and what must hold."""

    title: str
    measure: str
    unit: str
    told: str = ""
    most: float | None = None
    least: float | None = None
    ours: str = OURS
    peer: str = PEER
    is_speed: bool = False
    alone: bool = False

    @property
    def has_bar(self) -> bool:
        return self.most is not None or self.least is not None

    def compare(self, ours: float, theirs: float) -> float:
        if self.alone:
            return ours
        return theirs / ours if self.is_speed else ours / theirs

    def holds(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )

    def show(self, value: float) -> str:
        return f"{value:.3g} {self.unit}"


ROWS = (
    Row(
        "load to the host, beside a plain read of the bytes (first column)",
        "load s",
        "s",
        "at most 1.3 of the read",
        most=1.3,
        peer=PLAIN,
    ),
    Row("load to the host", "load s", "s", "no slower than Accelerate's", most=1.0),
    Row("load and the first forward", "load and forward s", "s"),
    Row(
        "peak memory of the load, over the model's size",
        "load peak",
        "x",
        "a peak of at most 1.05 of what is placed in memory",
        most=1.05,
        alone=True,
    ),
    Row("load as bfloat16", "bf16 s", "s"),
    Row(
        "peak memory of it, over the model's size in bfloat16",
        "bf16 peak",
        "x",
        "the same as bfloat16",
        most=1.05,
        alone=True,
    ),
    Row(
        "forward with all weights on disk, warm cache: times as fast as `disk_offload`",
        "disk warm s",
        "s",
        "1.5 times as fast as `disk_offload`, warm and cold",
        least=1.5,
        is_speed=True,
    ),
    Row("the same, cold cache", "disk cold s", "s", "", least=1.5, is_speed=True),
    Row(
        "cold cache, with (second column) and without fetching ahead",
        "disk cold s",
        "s",
        peer=NO_PREFETCH,
        is_speed=True,
    ),
    Row(
        "warm cache, with and without fetching ahead",
        "disk warm s",
        "s",
        peer=NO_PREFETCH,
        is_speed=True,
    ),
    Row(
        "nbaccel's own `disk_offload`, warm cache",
        "disk warm s",
        "s",
        ours=OWN_OFFLOAD,
        is_speed=True,
    ),
    Row("seconds per token of `generate` under half the memory", "token s", "s", is_speed=True),
    Row(
        "the same, with and without fetching ahead", "token s", "s", peer=NO_PREFETCH, is_speed=True
    ),
)


# ---------------------------------------------------------------- one process for one task
def run_task(task: str, name: str, folder: Path) -> dict[str, float]:
    """Run a task in a fresh process; returns what it measured."""
    script = Path(__file__).resolve().parents[1] / "bigmodel.py"
    done = subprocess.run(
        [sys.executable, str(script), "--task", task, name, str(folder)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if done.returncode:
        raise RuntimeError(f"{task} of {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def perform(task: str, name: str, folder: Path) -> dict[str, float]:
    """The task itself, in this process."""
    if task == "make":
        return _make(folder)
    measures: dict[str, Callable[[str, Path], dict[str, float]]] = {
        "read": _read,
        "load": _load,
        "load_bf16": _load_bf16,
        "disk": _disk,
        "generate": _generate,
    }
    return measures[task](name, folder)


def _library(name: str) -> Any:
    import accelerate

    import nbaccel

    return accelerate if name == PEER else nbaccel


def _make(folder: Path) -> dict[str, float]:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for number in range(LAYERS):
        # Small, so that values stay finite through all layers.
        tensors[f"{number}.weight"] = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        tensors[f"{number}.bias"] = torch.randn(WIDTH)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    del tensors
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_llama_config())
    model.save_pretrained(folder / "llama", max_shard_size="1GB")
    return {}


def _llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=10,
        num_attention_heads=16,
        vocab_size=4000,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def generate_bytes() -> int:
    """Bytes of the model that generates, in float32."""
    config = _llama_config()
    width, inner = config.hidden_size, config.intermediate_size
    per_layer = 4 * width * width + 3 * width * inner + 2 * width
    return 4 * (config.num_hidden_layers * per_layer + 2 * config.vocab_size * width + width)


def limit_bytes() -> int:
    """Memory of the control group in which it generates: half of the model, and the libraries."""
    return BASE_BYTES + generate_bytes() // 2


# ---------------------------------------------------------------- the tasks
def _empty_model(library: Any) -> Any:
    from torch import nn

    with library.init_empty_weights():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _read(name: str, folder: Path) -> dict[str, float]:
    path = folder / "model.safetensors"
    _warm(path)
    started = time.perf_counter()
    _read_through(path)
    return {"load s": time.perf_counter() - started}


def _read_through(path: Path) -> None:
    buffer = bytearray(PORTION)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _warm(*paths: Path) -> None:
    for path in paths:
        _read_through(path)


def _load(name: str, folder: Path) -> dict[str, float]:
    import torch

    library, path = _library(name), folder / "model.safetensors"
    _warm(path)
    model = _empty_model(library)
    inputs = torch.randn(ROWS_OF_INPUT, WIDTH)
    # The first product of matrices sets up torch's threads and kernels.
    torch.nn.functional.linear(inputs, torch.randn(WIDTH, WIDTH))
    memory = _Memory()
    started = time.perf_counter()
    model = library.load_checkpoint_and_dispatch(model, str(path), device_map={"": "cpu"})
    loaded = time.perf_counter()
    peak = memory.peak() / CHECKPOINT_BYTES
    with torch.no_grad():
        model(inputs)
    return {
        "load s": loaded - started,
        "load and forward s": time.perf_counter() - started,
        "load peak": max(peak, memory.peak() / CHECKPOINT_BYTES),
    }


def _load_bf16(name: str, folder: Path) -> dict[str, float]:
    import torch

    library, path = _library(name), folder / "model.safetensors"
    _warm(path)
    model = _empty_model(library)
    memory = _Memory()
    started = time.perf_counter()
    library.load_checkpoint_and_dispatch(
        model, str(path), device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    return {
        "bf16 s": time.perf_counter() - started,
        "bf16 peak": memory.peak() / (CHECKPOINT_BYTES / 2),
    }


class _Memory:
    """Resident bytes of this process: the peak since the object was made, over what was there."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
        self._before = _status_bytes("VmRSS")

    def peak(self) -> int:
        return _status_bytes("VmHWM") - self._before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _disk(name: str, folder: Path) -> dict[str, float]:
    import torch

    library, path = _library(name), folder / "model.safetensors"
    model, offload = _empty_model(library), folder / f"offload-{name}"
    inputs = torch.randn(ROWS_OF_INPUT, WIDTH)
    torch.nn.functional.linear(inputs, torch.randn(WIDTH, WIDTH))
    if name in (PEER, OWN_OFFLOAD):
        model = library.load_checkpoint_and_dispatch(model, str(path), device_map={"": "cpu"})
        model = library.disk_offload(model, offload)
        files = list(offload.glob("*.dat"))
    else:
        prefetch = name != NO_PREFETCH
        model = library.load_checkpoint_and_dispatch(
            model, str(path), device_map={"": "disk"}, prefetch=prefetch
        )
        files = [path]
    try:
        with torch.no_grad():
            _flush(files)
            cold = _timed(lambda: model(inputs))
            _warm(*files)
            warm = [_timed(lambda: model(inputs)) for _ in range(WARM_PASSES)]
    finally:
        shutil.rmtree(offload, ignore_errors=True)
    return {"disk cold s": cold, "disk warm s": statistics.median(warm)}


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _flush(paths: list[Path]) -> None:
    """Put files out of the system's cache; what is not written yet first."""
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _generate(name: str, folder: Path) -> dict[str, float]:
    import torch
    from transformers import LlamaForCausalLM

    library, checkpoint, offload = _library(name), folder / "llama", folder / f"llama-{name}"
    # Before the model: afterwards its pages would be another group's.
    files = list(checkpoint.glob("*.safetensors"))
    _flush(files)
    with _MemoryLimit(limit_bytes()):
        with library.init_empty_weights():
            model = LlamaForCausalLM(_llama_config())
        options: dict[str, Any] = {"offload_folder": offload}
        if name == NO_PREFETCH:
            options["prefetch"] = False
        model = library.load_checkpoint_and_dispatch(
            model,
            str(checkpoint),
            device_map="sequential",
            max_memory={"cpu": generate_bytes() // 2},
            no_split_module_classes=["LlamaDecoderLayer"],
            **options,
        ).eval()
        prompt = torch.arange(1, 9).unsqueeze(0)
        model.generate(prompt, max_new_tokens=1, do_sample=False)
        seconds = _timed(lambda: model.generate(prompt, max_new_tokens=TOKENS, do_sample=False))
    shutil.rmtree(offload, ignore_errors=True)
    return {"token s": seconds / TOKENS}


class _MemoryLimit:
    """A control group of this process's own, where it may make one; its page cache counts."""

    _ROOT = Path("/sys/fs/cgroup/memory")

    def __init__(self, num_bytes: int) -> None:
        self._folder = self._ROOT / f"nbaccel-bench-{os.getpid()}"
        self._bytes = num_bytes

    def __enter__(self) -> None:
        if not (self._ROOT / "memory.limit_in_bytes").exists():
            raise RuntimeError(
                f"{self._ROOT} has no memory controller (control groups, version 1): memory cannot "
                "be limited. Run it as root where there is one."
            )
        self._folder.mkdir()
        (self._folder / "memory.limit_in_bytes").write_text(str(self._bytes))
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *_: object) -> None:
        (self._ROOT / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()
