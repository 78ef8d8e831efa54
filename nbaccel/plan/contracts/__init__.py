"""Contracts: what a backend must be able to do, and nothing more."""

from __future__ import annotations
