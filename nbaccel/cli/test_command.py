"""``nbaccel test``: a short real training on the configured set-up, and a verdict."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import typer

from nbaccel.base.errors import NbaccelError
from nbaccel.cli.launch_options import ConfigFile, add_command

if TYPE_CHECKING:
    from nbaccel.config import RunConfig

_TEST_HELP = """\
Train for a few seconds on the set-up of a configuration file, or of flags as after nbaccel launch.

Checked are the processes, collectives, seeds, data loaders, the precision, a training and a
checkpoint, each against a known answer. The exit status is 0 if all is well, else 1.
"""
_TEST_TIMEOUT_S = 300.0
_REMEDIES = {
    "processes": "Look at --dry-run of nbaccel launch: how many workers, and on what device.",
    "collectives": "Workers do not reach each other: look for a firewall, and at the network "
    "interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more).",
    "seeds": "Random numbers are drawn elsewhere, too: look for a sitecustomize that draws some.",
    "data loader": "Please report this, with the output of nbaccel env.",
    "precision": "Choose another --mixed-precision, or the backend of FP8 by --fp8.",
    "training": "Try --mixed-precision no and --strategy ddp: what remains is the hardware.",
    "checkpoint": "Look at the free space and the permissions of the temporary folder (TMPDIR).",
}
_AT_START = "Nothing was trained: the workers did not start, or could not prepare the model."


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    add_command(app, "test", _test, description=_TEST_HELP, short_help="does this set-up train?")


def _test(
    config_file: ConfigFile = None,
    **further_options: Any,
) -> None:
    from nbaccel.base import env
    from nbaccel.cli.launch_request import read_launch_request, read_settings_file

    request = read_launch_request(further_options, read_settings_file(config_file))
    for note in request.notes:
        print(f"nbaccel: {note}", file=sys.stderr)
    with env.applied(dict(request.variables)):
        raise typer.Exit(_run_test(request.config))


def _run_test(config: RunConfig) -> int:
    # Here, so that `nbaccel test --help` needs no torch.
    from nbaccel.base.errors import WorkerFailed
    from nbaccel.cli.launch_request import plan_of_command
    from nbaccel.cli.set_up_checks import SetUpCheckFailed
    from nbaccel.plan import registry
    from nbaccel.workers.template import template_for

    if config.timeout is None:
        # A set-up that does not work may hang.
        config = config.changed(timeout=_TEST_TIMEOUT_S)
    plan = plan_of_command(config)
    print(f"{plan.headline()}", flush=True)
    if plan.start_method != "inline":
        template_for(registry.prepare_notebook()).start_ahead()
    start_time = time.monotonic()
    try:
        results = _launch_checks(config, plan.world_size)
    except NbaccelError as error:
        if not isinstance(error, (WorkerFailed, SetUpCheckFailed)):
            raise
        return _tell_failure(error)
    _show_checks({name: (found, seconds) for name, found, seconds in results})
    print(f"\nThis set-up trains: all checks passed in {time.monotonic() - start_time:.1f} s.")
    return 0


def _launch_checks(config: RunConfig, world_size: int) -> list[tuple[str, str, float]]:
    from nbaccel.cli.set_up_checks import run_checks
    from nbaccel.launchers import launch_configured

    with tempfile.TemporaryDirectory(prefix="nbaccel-test-") as folder:
        results = launch_configured(run_checks, (config.to_json(), world_size, folder), config)
    rank_results: list[tuple[str, str, float]] = results[0]
    return rank_results


def _tell_failure(error: NbaccelError) -> int:
    from nbaccel.cli.set_up_checks import CHECK_NAMES

    failure = getattr(error, "failure", None)
    message = str(error) if failure is None or failure.raised is None else failure.raised.message
    named_check = message.partition(":")[0]
    failed_check = named_check if named_check in CHECK_NAMES else ""
    _show_checks({}, failed_check)
    print(f"\n{error}", file=sys.stderr)
    text = _REMEDIES.get(failed_check, _AT_START)
    print(
        f"\nThis set-up does not train: {failed_check or 'the start'} failed. {text}",
        file=sys.stderr,
    )
    return 1


def _show_checks(found_by_check: dict[str, tuple[str, float]], failed_check: str = "") -> None:
    from nbaccel.cli.set_up_checks import CHECK_NAMES
    from nbaccel.cli.terminal import plain_table, terminal_console

    table = plain_table("", "check", "result", "found", "seconds")
    num_passed = CHECK_NAMES.index(failed_check) if failed_check else 0
    for position, name in enumerate(CHECK_NAMES):
        if name in found_by_check:
            text, seconds = found_by_check[name]
            table.add_row(name, "OK", text, f"{seconds:.1f}", style="green")
        elif name == failed_check:
            table.add_row(name, "failed", "see below", "", style="bold red")
        else:
            table.add_row(name, "OK" if position < num_passed else "not run", "", "")
    terminal_console().print(table)
