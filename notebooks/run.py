"""Execute a notebook in a real kernel and print, as it comes, what its cells print.

    python notebooks/run.py notebooks/01_quickstart.ipynb [--label demo] [--timeout 600] [--save]

The notebook file is only read, unless its outputs are to be saved in it. A cell that
raises ends the run with its traceback and status 1, unless the notebook says that it should raise
(tag `raises-exception`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

_WIDGET = "application/vnd.jupyter.widget-view+json"


class PrintingClient(NotebookClient):
    """A notebook client that hands on text output the moment the kernel sends it."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Print the new text of an output that changes in place: the client keeps it to itself."""
        if msg["msg_type"] == "update_display_data":
            _print_text("display_data", msg["content"])
        return super().process_message(msg, cell, cell_index)

    def output(self, outs: list[Any], msg: dict[str, Any], display_id: str, cell_index: int) -> Any:
        """Print the text of one output message, then let the client do its own work with it."""
        _print_text(msg["msg_type"], msg["content"])
        return super().output(outs, msg, display_id, cell_index)


def _print_text(kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        target = sys.stderr if content["name"] == "stderr" else sys.stdout
        target.write(content["text"])
        target.flush()
    elif kind in ("display_data", "execute_result") and "text/plain" in content["data"]:
        print(content["data"]["text/plain"], flush=True)


def run(path: Path, *, timeout_s: int) -> Any:
    """Execute the notebook in its own folder, with the interpreter that runs this script.

    Returns:
        The notebook with its new outputs.
    """
    notebook = nbformat.read(path, as_version=4)
    # Sockets in a folder of our own instead of TCP ports: nobody else on the machine can listen.
    # Their path is absolute, because the kernel works in the notebook's folder and we do not.
    with tempfile.TemporaryDirectory(prefix="nb-") as sockets:
        client = PrintingClient(
            notebook,
            timeout=timeout_s,
            record_timing=False,
            coalesce_streams=True,
            kernel_name="python3",
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            resources={"metadata": {"path": str(path.resolve().parent)}},
        )
        return client.execute()


def save(notebook: Any, path: Path) -> None:
    """Write the notebook without what differs from machine to machine, and without widgets.

    A widget is dead without its kernel; what stands in its place is an output of its own.
    """
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if _WIDGET not in one.get("data", {})]
    nbformat.write(notebook, path)


def main() -> int:
    """Run the notebook named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--label", default="notebook", help="the first word of the closing line")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take")
    parser.add_argument("--save", action="store_true", help="put the new outputs into the file")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        executed = run(options.notebook, timeout_s=options.timeout)
    except (CellExecutionError, CellTimeoutError, DeadKernelError, OSError, RuntimeError) as error:
        # OSError: no such notebook; RuntimeError: a kernel that does not answer
        print(f"{error}\n{options.label}: failed", file=sys.stderr)
        return 1
    if options.save:
        save(executed, options.notebook)
    print(f"{options.label}: ok in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
