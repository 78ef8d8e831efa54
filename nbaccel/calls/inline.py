"""One worker, in the notebook's own process: results look the same, and a debugger works.

The function trains the notebook's model itself, so nothing has to be copied back; and if it raises,
the exception is the original one, with frames for `%debug`. A panel shows its loops, bars and
memory, as it does those of workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nbaccel.base import env, processes, training_libraries
from nbaccel.base.errors import LaunchInterrupted, StoppedAtStep
from nbaccel.calls import launched_functions
from nbaccel.config.call_arguments import call_title
from nbaccel.config.capabilities import STRATEGIES
from nbaccel.config.capability_rows import StrategyRow
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RankStatus, RunBoard
from nbaccel.output.publish import CellPlace
from nbaccel.plan import Plan, registry
from nbaccel.plan.contracts.training import Remembered, ShardReader, remember
from nbaccel.plan.topology import FOLDER_VARIABLE, Topology, run_variables
from nbaccel.workers.fork_safety import has_process_group

if TYPE_CHECKING:
    from torch import nn

_SHORT_S = 0.05  # a function without a bar that is over by then leaves no place for a panel behind


def run_observed(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Any], RunBoard]:
    """Call the function here with the environment of a worker, and tidy up after it."""
    __tracebackhide__ = True  # so that what the function raises shows the user's frames
    folder = launched_functions.resume_folder(plan, function)
    channel = BoardChannel(plan, call_title(function, args))
    board = channel.dashboard.board
    more = {FOLDER_VARIABLE: str(folder)} if folder is not None else {}
    try:
        with contextlib.ExitStack() as clean_up:
            _observe(clean_up, plan, channel)
            values = _call_here(plan, function, args, more)
        launched_functions.note_end(folder, None)
        return values, board
    # After the block: it has noted the last steps.
    except StoppedAtStep:
        from nbaccel.calls import outcome
        from nbaccel.transfer.object_walk import find_modules, reached_modules

        modules = find_modules(args) or reached_modules(function, args)
        error = LaunchInterrupted(outcome.kept_words(board.ranks[0].told.steps, modules))
        launched_functions.note_end(folder, error)
        raise outcome.with_report(error, board) from None


def _call_here(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...], more: Mapping[str, str]
) -> list[Any]:
    __tracebackhide__ = True
    address = processes.loopback(plan.config.master_addr)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.ExitStack() as clean_up:
        if not training_libraries.accelerate_is_set_up():
            clean_up.callback(training_libraries.forget_accelerate)
        if not has_process_group():
            clean_up.callback(_leave_process_group)
        # Bound, not listened on: the port is reserved, and the store can listen there with this.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, plan.port or 0))
        topology = Topology(master_addr=address, master_port=int(probe.getsockname()[1]))
        variables: dict[str, str | None] = dict(
            topology.variables(mixed_precision=plan.config.mixed_precision, device=plan.device)
            | run_variables(plan.config)
        )
        # Without this variable rank 0 serves the rendezvous store, which no launcher does here.
        variables |= {**more, "TORCHELASTIC_USE_AGENT_STORE": None, "FORK_LAUNCHED": None}
        with env.applied(variables), _modules_given_back(args):
            return [function(*args)]


@contextlib.contextmanager
def _modules_given_back(args: tuple[Any, ...]) -> Iterator[None]:
    """Undo what the call itself has made of modules: layers for 8 bits, shards of a library."""
    modules: list[nn.Module] = []
    if "torch" in sys.modules:
        from nbaccel.transfer.object_walk import find_modules

        modules = [module for _, module in find_modules(args)]
    with contextlib.ExitStack() as clean_up:
        # In a process group of the notebook's own, what was set up belongs to the notebook too.
        for row in STRATEGIES if not has_process_group() else ():
            if row.shards:
                process = registry.load_object(row.observe)()
                # An engine that wraps a module knows its original state.
                is_used = row.library in sys.modules
                keep = registry.load_object(row.shards).remember if is_used else remember
                states = [(module, keep(module)) for module in modules]
                clean_up.callback(_tear_down, row, process, states)
        for module in modules:
            clean_up.callback(_restore_layers, module, [type(part) for part in module.modules()])
        yield


def _restore_layers(module: nn.Module, classes_before: list[type]) -> None:
    if [type(part) for part in module.modules()] != classes_before:
        for restore_layers in registry.layer_restorers():
            restore_layers(module)


def _tear_down(row: StrategyRow, process: Any, states: list[tuple[nn.Module, Remembered]]) -> None:
    if row.library in sys.modules:
        reader: ShardReader = registry.load_object(row.shards)
        for module, remembered in states:
            reader.take_back(module, remembered)
        reader.tear_down(process)


def _leave_process_group() -> None:
    if has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


class BoardChannel:
    """Takes the place of a worker's channel to the notebook: messages go to the board at once."""

    def __init__(self, plan: Plan, title: str) -> None:
        self._place = CellPlace()
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.has_panel = self._place.has_panel and is_main_thread
        self.dashboard = Dashboard(
            [0], plan=plan, title=title, place=self._place, is_wanted=self.has_panel
        )

    def try_send(self, message: Any) -> bool:
        """Take in what the function reports."""
        dashboard = self.dashboard
        dashboard.board.receive(0, message)
        is_short = time.monotonic() < dashboard.board.began + _SHORT_S
        if self.has_panel and (message.bars or dashboard.has_progress or not is_short):
            self._place.hold()
        if dashboard.is_due:
            dashboard.update([self._own_row("running")])
        return True

    send = try_send

    def end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the summary of a function that has returned, or raised what is of this kind."""
        ending = ""
        if kind is not None:
            ending = "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        self.dashboard.finish([self._own_row(ending or "done")], ending=ending)

    def _own_row(self, state: str) -> RankStatus:
        use = processes.process_use(os.getpid())
        return RankStatus(
            rank=0,
            state=state,
            seconds=time.monotonic() - self.dashboard.board.began,
            rss_bytes=use.rss_bytes if use is not None else 0,
        )


def _observe(clean_up: contextlib.ExitStack, plan: Plan, channel: BoardChannel) -> None:
    """Let loops of this process report to the board, until `clean_up` leaves the summary."""
    clean_up.push(channel.end)
    # Else nothing can report: torch takes a second to import, and the function need not use it.
    if "torch" in sys.modules:
        from nbaccel.loops import loop_watch
        from nbaccel.workers import step_stop

        hardware = registry.device(plan.device)
        device_name = str(hardware.torch_device(0))
        clean_up.enter_context(
            loop_watch.reporting_to(channel, hardware, device_name, shows_bars=channel.has_panel)
        )
        if plan.config.on_stop == "keep":
            clean_up.enter_context(step_stop.interrupted_at_step())
