"""TransformerEngine: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import FP8_TRAINING, missing_name_of

__all__ = [
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
]

apply_fp8_autowrap = missing_name_of("apply_fp8_autowrap", FP8_TRAINING, __name__)
contextual_fp8_autocast = missing_name_of("contextual_fp8_autocast", FP8_TRAINING, __name__)
convert_model = missing_name_of("convert_model", FP8_TRAINING, __name__)
has_transformer_engine_layers = missing_name_of(
    "has_transformer_engine_layers", FP8_TRAINING, __name__
)
