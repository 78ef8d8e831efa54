"""Engines that start this notebook's workers on other machines: one module each."""
