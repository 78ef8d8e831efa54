"""Time limits, in seconds, for starting, stopping and ending workers.

A limit is the longest wait; a wait ends earlier when a message or an exit is noticed.
"""

from __future__ import annotations

# ---- starting

TEMPLATE_S = 120.0  # for the template to be ready: torch from a cold disk takes most of a minute
IMPORT_S = 60.0  # for the import of one package by a template: what takes longer hangs
PACKAGES_S = 30.0  # for it to import what a launch uses: then the workers import that themselves
FORK_S = 20.0  # for the template to fork a worker: milliseconds where the machine does not swap
# A forked process that has sent nothing for so long hangs. It sends its first message within a
# second even where the machine swaps; a shorter limit would end workers that only were slow.
FIRST_MESSAGE_S = 20.0

# ---- after a failure, until the other ranks are stopped

# The same mistake meets all ranks within this time, and each then reports its own; the first to
# report may also be one that has only lost its connection to the rank which is at fault.
GRACE_END_S = 0.25
GRACE_KEEP_S = 0.1  # for live workers: a cell's author waits for the prompt, and runs it again
HOST_S = 5.0  # for Ray to find that a host is lost (2.3 s for a raylet that was killed)

# ---- while it runs

DISPLAY_S = 1.0  # for the notebook to take in a display: a call that listens does so at once

# ---- stopping where a step ends

STEP_S = 5.0  # for the step under way to end on all ranks when the user has pressed Stop
STEPS = 3  # of its length: how long a rank without news may still be in one that is longer
MOST_STEP_S = 60.0  # for the end of a step at most, and for the weights to be handed over then

# ---- asking and ending

ASK_S = 0.05  # for a rank to say where it is before it is interrupted: a signal and a few writes
ASK_LAST_S = 0.1  # before a pool's workers are killed because one was lost: nothing can follow
# For KeyboardInterrupt to be raised. A rank that is in Python does so in milliseconds; one that
# waits in C++ never does, and waiting for it is what makes Stop slow.
ANSWER_S = 0.2
CUT_S = 1.0  # for a wait in C++ to end after its connections were shut down, and to raise
EXIT_S = 10.0  # for what libraries do when a process ends, such as trackers that write last rows
UNWIND_S = 3.0  # for `finally` blocks after KeyboardInterrupt; and, beside `EXIT_S`, to leave
TERMINATE_S = 0.1  # for SIGTERM, which nothing in a worker handles but what user code installed
KILL_S = 5.0  # for a killed process to be reaped: one that takes longer hangs in a driver
DESCENDANTS_S = 2.0  # for what a worker has started to be gone after it was killed
EXIT_RECHECK_S = 2.0  # between looks at ranks that still work while others have returned
