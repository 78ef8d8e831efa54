"""Loading in 8 or 4 bits: names of a part that is still to come."""

from __future__ import annotations

from nbaccel.base.unsupported_names import QUANTIZED_LOADING, missing_name_of

__all__ = [
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
]

has_4bit_bnb_layers = missing_name_of("has_4bit_bnb_layers", QUANTIZED_LOADING, __name__)
load_and_quantize_model = missing_name_of("load_and_quantize_model", QUANTIZED_LOADING, __name__)
