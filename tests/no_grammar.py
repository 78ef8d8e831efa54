"""A plugin that `make test` names, so that it comes before nbval: three seconds less per process.

nbval imports nbformat and that jsonschema, which builds a grammar of internationalised addresses
where there is a package for it, as JupyterLab brings it. It does as well without: no notebook has
such an address to check. Each process of pytest-xdist would build it.
"""

from __future__ import annotations

import sys

if "jsonschema" not in sys.modules:
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
