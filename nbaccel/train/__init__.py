"""What a training loop consists of: data, gradients, collectives, checkpoints."""
