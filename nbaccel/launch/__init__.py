"""Machines that start worker processes, watch them and bring their work home."""
