"""Torchao: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import FP8_TRAINING, missing_name_of

__all__ = [
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "has_ao_layers",
]

convert_model_to_fp8_ao = missing_name_of("convert_model_to_fp8_ao", FP8_TRAINING, __name__)
filter_first_and_last_linear_layers = missing_name_of(
    "filter_first_and_last_linear_layers", FP8_TRAINING, __name__
)
filter_linear_layers = missing_name_of("filter_linear_layers", FP8_TRAINING, __name__)
has_ao_layers = missing_name_of("has_ao_layers", FP8_TRAINING, __name__)
