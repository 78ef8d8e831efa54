"""Workers on other machines, by Ray.

An actor runs on each machine, and two threads pass on what goes to it and comes from it.
"""
