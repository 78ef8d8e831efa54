"""What is known of a worker's death or failure, on its way to the user."""
