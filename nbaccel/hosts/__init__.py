"""Workers on other machines: one agent process on each, and a relay on the notebook's."""
