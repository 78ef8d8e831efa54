"""What holds for the whole house: directions, sizes, messages, the public face, and no leaks."""
