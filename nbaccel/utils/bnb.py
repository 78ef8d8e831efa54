"""Loading in 8 or 4 bits: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import QUANTIZATION, later

__all__ = [
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
]

has_4bit_bnb_layers = later("has_4bit_bnb_layers", QUANTIZATION, __name__)
load_and_quantize_model = later("load_and_quantize_model", QUANTIZATION, __name__)
