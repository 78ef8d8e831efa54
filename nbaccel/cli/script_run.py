"""A script's launch, from settings to an exit status that a shell understands."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import cast

from nbaccel.base import env
from nbaccel.base.errors import LaunchInterrupted, WorkerFailed
from nbaccel.base.frames import place, user_frame
from nbaccel.calls.launched_functions import exit_status_of, run_script, run_script_here
from nbaccel.cli.launch_request import LaunchRequest, plan_of_command
from nbaccel.config.call_arguments import Script
from nbaccel.launchers import launch_configured
from nbaccel.plan import registry
from nbaccel.workers.failure import FailureRecord, failure_text
from nbaccel.workers.template import template_for

_FAILURE = 1
# As a shell says that a signal ended a process.
_SIGNAL_STATUS = 128


def run_to_exit_status(
    script: Script, request: LaunchRequest, *, is_quiet: bool = False, is_debug: bool = False
) -> int:
    """Run a script in the workers that were asked for."""
    received_signals: list[int] = []
    tells_warnings = not is_quiet
    with env.applied(dict(request.variables)):
        try:
            if plan_of_command(request.config).start_method == "inline":
                [script_end] = launch_configured(
                    run_script_here, (script,), request.config, tells_warnings=tells_warnings
                )
                if isinstance(script_end, int):
                    return script_end
                _tell_failure(failure_text([script_end], 1), script_end, is_debug)
                return _FAILURE
            # Imports torch beside this process, which does the same now.
            template_for(registry.prepare_notebook()).start_ahead()
            with _signals_as_interrupts(received_signals):
                launch_configured(
                    run_script, (script,), request.config, tells_warnings=tells_warnings
                )
        except WorkerFailed as error:
            return _status_of_failure(error, is_debug)
        except KeyboardInterrupt as interruption:
            told = str(interruption) if isinstance(interruption, LaunchInterrupted) else ""
            if not is_quiet:
                print(f"nbaccel: {told or 'interrupted'}", file=sys.stderr)
            return _SIGNAL_STATUS + (received_signals or [signal.SIGINT])[0]
    return 0


def _status_of_failure(error: WorkerFailed, is_debug: bool) -> int:
    record = cast("FailureRecord | None", error.failure)
    if record is None or record.raised is None or record.raised.type_name != "SystemExit":
        _tell_failure(str(error), record, is_debug)
        return _FAILURE
    # The exception's text is all that is left of its code.
    code_text = record.raised.message.strip()
    is_number = code_text.lstrip("-").isdecimal()
    frame = user_frame(reversed(record.raised.frames))
    place_text = f" ({place(frame)})" if frame else ""
    status = exit_status_of(int(code_text) if is_number else code_text)
    left = f"rank {record.rank} left with exit status {status}{place_text}"
    print(f"nbaccel: {left}", file=sys.stderr)
    return status


def _tell_failure(report_text: str, record: FailureRecord | None, is_debug: bool) -> None:
    print(f"nbaccel: {report_text}", file=sys.stderr)
    if record is None or record.raised is None:
        return
    if is_debug:
        print(record.full_traceback, file=sys.stderr)
    else:
        print("The whole traceback: nbaccel launch --debug.", file=sys.stderr)


@contextlib.contextmanager
def _signals_as_interrupts(received_signals: list[int]) -> Iterator[None]:
    """Let a terminal that closes, and a scheduler's SIGTERM, stop the workers as Ctrl-C does."""

    def note(signal_number: int, _frame: FrameType | None) -> None:
        received_signals.append(signal_number)
        # Workers are stopped in order, as after Ctrl-C.
        signal.raise_signal(signal.SIGINT)

    handled_signals = (signal.SIGTERM, signal.SIGHUP)
    handlers_before = [signal.signal(number, note) for number in handled_signals]
    try:
        yield
    finally:
        for number, handler_before in zip(handled_signals, handlers_before, strict=True):
            signal.signal(number, handler_before)
