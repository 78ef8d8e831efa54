"""DeepSpeed in a notebook: its configuration, environment and memory."""
