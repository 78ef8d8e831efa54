"""Messages of other libraries, where their words are the only way to tell errors apart.

Where an error has a type, a field or a traceback that tells, that is used instead. If a version
changes the words, a user loses an explanation, but never a result.
"""

from __future__ import annotations

import re

# Seen with gloo, NCCL and the store of torch 2.13, which raise these types for anything else, too.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|recvvalue failed"
    r"|remote process exited|peer .{0,40}(closed|gone|exited)|read error|failed to (recv|connect)"
    r"|no error type|ncclremoteerror|ncclsystemerror|connectfullmesh|sendbytes failed",
    re.IGNORECASE,
)
_LOST_TYPES = {
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
}

_UNLIKE_COLLECTIVES = (
    "disagreement on list contents",  # DeepSpeed 0.19: ZeRO-3 gathers other weights by rank
    "op.preamble.length <= op.nbytes",  # gloo, before it aborts the process
)

# Raised for a group that is looked up by name, or held in C++, where no frame has it as a value.
_LEFT_GROUP_TYPES = (RuntimeError, ValueError, AssertionError)
_LEFT_GROUP = (
    "DeepSpeed backend not set",  # DeepSpeed 0.19
    "resolve the process group",  # torch 2.13: functional collectives, so FSDP2
    "Invalid process group",  # torch 2.13: distributed_c10d
)


def tells_of_unlike_collectives(text: str) -> bool:
    """Whether a text says that ranks met in one collective for different things."""
    return any(part in text for part in _UNLIKE_COLLECTIVES)


def tells_of_a_lost_connection(type_name: str, message: str) -> bool:
    """Whether an error says no more than that another rank has gone."""
    return type_name in _LOST_TYPES and bool(_LOST_CONNECTION.search(message))


def can_come_of_a_left_group(error: BaseException) -> bool:
    """Whether an error is of a type that the use of a process group which was left can raise."""
    return isinstance(error, _LEFT_GROUP_TYPES)


def tells_of_a_left_group(error: BaseException) -> bool:
    """Whether an error's text is that of a library which no longer finds its process group."""
    return can_come_of_a_left_group(error) and any(text in str(error) for text in _LEFT_GROUP)
