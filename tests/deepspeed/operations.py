"""Build the C++ operations that tests of DeepSpeed load, once, and as cheaply as it goes.

    python -m tests.deepspeed.operations     # `make test` does this first; later calls do nothing

DeepSpeed would build them on first use, inside a test. Its own builders are what builds here too,
so the files lie where its next `load()` looks for them and are up to date for it; only the compiler
behind the name `c++` is another (`compiler.py`): it leaves out optimisation and debug information
and reads torch's headers once per operation. That takes a fifth of the time.

What cannot be built is said, with what to install, and its tests are skipped with this reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nbaccel.base.optional_packages import is_installed
from nbaccel.deepspeed.library import path_with_ninja
from tests import apt
from tests.deepspeed import compiler

FOLDER = Path(sys.prefix) / "torch_extensions"
ENGINE = ("deepspeed_shm_comm", "fused_adam", "cpu_adam")
# Before 0.19.7 the reading of disks had its pinned memory in itself.
_APART = is_installed("deepspeed.ops.op_builder.cpu.pin_memory")
DISK = ("pin_memory", "async_io") if _APART else ("async_io",)
# What it takes, and the Debian package that brings it.
PACKAGES = {"c++": "g++", "libaio": "libaio-dev"}


def folder() -> Path:
    """Where operations are looked for: as the environment says, else beside this Python."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", FOLDER))


def use_those_of_the_environment() -> None:
    """Let DeepSpeed, in this process and its children, find what was built for the tests."""
    if folder().is_dir():
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder())
        # Another version of ninja would build all of it again: it remembers commands otherwise.
        os.environ["PATH"] = path_with_ninja() or ""


def not_built(names: tuple[str, ...]) -> list[str]:
    """Those of the operations that are not there."""
    return [name for name in names if not (folder() / name / f"{name}.so").exists()]


# ---------------------------------------------------------------- the tools
def missing_packages() -> list[str]:
    """System packages without which an operation cannot be built."""
    compiler_is_missing = shutil.which(os.environ.get("CXX", "c++").split()[0]) is None
    missing = {"c++": compiler_is_missing, "libaio": not _has_libaio()}
    return [PACKAGES[tool] for tool, is_missing in missing.items() if is_missing]


def _has_libaio() -> bool:
    """Whether programs can be linked with libaio; its `.so.1` alone, without headers, is no use."""
    program = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    command = [*os.environ.get("CXX", "c++").split(), "-x", "c++", "-", "-o", os.devnull, "-laio"]
    try:
        return (
            subprocess.run(
                command, input=program.encode(), capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:  # no compiler: that is said by its own name
        return Path("/usr/include/libaio.h").exists()


def install(packages: list[str]) -> list[str]:
    """Install system packages where we may without asking; return those still missing."""
    return missing_packages() if apt.install(packages) else packages


# ---------------------------------------------------------------- building
def build(names: tuple[str, ...]) -> None:
    """Have DeepSpeed build the operations, two at a time, in `folder()`."""
    from deepspeed.ops.op_builder import cpu

    builders = {
        "deepspeed_shm_comm": cpu.ShareMemCommBuilder,
        "fused_adam": cpu.FusedAdamBuilder,
        "cpu_adam": cpu.CPUAdamBuilder,
        "pin_memory": getattr(cpu, "PinMemoryBuilder", None),
        "async_io": cpu.AsyncIOBuilder,  # builds pin_memory itself
    }
    wanted = [name for name in names if name != "pin_memory" or "async_io" not in names]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda name: _build(builders[name], name), reversed(wanted)))


def _build(builder: Any, name: str) -> None:
    begun = time.monotonic()
    try:
        builder().load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        print(f"  {name}: {type(error).__name__}: {str(error)[-2000:]}", flush=True)
        return
    print(f"  {name}: {time.monotonic() - begun:.0f} s", flush=True)


def prepare() -> None:
    """What building and loading needs of this process's environment."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder())
    os.environ["PATH"] = path_with_ninja() or ""
    folder().mkdir(parents=True, exist_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plainly", action="store_true", help="with the compiler as it is")
    plainly = parser.parse_args().plainly
    print(f"building DeepSpeed's operations for the tests in {folder()} (once)", flush=True)
    lacking = missing_packages()
    if lacking and (lacking := install(lacking)):
        print(f"not without these packages of the system: apt-get install {' '.join(lacking)}")
    wanted = ENGINE + DISK if not lacking else ENGINE
    if "g++" not in lacking:
        prepare()
        with tempfile.TemporaryDirectory() as programs:
            if not plainly:
                compiler.put_on_path(Path(programs))
            build(wanted)
        if not plainly and (failed := not_built(wanted)):
            return _once_more(failed)
    return 1 if not_built(ENGINE + DISK) else 0


def _once_more(failed: list[str]) -> int:
    """Without our compiler, in a fresh process: torch does not try twice in one."""
    for name in failed:
        shutil.rmtree(folder() / name, ignore_errors=True)
    command = [sys.executable, "-m", "tests.deepspeed.operations", "--plainly"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
