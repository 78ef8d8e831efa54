"""The start of a host agent: it connects, and imports what workers need only then.

So a wrong address is known at once. `agent_server` has the rest.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

from nbaccel.base import env
from nbaccel.hosts import connecting
from nbaccel.plan.contracts.host_engine import AgentHello

__all__ = ["main"]


def main() -> NoReturn:
    """Read where to connect from standard input, connect, and serve until the connection ends."""
    hello = AgentHello.from_line(sys.stdin.readline())
    # Interrupts are for the notebook, which passes them on to workers one by one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As an exception, so that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        link = connecting.connect_to_relay(hello)
    except OSError as error:
        sys.stderr.write(f"nbaccel: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    # As in the template process, which says why.
    env.update({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    gc.disable()
    from nbaccel.hosts import agent_server

    agent_server.serve(link, hello)


if __name__ == "__main__":
    main()
