"""Stands for TransformerEngine where there is no GPU: names, and layers for CPUs."""
