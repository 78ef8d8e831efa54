"""The long lane: hundreds of moments, and the table of what survives what.

python -m tests.chaos --moments 320 --output benchmarks/results/chaos.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.harness import chaos


def main() -> int:
    """Run the lane; the exit status is 1 if anything was torn, silent or left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=320)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    print(f"chaos: {options.moments} moments, seed {options.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, chaos(Path(folder), seed=options.seed) as found:
        try:
            found.run(options.moments)
        finally:
            table, faults = found.table(), found.faults()
            if options.output:
                record = {"seed": options.seed, "scenes": table, "moments": found.dump()}
                options.output.write_text(json.dumps(record, indent=1) + "\n")
    for name, figures in table.items():
        print(f"{name}: {figures}")
    print("\n".join(faults))
    seconds = time.monotonic() - began
    print(f"chaos: {len(found.moments)} moments, {len(faults)} faults, in {seconds:.0f} s")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
