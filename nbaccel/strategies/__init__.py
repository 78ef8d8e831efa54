"""Training over processes: DDP, FSDP, SPMD."""
