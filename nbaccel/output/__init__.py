"""What workers print and display, and the dashboard, as the notebook shows it."""
