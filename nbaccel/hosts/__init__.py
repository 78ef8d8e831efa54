"""Workers on other machines: agents, relays.

One agent runs on each machine, and a relay for each on the notebook's.
"""
