"""What pickers offer of DeepSpeed: its keys as choices, their memory, and what would fit."""
