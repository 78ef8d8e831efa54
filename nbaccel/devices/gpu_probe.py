"""What torch says of the GPUs, asked in a process that ends with the answer.

Where NVML cannot be asked (a container without the driver's library, some of WSL, ROCm) nothing
else tells without creating a CUDA context, which a notebook's process must not have. It takes
seconds, so it is done once, and only where a device node says that there is something to ask about.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nbaccel.plan.inventory import Gpu

__all__ = ["DEVICE_NODES", "is_worth_it", "probe_gpus"]

DEVICE_NODES = ("nvidia0", "dxg", "kfd")
"""Of NVIDIA's driver, of WSL, of AMD's driver."""

_TIMEOUT_S = 60
_SCRIPT = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found.append([properties.name, total, free, properties.major, properties.minor])
print(json.dumps(found))
"""


def is_worth_it(folder: Path = Path("/dev"), torch_version: str | None = None) -> bool:
    """Whether there are device nodes of GPUs, and a torch that could use them."""
    if not any((folder / name).exists() for name in DEVICE_NODES):
        return False
    try:
        version = importlib.metadata.version("torch") if torch_version is None else torch_version
    except importlib.metadata.PackageNotFoundError:
        return False
    return not version.endswith("+cpu")


@functools.cache
def probe_gpus(interpreter: Sequence[str] = (sys.executable,)) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that torch sees."""
    try:
        done = subprocess.run(
            [*interpreter, "-c", _SCRIPT],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        answers = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return (), f"a process that asked torch for GPUs failed: {error}"
    gpus = tuple(
        Gpu(
            index=index,
            name=name,
            total_bytes=total,
            free_bytes=free,
            compute_capability=(major, minor),
        )
        for index, (name, total, free, major, minor) in enumerate(answers)
    )
    return gpus, "" if gpus else "torch sees no GPU"
