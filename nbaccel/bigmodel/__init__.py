"""Models bigger than one device's memory: built empty, placed by a map, read from their files."""
