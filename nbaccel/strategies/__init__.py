"""Strategies: one module per way in which several processes train one model."""
