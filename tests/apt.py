"""Packages of the system that tests need, installed where that takes no question."""

from __future__ import annotations

import os
import shutil
import subprocess


def install(packages: list[str]) -> bool:
    """Install system packages where we may without asking: as root, or through `sudo -n`.

    Returns:
        Whether apt-get has installed them.
    """
    prefix = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    if not all(shutil.which(program) for program in ["apt-get", *prefix[:1]]):
        return False
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = [*prefix, "apt-get", "install", "--yes", "--no-install-recommends", *packages]
    # The list of packages is fetched only where the one that is there does not do.
    for step in (command, [*prefix, "apt-get", "update"], command):
        done = subprocess.run(step, env=environ, capture_output=True, text=True, check=False)
        if done.returncode == 0 and step is command:
            return True
    return False
