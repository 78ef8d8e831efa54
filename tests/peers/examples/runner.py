"""Runs a list of scripts one after the other in this process, and writes down what became of each.

One process for all of them, because importing what they import takes longer than they do::

    python -m tests.peers.examples.runner request.json
    torchrun ... -m tests.peers.examples.runner request.json
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Outcome", "Request", "Run"]


@dataclass(frozen=True)
class Run:
    """One script.

    Attributes:
        name: What its outcome is called.
        script: Its file.
        arguments: Its command line.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """All of them.

    Attributes:
        way: As scripts, or their functions through `notebook_launcher` as a notebook would.
        library: What they import.
        runs: The scripts.
        folder: Where outcomes are written.
        deepspeed: DeepSpeed's configuration, for the launcher.
    """

    way: Literal["script", "launcher"]
    library: str
    runs: tuple[Run, ...]
    folder: str
    deepspeed: dict[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one script: what it printed, and the traceback if it raised."""

    output: str
    error: str | None

    @staticmethod
    def file(folder: Path, name: str, rank: int = 0) -> Path:
        """Where it is written."""
        return folder / f"{name}.{rank}.json"


def main(path: str) -> None:
    """Do what is asked in a file, in the working directory.

    Args:
        path: The request.
    """
    asked = json.loads(Path(path).read_text())
    request = Request(**asked | {"runs": tuple(Run(**run) for run in asked["runs"])})
    mend_transformers()
    with contextlib.ExitStack() as stack:
        start = as_script if request.way == "script" else through_launcher(request, stack)
        for run in request.runs:
            if request.library == "accelerate":
                forget_accelerate()
            outcome = attempt(lambda run=run: start(run), run)
            file = Outcome.file(Path(request.folder), run.name, int(os.environ.get("RANK", "0")))
            file.write_text(json.dumps(asdict(outcome)))


def mend_transformers() -> None:
    """Give back what an example imports and transformers 5 has no more."""
    import transformers.utils

    if not hasattr(transformers.utils, "send_example_telemetry"):
        transformers.utils.send_example_telemetry = lambda *_: None  # type: ignore[attr-defined]


def forget_accelerate() -> None:
    """Let the next script begin anew: Accelerate keeps what the last one asked for."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def attempt(start: Callable[[], Any], run: Run) -> Outcome:
    """Run one, and collect what it prints and raises."""
    sys.argv = [run.script, *run.arguments]
    output = io.StringIO()
    error = None
    try:
        with contextlib.redirect_stdout(output):
            start()
    except BaseException:  # also a script's own exit: the next one is to run
        error = traceback.format_exc()
    return Outcome(output.getvalue(), error)


def as_script(run: Run) -> None:
    """As if it had been started by its name."""
    runpy.run_path(run.script, run_name="__main__")


def through_launcher(request: Request, stack: contextlib.ExitStack) -> Callable[[Run], None]:
    """As a notebook does: the script's cells are run here, its training function is launched.

    The first is launched in workers made for it. The others share two live workers: fresh ones
    would import transformers again for each.
    """
    from nbaccel import Pool, RunConfig, notebook_launcher

    options: dict[str, Any] = {"num_processes": 2}
    if request.deepspeed:
        options = {"config": RunConfig(num_processes=2, deepspeed=request.deepspeed)}
    first = request.runs[0]
    pool = stack.enter_context(Pool(2)) if len(request.runs) > 1 else None

    def launch(run: Run) -> None:
        function, args = what_it_calls(run)
        own = None if run is first else pool
        notebook_launcher(function, args, pool=own, **options)

    return launch


def what_it_calls(run: Run) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A script's training function and its arguments; its `main` where it has no such function."""
    namespace: dict[str, Any] = {"__name__": "notebook", "__file__": run.script}
    exec(compile(Path(run.script).read_text(), run.script, "exec"), namespace)
    if "training_function" not in namespace:
        return with_command_line, (namespace["main"], sys.argv)
    calls: list[tuple[Any, ...]] = []
    function, namespace["training_function"] = namespace["training_function"], None
    namespace["training_function"] = lambda *args: calls.append(args)
    namespace["main"]()
    namespace["training_function"] = function
    return function, calls[0]


def with_command_line(main: Callable[[], Any], argv: list[str]) -> None:
    """Call a script's `main` in a worker as if the worker had been started with its arguments."""
    sys.argv = argv
    main()


if __name__ == "__main__":
    main(sys.argv[1])
