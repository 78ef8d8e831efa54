"""The files of a host with the pretended chips: `python -m tests.tpu.recorded_host FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.devices.tpu import hosts
from tests.tpu.pretended import CHIPS


def write_host(root: Path) -> None:
    """Write device files and the PCI bus of a host of v5p chips below a folder."""
    recorded = hosts.RecordedHost(
        nodes=hosts.vfio(0, CHIPS), bus=hosts.chips_on_bus("v5p", 0, CHIPS), packages=()
    )
    hosts.build_host(recorded, root)


if __name__ == "__main__":
    write_host(Path(sys.argv[1]))
