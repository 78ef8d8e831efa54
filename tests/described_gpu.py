"""A plugin for machines without a GPU: this process looks as if a library had woken one in it.

    make test PYTEST_ARGS='-p tests.described_gpu'

Where jax, cupy or a question to `torch.cuda` has come before a test, the CUDA driver's library is
mapped and a device of it is open, and nbaccel refuses to fork. Here a file of that name is mapped
and a file of such a name is open: what `driver_in_use` looks at. Whatever needs more of a GPU is
skipped as before; processes that are started have neither.
"""

from __future__ import annotations

import atexit
import mmap
import os
import tempfile
from pathlib import Path

from nbaccel.devices.cuda import driver_in_use

DEVICE = Path(f"/dev/nvidia-described-{os.getpid()}")


def describe() -> tuple[mmap.mmap, int]:
    """Map the library, whose file is gone at once, and open the device, a sign of which stays."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        library.write_bytes(bytes(mmap.PAGESIZE))
        with library.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
    device = os.open(DEVICE, os.O_CREAT | os.O_RDWR)
    atexit.register(DEVICE.unlink, missing_ok=True)
    if not driver_in_use():
        raise RuntimeError("a described GPU is not seen: does driver_in_use look at other traces?")
    return mapped, device


# For as long as the process lives.
HELD = describe()
