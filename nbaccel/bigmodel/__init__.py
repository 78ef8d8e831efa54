"""Models bigger than one device's memory.

They are built empty, placed by a map, and read from their files.
"""
