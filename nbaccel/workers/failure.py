r"""What is known of a worker's failure, and how it is reported.

The first failure *by time* that is not merely a lost connection is the cause: when one rank dies,
its peers see "Connection closed by peer" and often report first.

[Note: not pickled whole] Pickle rebuilds an exception by calling its class with `args`. That fails
for every class whose `__init__` takes other arguments than it hands on, and `except MyError` in the
notebook would not see it. So the parts are sent separately, and no `__init__` runs on arrival. An
error that torch raises again for another process or thread is sent as the original:

    DataLoader worker    KeyError('x') ─► ExceptionWrapper: its class, its traceback as text
    rank                 KeyError("Caught KeyError in DataLoader worker process 0.\nOriginal ...")
"""

from __future__ import annotations

import builtins
import contextlib
import re
import signal
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nbaccel.base.frames import (
    Frame,
    kind_name,
    of_traceback,
    place,
    source,
    user_frame,
    within_worker,
)
from nbaccel.base.units import format_bytes, plain_text, shorten_text
from nbaccel.plan import registry

# nbaccel's own error; where its cause is a lost connection, it is a consequence too.
_CONSEQUENCE_TYPE = "CollectiveTimeout"
_LINES_AROUND = 2  # source lines shown before and after the failing one
_MESSAGE_CHARS = 20_000  # of a longer message only head and tail are sent
_HEADLINE_CHARS = 1_000
_TEXT_CHARS = 300
_ONE_LINE_CHARS = 140
_OUTPUT_CHARS = 160
_OUTPUT_LINES = 4
_MOST_CAUSES = 20
_MOST_NOTES = 20
_MOST_PARTS = 6
_MOST_RANKS = 8
_GROUP_TYPES: type[BaseException] | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedError:
    """An exception, without the objects it holds: type, text and stack."""

    type_name: str
    message: str
    frames: tuple[Frame, ...]
    cause: RaisedError | None = None  # the exception it was raised from or during, if any
    notes: tuple[str, ...] = ()
    parts: tuple[RaisedError, ...] = ()
    missing_name: str = ""

    @property
    def first_line(self) -> str:
        """Of the message."""
        return self.message.strip().partition("\n")[0]

    @property
    def at(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        return user_frame(reversed(self.frames))

    def leaves(self) -> list[RaisedError]:
        """The exceptions in a group, and in the groups in it."""
        if not self.parts:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves()]


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A record of one rank's end."""

    rank: int
    time: float  # seconds of CLOCK_MONOTONIC
    raised: RaisedError | None = None
    traceback: str = ""  # as Python prints it, of a rank that has raised
    exit_status: int | None = None  # negative for a signal; None if it raised
    stack: tuple[Frame, ...] = ()  # innermost call first, as far as faulthandler could tell
    max_rss_bytes: int = 0
    evidence: str = ""  # what the system says about the death: out-of-memory kills, full /dev/shm
    doing: str = ""
    """What a rank was doing that was stopped; of one that died, what its status does not tell."""
    remedy: str = ""  # what to do, where the status does not tell: a host may be lost

    @classmethod
    def of_error(cls, rank: int, error: BaseException, *, failure_time: float) -> FailureRecord:
        """The record of a rank whose function has raised."""
        entry = error.__traceback__
        for _ in range(len(of_traceback(entry)) - len(_frames_of(entry))):
            entry = entry and entry.tb_next
        text = "".join(traceback.format_exception(type(error), error, entry))
        return cls(
            rank=rank,
            time=failure_time,
            raised=describe_error(error),
            traceback=shorten_text(text, _MESSAGE_CHARS),
        )

    @property
    def full_traceback(self) -> str:
        """The worker's whole traceback, causes first, in Python's own form."""
        return f"rank {self.rank}:\n{self.traceback}"

    @property
    def was_stopped(self) -> bool:
        """Whether the rank has neither raised nor died by itself."""
        return self.raised is None and self.exit_status is None

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        error = self.raised
        if error is not None and error.type_name.rpartition(".")[2] == _CONSEQUENCE_TYPE:
            error = error.cause
        if error is None:
            return False
        type_name = error.type_name.rpartition(".")[2]
        return bool(_LOST_TYPE.fullmatch(type_name) and _LOST_CONNECTION.search(error.message))

    @property
    def headline(self) -> str:
        """One line: what happened to this rank."""
        if self.raised is not None:
            line = self.raised.first_line
            return f"raised {self.raised.type_name}" + (f": {line}" if line else "")
        if self.doing or self.exit_status is None:
            return self.doing
        return name_exit(self.exit_status)


def first_cause(records: Sequence[FailureRecord]) -> FailureRecord:
    """The failure to look at: the earliest that is not a lost connection, if a rank has failed."""
    failed = [record for record in records if not record.was_stopped] or records
    by_time = sorted(failed, key=lambda record: record.time)
    # Where all are consequences, the earliest is the closest to the cause.
    return next((record for record in by_time if not record.is_consequence), by_time[0])


def describe_error(error: BaseException, seen: set[int] | None = None) -> RaisedError:
    """Describe an exception for another process. Outermost frames of nbaccel are dropped."""
    seen = set() if seen is None else seen
    seen.add(id(error))
    cause = error.__cause__
    # As in Python's own tracebacks: `raise … from None` hides the context.
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    described_cause = None
    # Causes may form a cycle, and a retry loop may build an endless chain.
    if cause is not None and id(cause) not in seen and len(seen) < _MOST_CAUSES:
        described_cause = describe_error(cause, seen)
    parts: Sequence[BaseException] = ()
    if isinstance(error, _GROUP_TYPES):
        parts = error.exceptions[:_MOST_PARTS]  # type: ignore[attr-defined]
    notes = [str(note) for note in getattr(error, "__notes__", ())][-_MOST_NOTES:]
    frames = _frames_of(error.__traceback__) + _unparsed_place(error)
    original = unwrap_error(error)
    if original is None:
        kind: type[BaseException] = type(error)
        text = _text_of(error)
    else:
        kind, text, inner_frames, where = original
        frames += inner_frames
        notes.append(f"It was raised {where}.")
    # Head and tail of the first line, which headlines show, and of the rest.
    first_line, *rest = text.strip().split("\n", 1)
    lines = [shorten_text(first_line, _HEADLINE_CHARS)]
    lines += [shorten_text(more, _MESSAGE_CHARS) for more in rest]
    return RaisedError(
        type_name=kind_name(kind),
        message="\n".join(lines),
        frames=frames,
        missing_name=(error.name or "") if isinstance(error, NameError) else "",
        cause=described_cause,
        notes=tuple(shorten_text(note, _MESSAGE_CHARS) for note in notes),
        parts=tuple(describe_error(part, seen) for part in parts if len(seen) < _MOST_CAUSES),
    )


def _text_of(error: BaseException) -> str:
    try:
        # str() of a SyntaxError repeats file and line, which the frame shows.
        return error.msg if _unparsed_place(error) else str(error)  # type: ignore[attr-defined]
    except Exception as broken:  # the user's own __str__ may raise anything
        return f"<its text cannot be shown: __str__ raised {type(broken).__name__}>"


def _unparsed_place(error: BaseException) -> tuple[Frame, ...]:
    """Code that never ran has no frame: the place that a SyntaxError names stands for it."""
    if not isinstance(error, SyntaxError) or not error.filename or not error.lineno:
        return ()
    return (Frame(file=error.filename, line=error.lineno, function="<module>"),)


def _frames_of(traceback: TracebackType | None) -> tuple[Frame, ...]:
    frames = of_traceback(traceback)
    # One frame stays, or an error raised by nbaccel itself would have no place.
    while len(frames) > 1 and frames[0].is_house:
        frames = frames[1:]
    return frames


_PACKAGE_FOLDER = Path(__file__).parents[1]
_WORKER_FILE = str(_PACKAGE_FOLDER / "workers" / "worker.py")
# Names of files, because this is below what trains.
_COLLECTIVES_FILE = str(_PACKAGE_FOLDER / "train" / "collectives.py")
_CHECK_FILE = str(_PACKAGE_FOLDER / "train" / "call_check.py")
_THREAD_HEADING = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)
# Of faulthandler, which writes question marks where it cannot read the line, and of tracebacks.
_FRAME_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+),? in (?P<function>.*)$')


def parse_stack(dump: str) -> tuple[Frame, ...]:
    """The main thread's stack from a faulthandler dump, innermost call first."""
    stack: list[Frame] = []
    for block in _THREAD_HEADING.split(dump):
        frames = _frames_in(block.splitlines())
        if frames and (not stack or any(frame.file == _WORKER_FILE for frame in frames)):
            stack = frames
    return within_worker(stack)


def _frames_in(lines: Iterable[str]) -> list[Frame]:
    return [
        Frame(file=one["file"], line=int(one["line"].strip("?") or 0), function=one["function"])
        for one in filter(None, map(_FRAME_LINE.match, lines))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankActivity:
    """What a rank was doing. As text, one line: `waiting in barrier (Cell In[2], line 4)`."""

    collective: str = ""  # what of torch.distributed or of nbaccel's it was in; or empty
    is_comparing: bool = False  # it waited to compare its call with those of others
    called: str = ""  # what else its own code had called; empty if that was running itself
    at: Frame | None = None  # where in its own code it was, if in any

    @classmethod
    def of_stack(cls, stack: Sequence[Frame]) -> RankActivity:
        """What a stack says, innermost call first."""
        at = user_frame(stack)
        # The outermost ones, because collectives call each other and the user called this one.
        own_call = _outermost(frame for frame in stack if frame.file == _COLLECTIVES_FILE)
        if own_call:
            return cls(
                collective=_called_name(stack, at) if at else own_call,
                is_comparing=any(
                    frame.function == "compare" and frame.file == _CHECK_FILE for frame in stack
                ),
                at=at,
            )
        torch_call = _outermost(frame for frame in stack if "/torch/distributed/" in frame.file)
        if torch_call:
            return cls(collective=torch_call, at=at)
        has_called = bool(stack) and stack[0] != at
        return cls(called=_called_name(stack, at) if has_called else "", at=at)

    def __str__(self) -> str:
        words = f"in {self.called}" if self.called else "running"
        if self.collective:
            words = f"waiting in {self.collective}"
        if self.is_comparing:
            words = f"waiting before {self.collective}, to compare calls"
        return f"{words} ({place(self.at)})" if self.at else words


def _outermost(stack: Iterable[Frame]) -> str:
    """The outermost function whose name is public; empty if there is none."""
    name = ""
    for frame in stack:
        # torch wraps its collectives in functions called `wrapper`, which say nothing.
        if not frame.function.startswith("_") and frame.function != "wrapper":
            name = frame.function
    return name


def _called_name(stack: Sequence[Frame], at: Frame | None) -> str:
    """What the user's frame called, by the outermost name that is not private."""
    return _outermost(stack[: stack.index(at)] if at else stack) or stack[0].function


def as_clause(sentence: str) -> str:
    """`It has ended.` → `it has ended`, to go on in another sentence."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")


_SIGNAL_MEANINGS: dict[str, tuple[str, str]] = {
    "SIGKILL": (
        "Nothing in Python can catch this signal. Most often the system ran out of memory and "
        "chose this process.",
        "Use a smaller batch or model, or fewer workers (num_processes).",
    ),
    "SIGSEGV": (
        "Compiled code touched memory that is not its own.",
        "The stack shows the Python line that called it.",
    ),
    "SIGBUS": (
        "A page of mapped memory could not be provided: usually /dev/shm is full (containers "
        "give it 64 MB), or a mapped file was cut.",
        "Set num_workers=0 in the DataLoader or enlarge /dev/shm (docker run --shm-size=8g). "
        "Models and tensors that nbaccel shares do not use /dev/shm.",
    ),
    "SIGABRT": (
        "Compiled code gave up on purpose (a failed check in C++).",
        "Its reason is in the last output above.",
    ),
    "SIGTERM": ("Another process asked it to end.", "Look for a job scheduler or a kill."),
    "SIGILL": (
        "The processor does not know an instruction that a package was compiled for.",
        "Install a build of that package for this processor.",
    ),
    "SIGFPE": ("Compiled code divided by zero.", "The stack shows the Python line."),
}
"""By name: not every system that nbaccel can be imported on has all of them."""


def _signal_name(number: int) -> str:
    # Not a signal, or a real-time signal other than the first and the last, which have no name.
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return ""


def name_exit(status: int) -> str:
    """`-9` → `was killed by SIGKILL (signal 9)`."""
    if status >= 0:
        return f"left with exit code {status} before the function returned"
    name = _signal_name(-status)
    return f"was killed by {name} (signal {-status})" if name else f"was killed by signal {-status}"


def explain_exit(record: FailureRecord) -> list[str]:
    """Likely cause and remedy of a death without an exception."""
    status = record.exit_status
    if status is None or (record.doing and status >= 0):
        # All that is known is in the headline.
        return []
    if record.remedy:
        return [record.remedy]
    if status >= 0:
        return [
            "The process ended itself (os._exit, or a library that exits). Let the function "
            "return: neither results nor weights came back."
        ]
    name = _signal_name(-status)
    of_device = registry.explain_signal(name, [frame.function for frame in record.stack])
    cause, remedy = of_device or _SIGNAL_MEANINGS.get(name, ("", ""))
    memory = f"It had used up to {format_bytes(record.max_rss_bytes)}."
    lines = (record.evidence or cause, memory if record.max_rss_bytes else "", remedy)
    return [line for line in lines if line]


def failure_text(
    records: Sequence[FailureRecord],
    world_size: int,
    *,
    last_output: Mapping[int, Sequence[str]] | None = None,
    library_messages: Sequence[str] = (),
    headline: str = "",
    advice: str = "",
    closing: str = "",
) -> str:
    """The report of a failed launch, about thirty lines; `headline` replaces the cause's."""
    cause = first_cause(records)
    lines = [f"rank {cause.rank} of {world_size} {headline or cause.headline}"]
    if advice:
        lines.append(advice)
    if cause.raised is None:
        frame = user_frame(cause.stack)
        lines += _tell_frame(frame, num_around=_LINES_AROUND)
        if frame is not None and cause.stack[0] != frame:
            lines.append(f"  inside {cause.stack[0].function} ({place(cause.stack[0])})")
        lines += explain_exit(cause)
    else:
        if not headline:
            lines += _more_message(cause.raised)
        # Where a headline says what its message and cause mean, those are not told.
        lines += _tell_raised(cause.raised, tells_cause=not headline)
    if output := (last_output or {}).get(cause.rank, [])[-_OUTPUT_LINES:]:
        lines.append(f"Last output of rank {cause.rank}:")
        lines += [f"  {line[:_OUTPUT_CHARS]}" for line in output]
    if others := sorted((one for one in records if one is not cause), key=lambda one: one.rank):
        lines.append("The other ranks:")
        lines += [f"  rank {one.rank}: {_one_line(one, cause)}" for one in others[:_MOST_RANKS]]
    if len(others) > _MOST_RANKS:
        lines.append(f"  … and {len(others) - _MOST_RANKS} more ranks")
    if library_messages:
        lines += ["Messages of libraries:", *(f"  {line}" for line in library_messages)]
    return "\n".join([*lines, closing] if closing else lines)


def _one_line(record: FailureRecord, cause: FailureRecord) -> str:
    raised = record.raised
    if raised is None:
        if record.exit_status is not None and record.doing and record.doing == cause.doing:
            return "ended with it, too"
        return plain_text(record.headline, _ONE_LINE_CHARS)
    at = _at(raised)
    if record.is_consequence:
        return f"lost its connection{at} (a consequence)"
    if cause.raised is not None and cause.raised.type_name == raised.type_name:
        return f"raised {raised.type_name}, too{',' if at else ''}{at}"
    return plain_text(record.headline, _ONE_LINE_CHARS) + at


def _at(error: RaisedError) -> str:
    return f" at {place(error.at)}" if error.at else ""


def _more_message(error: RaisedError) -> list[str]:
    """What follows the first line, shortened in the middle: what matters may be at the end."""
    rest = error.message.strip().splitlines()[1:]
    if len(rest) > 11:
        rest = [*rest[:4], f"… {len(rest) - 10} more lines", *rest[-6:]]
    notes = [line for note in error.notes for line in note.splitlines()]
    return [f"  {shorten_text(line, _TEXT_CHARS)}" for line in [*rest, *notes]]


def _tell_raised(error: RaisedError, *, tells_cause: bool) -> list[str]:
    """The user's own frames with source around the failing line; libraries in one line each."""
    own = [frame for frame in error.frames if not frame.is_library]
    lines: list[str] = []
    for frame in own[-3:-1]:
        lines += _tell_frame(frame)
    if own:
        lines += _tell_frame(own[-1], num_around=0 if error.parts else _LINES_AROUND)
    if error.frames and error.frames[-1].is_library and not error.frames[-1].is_house:
        innermost = error.frames[-1]
        lines.append(f"  raised inside {innermost.function} ({place(innermost)})")
    if error.cause is not None and tells_cause:
        cause = f"{error.cause.type_name}: {error.cause.first_line}{_at(error.cause)}"
        lines.append(f"  which came from {cause}")
    if error.parts:
        for number, part in enumerate(error.leaves(), 1):
            lines.append(f"  {number}. {part.type_name}: {part.first_line}")
            lines += _tell_frame(part.at)
    return lines


def _tell_frame(frame: Frame | None, *, num_around: int = 0) -> list[str]:
    if frame is None:
        return []
    return [f"  {place(frame)}, in {frame.function}", *source(frame, num_around=num_around)]


# ------------------------------------------------------------------------- texts of libraries

# Seen with gloo, NCCL and the store of torch 2.13, which raise these types for anything else, too.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|recvvalue failed"
    r"|remote process exited|peer .{0,40}(closed|gone|exited)|read error|failed to (recv|connect)"
    r"|no error type|ncclremoteerror|ncclsystemerror|connectfullmesh|sendbytes failed",
    re.IGNORECASE,
)
_LOST_TYPE = re.compile(
    "(Runtime|Dist(Backend|Network|Store)|Connection(Reset|Refused|Aborted)|BrokenPipe)Error"
)

UNLIKE_COLLECTIVES = re.compile(
    r"disagreement on list contents"  # DeepSpeed 0.19: ZeRO-3 gathers other weights by rank
    r"|op\.preamble\.length <= op\.nbytes"  # gloo, before it aborts the process
)
"""What says that ranks met in one collective for different things."""


_MOST_CHARS = 1_000_000
_TRACEBACK_BLOCK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a `class` statement


@dataclass(frozen=True)
class PortableException:
    """An exception, taken apart."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]  # its `__dict__`
    slots: dict[str, Any]  # what its class keeps elsewhere: `OSError.errno`, `StopIteration.value`

    def in_reserve(self) -> Iterator[PortableException]:
        """This, and what can be sent in its place if it cannot be pickled, in decreasing detail."""
        yield self
        for kind in self.kind.__mro__:
            if issubclass(kind, Exception) and kind is not Exception:
                yield PortableException(kind, (), {}, {})

    def revive(self, base: type[BaseException], names: dict[str, Any]) -> BaseException:
        """A new exception that is of this type and of `base`."""
        joined = type(f"{base.__name__}[{self.kind.__name__}]", (base, self.kind), names)
        # The `__new__` that the joined type inherits is that of `base`, which Python refuses where
        # the other type has a memory layout of its own (OSError, UnicodeError, ExceptionGroup).
        native = next(kind for kind in self.kind.__mro__ if not kind.__flags__ & _HEAP_TYPE)
        try:
            revived: BaseException = native.__new__(joined, *self.args)
        # MemoryError has a `__new__` of its own, but the common layout.
        except TypeError:
            revived = base.__new__(joined, *self.args)
        revived.__dict__.update(self.attributes)
        for name, value in self.slots.items():
            # Some slots are read-only.
            with contextlib.suppress(AttributeError, TypeError):
                setattr(revived, name, value)
        return revived


def take_error(error: BaseException) -> PortableException:
    """Take an exception apart; traceback, causes and notes are described elsewhere."""
    original = unwrap_error(error)
    # Of an error that torch has raised again, the parts have stayed in the process it came from.
    if original is not None:
        return PortableException(original[0], (), {}, {})
    # Notes are part of the failure record, which shows them.
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    return PortableException(
        type(error),
        tuple(map(_shortened, error.args)),
        {name: _shortened(value) for name, value in attributes.items()},
        {name: _shortened(value) for name, value in _slots_of(error)},
    )


def _shortened(value: Any) -> Any:
    """A message of a hundred megabytes is not sent whole: handlers need the type."""
    return shorten_text(value, _MOST_CHARS) if type(value) is str else value


def _slots_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    slot_types = (types.MemberDescriptorType, types.GetSetDescriptorType)
    for owner in type(error).__mro__:
        for name, attribute in vars(owner).items():
            if isinstance(attribute, slot_types) and not name.startswith("_") and name != "args":
                # A slot that was never set raises.
                with contextlib.suppress(AttributeError):
                    yield name, getattr(error, name)


def unwrap_error(
    error: BaseException,
) -> tuple[type[BaseException], str, tuple[Frame, ...], str] | None:
    """Type, message, frames and place of what torch has raised for another process or thread."""
    wrapper = _torch_wrapper(error.__traceback__)
    # By its text: an error whose class takes more than a text is raised as a RuntimeError.
    if wrapper is None or not str(error).startswith(f"Caught {wrapper.exc_type.__name__} "):
        return None
    blocks = _TRACEBACK_BLOCK.split(wrapper.exc_msg)
    if len(blocks) < 2:
        return None
    # The last block, because the causes of an error come before it.
    lines = blocks[-1].rstrip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    # `ValueError: bad` → `bad`
    text = "\n".join(lines[end:])
    name, _, message = text.partition(": ")
    if name.rpartition(".")[2] != wrapper.exc_type.__name__:
        message = text.removeprefix(name)
    return wrapper.exc_type, message, tuple(_frames_in(lines[:end])), wrapper.where


def _torch_wrapper(traceback: TracebackType | None) -> Any:
    """The wrapper whose `reraise` is the innermost call."""
    # Without torch there is no wrapper to find, and importing it takes seconds.
    if traceback is None or "torch" not in sys.modules:
        return None
    from nbaccel.base import torch_private

    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    holder = traceback.tb_frame.f_locals.get("self")
    return holder if torch_private.is_exception_wrapper(holder) else None
