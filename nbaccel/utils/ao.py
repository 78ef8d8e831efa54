"""Torchao: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import FP8, later

__all__ = [
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "has_ao_layers",
]

convert_model_to_fp8_ao = later("convert_model_to_fp8_ao", FP8, __name__)
filter_first_and_last_linear_layers = later("filter_first_and_last_linear_layers", FP8, __name__)
filter_linear_layers = later("filter_linear_layers", FP8, __name__)
has_ao_layers = later("has_ao_layers", FP8, __name__)
