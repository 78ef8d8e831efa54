"""Training over processes: DDP, FSDP."""
