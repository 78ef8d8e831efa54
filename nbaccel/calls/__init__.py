"""Calls on workers: launches and pools.

A pool's workers live on between cells. What only reads a cell's source imports no torch.
"""
