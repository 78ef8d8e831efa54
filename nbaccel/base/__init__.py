"""What all else stands on: errors, messages, the environment, files, private names of libraries."""
