"""TransformerEngine: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import FP8, later

__all__ = [
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
]

apply_fp8_autowrap = later("apply_fp8_autowrap", FP8, __name__)
contextual_fp8_autocast = later("contextual_fp8_autocast", FP8, __name__)
convert_model = later("convert_model", FP8, __name__)
has_transformer_engine_layers = later("has_transformer_engine_layers", FP8, __name__)
