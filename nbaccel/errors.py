"""The errors of nbaccel, as users and other packages import them."""

from nbaccel.base import errors
from nbaccel.base.errors import *  # noqa: F403

__doc__ = errors.__doc__
__all__ = errors.__all__
