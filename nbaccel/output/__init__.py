"""What workers print, the panel, the report."""
