"""What is known of a worker's failure, and how it is told: the obituary.

The first failure *by time* that is not merely a lost connection is the cause; everything else is a
consequence and gets one line. (When one rank dies, its peers see "Connection closed by peer" and
often report first: to believe them is to blame the wrong rank.)
"""

from __future__ import annotations

import builtins
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from nbaccel import env, frames
from nbaccel.frames import Frame, place, user_frame
from nbaccel.launch.wrapped import unwrap
from nbaccel.plan.tpus import count_chips
from nbaccel.units import format_bytes, left_out, shortened

_LOST = re.compile(
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
_LEFT = "CollectiveTimeout"  # nbaccel's own; one whose cause is a lost connection is no better
_LINE_CHARS = 140
_AROUND = 2  # source lines shown before and after the failing one
_MESSAGE_CHARS = 20_000  # of a longer message head and tail travel
_HEADLINE_CHARS = 1_000
_TEXT_CHARS = 300
_MOST_CAUSES = 20
_MOST_NOTES = 20
_MOST_PARTS = 6
_GROUP: type[BaseException] | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An exception, without the objects it holds: type, text and stack."""

    type_name: str
    message: str
    frames: tuple[Frame, ...]
    cause: Raised | None = None
    """The exception it was raised from or during, if any."""
    notes: tuple[str, ...] = ()
    parts: tuple[Raised, ...] = ()
    """The exceptions of an ExceptionGroup."""
    num_chars: int = 0
    """How long the whole message was, where only head and tail are here."""

    @property
    def first_line(self) -> str:
        """Of the message, not too long."""
        first, *more = self.message.strip().split("\n", 1)
        half = _HEADLINE_CHARS // 2
        if len(first) <= 2 * half:
            return first
        missing = (len(first) if more else max(len(first), self.num_chars)) - 2 * half
        return left_out(first[:half], missing, first[-half:])

    def leaves(self) -> list[Raised]:
        """The exceptions in a group, and in the groups in it."""
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of one rank's end."""

    rank: int
    time: float
    """Seconds of CLOCK_MONOTONIC."""
    raised: Raised | None = None
    exit_status: int | None = None
    """Negative for a signal; None if it raised."""
    stack: tuple[Frame, ...] = ()
    """Where it was, innermost call first, as far as faulthandler could tell."""
    max_rss_bytes: int = 0
    evidence: str = ""
    """What the system says about the death: out-of-memory kills, full /dev/shm."""
    doing: str = ""
    """For a rank that was stopped: what it was doing; for one that has died: what is known of it
    beyond its status."""

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        raised = self.raised
        if raised is not None and raised.type_name.rpartition(".")[2] == _LEFT:
            raised = raised.cause
        if raised is None:
            return False
        name = raised.type_name.rpartition(".")[2]
        return name in _LOST_TYPES and bool(_LOST.search(raised.message))

    @property
    def headline(self) -> str:
        """One line: what happened to this rank."""
        if self.raised is not None:
            first = self.raised.first_line
            return f"raised {self.raised.type_name}" + (f": {first}" if first else "")
        if self.doing or self.exit_status is None:
            return self.doing
        return name_exit(self.exit_status)


def first_cause(records: Sequence[Record]) -> Record:
    """The failure to look at: the earliest that is not a lost connection."""
    ordered = sorted(records, key=lambda record: record.time)
    return next((r for r in ordered if not r.is_consequence), ordered[0])


def describe(error: BaseException) -> Raised:
    """Take down an exception for another process. Frames of nbaccel at the outside are dropped."""
    seen: set[int] = set()
    return _describe(error, seen)


def _describe(error: BaseException, seen: set[int]) -> Raised:
    seen.add(id(error))
    inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    has_cause = inner is not None and id(inner) not in seen and len(seen) < _MOST_CAUSES
    notes = [str(note) for note in getattr(error, "__notes__", ())][-_MOST_NOTES:]
    own = _frames(error.__traceback__) + _unparsed(error)
    original = unwrap(error)
    if original is not None:
        own += original.frames
        notes.append(f"It was raised {original.where}.")
    text = _text(error) if original is None else original.message
    return Raised(
        type_name=kind_name(type(error) if original is None else original.kind),
        message=shortened(text, _MESSAGE_CHARS),
        num_chars=len(text),
        frames=own,
        cause=_describe(inner, seen) if inner is not None and has_cause else None,
        notes=tuple(shortened(note, _MESSAGE_CHARS) for note in notes),
        parts=tuple(
            _describe(part, seen)
            for part in getattr(error, "exceptions", ())[:_MOST_PARTS]
            if isinstance(error, _GROUP) and len(seen) < _MOST_CAUSES
        ),
    )


def kind_name(kind: type) -> str:
    """A class as a reader knows it: with its module, unless that goes without saying."""
    plain = kind.__module__ in ("builtins", "__main__", "nbaccel.errors")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return error.msg if _unparsed(error) else str(error)  # type: ignore[attr-defined]
    except Exception as broken:  # the user's own __str__ may raise anything
        return f"<its text cannot be shown: __str__ raised {type(broken).__name__}>"


def _unparsed(error: BaseException) -> tuple[Frame, ...]:
    """Code that never ran has no frame: the place that a SyntaxError names stands for it."""
    if not isinstance(error, SyntaxError) or not error.filename or not error.lineno:
        return ()
    return (Frame(file=error.filename, line=error.lineno, function="<module>"),)


def _frames(tb: TracebackType | None) -> tuple[Frame, ...]:
    found = list(frames.of_traceback(tb))
    while len(found) > 1 and found[0].is_house:
        found.pop(0)
    return tuple(found)


_STACK_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')


def parse_stack(dump: str) -> tuple[Frame, ...]:
    """The main thread's stack from a faulthandler dump, innermost call first.

    The main thread is the one whose outermost frames are nbaccel's worker.
    """
    best: list[Frame] = []
    for block in re.split(r"^(?=(?:Current thread|Thread) )", dump, flags=re.MULTILINE):
        matches = filter(None, map(_STACK_LINE.match, block.splitlines()))
        found = [
            Frame(file=m["file"], line=int(m["line"].strip("?") or 0), function=m["function"])
            for m in matches
        ]
        if found and (not best or any("launch/worker.py" in f.file for f in found)):
            best = found
    while best and best[-1].is_house:
        best.pop()
    return tuple(best)


def doing(stack: Sequence[Frame]) -> str:
    """What a rank was doing, in one line, from its stack (innermost first)."""
    mine = user_frame(stack)
    calls = [f for f in stack if "/torch/distributed/" in f.file and not f.function.startswith("_")]
    collective = next((f.function for f in reversed(calls) if f.function != "wrapper"), None)
    what = f"waiting in {collective}" if collective else "running"
    if not collective and stack and stack[0] != mine:
        what = f"in {_called(stack, mine)}"
    return f"{what} ({place(mine)})" if mine else what


def _called(stack: Sequence[Frame], mine: Frame | None) -> str:
    """What the user's frame called, by the outermost name that is not private."""
    inner = stack[: stack.index(mine)] if mine else stack
    names = [f.function for f in reversed(inner) if not f.function.startswith("_")]
    return names[0] if names else stack[0].function


# ------------------------------------------------------------------------- exits


_ADDS_UP = "inference_all_reduce"
"""DeepSpeed's function that ends a worker without shared memory, and says nothing."""

_SIGNALS: dict[str, tuple[str, str]] = {
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
        "A page of mapped memory could not be provided: usually /dev/shm is full (containers give "
        "it 64 MB), or a mapped file was cut.",
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
    try:
        return signal.Signals(number).name
    except ValueError:  # no signal, or one of the real-time signals between the first and the last
        return ""


def name_exit(status: int) -> str:
    """`-9` → `was killed by SIGKILL (signal 9)`."""
    if status >= 0:
        return f"left with exit code {status} before the function returned"
    name = _signal_name(-status)
    return f"was killed by {name} (signal {-status})" if name else f"was killed by signal {-status}"


def explain_exit(record: Record) -> list[str]:
    """Likely cause and remedy of a death without an exception."""
    status = record.exit_status
    if status is None or (record.doing and status >= 0):
        return []  # all that is known is in the headline
    if status >= 0:
        return [
            "The process ended itself (os._exit, or a library that exits), so neither results nor "
            "weights came back. Let the function return instead."
        ]
    cause, remedy = _SIGNALS.get(_signal_name(-status), ("", ""))
    if status == -signal.SIGSEGV and count_chips(env.snapshot()):
        cause, remedy = (
            "On a TPU host this usually means that host memory ran out.",
            "Build the model in a cell and pass it in args, so that all workers share one copy.",
        )
    if status == -signal.SIGSEGV and any(f.function == _ADDS_UP for f in record.stack):
        cause, remedy = (
            "DeepSpeed adds up through shared memory, and this worker has none: /dev/shm lacks "
            "66 MiB for each worker, or it was forked after DeepSpeed had run in the notebook.",
            "Enlarge /dev/shm (docker run --shm-size=1g), and leave start_method at 'auto'.",
        )
    used = (
        f"It had used up to {format_bytes(record.max_rss_bytes)}." if record.max_rss_bytes else ""
    )
    return [line for line in (record.evidence or cause, used, remedy) if line]


# ------------------------------------------------------------------------- telling it


@dataclass(frozen=True, kw_only=True)
class Obituary:
    """Everything a failed launch says."""

    records: tuple[Record, ...]
    world_size: int
    last_output: dict[int, list[str]] = field(default_factory=dict)
    closing: str = ""
    headline: str = ""
    """Says better what happened than the cause's own words."""
    advice: str = ""

    @property
    def cause(self) -> Record:
        """The failure to look at."""
        return first_cause(self.records)

    def lines(self) -> list[str]:
        """The text, at most about thirty lines."""
        cause = self.cause
        lines = [f"rank {cause.rank} of {self.world_size} {self.headline or cause.headline}"]
        lines += [self.advice] if self.advice else []
        if cause.raised is not None:
            lines += [] if self.headline else _more_message(cause.raised)
            lines += _tell_raised(cause.raised)
        else:
            lines += _tell_stack(cause.stack)
            lines += explain_exit(cause)
        lines += self._output(cause.rank)
        lines += self._others(cause)
        return [*lines, self.closing] if self.closing else lines

    def _output(self, rank: int) -> list[str]:
        tail = self.last_output.get(rank, [])[-4:]
        return (
            [f"Last output of rank {rank}:", *(f"  {line[:160]}" for line in tail)] if tail else []
        )

    def _others(self, cause: Record) -> list[str]:
        others = sorted((r for r in self.records if r is not cause), key=lambda r: r.rank)
        if not others:
            return []
        shown = [f"  rank {r.rank}: {_one_line(r, cause)}" for r in others[:8]]
        more = [f"  … and {len(others) - 8} more ranks"] if len(others) > 8 else []
        return ["The other ranks:", *shown, *more]


def _one_line(record: Record, cause: Record) -> str:
    if record.is_consequence and record.raised is not None:
        mine = user_frame(reversed(record.raised.frames))
        where = f" at {place(mine)}" if mine else ""
        return f"lost its connection{where} (a consequence)"
    if record.exit_status is not None and record.doing and record.doing == cause.doing:
        return "ended with it, too"
    text = _cut(record.headline)
    if record.raised is not None:
        mine = user_frame(reversed(record.raised.frames))
        where = f" at {place(mine)}" if mine else ""
        if cause.raised is not None and cause.raised.type_name == record.raised.type_name:
            return f"raised {record.raised.type_name}, too{',' if where else ''}{where}"
        text += where
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _LINE_CHARS else text[: _LINE_CHARS - 2] + " …"


def _more_message(raised: Raised) -> list[str]:
    """What follows the first line. What matters may stand at the end of it as well."""
    rest = raised.message.strip().splitlines()[1:]
    if len(rest) > 11:
        rest = [*rest[:4], f"… {len(rest) - 10} more lines", *rest[-6:]]
    notes = [line for note in raised.notes for line in note.splitlines()]
    return [f"  {shortened(line, _TEXT_CHARS)}" for line in [*rest, *notes]]


def _tell_raised(raised: Raised) -> list[str]:
    """The user's own frames with source around the failing line; libraries in one line each."""
    mine = [f for f in raised.frames if not f.is_library]
    lines: list[str] = []
    for frame in mine[-3:-1]:
        lines += [f"  {place(frame)}, in {frame.function}", *frames.source(frame, around=0)]
    if mine:
        lines += [
            f"  {place(mine[-1])}, in {mine[-1].function}",
            *frames.source(mine[-1], around=0 if raised.parts else _AROUND),
        ]
    if raised.frames and raised.frames[-1].is_library and not raised.frames[-1].is_house:
        inner = raised.frames[-1]
        lines.append(f"  raised inside {inner.function} ({place(inner)})")
    if raised.cause is not None:
        where = user_frame(reversed(raised.cause.frames))
        at = f" at {place(where)}" if where else ""
        lines.append(f"  which came from {raised.cause.type_name}: {raised.cause.first_line}{at}")
    return lines + _tell_parts(raised)


def _tell_parts(raised: Raised) -> list[str]:
    """The exceptions of a group: each with the user's own frame."""
    lines = []
    for number, part in enumerate(raised.leaves() if raised.parts else (), 1):
        lines.append(f"  {number}. {part.type_name}: {part.first_line}")
        mine = user_frame(reversed(part.frames))
        if mine is not None:
            lines += [f"  {place(mine)}, in {mine.function}", *frames.source(mine, around=0)]
    return lines


def _tell_stack(stack: Sequence[Frame]) -> list[str]:
    mine = user_frame(stack)
    if mine is None:
        return []
    lines = [f"  {place(mine)}, in {mine.function}", *frames.source(mine, around=_AROUND)]
    if stack[0] != mine:
        lines.append(f"  inside {stack[0].function} ({place(stack[0])})")
    return lines
