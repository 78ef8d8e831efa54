"""What a measurement needs: a real kernel in its own namespaces, samples, and a table."""
