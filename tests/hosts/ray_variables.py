"""How Ray is set for tests that share two cores with others."""

from __future__ import annotations

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its workers run at nice 15, and ours with them: beside other tests they would hardly run.
    "RAY_worker_niceness": "0",
    # A raylet gives up where its helpers have not been imported after half a minute.
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_raylet_start_wait_time_s": "180",
}
