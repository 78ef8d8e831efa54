"""Get what the tests of several hosts need of the system, once.

    python -m tests.hosts.packages     # `make test-slow` does this first; later calls do nothing

Debian's own packages. What cannot be installed is said, and the tests that need it are skipped with
this reason.
"""

from __future__ import annotations

import os
import shutil
import sys

from tests import apt

PACKAGES = {
    "ip": "iproute2",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "srun": "slurm-wlm",
    "munged": "munge",
}
# Where daemons are, which a user's PATH may leave out.
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> list[str]:
    """Packages whose program is not there."""
    return sorted(
        package
        for program, package in PACKAGES.items()
        if shutil.which(program, path=SEARCHED) is None
    )


def main() -> int:
    wanted = missing()
    if not wanted:
        return 0
    print(f"installing {', '.join(wanted)} for the tests of several hosts (once)", flush=True)
    if apt.install(wanted) and not missing():
        return 0
    print(f"no tests of several hosts without these packages: apt-get install {' '.join(wanted)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
