"""What a training loop consists of."""
