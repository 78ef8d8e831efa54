"""Stands behind the name `c++` while operations are built for tests: the real one, with less to do.

    c++ ... -O3 -g ... -c a.cpp -o a.o   ->   the same with -O0 -g0
                                              and, where they can be: all of its operation at once

Nearly all of the time goes into torch's headers, once per file: so the first file of an operation
is compiled with all the others included in it, and theirs become empty objects. The commands that
ninja remembers are those of DeepSpeed, so that its next `load()` finds nothing to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REAL = "NBACCEL_TEST_REAL_CXX"
LESS = ("-O0", "-g0", "-w")
# Folders of DeepSpeed whose files define the same names and so cannot be one translation unit.
APART = ("/aio/common/", "/cpu/comm/")


def put_on_path(folder: Path) -> None:
    """Let this process's children find this compiler under the name `c++`."""
    os.environ[REAL] = shutil.which("c++") or "c++"
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"  # it knows compilers by their file names
    program = folder / "c++"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])


def main(arguments: list[str]) -> int:
    real = os.environ[REAL]
    if "-c" not in arguments:  # it links, or is asked for its version
        return subprocess.run([real, *arguments], check=False).returncode
    at = arguments.index("-c")
    source, others = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
    together = files_compiled_together()
    if source not in together:
        return subprocess.run([real, *arguments, *LESS], check=False).returncode
    text = one_file_of(together) if source == together[0] else ""
    command = [real, *others, *LESS, "-x", "c++", "-c", "-"]
    return subprocess.run(command, input=text.encode(), check=False).returncode


def files_compiled_together() -> list[str]:
    """The sources of the operation that is built in this folder, less those that stand apart."""
    plan = Path("build.ninja").read_text()
    sources = re.findall(r"^build .*: compile (.*)$", plan, re.MULTILINE)
    return [source for source in sources if not any(part in source for part in APART)]


def one_file_of(sources: list[str]) -> str:
    """A source that includes all; headers without a guard come first, as `#import`: once only."""
    folders = {Path(source).parent for source in sources}
    headers = sorted(header for folder in folders for header in folder.glob("*.h"))
    text = {path: path.read_text() for path in [*headers, *map(Path, sources)]}
    once = [
        header
        for header in headers
        if "#pragma once" not in text[header]
        and any(f'"{header.name}"' in other for other in text.values())
    ]
    return "".join(f'#import "{path}"\n' for path in once) + "".join(
        f'#include "{path}"\n' for path in sources
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
