"""The records of which backends' tables are made, as other packages import them."""

from nbaccel.config import capability_rows
from nbaccel.config.capability_rows import *  # noqa: F403

__all__ = capability_rows.__all__
