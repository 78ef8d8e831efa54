from __future__ import annotations

from dataclasses import replace

from added_backends import rows

DEVICE = replace(rows.DEVICE, meaning="another one of that name")
