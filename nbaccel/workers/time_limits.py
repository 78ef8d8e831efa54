"""Time limits, in seconds, for starting, stopping and ending workers.

A limit is the longest wait; a wait ends earlier when a message or an exit is noticed.
"""

from __future__ import annotations

TEMPLATE_S = 120.0
"""For the template process to be ready: importing torch from a cold disk can take most of a
minute."""

IMPORT_S = 60.0
"""For the import of one package by a template: what takes longer hangs."""

PACKAGES_S = 30.0
"""For a launch to wait until the template has imported what the launch uses: afterwards the workers
import it themselves."""

FORK_S = 20.0
"""For the template to fork a worker, which takes milliseconds where the machine does not swap."""

FIRST_MESSAGE_S = 20.0
"""A forked process that has sent nothing for so long hangs. It sends its first message within a
second even where the machine swaps; a shorter limit would end workers that only were slow."""

GRACE_END_S = 0.25
"""After a launch's first failure, until the others are stopped. The same mistake meets all ranks
within this time, and each then reports its own; the first to report may also be one that has only
lost its connection to the rank which is at fault."""

GRACE_KEEP_S = 0.1
"""The same for live workers: shorter, because a cell's author waits for the prompt, and runs a
cell again sooner than a launch."""

HOST_S = 5.0
"""After ranks on other hosts have lost their connections, until the others are stopped: Ray needs
some seconds to find that a host is lost (2.3 s for a raylet that was killed)."""

STEP_S = 5.0
"""For the step under way to end on all ranks when the user has pressed Stop; longer where steps are
known to take longer, by `STEPS` of them."""

STEPS = 3
"""Of the length of a step: how long a rank without news may still be in one."""

MOST_STEP_S = 60.0
"""The most that is waited for the end of a step, and for the weights to be handed over then."""

ASK_S = 0.05
"""For a rank to say where it is, before it is interrupted: a signal and a few writes to a pipe."""

ASK_LAST_S = 0.1
"""The same before a pool's workers are killed because one was lost: nothing can be asked later."""

ASK_STATUS_S = 0.2
"""The same for `%accelerate status`: nothing is stopped meanwhile."""

ANSWER_S = 0.2
"""For KeyboardInterrupt to be raised. A rank that is in Python does so in milliseconds; one that
waits in C++ never does, and waiting for it is what makes Stop slow."""

CUT_S = 1.0
"""For a wait in C++ to end after its connections were shut down, and the exception to come up."""

EXIT_S = 10.0
"""For what libraries do when a process ends, such as trackers that write their last rows."""

UNWIND_S = 3.0
"""For `finally` blocks and `with` statements, once KeyboardInterrupt has been raised; and for a
worker whose work is over to leave, beside `EXIT_S`."""

TERMINATE_S = 0.1
"""For SIGTERM, which nothing in a worker handles: only what user code has installed for it."""

KILL_S = 5.0
"""For a killed process to be reaped. The system may have gigabytes to free; one that takes longer
hangs in a driver, and the notebook must not hang with it."""

DESCENDANTS_S = 2.0
"""For what a worker has started to be gone after it was killed, when the worker ends."""

EXIT_RECHECK_S = 2.0
"""Between looks at ranks that still work while others have returned."""
