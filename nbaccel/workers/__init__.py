"""Worker processes, messages, failures."""
