"""Training with DeepSpeed's engines: the strategy, and what it is made of."""

from __future__ import annotations
