"""What is known of a worker's failure, and how it is reported.

The first failure *by time* that is not merely a lost connection is the cause; everything else is a
consequence and gets one line. (When one rank dies, its peers see "Connection closed by peer" and
often report first: believing them would blame the wrong rank.)
"""

from __future__ import annotations

import builtins
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from nbaccel.base import frames
from nbaccel.base.frames import Frame, place, user_frame
from nbaccel.base.process_death import explain_kill
from nbaccel.base.units import format_bytes, mark_left_out, shorten_text
from nbaccel.plan import registry
from nbaccel.workers.library_texts import tells_of_a_lost_connection
from nbaccel.workers.wrapped_errors import unwrap_error

# nbaccel's own error; where its cause is a lost connection, it is a consequence too.
_CONSEQUENCE_TYPE = "CollectiveTimeout"
_OUTPUT_LINE_CHARS = 140
_LINES_AROUND = 2  # source lines shown before and after the failing one
_MESSAGE_CHARS = 20_000  # of a longer message only head and tail are sent
_HEADLINE_CHARS = 1_000
_TEXT_CHARS = 300
_MOST_CAUSES = 20
_MOST_NOTES = 20
_MOST_PARTS = 6
_GROUP_TYPES: type[BaseException] | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedError:
    """An exception, without the objects it holds: type, text and stack."""

    type_name: str
    message: str
    frames: tuple[Frame, ...]
    cause: RaisedError | None = None
    """The exception it was raised from or during, if any."""
    notes: tuple[str, ...] = ()
    parts: tuple[RaisedError, ...] = ()
    """The exceptions of an ExceptionGroup."""
    num_chars: int = 0
    """How long the whole message was, where only head and tail are here."""
    missing_name: str = ""
    """The name that a NameError is about."""

    @property
    def first_line(self) -> str:
        """Of the message, not too long."""
        first_text, *words = self.message.strip().split("\n", 1)
        half_chars = _HEADLINE_CHARS // 2
        if len(first_text) <= 2 * half_chars:
            return first_text
        missing_chars = (
            len(first_text) if words else max(len(first_text), self.num_chars)
        ) - 2 * half_chars
        return mark_left_out(first_text[:half_chars], missing_chars, first_text[-half_chars:])

    def leaves(self) -> list[RaisedError]:
        """The exceptions in a group, and in the groups in it."""
        return (
            [error for group_part in self.parts for error in group_part.leaves()]
            if self.parts
            else [self]
        )


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A record of one rank's end."""

    rank: int
    time: float
    """Seconds of CLOCK_MONOTONIC."""
    raised: RaisedError | None = None
    exit_status: int | None = None
    """Negative for a signal; None if it raised."""
    stack: tuple[Frame, ...] = ()
    """Where it was, innermost call first, as far as faulthandler could tell."""
    max_rss_bytes: int = 0
    evidence: str = ""
    """What the system says about the death: out-of-memory kills, full /dev/shm."""
    doing: str = ""
    """For a rank that was stopped: what it was doing; for one that has died: what is known beyond
    its status."""
    remedy: str = ""
    """What to do, where the status does not tell: a signal says nothing of a host that is lost."""

    @classmethod
    def of_error(
        cls, worker_rank: int, raised_error: BaseException, *, failure_time: float
    ) -> FailureRecord:
        """The record of a rank whose function has raised."""
        return cls(rank=worker_rank, time=failure_time, raised=describe_error(raised_error))

    @classmethod
    def of_death(
        cls,
        worker_rank: int,
        exit_status: int,
        *,
        max_rss_bytes: int,
        stack_dump: str,
        oom_kills: int,
        death_reason: str,
        remedy: str = "",
    ) -> FailureRecord:
        """The record of a rank whose process has just ended by itself."""
        return cls(
            rank=worker_rank,
            time=time.monotonic(),
            exit_status=exit_status,
            stack=parse_stack(stack_dump),
            max_rss_bytes=max_rss_bytes,
            evidence=explain_kill(exit_status, oom_kills),
            doing=f"ended: {as_clause(death_reason)}" if death_reason else "",
            remedy=remedy,
        )

    @classmethod
    def of_stop(
        cls, worker_rank: int, stack_frames: Sequence[Frame], *, had_started: bool
    ) -> FailureRecord:
        """The record of a rank that did nothing wrong, and was stopped for something else."""
        rank_activity = f"was {RankActivity.of_stack(stack_frames)} when nbaccel stopped it"
        return cls(
            rank=worker_rank,
            # Never the first failure: it was stopped because of another one.
            time=float("inf"),
            doing=rank_activity if had_started else "had not started",
            stack=tuple(stack_frames),
        )

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
        return tells_of_a_lost_connection(error.type_name.rpartition(".")[2], error.message)

    @property
    def headline(self) -> str:
        """One line: what happened to this rank."""
        if self.raised is not None:
            first_text = self.raised.first_line
            return f"raised {self.raised.type_name}" + (f": {first_text}" if first_text else "")
        if self.doing or self.exit_status is None:
            return self.doing
        return name_exit(self.exit_status)


def first_cause(failure_records: Sequence[FailureRecord]) -> FailureRecord:
    """The failure to look at: the earliest that is not a lost connection."""
    ordered_records = sorted(failure_records, key=lambda failure_record: failure_record.time)
    return next(
        (failure_record for failure_record in ordered_records if not failure_record.is_consequence),
        # All are consequences; the earliest is the closest to the cause.
        ordered_records[0],
    )


def describe_error(raised_error: BaseException) -> RaisedError:
    """Describe an exception for another process. Outermost frames of nbaccel are dropped."""
    seen_errors: set[int] = set()
    return _describe_part(raised_error, seen_errors)


def _describe_part(raised_error: BaseException, seen_errors: set[int]) -> RaisedError:
    seen_errors.add(id(raised_error))
    # As in Python's own tracebacks: `raise … from None` hides the context.
    cause_error = raised_error.__cause__ or (
        None if raised_error.__suppress_context__ else raised_error.__context__
    )
    # Causes may form a cycle, and a retry loop may build an endless chain.
    has_cause = (
        cause_error is not None
        and id(cause_error) not in seen_errors
        and len(seen_errors) < _MOST_CAUSES
    )
    error_notes = [str(error_note) for error_note in getattr(raised_error, "__notes__", ())][
        -_MOST_NOTES:
    ]
    error_frames = _error_frames(raised_error.__traceback__) + _unparsed_place(raised_error)
    original_error = unwrap_error(raised_error)
    if original_error is not None:
        error_frames += original_error.frames
        error_notes.append(f"It was raised {original_error.where}.")
    error_text = _error_text(raised_error) if original_error is None else original_error.message
    return RaisedError(
        type_name=kind_name(type(raised_error) if original_error is None else original_error.kind),
        message=shorten_text(error_text, _MESSAGE_CHARS),
        num_chars=len(error_text),
        frames=error_frames,
        missing_name=getattr(raised_error, "name", None) or ""
        if isinstance(raised_error, NameError)
        else "",
        cause=_describe_part(cause_error, seen_errors)
        if cause_error is not None and has_cause
        else None,
        notes=tuple(shorten_text(error_note, _MESSAGE_CHARS) for error_note in error_notes),
        parts=tuple(
            _describe_part(group_part, seen_errors)
            for group_part in getattr(raised_error, "exceptions", ())[:_MOST_PARTS]
            if isinstance(raised_error, _GROUP_TYPES) and len(seen_errors) < _MOST_CAUSES
        ),
    )


def kind_name(error_class: type) -> str:
    """A class as a reader knows it: with its module, except for built-in and own classes."""
    plain_name = error_class.__module__ in ("builtins", "__main__", "nbaccel.errors")
    return (
        error_class.__qualname__
        if plain_name
        else f"{error_class.__module__}.{error_class.__qualname__}"
    )


def _error_text(error: BaseException) -> str:
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


def _error_frames(entry: TracebackType | None) -> tuple[Frame, ...]:
    found_frames = list(frames.of_traceback(entry))
    # One frame stays, or an error raised by nbaccel itself would have no place.
    while len(found_frames) > 1 and found_frames[0].is_house:
        found_frames.pop(0)
    return tuple(found_frames)


_PACKAGE_FOLDER = Path(__file__).parents[1]
_WORKER_FILE = str(_PACKAGE_FOLDER / "workers" / "worker.py")
# Names of files, because this is below what trains.
_COLLECTIVES_FILE = str(_PACKAGE_FOLDER / "train" / "collectives.py")
_CHECK_FILE = str(_PACKAGE_FOLDER / "train" / "call_check.py")
_STACK_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')


def parse_stack(stack_dump: str) -> tuple[Frame, ...]:
    """The main thread's stack from a faulthandler dump, innermost call first.

    The main thread is the one that came through nbaccel's worker. Threads that have begun later
    stand before it in the dump.
    """
    longest_stack: list[Frame] = []
    for stack_block in re.split(r"^(?=(?:Current thread|Thread) )", stack_dump, flags=re.MULTILINE):
        frame_matches = filter(None, map(_STACK_LINE.match, stack_block.splitlines()))
        found_frames = [
            Frame(
                file=frame_match["file"],
                # faulthandler writes question marks where it cannot read the line.
                line=int(frame_match["line"].strip("?") or 0),
                function=frame_match["function"],
            )
            for frame_match in frame_matches
        ]
        if found_frames and (
            not longest_stack
            or any(stack_frame.file == _WORKER_FILE for stack_frame in found_frames)
        ):
            longest_stack = found_frames
    return frames.within_worker(longest_stack)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankActivity:
    """What a rank was doing. As text, one line: `waiting in barrier (Cell In[2], line 4)`."""

    collective: str = ""
    """The function of torch.distributed, or the call of nbaccel's, that it was in; empty if it was
    in none."""
    is_comparing: bool = False
    """It was not in the collective yet, but waited to compare its call with those of others."""
    called: str = ""
    """What else its own code had called; empty if that was running itself."""
    at: Frame | None = None
    """Where in its own code it was, if in any."""

    @classmethod
    def of_stack(cls, stack_frames: Sequence[Frame]) -> RankActivity:
        """What a stack says, innermost call first."""
        frame = user_frame(stack_frames)
        own_calls = [
            stack_frame.function
            for stack_frame in stack_frames
            if stack_frame.file == _COLLECTIVES_FILE and not stack_frame.function.startswith("_")
        ]
        if own_calls:
            return cls(
                collective=_called_name(stack_frames, frame) if frame else own_calls[-1],
                is_comparing=any(
                    stack_frame.function == "compare" and stack_frame.file == _CHECK_FILE
                    for stack_frame in stack_frames
                ),
                at=frame,
            )
        names = [
            stack_frame.function
            for stack_frame in stack_frames
            if "/torch/distributed/" in stack_frame.file
        ]
        # torch wraps its collectives in functions called `wrapper`, which say nothing.
        public_calls = [
            function_name
            for function_name in names
            if not function_name.startswith("_") and function_name != "wrapper"
        ]
        # The outermost one, because collectives call each other and the user called this one.
        if public_calls:
            return cls(collective=public_calls[-1], at=frame)
        return cls(
            called=_called_name(stack_frames, frame)
            if stack_frames and stack_frames[0] != frame
            else "",
            at=frame,
        )

    def __str__(self) -> str:
        words = f"in {self.called}" if self.called else "running"
        if self.collective:
            words = f"waiting in {self.collective}"
        if self.is_comparing:
            words = f"waiting before {self.collective}, to compare calls"
        return f"{words} ({place(self.at)})" if self.at else words


def _called_name(stack_frames: Sequence[Frame], own_frame: Frame | None) -> str:
    """What the user's frame called, by the outermost name that is not private."""
    inner_frames = stack_frames[: stack_frames.index(own_frame)] if own_frame else stack_frames
    function_names = [
        stack_frame.function
        for stack_frame in reversed(inner_frames)
        if not stack_frame.function.startswith("_")
    ]
    return function_names[0] if function_names else stack_frames[0].function


def as_clause(message_sentence: str) -> str:
    """`It has ended.` → `it has ended`, to go on in another sentence."""
    return message_sentence[:1].lower() + message_sentence[1:].rstrip(".")


# ------------------------------------------------------------------------- exits


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
    try:
        return signal.Signals(number).name
    # Not a signal, or a real-time signal other than the first and the last, which have no name.
    except ValueError:
        return ""


def name_exit(exit_status: int) -> str:
    """`-9` → `was killed by SIGKILL (signal 9)`."""
    if exit_status >= 0:
        return f"left with exit code {exit_status} before the function returned"
    signal_name = _signal_name(-exit_status)
    return (
        f"was killed by {signal_name} (signal {-exit_status})"
        if signal_name
        else f"was killed by signal {-exit_status}"
    )


def explain_exit(failure_record: FailureRecord) -> list[str]:
    """Likely cause and remedy of a death without an exception."""
    exit_status = failure_record.exit_status
    if exit_status is None or (failure_record.doing and exit_status >= 0):
        # All that is known is in the headline.
        return []
    if failure_record.remedy:
        return [failure_record.remedy]
    if exit_status >= 0:
        return [
            "The process ended itself (os._exit, or a library that exits), so neither results "
            "nor weights came back. Let the function return instead."
        ]
    signal_name = _signal_name(-exit_status)
    functions = [stack_frame.function for stack_frame in failure_record.stack]
    likely_cause, remedy_text = registry.explain_signal(signal_name, functions) or (
        _SIGNAL_MEANINGS.get(signal_name, ("", ""))
    )
    used_memory = (
        f"It had used up to {format_bytes(failure_record.max_rss_bytes)}."
        if failure_record.max_rss_bytes
        else ""
    )
    return [
        text_line
        for text_line in (failure_record.evidence or likely_cause, used_memory, remedy_text)
        if text_line
    ]


# ------------------------------------------------------------------------- telling it


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The report of a failed launch."""

    records: tuple[FailureRecord, ...]
    world_size: int
    last_output: dict[int, list[str]] = field(default_factory=dict)
    library_messages: Sequence[str] = ()
    """What libraries have printed that is not shown as long as all is well."""
    closing: str = ""
    headline: str = ""
    """A better description of what happened than the text of the cause."""
    advice: str = ""

    @property
    def cause(self) -> FailureRecord:
        """The failure to look at."""
        return first_cause(self.records)

    def lines(self) -> list[str]:
        """The text, at most about thirty lines."""
        cause = self.cause
        report_lines = [f"rank {cause.rank} of {self.world_size} {self.headline or cause.headline}"]
        report_lines += [self.advice] if self.advice else []
        if cause.raised is not None:
            report_lines += [] if self.headline else _more_message(cause.raised)
            report_lines += _tell_raised(cause.raised)
        else:
            report_lines += _tell_stack(cause.stack)
            report_lines += explain_exit(cause)
        report_lines += self._output(cause.rank)
        report_lines += self._others(cause)
        if self.library_messages:
            report_lines += ["Messages of libraries:", *(f"  {m}" for m in self.library_messages)]
        return [*report_lines, self.closing] if self.closing else report_lines

    def _output(self, rank: int) -> list[str]:
        output_tail = self.last_output.get(rank, [])[-4:]
        return (
            [
                f"Last output of rank {rank}:",
                *(f"  {line[:160]}" for line in output_tail),
            ]
            if output_tail
            else []
        )

    def _others(self, cause_record: FailureRecord) -> list[str]:
        other_records = sorted(
            (
                failure_record
                for failure_record in self.records
                if failure_record is not cause_record
            ),
            key=lambda failure_record: failure_record.rank,
        )
        if not other_records:
            return []
        records = [
            f"  rank {failure_record.rank}: {_one_line(failure_record, cause_record)}"
            for failure_record in other_records[:8]
        ]
        words = [f"  … and {len(other_records) - 8} more ranks"] if len(other_records) > 8 else []
        return ["The other ranks:", *records, *words]


def _one_line(failure_record: FailureRecord, cause_record: FailureRecord) -> str:
    if failure_record.is_consequence and failure_record.raised is not None:
        frame = user_frame(reversed(failure_record.raised.frames))
        place_words = f" at {place(frame)}" if frame else ""
        return f"lost its connection{place_words} (a consequence)"
    if (
        failure_record.exit_status is not None
        and failure_record.doing
        and failure_record.doing == cause_record.doing
    ):
        return "ended with it, too"
    error_text = _cut_line(failure_record.headline)
    if failure_record.raised is not None:
        frame = user_frame(reversed(failure_record.raised.frames))
        place_words = f" at {place(frame)}" if frame else ""
        if (
            cause_record.raised is not None
            and cause_record.raised.type_name == failure_record.raised.type_name
        ):
            return (
                f"raised {failure_record.raised.type_name}, "
                f"too{',' if place_words else ''}{place_words}"
            )
        error_text += place_words
    return error_text


def _cut_line(error_text: str) -> str:
    return (
        error_text
        if len(error_text) <= _OUTPUT_LINE_CHARS
        else error_text[: _OUTPUT_LINE_CHARS - 2] + " …"
    )


def _more_message(error: RaisedError) -> list[str]:
    """What follows the first line, shortened in the middle: what matters may be at the end."""
    rest_lines = error.message.strip().splitlines()[1:]
    if len(rest_lines) > 11:
        rest_lines = [*rest_lines[:4], f"… {len(rest_lines) - 10} more lines", *rest_lines[-6:]]
    error_notes = [text_line for error_note in error.notes for text_line in error_note.splitlines()]
    return [
        f"  {shorten_text(text_line, _TEXT_CHARS)}" for text_line in [*rest_lines, *error_notes]
    ]


def _tell_raised(described_error: RaisedError) -> list[str]:
    """The user's own frames with source around the failing line; libraries in one line each."""
    user_frames = [
        stack_frame for stack_frame in described_error.frames if not stack_frame.is_library
    ]
    report_lines: list[str] = []
    for shown_frame in user_frames[-3:-1]:
        report_lines += [
            f"  {place(shown_frame)}, in {shown_frame.function}",
            *frames.source(shown_frame, num_around=0),
        ]
    if user_frames:
        report_lines += [
            f"  {place(user_frames[-1])}, in {user_frames[-1].function}",
            *frames.source(
                user_frames[-1], num_around=0 if described_error.parts else _LINES_AROUND
            ),
        ]
    if (
        described_error.frames
        and described_error.frames[-1].is_library
        and not described_error.frames[-1].is_house
    ):
        innermost_frame = described_error.frames[-1]
        report_lines.append(
            f"  raised inside {innermost_frame.function} ({place(innermost_frame)})"
        )
    if described_error.cause is not None:
        cause_frame = user_frame(reversed(described_error.cause.frames))
        place_words = f" at {place(cause_frame)}" if cause_frame else ""
        report_lines.append(
            f"  which came from {described_error.cause.type_name}: "
            f"{described_error.cause.first_line}{place_words}"
        )
    return report_lines + _tell_parts(described_error)


def _tell_parts(error: RaisedError) -> list[str]:
    """The exceptions of a group: each with the user's own frame."""
    lines = []
    for part_number, group_part in enumerate(error.leaves() if error.parts else (), 1):
        lines.append(f"  {part_number}. {group_part.type_name}: {group_part.first_line}")
        frame = user_frame(reversed(group_part.frames))
        if frame is not None:
            lines += [
                f"  {place(frame)}, in {frame.function}",
                *frames.source(frame, num_around=0),
            ]
    return lines


def _tell_stack(stack_frames: Sequence[Frame]) -> list[str]:
    frame = user_frame(stack_frames)
    if frame is None:
        return []
    lines = [
        f"  {place(frame)}, in {frame.function}",
        *frames.source(frame, num_around=_LINES_AROUND),
    ]
    if stack_frames[0] != frame:
        lines.append(f"  inside {stack_frames[0].function} ({place(stack_frames[0])})")
    return lines
