"""Workers on other machines, by Ray.

An actor runs on each machine, and a thread passes on what comes from it.
"""
